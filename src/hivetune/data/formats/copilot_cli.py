"""Copilot CLI: the events of a session, one a line; calls stand in the answers, their results in events of their own.

https://docs.github.com/en/copilot/concepts/agents/about-copilot-cli
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, conversation, events, lost
from hivetune.data.pieces.said import Row, one_of


def recognise(head: Head) -> bool:
    return any(one.get("type") == "session.start" and "sessionId" in _data(one) for one in head.events)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    place, session, turns, notes = 1, None, list[dict[str, Any]](), False
    for number, event, _ in events(lines):
        if event is None:
            yield lost(number)
            continue
        kind, data = event.get("type"), _data(event)
        if kind == "session.start":
            yield from _row(place, session, turns, notes=notes)
            place, session, turns, notes = number, data.get("sessionId"), [], False
        elif kind == "user.message":
            turns.append({"role": "user", "content": data.get("content")})
        elif kind == "assistant.message":
            turns.append(
                {"role": "assistant", "content": data.get("content"), "tool_calls": data.get("toolRequests") or None}
            )
        elif kind == "tool.execution_complete":
            result = one_of(data.get("result"), "content") or one_of(data.get("error"), "message") or ""
            turns.append({"role": "tool", "content": result, "tool_call_id": data.get("toolCallId")})
        else:
            notes = True
    yield from _row(place, session, turns, notes=notes)


def _row(place: int, session: Any, turns: list[dict[str, Any]], *, notes: bool) -> Iterator[PlacedRow]:
    if turns:
        yield from conversation("copilot-cli", place, turns, ["program-notes"] if notes else (), session_id=session)


def _data(event: Row) -> dict[str, Any]:
    data = event.get("data")
    return data if isinstance(data, dict) else {}


FORMAT = Format("copilot-cli", recognise, rows, "file")
