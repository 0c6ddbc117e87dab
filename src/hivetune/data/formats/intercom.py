"""Intercom: a conversation of its API, a customer's first message (`source`) and the parts that follow.

https://developers.intercom.com/docs/references/rest-api/api.intercom.io/conversations/conversation
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import desk_conversation
from hivetune.data.reasons import RowRefused
from hivetune.records import Role

_CUSTOMERS, _STAFF = ("user", "lead", "contact"), ("admin", "team", "bot")


def read(row: Row) -> Conversation | None:
    if not isinstance(row.get("source"), dict) or not isinstance(row["conversation_parts"], dict):
        return None
    parts = objects(row["conversation_parts"].get("conversation_parts")) or []
    shown = [row["source"], *(part for part in parts if one_of(part, "body") and part.get("part_type") != "note")]
    notes = any(part.get("part_type") == "note" for part in parts)
    turns: list[tuple[Role, Any, float]] = []
    for part in shown:
        kind = one_of(part.get("author"), "type")
        if kind not in (*_CUSTOMERS, *_STAFF):
            raise RowRefused("unknown-role", f"a message of author type {str(kind)[:40]!r}")
        # A bot's turn is read and not learned.
        turns.append(("user" if kind in _CUSTOMERS else "assistant", part.get("body"), 0.0 if kind == "bot" else 1.0))
    return desk_conversation("intercom", turns, notes)


FORMAT = Format("intercom", read, needs=names("conversation_parts"))
