"""The reader of JSON Lines files that others write: through rotation, with no line read twice or lost."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from hivetune.base.paths import quoted, spelled
from hivetune.data.files.kinds import source_of
from hivetune.data.files.unpack import DAMAGED
from hivetune.data.intake.interactions import Batch, Cursor, Delivery
from hivetune.data.intake.sources.delivered import Batches, is_complete, rows_of_line
from hivetune.data.intake.sources.rotation import (
    SAMPLE_BYTES,
    Generations,
    Moved,
    Position,
    Track,
    open_unpacked,
    sample_hash,
)
from hivetune.data.raw import MAX_ROW_BYTES as MAX_LINE_BYTES
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

_BATCH_ROWS = 1000
_BATCH_BYTES = 1 << 20
LOOKS = 10  # in one read, while logs are renamed or truncated


@dataclass(slots=True)
class _Lines:
    """The result of one read. `read` has a sample of the bytes before it and those of the finished lines, which
    `consumed` counts. `line` counts all finished lines. `rest` is the unfinished line at the end of the file, None if
    there is more to read.
    """

    position: Position
    line: int
    skipping: bool
    read: bytearray = field(default_factory=bytearray)
    consumed: int = 0
    rest: bytes | None = None
    deliveries: list[Delivery] = field(default_factory=list)

    def take_all(self, file: IO[bytes]) -> None:
        """Take the next lines of a file, as many as make a batch."""
        while len(self.deliveries) < _BATCH_ROWS and self.consumed < _BATCH_BYTES:
            text = file.readline(MAX_LINE_BYTES + 1)
            is_finished, is_too_large = text.endswith(b"\n"), len(text) > MAX_LINE_BYTES
            if not text or not (is_finished or is_too_large or self.skipping):
                self.rest = text
                return
            self.consume(text)
            if is_finished:
                if not self.skipping and text.strip():
                    self.take(text[:-1])
                self.skipping = False
                self.line += 1
            elif not self.skipping and text.strip(b"\0"):
                # It is refused once, then passed over to its end.
                self.take(text[:SAMPLE_BYTES], RowRefused("line-too-large"))
                self.skipping = True

    def take(self, text: bytes, refused: RowRefused | None = None) -> None:
        """Add the rows of one line, or its refusal."""
        rows: list[dict[str, Any] | RowRefused]
        try:
            rows = [refused] if refused else [*rows_of_line(text)]
        except RowRefused as error:
            rows = [error]
        origin, number = self.position.origin, self.line + 1
        place, key = f"{origin}:{number}", f"{self.position.key}:{number}"
        self.deliveries += [Delivery(origin, place, key, row, raw=text) for row in rows]

    def consume(self, text: bytes) -> None:
        self.read += text
        self.consumed += len(text)


class JsonlReader:
    """The Reader of a file, glob or folder of JSON Lines."""

    def __init__(self, pattern: str):
        self.name = pattern
        self.notes: list[str] = []
        self.poll_s = 0.2
        self._generations = Generations(pattern, self.notes)
        self._follow = False
        self._given: set[str] = set()

    def has_files(self) -> bool:
        return bool(self.paths())

    def paths(self) -> list[str]:
        """Return the logs that are there now, without links."""
        return [*self._generations.files()]

    def new_documents(self) -> list[str]:
        """Return the files of the pattern that are not logs, each once and after a look at the logs; documents.py reads
        them.
        """
        found = [path for path in self._generations.documents if path not in self._given]
        self._given.update(found)
        return found

    @property
    def waiting(self) -> list[str]:
        return self._generations.waiting()

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        self._follow = follow
        self._generations.load(database)
        if not follow and not self.has_files():
            fault = "is not JSON Lines, or a folder of it" if os.path.exists(self.name) else "does not exist"
            raise UsageError(
                f"{spelled(self.name)} {fault}", hint="give a file, a folder with *.jsonl, or a glob in quotes"
            )

        looks_left = LOOKS
        while not stop.is_set():
            moved = False  # whether a log was renamed or truncated between look and read
            for track, cursor_only in self._generations.look():
                try:
                    for batch in self._generation(track, cursor_only=cursor_only):
                        yield batch
                        if stop.is_set():
                            return
                        looks_left = LOOKS
                except Moved:
                    moved = True
            looks_left -= 1
            if not moved or not looks_left:
                yield None
                looks_left = LOOKS

    def _generation(self, track: Track, *, cursor_only: bool) -> Iterator[Batch]:
        """Yield the next rows of one generation, or only its position if that is not stored yet. Raise Moved."""
        while True:
            after, deliveries = (track.position, []) if cursor_only else self._read(track)
            text = after.dump()
            if text == track.stored and not deliveries:
                return
            yield Batch(after.origin, deliveries, Cursor(after.key, track.stored, text))
            track.position, track.stored = after, text

    def _read(self, track: Track) -> tuple[Position, list[Delivery]]:
        """Return the next rows of one generation, and the position after them. Raise Moved."""
        position, damaged = track.position, None
        track.waiting = None
        lines = _Lines(position, position.line, position.skipping)
        before = min(position.offset, SAMPLE_BYTES)
        try:
            with open_unpacked(position.path, position.identity, position.offset - before) as file:
                lines.read += file.read(before)
                if sample_hash(lines.read) != (position.tail or sample_hash(b"")):
                    raise Moved(position.path)  # it was truncated, and the next look finds the copy
                lines.take_all(file)
        except PermissionError:
            raise UsageError(
                f"{spelled(position.path)} is not readable", hint=f"chmod u+r {quoted(position.path)}"
            ) from None
        except DAMAGED as error:
            damaged = error
        if not lines.deliveries and (damaged or lines.rest):
            self._end(track, lines, damaged)
            track.read_to_end = track.state
        if not position.offset and (lines.consumed or lines.rest):
            self._check_format(position.path)
        is_whole = lines.rest == b""
        if is_whole:
            track.read_to_end = track.state
        after = replace(position, closed=position.closed or (is_whole and track.is_over))
        if lines.consumed:
            head = position.head if position.offset >= SAMPLE_BYTES else sample_hash(lines.read[:SAMPLE_BYTES])
            tail, offset = sample_hash(lines.read[-SAMPLE_BYTES:]), position.offset + lines.consumed
            after = replace(after, offset=offset, line=lines.line, head=head, tail=tail, skipping=lines.skipping)
        return after, lines.deliveries

    def _check_format(self, path: str) -> None:
        """Note a file whose rows are not its lines: a program's session, text in UTF-16, objects over several lines."""
        try:
            form = source_of(path, path).kind
        except UsageError as error:
            note = f"{error.message}: {error.hint}"
        else:
            plain = form.removesuffix(".gz").removesuffix(".zst")
            note = "" if plain == "jsonl" else f"{spelled(path)}: its lines are no rows; as a file it is read ({plain})"
            note = note and f"{note}: train from the file, by data.path, instead of the store"
        if note and note not in self.notes:
            self.notes.append(note)

    def _end(self, track: Track, lines: _Lines, damaged: Exception | None) -> None:
        """Handle a last line without a line feed: a whole row, an unfinished one, or a torn one."""
        text = lines.rest or b""
        if damaged:
            if track.broken_at != track.state:
                track.broken_at = track.state
                lines.take(b"", RowRefused("broken-file", f"damaged compression ({damaged}): restore the file"))
            return
        if not text.strip(b"\0 \t\r"):
            return
        if (not self._follow or track.is_over) and is_complete(text):
            lines.take(text)
        elif track.is_over:
            lines.take(text, RowRefused("truncated-line"))
        else:
            track.waiting = f"{track.position.origin}:{lines.line + 1}"
            return
        lines.consume(text)
        lines.rest = b""
