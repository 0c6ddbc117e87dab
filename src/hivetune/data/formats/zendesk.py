"""Zendesk: a ticket with its comments. Who asked is the `requester`; all others answer.

https://developer.zendesk.com/api-reference/ticketing/tickets/ticket_comments/
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import desk_conversation
from hivetune.records import Role


def read(row: Row) -> Conversation | None:
    """Return the conversation; comments that are not public are notes."""
    comments, number = objects(row["comments"]), row.get("requester_id") or one_of(row.get("requester"), "id")
    if comments is None or not isinstance(number, str | int) or not all("author_id" in c for c in comments):
        return None
    public = [comment for comment in comments if comment.get("public") is not False]
    turns: list[tuple[Role, Any, float]] = []
    for comment in public:
        asks = str(comment.get("author_id")) == str(number)
        turns.append(("user" if asks else "assistant", one_of(comment, "html_body", "body", "plain_body"), 1.0))
    return desk_conversation("zendesk", turns, len(public) < len(comments))


FORMAT = Format("zendesk", read, needs=names("comments"))
