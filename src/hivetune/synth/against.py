"""Rows of the user that no made row may repeat: what is trained and what is held out."""

from collections.abc import Iterator, Sequence

from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused


class Against:
    """Reads the rows once; `unreadable` counts those that say nothing that could be compared."""

    def __init__(self, sources: Sequence[str]):
        self._sources = sources
        self.rows = self.unreadable = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(place, question and answer). Raises UsageError for a file that is not there."""
        if not self._sources:
            return
        for raw in rows_of_files(self._sources):
            try:
                example = example_of(raw)
            except RowRefused:
                self.unreadable += 1
                continue
            self.rows += 1
            turns = [message.content for message in example.messages if message.role != "system"]
            yield example.source, "\n".join(turns)
