"""What a format is: the shape of `FORMAT` in each module of data/formats, and of an entry point `hivetune.formats`.

A module says in its docstring who writes its format, with a link to what defines it. There are three kinds: `Format` of
records that are rows, `Batch` of records that hold rows, `Log` of files whose rows have many lines.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.pieces.said import Conversation, Row

Lines = Iterator[tuple[int, str]]  # (line number, the line without its line break)


class Format(NamedTuple):
    """Records that are rows. `read` is given one JSON object, its names in snake_case, and returns its conversation, or
    None if it is of another format. It raises RowRefused, with the reason, for a record that nobody should learn. A
    format may be two functions instead, `Format(name, recognise, rows)`: whether a record is one of its, and its
    conversation.

    `needs`: a record must have one of these columns before it is read, or none if it is empty. `rank` says which
    formats are asked first, the lower the earlier: 0 what one program writes, 10 to 19 what many APIs share, from 20 on
    what published data sets share, from 30 on columns by their names.

    From rank 1 on, other columns that look like content are refused. `explains`: columns that `read` reads or rightly
    leaves out; `beside`: names of notes about such records; `asks`: names that are content in such records.
    """

    name: str
    read: Callable[[Row], Conversation | bool | None]
    rows: Callable[[Row], Conversation] | None = None
    needs: frozenset[str] = frozenset()
    rank: int = 0
    explains: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    asks: frozenset[str] = frozenset()

    def conversation(self, row: Row) -> Conversation | None:
        """Return the conversation of a record, None if it is of another format. Raise RowRefused."""
        found = self.read(row)
        if self.rows is not None:
            return self.rows(row) if found else None
        return found if isinstance(found, Conversation) else None


class Batch(NamedTuple):
    """Records that hold rows. `rows` yields them, and nothing for a record of another format; `needs` and `rank` as
    those of a Format.
    """

    name: str
    rows: Callable[[Row], Iterable[Row]]
    needs: frozenset[str]
    rank: int = 0


class Head(NamedTuple):
    """The beginning of a file. `name`: its path as the user gave it; `data`: its first 256 KiB at most, in UTF-8 and
    unpacked (of a file that does not begin with JSON also 8 MiB: servers print pages before the first request);
    `events`: the JSON objects of its first 20 lines.
    """

    name: str
    data: bytes
    events: Sequence[Row]


class Log(NamedTuple):
    """Files whose rows have many lines. `rows` yields (line, record), or (line, RowRefused) where one is lost; formats
    of records read these.
    """

    name: str
    recognise: Callable[[Head], bool]
    rows: Callable[[Lines], Iterator[PlacedRow]]
    rank: int = 0
