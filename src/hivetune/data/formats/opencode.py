"""Sessions of OpenCode: its SQLite store (`opencode.db`), and its export of one session (`opencode export`): `info` of
the session, `messages` of info and parts. A tool's call and result are one part.

https://opencode.ai/docs/cli/#export
"""

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Conversation, Format, PlacedRow, Store
from hivetune.data.pieces.sessions import is_lone_thought
from hivetune.data.pieces.turns import conversation_of, read_turn
from hivetune.data.pieces.values import Row, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_TABLES = frozenset(("session", "message", "part"))
# What the user took back stays in the store, from the message on that `revert` names; ids grow with time.
_SESSIONS = "SELECT id, json_extract(revert, '$.messageID') FROM session ORDER BY id"
_MESSAGES = "SELECT id, data FROM message WHERE session_id = ? ORDER BY time_created, id"
_PARTS = "SELECT data FROM part WHERE message_id = ? ORDER BY id"


def stored_rows(database: sqlite3.Connection) -> Iterator[PlacedRow]:
    """Yield each session of the store, as the export would write it, with its number."""
    for number, (session, taken_back) in enumerate(database.execute(_SESSIONS).fetchall(), 1):
        messages = []
        for message, data in database.execute(_MESSAGES, (session,)).fetchall():
            if taken_back is None or message < taken_back:
                parts = [parsed(part) for (part,) in database.execute(_PARTS, (message,))]
                messages.append({"info": parsed(data), "parts": parts})
        if messages:
            yield number, json.dumps({"info": {"id": session}, "session_id": session, "messages": messages})


def read(row: Row) -> Conversation | None:
    turns = objects(row.get("messages"))
    if turns is None or not isinstance(row["info"], dict) or not {"parts", "info"} <= turns[0].keys():
        return None
    messages: list[Message] = []
    changes: list[str] = []
    for turn in turns:
        info, parts = one_of(turn, "info"), [part for part in listed(one_of(turn, "parts")) if isinstance(part, dict)]
        if one_of(info, "error"):
            changes.append("other-branches")
        elif one_of(info, "summary") is True or any(part.get("type") == "compaction" for part in parts):
            # What was said before, summed up. It stands in the export as it was.
            changes.append("program-notes")
        elif one_of(info, "role") == "user":
            texts = [part for part in parts if part.get("type") == "text" and not part.get("ignored")]
            if any(part.get("type") == "file" and not part.get("synthetic") for part in parts) and not texts:
                raise RowRefused("unsupported-content", "a message that is only a file")
            messages.append(Message("user", "\n".join(str(part.get("text", "")) for part in texts)))
        else:
            messages += _answer(parts)
    answered = [message for message in messages if not is_lone_thought(message, silent=True)]
    changes += [] if len(answered) == len(messages) else ["lone-thought"]
    return conversation_of("opencode", answered, changed=tuple(dict.fromkeys(changes)))


def _answer(parts: list[dict[str, Any]]) -> list[Message]:
    """Return an answer as messages: its text, its calls and their results."""
    content: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []  # of the calls that were made at once
    for part in parts:
        kind, state, call_id = part.get("type"), part.get("state"), part.get("callID")
        if kind in ("text", "reasoning", "step-start"):
            content, results = [*content, *results], []
        if kind in ("text", "reasoning"):
            content.append({"type": kind, "text": part.get("text")})
        elif kind == "tool" and isinstance(state, dict):  # a call with its result, or with why it failed
            content.append({"type": "tool_use", "id": call_id, "name": part.get("tool"), "input": state.get("input")})
            output = one_of(state, "output", "error") or ""
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": output})
    return read_turn({"role": "assistant", "content": [*content, *results]}) if content else []


FORMAT = Format("opencode", read, needs=("info", "messages"), reads=frozenset(("info", "messages")))
STORE = Store("opencode-store", _TABLES, stored_rows)
