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

    `path` has the bytes, `name` is the user's name for it. `kind` says how it is read (files/kinds.py), `packed` is
    "gz", "zst" or empty, and `encoding` is that of its text, None for UTF-8. `size` bytes of it were hashed, and only
    these are read: a log may grow meanwhile. `lines` is the number of its line breaks, 0 if it is packed.

    A channel of Slack is read as one: `parts` are the files of its days, and `users` is the path of the export's names.

    What its first rows told (prepare/understand.py): `inside` is the path of the rows in a record, empty if a record is
    a row; `turns` is the user's mapping where each row is a turn; `suggestion` is a mapping for unread rows, in words;
    `refusal` is why its tables are refused.
    """

    path: str
    name: str
    kind: str
    packed: str = ""
    encoding: str | None = None
    size: int = 0
    lines: int = 0
    inside: str = ""
    suggestion: str = ""
    refusal: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    parts: "tuple[Source, ...]" = ()
    users: str = ""

    def place(self, number: int) -> str:
        """Return "file:line" for a line number."""
        # The lines of the parts are numbered through, and people look for them in the file of a day.
        for part in self.parts:
            if number <= part.lines:
                return f"{part.name}:{number}"
            number -= part.lines
        return f"{self.name}:{number}"


class RawRow(NamedTuple):
    """One row as it came. `source`: its place, such as "rows.jsonl:17". `problem`: the reason why it could not be read.
    `stored`: the store's own values for the row.
    """

    source: str
    payload: bytes
    problem: RowRefused | None = None
    interaction_id: str | None = None
    stored: Mapping[str, Any] | None = None
    file: Source | None = None
