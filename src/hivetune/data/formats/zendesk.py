"""Zendesk: a ticket with its comments. Who asked is the `requester`; all others answer.

https://developer.zendesk.com/api-reference/ticketing/tickets/ticket_comments/
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import desk_conversation
from hivetune.records import Role


def recognise(row: Row) -> bool:
    comments = objects(row.get("comments"))
    return comments is not None and _requester(row) is not None and all("author_id" in comment for comment in comments)


def rows(row: Row) -> Conversation:
    """Return the conversation; comments that are not public are notes."""
    comments = objects(row["comments"]) or []
    public = [comment for comment in comments if comment.get("public") is not False]
    turns: list[tuple[Role, Any, float]] = []
    for comment in public:
        asks = str(comment.get("author_id")) == _requester(row)
        turns.append(("user" if asks else "assistant", one_of(comment, "html_body", "body", "plain_body"), 1.0))
    return desk_conversation("zendesk", turns, len(public) < len(comments))


def _requester(row: Row) -> str | None:
    number = row.get("requester_id") or one_of(row.get("requester"), "id")
    return str(number) if isinstance(number, str | int) else None


FORMAT = Format("zendesk", recognise, rows, needs=names("comments"))
