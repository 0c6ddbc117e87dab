"""All generations of the logs that one pattern follows: which are there, where, and which have something to read."""

import glob
import os
import sqlite3
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.data.interactions import read_cursors
from hivetune.data.sources.rotation import (
    Position,
    find_again,
    holds,
    is_packed,
    load_position,
    younger_rotations,
)

LOGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
DOCUMENTS = (".json", ".csv", ".tsv", ".parquet", ".json.gz", ".csv.gz", ".tsv.gz", ".json.zst", ".csv.zst", ".tsv.zst")

CLOSE_AFTER_S = 60.0  # a writer may hold a renamed log open for a while

Files = dict[str, os.stat_result]


@dataclass(slots=True)
class Track:
    """One generation as this process follows it. `stored` is its cursor in the database, None before the first."""

    position: Position
    stored: str | None
    status: os.stat_result | None = None  # of the last look; None: not found then
    read_to_end: tuple[int, int] | None = None  # size and mtime_ns when it was last read to the end
    rotated: bool = False
    waiting: str | None = None  # the place of a last line that is not complete

    @property
    def state(self) -> tuple[int, int] | None:
        return (self.status.st_size, self.status.st_mtime_ns) if self.status else None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written: rotated away, and silent for a minute."""
        return self.rotated and self.status is not None and time.time() - self.status.st_mtime > CLOSE_AFTER_S

    @property
    def is_due(self) -> bool:
        """Whether there may be something to read, or to close."""
        changed = self.status is not None and self.state != self.read_to_end
        return changed or (self.is_over and not self.position.closed and self.stored is not None)


class Generations:
    """Finds files by name and generations by content. `notes` gets a line for each loss that can't be ruled out."""

    def __init__(self, pattern: str, notes: list[str]):
        self.pattern = os.path.abspath(os.path.expanduser(pattern))
        self._notes = notes
        self._tracks: list[Track] = []

    def load(self, database: sqlite3.Connection) -> None:
        cursors = read_cursors(database, "jsonl:").values()
        self._tracks = [Track(load_position(text), text) for text in cursors]

    def waiting(self) -> list[str]:
        return [track.waiting for track in self._tracks if track.waiting]

    def files(self) -> Files:
        """The logs that the pattern names now: a file, the JSON Lines files of a folder, or the matches of a glob."""
        found: Files = {}
        for path in self._paths():
            status = _stat(path)
            if status and os.path.isfile(path) and not path.endswith(DOCUMENTS):
                found[path] = status
        return found

    def documents(self) -> list[str]:
        """What the pattern names and is written whole, not line by line: CSV, Parquet, JSON."""
        return [path for path in self._paths() if path.endswith(DOCUMENTS) and os.path.isfile(path)]

    def _paths(self) -> list[str]:
        if os.path.isdir(self.pattern):
            names = (str(path) for path in Path(self.pattern).rglob("*"))
            paths = [name for name in names if name.endswith(LOGS + DOCUMENTS)]
        elif os.path.lexists(self.pattern) or not glob.has_magic(self.pattern):
            paths = [self.pattern]
        else:
            paths = glob.glob(self.pattern, recursive=True)
        return sorted({os.path.realpath(path) for path in paths})

    def look(self) -> list[Track]:
        """Match files with generations; returns those that changed since they were read, oldest first.

        A file whose content is known goes on, under whatever name; another one starts a new generation.
        """
        files = self.files()
        taken = {(status.st_dev, status.st_ino) for status in files.values()}
        for track in self._tracks:
            track.status = None
        unknown = [path for path, status in files.items() if not self._known(path, status)]
        mine = [track for track in self._tracks if track.position.pattern == self.pattern and not track.position.closed]
        for track in mine:
            if track.status is None:
                self._search(track, taken)
        for path in unknown:
            if not self._moved_here(path, files[path]):
                self._tracks.append(self._new(path, files[path]))
        for track in mine:
            if track.status is None:
                self._give_up(track)
        due = [track for track in self._tracks if track.is_due]
        gone = [track for track in mine if track.status is None]
        return gone + sorted(due, key=lambda track: (not track.rotated, track.position.origin))

    def _known(self, path: str, status: os.stat_result) -> bool:
        """Whether a generation lies under this inode and still has the bytes that were read of it."""
        for track in self._tracks:
            if track.position.identity != (status.st_dev, status.st_ino) or track.status:
                continue
            if track.read_to_end == (status.st_size, status.st_mtime_ns) or holds(path, track.position):
                self._place(track, path, status, rotated=path != track.position.origin)
                return True
        return False

    def _search(self, track: Track, taken: set[tuple[int, int]]) -> None:
        """A generation that lost its name: renamed, copied and cut off, or compressed, in the same folder."""
        others = taken | {other.position.identity for other in self._tracks if other is not track}
        found = find_again(track.position, others)
        if not found:
            return
        path, status = found
        newly = path != track.position.path
        self._place(track, path, status, rotated=True)
        if newly:
            others.add(track.position.identity)
            for other, other_status in younger_rotations(track.position, path, others):
                missed = self._new(other, other_status)
                missed.rotated = True
                self._tracks.append(missed)

    def _moved_here(self, path: str, status: os.stat_result) -> bool:
        """Whether this file is a generation that is no longer where it was: moved, or rewritten by an editor."""
        for track in self._tracks:
            position = track.position
            if track.status or not position.offset:
                continue
            there = _stat(position.path)
            left = not there or (there.st_dev, there.st_ino) != position.identity or path == position.path
            if left and holds(path, position):
                self._place(track, path, status, rotated=path != position.origin)
                return True
        return False

    def _place(self, track: Track, path: str, status: os.stat_result, *, rotated: bool) -> None:
        track.position = replace(
            track.position, pattern=self.pattern, path=path, device=status.st_dev, inode=status.st_ino
        )
        track.status = status
        track.rotated = rotated

    def _new(self, path: str, status: os.stat_result) -> Track:
        known = [track.position.generation for track in self._tracks if track.position.origin == path]
        generation = 1 + max(known, default=0)
        position = Position(path, generation, self.pattern, path, status.st_dev, status.st_ino)
        return Track(position, None, status)

    def _give_up(self, track: Track) -> None:
        """The generation is nowhere. Silent only when it was read to its end while we watched."""
        position = track.position
        if track.read_to_end is None or (not is_packed(position.path) and track.read_to_end[0] != position.offset):
            self._notes.append(
                f"{position.origin}: replaced, cut off or removed; lines after {position.line} may be lost"
            )
        track.position = replace(position, closed=True, inode=0)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
