"""The definition of a format: the shape of an entry of formats.toml, of `FORMAT` in a module, and of an entry point;
and the conversation that it returns for a row.

There are four kinds: `Format` of records that are rows, `Batch` of records that contain rows, `Log` of files in which a
row has many lines, `Store` of SQLite files.
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
    """The conversation of a row. `untrusted`: a tool or a web page wrote the answer. `changed`: what was changed in the
    row, as keys of REASONS or REWRITTEN."""

    layout: str
    messages: tuple[Message, ...]
    tools: Tools = ()
    untrusted: bool = False
    changed: tuple[str, ...] = ()


class Format(NamedTuple):
    """Records that are rows. `read` is called with one JSON object, its names in snake_case. It returns the
    conversation, or None if the record has another format, and raises RowRefused for a record that must not be
    trained on.

    `needs`: the columns that a record must have before it is read; `a|b` means one of the two. `reads`: the columns
    that the format uses; others are reported as not read. `one_of`: columns of which only the first with a value is
    read. `table`: the format is recognised by names of columns alone, so an unread column may be a part of the
    question. `days` returns the rows of a record that contains one for each day, and None if the record has another
    format; the text of such a record contains `mark`.
    """

    name: str
    read: Callable[[Row], Conversation | None]
    needs: tuple[str, ...]
    reads: frozenset[str] = frozenset()
    one_of: tuple[tuple[str, ...], ...] = ()
    table: bool = False
    days: Callable[[Row], list[Row] | None] | None = None
    mark: str = ""


class Batch(NamedTuple):
    """Records that contain rows. `rows` yields these, nothing for a record of another format. `needs`: as in Format."""

    name: str
    rows: Callable[[Row], Iterable[Row]]
    needs: tuple[str, ...]


class Head(NamedTuple):
    """The beginning of a file. `data`: its first 256 KiB at most, in UTF-8 and unpacked; `events`: the JSON objects of
    its first 20 lines.
    """

    data: bytes
    events: Sequence[Row]


class Log(NamedTuple):
    """Files in which a row has many lines. `rows` yields (line, record), or (line, RowRefused) for lines that can't be
    joined to a row; a `Format` reads the records."""

    name: str
    recognise: Callable[[Head], bool]
    rows: Callable[[Lines], Iterator[PlacedRow]]


class Store(NamedTuple):
    """SQLite files of another program, recognised by `tables`. `rows` yields (number, record)."""

    name: str
    tables: frozenset[str]
    rows: Callable[[sqlite3.Connection], Iterator[PlacedRow]]


AnyFormat = Format | Batch | Log | Store
