"""Sessions of OpenCode: its SQLite store (`opencode.db`), and its export of one session (`opencode export`): `info` of
the session, `messages` of info and parts. A tool's call and result are one part.

https://opencode.ai/docs/cli/#export
"""

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Conversation, Format, PlacedRow, Store
from hivetune.data.pieces.sessions import SESSION, read_session
from hivetune.data.pieces.values import Row, listed, objects, one_of, parsed

_WRITTEN_AS_TEXT = ("text/plain", "application/x-directory")  # kinds of files that a part of text repeats
_SUBTASK = "The following tool was executed by the user"  # what the program tells the model of a command's own agent
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
    said: list[dict[str, Any]] = []
    left_out: list[str] = []
    for turn in turns:
        info, parts = one_of(turn, "info"), [part for part in listed(one_of(turn, "parts")) if isinstance(part, dict)]
        if one_of(info, "error"):
            left_out.append("other-branches")
        elif one_of(info, "summary") is True or any(part.get("type") == "compaction" for part in parts):
            # What was said before, summed up. It stands in the export as it was.
            left_out.append("program-notes")
        elif one_of(info, "role") == "user":
            said.append({"role": "user", "content": _asked(parts)})
        elif content := _answered(parts):
            said.append({"role": "assistant", "content": content})
    return read_session({SESSION: "opencode", "messages": said, "left_out": left_out})


def _asked(parts: list[dict[str, Any]]) -> list[Any]:
    """Return a question as its text, with a part for what is no text."""
    texts = [str(part.get("text", "")) for part in parts if part.get("type") == "text" and not part.get("ignored")]
    texts += [_SUBTASK for part in parts if part.get("type") == "subtask"]
    has_file = any(part.get("type") == "file" and part.get("mime") not in _WRITTEN_AS_TEXT for part in parts)
    return ["\n".join(texts), *([{"type": "file"}] if has_file else [])]


def _answered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
            results += [{"type": "file"}] if state.get("attachments") else []
    return [*content, *results]


FORMAT = Format("opencode", read, needs=("info", "messages"), reads=frozenset(("info", "messages")))
STORE = Store("opencode-store", _TABLES, stored_rows)
