"""Transcripts of Google's Antigravity, one step a line.

https://antigravity.google/docs (transcripts below `~/.gemini/antigravity/`)
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import Row, listed, one_of

_CUT = re.compile(r"<truncated \d+ (?:bytes|lines)>")  # what Antigravity leaves out of a long text


@dataclass(slots=True)
class _Session:
    """`turns` with the numbers of their steps; `calls`: ids of the last answer's calls, whose results are awaited."""

    turns: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)


def _is_step(event: Row) -> bool:
    return {"step_index", "source", "type", "status"} <= event.keys() and event["source"] in (
        "USER_EXPLICIT",
        "MODEL",
        "SYSTEM",
    )


def recognise(head: Head) -> bool:
    return any(map(_is_step, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each stretch between checkpoints."""
    return session_rows(lines, lambda event: event.get("type") == "CHECKPOINT", _row)


def _row(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    session = _Session()
    for _, event in events:
        if "step_index" in event:
            _add(session, event)
    turns = [turn for _, turn in session.turns]
    if any(turn["role"] == "assistant" for turn in turns):
        yield from conversation("antigravity", events[0][0], turns, session.left_out)


def _add(session: _Session, event: Row) -> None:
    step, kind, source = event.get("step_index"), event.get("type"), event.get("source")
    number = step if isinstance(step, int) else 0
    if kind == "USER_INPUT" and session.turns and number <= session.turns[-1][0]:  # the user went back
        session.turns = [(at, turn) for at, turn in session.turns if at < number]
        session.left_out.add("other-branches")
    content = str(event.get("content") or "")
    if kind == "PLANNER_RESPONSE":
        session.turns.append((number, _answer(session, event, content)))
    elif source == "USER_EXPLICIT" or kind == "CHECKPOINT":
        asked, mark, _ = content.partition("<USER_REQUEST>")[2].partition("</USER_REQUEST>")
        text = asked.removeprefix("\n").removesuffix("\n") if mark else content
        question: Any = text if text.strip() else [{"type": "image"}]  # nothing was written: a picture was given
        session.turns.append((number, {"role": "user", "content": question}))
        session.calls = []
    elif source == "MODEL" and session.calls:
        session.turns.append((number, {"role": "tool", "content": content, "tool_call_id": session.calls.pop(0)}))
    elif content:
        session.left_out.add("program-notes")


def _answer(session: _Session, event: Row, content: str) -> dict[str, Any]:
    calls = [
        {
            "type": "tool_use",
            "id": f"{event['step_index']}.{place}",
            "name": one_of(call, "name"),
            "input": {name: _argument(value) for name, value in (one_of(call, "args") or {}).items()},
        }
        for place, call in enumerate(listed(event.get("tool_calls")))
    ]
    session.calls = [call["id"] for call in calls]
    parts: list[dict[str, Any]] = [{"type": "thinking", "thinking": event["thinking"]}] if event.get("thinking") else []
    parts += [{"type": "text", "text": content}] if content else []
    cut = event.get("status") != "DONE" or _CUT.search(content) or _CUT.search(json.dumps(calls))
    return {"role": "assistant", "content": [*parts, *calls], **({"weight": 0} if cut else {})}


def _argument(value: Any) -> Any:
    """Return an argument of a call, which Antigravity writes as JSON text."""
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value


FORMAT = Format("antigravity", recognise, rows, "file")
