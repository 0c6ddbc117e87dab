"""The definition of a format: the shape of an entry of formats.toml, of `FORMAT` in a module, and of an entry point;
and what it makes of a row.

There are four kinds: `Format` of records that are rows, `Batch` of records that hold rows, `Log` of files whose rows
have many lines, `Store` of SQLite files.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.values import Row
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Tools = tuple[Mapping[str, Any], ...]
Lines = Iterator[tuple[int, str]]  # (line number, the line without its line break)
# (place, a record, its JSON as text, or why there is none). The place is the line of the file where the row begins.
PlacedRow = tuple[int, Row | str | RowRefused]
NOT_HELD = "not-held"  # why nothing is learned where a log lacks an image, a file, a tool or a whole line


class Conversation(NamedTuple):
    """The conversation of a row. `untrusted`: a tool or a web page wrote the answer; `changed`: reasons of severity
    warn.
    """

    layout: str
    messages: tuple[Message, ...]
    tools: Tools = ()
    untrusted: bool = False
    changed: tuple[str, ...] = ()


class Format(NamedTuple):
    """Records that are rows. `read` is given one JSON object, its names in snake_case, and returns its conversation, or
    None if it is of another format. It raises RowRefused, with the reason, for a record that nobody should learn.

    `needs`: the columns that a record must have before it is read; `a|b` means one of the two. `reads`: the columns
    that are read, or that the format gives a meaning; others are listed as not read. `one_of`: columns of which the
    first with a value is read. `table`: the format is no more than names of columns, so that a column that is not read
    may hold a part of the question. `rows` yields the rows of a record that holds several of this format; its text
    has the name `mark`.
    """

    name: str
    read: Callable[[Row], Conversation | None]
    needs: tuple[str, ...]
    reads: frozenset[str] = frozenset()
    one_of: tuple[tuple[str, ...], ...] = ()
    table: bool = False
    rows: Callable[[Row], Iterable[Row]] | None = None
    mark: str = ""


class Batch(NamedTuple):
    """Records that hold rows. `rows` yields them; it yields no row for a record of another format. `needs`: as in
    Format.
    """

    name: str
    rows: Callable[[Row], Iterable[Row]]
    needs: tuple[str, ...]


class Head(NamedTuple):
    """The beginning of a file. `name`: its path as the user gave it; `data`: its first 256 KiB at most, in UTF-8 and
    unpacked; `events`: the JSON objects of its first 20 lines.
    """

    name: str
    data: bytes
    events: Sequence[Row]


class Log(NamedTuple):
    """Files whose rows have many lines. `rows` yields (line, record), or (line, RowRefused) for a row that can't be
    joined; formats of records read these.
    """

    name: str
    recognise: Callable[[Head], bool]
    rows: Callable[[Lines], Iterator[PlacedRow]]


class Store(NamedTuple):
    """SQLite files of a program. `tables`: those that it has, among others; `rows` yields (number, record)."""

    name: str
    tables: frozenset[str]
    rows: Callable[[sqlite3.Connection], Iterator[PlacedRow]]


AnyFormat = Format | Batch | Log | Store
