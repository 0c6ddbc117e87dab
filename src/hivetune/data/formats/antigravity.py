"""Transcripts of Google's Antigravity, one step a line.

https://antigravity.google/docs (transcripts below `~/.gemini/antigravity/`)
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import Row, listed, one_of

_CUT = re.compile(r"<truncated \d+ (?:bytes|lines)>")  # what Antigravity leaves out of a long text
_SOURCES = ("USER_EXPLICIT", "MODEL", "SYSTEM")


def recognise(head: Head) -> bool:
    return any({"step_index", "source", "type", "status"} <= e.keys() and e["source"] in _SOURCES for e in head.events)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each stretch between checkpoints."""
    return session_rows(lines, lambda event: event.get("type") == "CHECKPOINT", _row)


def _row(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[tuple[int, dict[str, Any]]] = []  # with the numbers of their steps
    calls: list[str] = []  # ids of the last answer's calls, whose results are awaited
    left_out: set[str] = set()
    for _, event in events:
        if "step_index" not in event:
            continue
        step, kind, source = event["step_index"], event.get("type"), event.get("source")
        number = step if isinstance(step, int) else 0
        content = str(event.get("content") or "")
        if kind == "USER_INPUT" and turns and number <= turns[-1][0]:  # the user went back
            turns = [(at, turn) for at, turn in turns if at < number]
            left_out.add("other-branches")
        if kind == "PLANNER_RESPONSE":
            turn, calls = _answer(event, content)
            turns.append((number, turn))
        elif source == "USER_EXPLICIT" or kind == "CHECKPOINT":
            request, mark, _ = content.partition("<USER_REQUEST>")[2].partition("</USER_REQUEST>")
            text = request.removeprefix("\n").removesuffix("\n") if mark else content
            question: Any = text if text.strip() else [{"type": "image"}]  # nothing was written: a picture was given
            turns.append((number, {"role": "user", "content": question}))
            calls = []
        elif source == "MODEL" and calls:
            turns.append((number, {"role": "tool", "content": content, "tool_call_id": calls.pop(0)}))
        elif content:
            left_out.add("program-notes")
    spoken = [turn for _, turn in turns]
    if any(turn["role"] == "assistant" for turn in spoken):
        yield events[0][0], conversation("antigravity", spoken, left_out)


def _answer(event: Row, content: str) -> tuple[dict[str, Any], list[str]]:
    """Return an answer and the ids of its calls."""
    parts: list[dict[str, Any]] = [{"type": "thinking", "thinking": event["thinking"]}] if event.get("thinking") else []
    parts += [{"type": "text", "text": content}] if content else []
    ids: list[str] = []
    for call in listed(event.get("tool_calls")):
        ids.append(f"{event['step_index']}.{len(ids)}")
        arguments = dict(one_of(call, "args") or {})
        for name, value in arguments.items():  # each of which Antigravity writes as JSON text
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                arguments[name] = json.loads(value)
        parts.append({"type": "tool_use", "id": ids[-1], "name": one_of(call, "name"), "input": arguments})
    written = json.dumps([part for part in parts if part["type"] != "thinking"])
    cut = event.get("status") != "DONE" or _CUT.search(written)
    return {"role": "assistant", "content": parts, **({"weight": 0} if cut else {})}, ids


FORMAT = Log("antigravity", recognise, rows)
