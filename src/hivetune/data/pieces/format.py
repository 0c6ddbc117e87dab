"""What a format is: the shape of `FORMAT` in each module of data/formats, and of an entry point `hivetune.formats`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from hivetune.data.pieces.said import Row

Lines = Iterator[tuple[int, str]]  # (line number, the line without its line break)


class Head(NamedTuple):
    """The beginning of a file. `name`: its path as the user gave it; `data`: its first 256 KiB at most, in UTF-8 and
    unpacked (of a file that does not begin with JSON also 8 MiB: servers print pages before the first request);
    `events`: the JSON objects of its first 20 lines.
    """

    name: str
    data: bytes
    events: Sequence[Row]


class Format(NamedTuple):
    """One named format. Its module says in its docstring who writes it, with a link to what defines it.

    `unit` says what `recognise` and `rows` are given:

    - "record": one JSON object, its names in snake_case. `rows` returns its conversation.
    - "batch": one JSON object that holds many records. `rows` yields them.
    - "file": `recognise` gets a `Head`, `rows` the lines of the file. It yields (line, record), or (line, RowRefused)
      where one is lost.

    Formats of the unit "record" read what "batch" and "file" yield. `rows` raises RowRefused, with the reason, for a
    record that nobody should learn. `needs`: a record must have one of these columns before `recognise` is asked, or
    none if it is empty. `rank` says which formats are asked first, the lower the earlier: 0 what one program writes,
    10 to 19 what many APIs share, from 20 on what published data sets share, from 30 on columns by their names.

    From rank 1 on, other columns that look like content are refused. `explains`: columns that `rows` reads or rightly
    leaves out; `beside`: names of notes about such records; `asks`: names that are content in such records.
    """

    name: str
    recognise: Callable[..., bool]
    rows: Callable[..., Any]
    unit: Literal["record", "batch", "file"] = "record"
    needs: frozenset[str] = frozenset()
    rank: int = 0
    explains: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    asks: frozenset[str] = frozenset()
