"""What the readers of containers (JSON documents, CSV) take and give: text in pieces, and rows with their places."""

from collections.abc import Iterator
from typing import Protocol

MAX_ROW_CHARS = 16 << 20
PlacedRow = tuple[int, str, str]  # place, "r" or "p", text without line breaks


class TextSource(Protocol):
    """A text that is read once, from its start."""

    ended: bool
    problem: str | None  # why it ended before its end

    def more(self) -> str:
        """The next text, empty at the end."""

    def lines(self) -> Iterator[str]:
        """All lines with their line feeds, in place of `more`."""


def one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\r", " ")
