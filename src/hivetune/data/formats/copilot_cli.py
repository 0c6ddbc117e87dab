"""Copilot CLI: the events of a session, one a line; calls stand in the answers, their results in events of their own.

https://docs.github.com/en/copilot/concepts/agents/about-copilot-cli
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import one_of


def recognise(head: Head) -> bool:
    starts = (event.get("data") for event in head.events if event.get("type") == "session.start")
    return any(one_of(data, "sessionId") is not None for data in starts)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return session_rows(lines, lambda event: event.get("type") == "session.start", _row)


def _row(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[dict[str, Any]] = []
    notes = False
    for _, event in session:
        kind, data = event.get("type"), one_of(event, "data")
        if kind == "user.message":
            turns.append({"role": "user", "content": one_of(data, "content")})
        elif kind == "assistant.message":
            calls = one_of(data, "toolRequests") or None
            turns.append({"role": "assistant", "content": one_of(data, "content"), "tool_calls": calls})
        elif kind == "tool.execution_complete":
            result = one_of(one_of(data, "result"), "content") or one_of(one_of(data, "error"), "message") or ""
            turns.append({"role": "tool", "content": result, "tool_call_id": one_of(data, "toolCallId")})
        else:
            notes = notes or kind != "session.start"
    number, first = session[0]
    if turns:
        left_out = ["program-notes"] if notes else []
        yield (
            number,
            conversation("copilot-cli", turns, left_out, session_id=one_of(one_of(first, "data"), "sessionId")),
        )


FORMAT = Log("copilot-cli", recognise, rows)
