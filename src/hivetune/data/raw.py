"""A row as it was read, before any check, and the file that it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hivetune.data.reasons import RowRefused

# A row is held several times while it is read, checked and rendered, by each worker.
MAX_ROW_BYTES = 16 << 20
GATEWAY = "gateway"  # the rows that our gateway captured have the source gateway:RELEASE


@dataclass(frozen=True, slots=True)
class Source:
    """A file of rows, or the store.

    `path` is the file, `name` the user's name for it. `kind` determines the reader (files/kinds.py), `packed` is "gz",
    "zst" or empty, and `encoding` is that of its text, None for UTF-8. Only the first `size` bytes were hashed and are
    read, since a log may grow meanwhile. `lines` is the number of line breaks in them, 0 for a packed file.

    The daily files of a Slack channel are read as one source: `parts` are these files, and `users` is the path of
    users.json.
    The `parts` of the store are the files, tables and streams that its rows came from, `last` is the last row id that
    is read, and `size` the bytes of its rows.

    The other fields follow from its first rows (prepare/understand.py). `inside`: the path of the rows in a record,
    empty if a record is a row. `turns`: the user's mapping, if each row is a turn. `suggestion`: a mapping for rows of
    unknown layout, as text. `refusal`: the reason why its tables are refused, or "". `columns`: those with a value.
    """

    path: str
    name: str
    kind: str
    packed: str = ""
    encoding: str | None = None
    size: int = 0
    lines: int = 0
    last: int = 0
    inside: str = ""
    suggestion: str = ""
    refusal: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    parts: "tuple[Source, ...]" = ()
    users: str = ""
    columns: frozenset[str] = frozenset()

    def place(self, number: int) -> str:
        """Return "file:line" for a line number."""
        # The lines of the parts are numbered through, and people look for them in the file of a day.
        for part in self.parts:
            if number <= part.lines:
                return f"{part.name}:{number}"
            number -= part.lines
        return f"{self.name}:{number}"


class RawRow(NamedTuple):
    """One row as it was read. `source`: its place, such as "rows.jsonl:17". `problem`: the reason why it could not be
    read, or None. `stored`: the values of its columns in the store, if it comes from there."""

    source: str
    payload: bytes
    problem: RowRefused | None = None
    interaction_id: str | None = None
    stored: Mapping[str, Any] | None = None
    file: Source | None = None
