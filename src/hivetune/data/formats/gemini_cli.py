"""Gemini CLI: what it prints as a stream of JSON (`--output-format stream-json`), one event a line.

https://github.com/google-gemini/gemini-cli/blob/main/docs/cli/headless.md
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation, events, lost
from hivetune.data.pieces.said import Row, one_of


@dataclass(slots=True)
class _Session:
    name: Any = None
    place: int = 0  # the line of its first event
    turns: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0


def _is_event(event: Row) -> bool:
    """Whether an object is an event that no other program writes."""
    if event.get("type") == "tool_use":
        return {"tool_name", "tool_id", "parameters"} <= event.keys()
    return event.get("type") == "init" and {"session_id", "model", "timestamp"} <= event.keys()


def recognise(head: Head) -> bool:
    return any(map(_is_event, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """One row for each session."""
    session = _Session()
    for number, event, text in events(lines):
        if event is None:
            yield lost(number)
            continue
        if (event.get("type") == "init" and session.turns) or session.size > MAX_KEPT_CHARS:
            yield from _row(session)
            session = _Session()
        session.place = session.place or number
        session.size += len(text)
        session.name = session.name or event.get("session_id")
        _add(session.turns, event)
    yield from _row(session)


def _row(session: _Session) -> Iterator[PlacedRow]:
    if any(turn["role"] == "assistant" for turn in session.turns):
        yield from conversation("gemini-cli", session.place, session.turns, (), session_id=session.name)


def _add(turns: list[dict[str, Any]], event: Row) -> None:
    kind, content = event.get("type"), event.get("content")
    last = turns[-1] if turns else {}
    if kind == "message" and event.get("role") == "assistant" and event.get("delta") and "delta" in last:
        last["content"] += str(content)
    elif kind == "message":
        turns.append(
            {"role": event.get("role"), "content": str(content), **({"delta": True} if event.get("delta") else {})}
        )
    elif kind == "tool_use":
        call = {"id": event.get("tool_id"), "name": event.get("tool_name"), "input": event.get("parameters")}
        turns.append({"role": "assistant", "content": [{"type": "tool_use", **call}]})
    elif kind == "tool_result":
        result = one_of(event, "output") or one_of(event.get("error"), "message") or ""
        turns.append({"role": "tool", "content": result, "tool_call_id": event.get("tool_id")})
    elif kind == "error" and last.get("role") == "assistant":
        last["weight"] = 0


FORMAT = Format("gemini-cli", recognise, rows, "file")
