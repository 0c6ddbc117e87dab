"""The reader of JSON Lines files that others write: through rotation, with no line read twice or lost."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hivetune.base.paths import quoted, spelled
from hivetune.data.intake.files import MAX_LINE_BYTES
from hivetune.data.intake.interactions import Batch, Cursor, Delivery
from hivetune.data.intake.sources.delivered import Batches, is_complete, rows_of_line
from hivetune.data.intake.sources.rotation import (
    SAMPLE_BYTES,
    Generations,
    Moved,
    Position,
    Track,
    open_unpacked,
    read_before_damage,
    sample_hash,
)
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

_BATCH_ROWS = 1000
_CHUNK_BYTES = 1 << 20
LOOKS = 10  # in one read, while logs are renamed or truncated


@dataclass(slots=True)
class _Lines:
    """The result of one read. `consumed` counts bytes of the chunk, `line` all finished lines."""

    position: Position
    consumed: int = 0
    line: int = 0
    skipping: bool = False
    deliveries: list[Delivery] = field(default_factory=list)

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


class JsonlReader:
    """The Reader of a file, glob or folder of JSON Lines."""

    def __init__(self, pattern: str):
        self.name = pattern
        self.notes: list[str] = []
        self.poll_s = 0.2
        self._generations = Generations(pattern, self.notes)
        self._follow = False

    def has_files(self) -> bool:
        return bool(self._generations.files())

    def documents(self) -> list[str]:
        """Return the files of the pattern that are not logs; documents.py reads them."""
        return self._generations.documents()

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
        position = track.position
        track.waiting = None
        before = min(position.offset, SAMPLE_BYTES)
        try:
            chunk, at_end, error = self._chunk(position, before)
        except PermissionError:
            raise UsageError(
                f"{spelled(position.path)} is not readable", hint=f"chmod u+r {quoted(position.path)}"
            ) from None
        if not error and sample_hash(chunk[:before]) != (position.tail or sample_hash(b"")):
            raise Moved(position.path)  # it was truncated, and the next look finds the copy
        body = chunk[before:]
        lines = self._split(position, body, at_end)
        if at_end and not lines.deliveries and (error or lines.consumed < len(body)):
            self._rest(track, lines, body[lines.consumed :], error)
            track.read_to_end = track.state
        whole = at_end and lines.consumed == len(body)
        if whole:
            track.read_to_end = track.state
        after = replace(position, closed=position.closed or (whole and track.is_over))
        if lines.consumed:
            read = chunk[: before + lines.consumed]
            head = position.head if position.offset >= SAMPLE_BYTES else sample_hash(read[:SAMPLE_BYTES])
            tail, offset = sample_hash(read[-SAMPLE_BYTES:]), position.offset + lines.consumed
            after = replace(after, offset=offset, line=lines.line, head=head, tail=tail, skipping=lines.skipping)
        return after, lines.deliveries

    def _chunk(self, position: Position, before: int) -> tuple[bytes, bool, Exception | None]:
        """Return (`before` old bytes and new ones, whether they are the last, the damage that ended them).

        One read returns both, so that the log can't be truncated between the check and the rows.
        """
        size = _CHUNK_BYTES
        with open_unpacked(position.path, position.identity) as file:
            file.seek(position.offset - before)
            chunk, error = read_before_damage(file, before + size)
            while len(chunk) == before + size and size <= MAX_LINE_BYTES and b"\n" not in chunk[before:]:
                more, error = read_before_damage(file, size)
                size *= 2
                chunk += more
            return chunk, len(chunk) < before + size, error

    def _split(self, position: Position, body: bytes, at_end: bool) -> _Lines:
        lines = _Lines(position, line=position.line, skipping=position.skipping)
        while len(lines.deliveries) < _BATCH_ROWS:
            end = body.find(b"\n", lines.consumed)
            if end < 0:
                break
            text = body[lines.consumed : end]
            if not lines.skipping and text.strip():
                lines.take(text)
            lines.skipping = False
            lines.line += 1
            lines.consumed = end + 1
        if not lines.consumed and body and not at_end:
            # A line of more than MAX_LINE_BYTES is refused once, then skipped to its end.
            lines.consumed = len(body)
            if not lines.skipping and body.strip(b"\0"):
                lines.take(body[:SAMPLE_BYTES], RowRefused("line-too-large"))
                lines.skipping = True
        elif lines.skipping and at_end:
            lines.consumed = len(body)
        return lines

    def _rest(self, track: Track, lines: _Lines, text: bytes, error: Exception | None) -> None:
        """Handle a last line without a line feed: a whole row, an unfinished one, or a torn one."""
        if error:
            if track.broken_at == track.state:
                return
            track.broken_at = track.state
            lines.take(b"", RowRefused("broken-file", f"damaged compression ({error}): restore the file"))
        elif not text.strip(b"\0 \t\r"):
            return
        elif (not self._follow or track.is_over) and is_complete(text):
            lines.take(text)
            lines.consumed += len(text)
        elif track.is_over:
            lines.take(text, RowRefused("truncated-line"))
            lines.consumed += len(text)
        else:
            track.waiting = f"{track.position.origin}:{lines.line + 1}"
