"""Which log a file is, and its conversations as numbered lines, as for every format that is no JSONL."""

import itertools
import json
from typing import Any

from hivetune.data.formats import claude_code, codex, file_format, file_rows, is_file_format, pi
from hivetune.data.pieces.format import Head
from hivetune.data.pieces.logs import PlacedRow, begins_with_json, write_rows
from hivetune.data.pieces.messages import MIN_MESSAGES, TEXTS, is_event_like
from hivetune.data.rows.formats import open_bytes, text_lines
from hivetune.data.rows.sessions.messages import NUM_SAMPLE, are_of_openhands, message_rows, message_shape

_MESSAGES = "message-log"  # its name may say that it is a conversation
_HEAD_BYTES = 256 << 10  # a first line may hold an agent's whole instructions
_HEAD_LINE = 4096  # bytes of a line about a log
_NUM_LINES = 20
_SERVER_HEAD_BYTES = 8 << 20  # servers print pages before the first request
_OF_EVENTS = tuple(f'"{name}"'.encode() for name in (*TEXTS, "type", "event", "kind", "role", "user", "assistant"))
_TABLES = (".csv", ".tsv", ".parquet")


def session_format(path: str, name: str, known: str) -> str:
    """`known`, the format by data/rows/formats.py, or that of a log (`is_session`), with .gz or .zst if packed."""
    kind, _, packed = known.partition(".")
    if kind not in ("jsonl", "json") or name.lower().endswith(_TABLES):
        return known
    suffix = f".{packed}" if packed else ""
    head = open_bytes(path, suffix).read(_HEAD_BYTES)[0]
    found = _agent(head, name) if kind == "jsonl" else None
    if found is None and not begins_with_json(head):
        head = open_bytes(path, suffix).read(_SERVER_HEAD_BYTES)[0]
        printed = file_format(Head(name, head, ()))
        found = printed.name if printed is not None else None
    return found + suffix if found else known


def _agent(head: bytes, name: str) -> str | None:
    """The coding agent that wrote this, or a chat application with one message a line."""
    found: list[dict[str, Any]] = []
    for line in head.split(b"\n")[:_NUM_LINES]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.append(event)
    if (known := file_format(Head(name, head, found))) is not None:
        return known.name
    return _MESSAGES if _is_message_log(head, name) else None


def _is_message_log(head: bytes, name: str) -> bool:
    """Whether the first lines are messages that name their session, or all lines are one conversation."""
    *lines, last = head.split(b"\n")
    whole = len(head) < _HEAD_BYTES and len(lines) < NUM_SAMPLE
    found: list[dict[str, Any] | None] = []
    for line in [*lines, last][:NUM_SAMPLE] if whole else lines[:NUM_SAMPLE]:
        if not line.strip():
            continue
        if (
            len(found) < MIN_MESSAGES
            and not any(name in line for name in _OF_EVENTS)
            and (found or len(line) > _HEAD_LINE)
        ):
            return False  # a quick no, before anything is parsed; the first line may be about the log
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        found.append(event if isinstance(event, dict) else None)
        if len(found) == MIN_MESSAGES and not all(map(_may_be_event, found[1:])):
            return False
    return are_of_openhands(found) or message_shape(found, name, whole=whole) is not None


def _may_be_event(event: dict[str, Any] | None) -> bool:
    return event is None or is_event_like(event) or "source" in event


def convert_session(path: str, name: str, known: str, out: str) -> None:
    """Write the conversations of a log called `name` to `out` as numbered lines. A place is its first line."""
    kind, _, packed = known.partition(".")
    damage: list[PlacedRow] = []
    lines = text_lines(open_bytes(path, f".{packed}" if packed else ""), damage)
    rows = message_rows(lines, name) if kind == _MESSAGES else file_rows(kind, lines)
    write_rows(itertools.chain(rows, damage), out)


def is_session(known: str) -> bool:
    kind = known.partition(".")[0]
    return kind == _MESSAGES or is_file_format(kind)


def is_session_line(row: Any) -> bool:
    """Whether a row is one line of a session, read without the others."""
    return isinstance(row, dict) and any(program.is_line(row) for program in (claude_code, codex, pi))
