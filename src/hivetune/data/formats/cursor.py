"""Transcripts of Cursor's agent (`~/.cursor/projects/*/agent-transcripts/*.jsonl`): one message a line, and how each
turn ended. They have calls without their results. An aborted turn is read and not learned.

https://cursor.com/docs/agent/overview
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Log, PlacedRow
from hivetune.data.pieces.sessions import PlacedEvent, conversation, session_rows
from hivetune.data.pieces.values import Row, listed, one_of

_OPENS, _CLOSES = "<user_query>", "</user_query>"


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a transcript."""
    if row.get("type") == "turn_ended":
        return "status" in row
    return row.keys() == {"role", "message"} and isinstance(one_of(row["message"], "content"), list)


def _row(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    turns: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for _, event in session:
        last = turns[-1] if turns else {}
        if event.get("type") == "turn_ended" and event["status"] != "success":
            for turn in itertools.takewhile(lambda turn: turn["role"] != "user", reversed(turns)):
                turn["weight"] = 0
        elif "role" in event:
            calls = [part for part in listed(last.get("content")) if one_of(part, "type") == "tool_use"]
            if event["role"] == "assistant" and calls:
                left_out.add("call-without-result")  # templates want a turn of the tool before the answer goes on
                turns += [{"role": "tool", "content": "", "tool_call_id": call.get("id")} for call in calls]
            parts = [_plain(part) for part in listed(one_of(event.get("message"), "content"))]
            turns.append({"role": event["role"], "content": parts})
    if any(turn["role"] == "assistant" for turn in turns):
        yield session[0][0], conversation("cursor", turns, left_out)


def _plain(part: Any) -> Any:
    """Return a part without the tags around what the user wrote."""
    text = one_of(part, "text")
    if isinstance(text, str) and _OPENS in text:
        return {**part, "text": text.partition(_OPENS)[2].partition(_CLOSES)[0].strip()}
    return part


FORMAT = Log(
    "cursor",
    lambda head: bool(head.events) and all(map(is_line, head.events)),
    lambda lines: session_rows(lines, _row, is_line),
)
