"""The conversion of a delivery (a line, columns, stream fields) to a row, or to the reason for its refusal."""

import codecs
import contextlib
import json
import sqlite3
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from hivetune.data.formats import may_hold_rows, rows_inside
from hivetune.data.intake.interactions import Batch
from hivetune.data.pieces.turns import is_conversation
from hivetune.data.pieces.values import objects
from hivetune.data.read import parse_row, refuse_constant, refuse_session_line, unique_keys
from hivetune.data.reasons import RowRefused

BINARY = "binary-column"
BINARY_HINT = "store it as text; of a table, collect a view without it: ?table=VIEW&cursor=COLUMN"


Batches = Generator[Batch | None, None, None]


class Reader:
    """A source. `name` and `notes` are for people, and never hold a password. `waiting`: the places of rows that are
    not complete yet. `retrying`: the source can't be reached now.
    """

    def __init__(self, name: str):
        self.name = name
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self.retrying = False

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def found(self) -> Sequence["Reader"]:
        """Return readers of further sources that this one met, each once."""
        return ()

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        """Yield the rows after the stored position, and None where there are no more now.

        Whoever asks for the next batch has made the last one durable. With `follow`, later rows count too. Raise
        UsageError, MachineNotFit, Busy.
        """
        raise NotImplementedError


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the row of one line of JSON. Raise RowRefused."""
    return dict(parse_row(_text(line)))


def rows_of_line(line: bytes) -> list[dict[str, Any]]:
    """Return the row of a log's line, or the rows inside of it. Raise RowRefused."""
    text = _text(line)
    inside = rows_inside(text) if may_hold_rows(text) else None
    rows = [dict(parse_row(payload)) for payload in inside or [text]]
    for row in rows:
        refuse_session_line(row)
    return rows


def rows_of_document(text: bytes) -> list[dict[str, Any]]:
    """Return the row of a JSON text, or the rows inside of it, such as a list of conversations. Raise RowRefused."""
    try:
        value = json.loads(_text(text), parse_constant=refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return [parse_line(text)]  # raises the reason
    if isinstance(value, dict):
        return divided(parse_line(text))
    rows = objects(value) if isinstance(value, list) and not is_conversation(value) else None
    return [dict(row) for row in rows] if rows else [parse_line(text)]


def divided(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows inside of a delivered row, or the row itself."""
    if "messages" in row or not any(isinstance(value, dict | list) for value in row.values()):
        return [row]
    text = json.dumps(row).encode()
    if may_hold_rows(text) and (inside := rows_inside(text)):
        return [dict(parse_row(payload)) for payload in inside]
    return [row]


def _text(line: bytes) -> bytes:
    """Return a line without byte order mark and without the zeros of a log that was truncated under its writer."""
    return line.lstrip(b"\0").strip().removeprefix(codecs.BOM_UTF8)


def is_complete(line: bytes) -> bool:
    """Return whether a last line without a line feed is a whole row; no prefix of a JSON object is one."""
    try:
        parse_line(line)
    except RowRefused:
        return False
    return True


def from_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of named cells, in which JSON objects and arrays are parsed. Raise RowRefused for bytes."""
    row: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise RowRefused(BINARY, f"{name} holds bytes that are no text: {BINARY_HINT}") from None
        if isinstance(value, str) and value.startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):  # a text like others
                value = json.loads(value, parse_constant=refuse_constant)
        row[name] = value
    return row


def rename(row: Mapping[str, Any], column_map: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with the names of `column_map` (our name -> the row's); other columns keep theirs."""
    if not column_map:
        return dict(row)
    mapped = {ours: row[theirs] for ours, theirs in column_map.items() if theirs in row}
    used = set(column_map.values())
    return {name: value for name, value in row.items() if name not in used and name not in mapped} | mapped
