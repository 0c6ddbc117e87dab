"""Intercom: a conversation of its API, a customer's first message (`source`) and the parts that follow.

https://developers.intercom.com/docs/references/rest-api/api.intercom.io/conversations/conversation
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.markup import desk_conversation
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Role

_ROLES: dict[str, Role] = {
    "user": "user",
    "lead": "user",
    "contact": "user",
    "admin": "assistant",
    "team": "assistant",
    "bot": "assistant",
}


def recognise(row: Row) -> bool:
    return isinstance(row.get("source"), dict) and isinstance(row.get("conversation_parts"), dict)


def rows(row: Row) -> Conversation:
    parts = objects(row["conversation_parts"].get("conversation_parts")) or []
    shown = [row["source"], *(part for part in parts if one_of(part, "body") and part.get("part_type") != "note")]
    notes = any(part.get("part_type") == "note" for part in parts)
    return desk_conversation("intercom", map(_turn, shown), notes)


def _turn(part: Mapping[str, Any]) -> tuple[Role, Any, float]:
    """Return a turn; a bot's is read and not learned."""
    kind = one_of(part.get("author"), "type")
    role = _ROLES.get(kind) if isinstance(kind, str) else None
    if role is None:
        raise RowRefused("unknown-role", f"a message of author type {str(kind)[:40]!r}")
    return role, part.get("body"), 0.0 if kind == "bot" else 1.0


FORMAT = Format("intercom", recognise, rows, needs=frozenset(("conversation_parts",)))
