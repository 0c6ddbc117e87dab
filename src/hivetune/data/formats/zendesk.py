"""Zendesk: a ticket with its comments. Who asked is the `requester`; all others answer.

https://developer.zendesk.com/api-reference/ticketing/tickets/ticket_comments/
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.markup import desk_conversation
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.records import Role


def recognise(row: Row) -> bool:
    comments = objects(row.get("comments"))
    return comments is not None and _requester(row) is not None and all("author_id" in comment for comment in comments)


def rows(row: Row) -> Conversation:
    """Return the conversation; comments that are not public are notes."""
    comments = objects(row["comments"]) or []
    public = [comment for comment in comments if comment.get("public") is not False]
    requester = _requester(row)
    roles: list[Role] = ["user" if str(c.get("author_id")) == requester else "assistant" for c in public]
    texts = [one_of(public_comment, "html_body", "body", "plain_body") for public_comment in public]
    turns = ((role, text, 1.0) for role, text in zip(roles, texts, strict=True))
    return desk_conversation("zendesk", turns, len(public) < len(comments))


def _requester(row: Row) -> str | None:
    number = row.get("requester_id") or one_of(row.get("requester"), "id")
    return str(number) if isinstance(number, str | int) else None


FORMAT = Format("zendesk", recognise, rows, needs=frozenset(("comments",)))
