"""Sessions of agents that write one step a line, without a tree: Gemini CLI (its stream of JSON) and Antigravity (its
transcripts).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation, events, lost
from hivetune.data.pieces.said import listed, one_of

_GEMINI_STEPS = ("init", "message", "tool_use", "tool_result", "result", "error")
_CUT = re.compile(r"<truncated \d+ (?:bytes|lines)>")  # what Antigravity leaves out of a long text


@dataclass(slots=True)
class _Session:
    """`turns` with the numbers of their steps; `calls`: of the last answer, whose results are awaited."""

    program: str = ""
    name: Any = None
    place: int = 0
    turns: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    size: int = 0


def is_step(event: dict[str, Any]) -> bool:
    """Whether an object is a line of such a session, by a line that nothing else has."""
    if {"step_index", "source", "type", "status"} <= event.keys():
        return event["source"] in ("USER_EXPLICIT", "MODEL", "SYSTEM")
    if event.get("type") == "tool_use":
        return {"tool_name", "tool_id", "parameters"} <= event.keys()
    return event.get("type") == "init" and {"session_id", "model", "timestamp"} <= event.keys()


def step_rows(lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """One row for each session, and for each stretch between checkpoints of Antigravity."""
    session = _Session()
    for number, event, text in events(lines):
        if event is None:
            yield lost(number)
            continue
        begins = event.get("type") == "CHECKPOINT" or (event.get("type") == "init" and session.calls)
        if begins or session.size > MAX_KEPT_CHARS:
            yield from _row(session)
            session = _Session()
        session.place = session.place or number
        session.size += len(text)
        if "step_index" in event:
            _add_of_antigravity(session, event)
        elif event.get("type") in _GEMINI_STEPS:
            _add_of_gemini(session, event)
    yield from _row(session)


def _row(session: _Session) -> Iterator[PlacedRow]:
    turns = [turn for _, turn in session.turns]
    if any(turn["role"] == "assistant" for turn in turns):
        yield from conversation(session.program, session.place, turns, session.left_out, session_id=session.name)


def _add_of_gemini(session: _Session, event: dict[str, Any]) -> None:
    kind, content = event["type"], event.get("content")
    session.program = "gemini-cli"
    session.name = session.name or event.get("session_id")
    last = session.turns[-1][1] if session.turns else {}
    if kind == "message" and event.get("role") == "assistant" and event.get("delta") and "delta" in last:
        last["content"] += str(content)
    elif kind == "message":
        pieces = {"delta": True} if event.get("delta") else {}
        session.turns.append((0, {"role": event.get("role"), "content": str(content), **pieces}))
    elif kind == "tool_use":
        session.calls.append(str(event.get("tool_id")))
        call = {"id": event.get("tool_id"), "name": event.get("tool_name"), "input": event.get("parameters")}
        session.turns.append((0, {"role": "assistant", "content": [{"type": "tool_use", **call}]}))
    elif kind == "tool_result":
        given = one_of(event, "output") or one_of(event.get("error"), "message") or ""
        session.turns.append((0, {"role": "tool", "content": given, "tool_call_id": event.get("tool_id")}))
    elif kind == "error" and last.get("role") == "assistant":
        last["weight"] = 0


def _add_of_antigravity(session: _Session, event: dict[str, Any]) -> None:
    session.program = "antigravity"
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
        said: Any = text if text.strip() else [{"type": "image"}]  # nothing was written: a picture was given
        session.turns.append((number, {"role": "user", "content": said}))
        session.calls = []
    elif source == "MODEL" and session.calls:
        session.turns.append((number, {"role": "tool", "content": content, "tool_call_id": session.calls.pop(0)}))
    elif content:
        session.left_out.add("program-notes")


def _answer(session: _Session, event: dict[str, Any], content: str) -> dict[str, Any]:
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
    """An argument of a call, which Antigravity writes as JSON text."""
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value
