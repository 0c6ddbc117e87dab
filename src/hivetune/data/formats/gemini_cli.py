"""Gemini CLI: what it prints as a stream of JSON (`--output-format stream-json`), one event a line.

https://github.com/google-gemini/gemini-cli/blob/main/docs/cli/headless.md
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import Row, one_of


def _is_event(event: Row) -> bool:
    """Return whether an object is an event that no other program writes."""
    if event.get("type") == "tool_use":
        return {"tool_name", "tool_id", "parameters"} <= event.keys()
    return event.get("type") == "init" and {"session_id", "model", "timestamp"} <= event.keys()


def recognise(head: Head) -> bool:
    return any(map(_is_event, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each session."""
    return session_rows(lines, lambda event: event.get("type") == "init", _row)


def _row(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[dict[str, Any]] = []
    for _, event in session:
        _add(turns, event)
    if any(turn["role"] == "assistant" for turn in turns):
        name = next((event["session_id"] for _, event in session if event.get("session_id")), None)
        yield from conversation("gemini-cli", session[0][0], turns, (), session_id=name)


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
