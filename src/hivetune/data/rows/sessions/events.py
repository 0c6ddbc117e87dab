"""What the readers of sessions share: events of a log, and a conversation as a row that the layout `session` reads."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hivetune.data.rows.placed import MAX_ROW_CHARS, PlacedRow

MAX_KEPT_CHARS = 64 << 20  # of one session, in memory
_KEY = "hivetune_session"  # names the program whose log it was


def events(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """(line, event or None, the line) for each line that is not blank; None: it is no JSON object."""
    for number, line in lines:
        text = line.strip()
        if not text:
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        yield number, event if isinstance(event, dict) else None, text


def conversation(
    program: str, place: int, messages: Sequence[Any], left_out: Iterable[str], **facts: Any
) -> Iterator[PlacedRow]:
    """The row of one conversation; `left_out`: reasons of severity warn."""
    row = {_KEY: program, **{name: value for name, value in facts.items() if value}, "messages": list(messages)}
    if left := sorted(set(left_out)):
        row["left_out"] = left
    text = json.dumps(row, ensure_ascii=True)
    if len(text) > MAX_ROW_CHARS // 2:  # MAX_ROW_CHARS with its place, whatever the characters
        yield place, "p", f"line-too-large:the session has {len(text):,} characters"
    else:
        yield place, "r", text


def broken(number: int, text: str) -> PlacedRow:
    """A line that is no JSON: rejected as it would be in a JSONL file."""
    return number, "r", text.replace("\t", " ")
