"""Gemini CLI: what it prints as a stream of JSON (`--output-format stream-json`), one event a line.

https://github.com/google-gemini/gemini-cli/blob/main/docs/cli/headless.md
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import one_of

# Columns of events that no other program writes.
_COLUMNS = {"tool_use": {"tool_name", "tool_id", "parameters"}, "init": {"session_id", "model", "timestamp"}}


def recognise(head: Head) -> bool:
    named = ((_COLUMNS.get(str(event.get("type"))), event) for event in head.events)
    return any(columns is not None and columns <= event.keys() for columns, event in named)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return session_rows(lines, lambda event: event.get("type") == "init", _row)


def _row(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[dict[str, Any]] = []
    for _, event in session:
        kind, role, content = event.get("type"), event.get("role"), str(event.get("content"))
        last = turns[-1] if turns else {}
        if kind == "message" and role == "assistant" and event.get("delta") and "delta" in last:
            last["content"] += content
        elif kind == "message":
            turns.append({"role": role, "content": content, **({"delta": True} if event.get("delta") else {})})
        elif kind == "tool_use":
            call = {"id": event.get("tool_id"), "name": event.get("tool_name"), "input": event.get("parameters")}
            turns.append({"role": "assistant", "content": [{"type": "tool_use", **call}]})
        elif kind == "tool_result":
            result = one_of(event, "output") or one_of(event.get("error"), "message") or ""
            turns.append({"role": "tool", "content": result, "tool_call_id": event.get("tool_id")})
        elif kind == "error" and last.get("role") == "assistant":
            last["weight"] = 0
    if any(turn["role"] == "assistant" for turn in turns):
        name = next((event["session_id"] for _, event in session if event.get("session_id")), None)
        yield session[0][0], conversation("gemini-cli", turns, session_id=name)


FORMAT = Log("gemini-cli", recognise, rows)
