"""Conversations as help desks export them: Intercom's parts, Zendesk's comments. What was said is HTML, between notes
that the desk's people wrote to each other: those are left out and counted (`internal-notes`).
"""

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.said import Conversation, Row, RowLayout, objects, one_of, text_of
from hivetune.data.rows.layouts.turns import in_order
from hivetune.records import Message, Role

_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)
_INTERCOM_ROLES: dict[str, Role] = {
    "user": "user",
    "lead": "user",
    "contact": "user",
    "admin": "assistant",
    "team": "assistant",
    "bot": "assistant",
}


def without_markup(body: str) -> str:
    """What a person reads of a message's HTML; text without tags is only rid of its entities."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _conversation(name: str, turns: Iterable[tuple[Role, Any, float]], notes: bool) -> Conversation:
    """`turns`: who, what, and the weight."""
    said: list[Message] = []
    marked = False
    for role, value, weight in turns:
        body = text_of(value, "body")
        text = without_markup(body)
        if not text and "<img" in body.lower():
            raise RowRefused("unsupported-content", "a message that is only an image")
        marked = marked or _MARKUP.search(body) is not None
        said += [Message(role, text, weight=weight)] if text else []
    ordered, changed = in_order(said)
    told = (("internal-notes",) if notes else ()) + (("markup",) if marked else ())
    return Conversation(name, ordered, changed=told + changed)


def _intercom_parts(row: Row) -> list[dict[str, Any]]:
    return objects(one_of(row["conversation_parts"], "conversation_parts")) or []


def _intercom(name: str, row: Row) -> Conversation:
    """What a customer wrote first is the `source`; all that follows are parts."""
    parts = _intercom_parts(row)
    said = [row["source"], *(part for part in parts if one_of(part, "body") and part.get("part_type") != "note")]
    notes = any(part.get("part_type") == "note" for part in parts)
    return _conversation(name, map(_intercom_turn, said), notes)


def _intercom_turn(part: Mapping[str, Any]) -> tuple[Role, Any, float]:
    """What a bot said is read and not learned."""
    kind = one_of(part.get("author"), "type")
    role = _INTERCOM_ROLES.get(kind) if isinstance(kind, str) else None
    if role is None:
        raise RowRefused("unknown-role", f"a message of author type {str(kind)[:40]!r}")
    return role, part.get("body"), 0.0 if kind == "bot" else 1.0


def _zendesk(name: str, row: Row) -> Conversation:
    """Who asked is the `requester`; all others answer. Comments that are not public are notes."""
    comments = objects(row["comments"]) or []
    public = [comment for comment in comments if comment.get("public") is not False]
    return _conversation(name, _zendesk_turns(row, public), len(public) < len(comments))


def _zendesk_turns(row: Row, comments: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Role, Any, float]]:
    asked = _requester(row)
    for comment in comments:
        body = one_of(comment, "html_body", "body", "plain_body")
        yield "user" if str(comment.get("author_id")) == asked else "assistant", body, 1.0


def _requester(row: Row) -> str | None:
    number = row.get("requester_id") or one_of(row.get("requester"), "id")
    return str(number) if isinstance(number, str | int) else None


def _is_intercom(row: Row) -> bool:
    return isinstance(row.get("source"), dict) and isinstance(row.get("conversation_parts"), dict)


def _is_zendesk(row: Row) -> bool:
    comments = objects(row.get("comments"))
    return comments is not None and _requester(row) is not None and all("author_id" in one for one in comments)


INTERCOM = RowLayout(
    "intercom",
    frozenset(("conversation_parts",)),
    _is_intercom,
    _intercom,
    frozenset(("source", "conversation_parts")),
    frozenset(("title", "conversation_rating", "custom_attributes", "ai_agent", "statistics", "contacts", "tags")),
)
ZENDESK = RowLayout(
    "zendesk",
    frozenset(("comments",)),
    _is_zendesk,
    _zendesk,
    frozenset(("comments", "description", "subject", "raw_subject")),
    frozenset(("custom_fields", "fields", "via", "requester", "assignee", "submitter", "organization", "group")),
)
