"""Copilot CLI: the events of a session, one a line; calls stand in the answers, their results in events of their own.

https://docs.github.com/en/copilot/concepts/agents/about-copilot-cli
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import Row, one_of


def recognise(head: Head) -> bool:
    return any(event.get("type") == "session.start" and "sessionId" in _data(event) for event in head.events)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return session_rows(lines, lambda event: event.get("type") == "session.start", _row)


def _row(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[dict[str, Any]] = []
    notes = False
    for _, event in session:
        kind, data = event.get("type"), _data(event)
        if kind == "user.message":
            turns.append({"role": "user", "content": data.get("content")})
        elif kind == "assistant.message":
            calls = data.get("toolRequests") or None
            turns.append({"role": "assistant", "content": data.get("content"), "tool_calls": calls})
        elif kind == "tool.execution_complete":
            result = one_of(data.get("result"), "content") or one_of(data.get("error"), "message") or ""
            turns.append({"role": "tool", "content": result, "tool_call_id": data.get("toolCallId")})
        else:
            notes = notes or kind != "session.start"
    number, first = session[0]
    if turns:
        left_out = ["program-notes"] if notes else []
        yield number, conversation("copilot-cli", turns, left_out, session_id=_data(first).get("sessionId"))


def _data(event: Row) -> dict[str, Any]:
    data = event.get("data")
    return data if isinstance(data, dict) else {}


FORMAT = Format("copilot-cli", recognise, rows, "file")
