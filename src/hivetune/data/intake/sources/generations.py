"""The generations of the logs of one pattern: where they are, and which have something to read."""

import glob
import os
import sqlite3
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.data.intake.interactions import read_cursors
from hivetune.data.intake.places import is_storable
from hivetune.data.intake.sources.rotation import (
    Identity,
    Moved,
    Position,
    holds,
    inode_of,
    is_packed,
    is_rotation_of,
    load_position,
    may_be_copy,
    scan,
)

LOGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
DOCUMENTS = (".json", ".csv", ".tsv", ".parquet", ".json.gz", ".csv.gz", ".tsv.gz", ".json.zst", ".csv.zst", ".tsv.zst")

CLOSE_AFTER_S = 60.0  # a writer may hold a renamed log open for a while
SCAN_EVERY_S = 5.0
STABLE_WITHIN_S, PAUSE_S = 2.0, 0.002  # how long to look at a folder while files are renamed

_Files = dict[str, os.stat_result]


@dataclass(slots=True)
class Track:
    """One generation that is followed. `stored` is its cursor in the database, None before the first one."""

    position: Position
    stored: str | None
    status: os.stat_result | None = None  # at the last look, None if it was not found
    read_to_end: tuple[int, int] | None = None  # size and mtime_ns when it was last read to the end
    broken_at: tuple[int, int] | None = None  # the same when damage was last reported
    rotated: bool = False
    waiting: str | None = None  # the place of a last line that is not complete

    @property
    def state(self) -> tuple[int, int] | None:
        return (self.status.st_size, self.status.st_mtime_ns) if self.status else None

    @property
    def is_over(self) -> bool:
        """Return whether the file is complete: rotated, and unchanged for a minute."""
        return self.rotated and self.status is not None and time.time() - self.status.st_mtime > CLOSE_AFTER_S

    @property
    def is_due(self) -> bool:
        """Return whether there may be something to read or to close."""
        if self.status is None:
            return False
        if self.position.closed:
            return not is_packed(self.position.path) and self.status.st_size > self.position.offset
        return self.is_over or self.state != self.read_to_end


class Generations:
    """The search for files by name and generations by content. `notes` gets a line for each possible loss."""

    def __init__(self, pattern: str, notes: list[str]):
        self.pattern = os.path.abspath(os.path.expanduser(pattern))
        self._notes = notes
        self._tracks: list[Track] = []
        self._scanned_at = 0.0

    def load(self, database: sqlite3.Connection) -> None:
        cursors = read_cursors(database, "jsonl:").values()
        self._tracks = [Track(load_position(text), text) for text in cursors]

    def waiting(self) -> list[str]:
        return [track.waiting for track in self._tracks if track.waiting]

    def files(self) -> _Files:
        """Return the logs of the pattern now: a file, the JSON Lines files of a folder, or the matches of a glob."""
        files: _Files = {}
        for path in self._paths():
            status = _stat(path)
            if status and os.path.isfile(path) and not path.endswith(DOCUMENTS):
                files[path] = status
        return files

    def documents(self) -> list[str]:
        """Return the files of the pattern that are not logs: CSV, Parquet, JSON."""
        return [path for path in self._paths() if path.endswith(DOCUMENTS) and os.path.isfile(path)]

    def _paths(self) -> list[str]:
        if os.path.isdir(self.pattern):
            names = (str(path) for path in Path(self.pattern).rglob("*"))
            paths = [name for name in names if name.endswith(LOGS + DOCUMENTS)]
        elif os.path.lexists(self.pattern) or not glob.has_magic(self.pattern):
            paths = [self.pattern]
        else:
            paths = glob.glob(self.pattern, recursive=True)
        real_paths = sorted({os.path.realpath(path) for path in paths})
        for path in real_paths:
            note = f"{path!a} is not read: its name is not UTF-8; rename it"
            if not is_storable(path) and note not in self._notes:
                self._notes.append(note)
        return list(filter(is_storable, real_paths))

    def look(self) -> list[tuple[Track, bool]]:
        """Match files with generations, and return (track, whether only its cursor is to be written).

        A file with known content continues a generation under any name; another file starts a new one. If the folder
        changes during the look, the look is repeated.
        """
        until = time.monotonic() + STABLE_WITHIN_S
        while True:
            try:
                given_up = self._match()
                break
            except Moved:
                if time.monotonic() > until:
                    return []  # the next call looks again
                time.sleep(PAUSE_S)
        due = sorted(
            (track for track in self._tracks if track.is_due),
            key=lambda track: (not track.rotated, track.position.origin),
        )
        # A new generation is recorded before an old one moves on: if this process dies in between and the new file is
        # rotated, its cursor still leads to it.
        return [
            *((track, True) for track in due if track.stored is None),
            *((track, True) for track in given_up),
            *((track, False) for track in due),
        ]

    def _match(self) -> list[Track]:
        """Give each track its current file, and return the tracks that are given up. Raise Moved."""
        unknown = self._unknown(self.files())
        lost = [track for track in self._mine() if track.status is None]
        if not (lost or unknown or time.monotonic() - self._scanned_at > SCAN_EVERY_S):
            return []
        files, siblings = self._survey()
        unknown = self._unknown(files)
        new_tracks = self._match_siblings(siblings)
        for path, status in unknown.items():
            if not self._goes_on(path, status, rotated=False):
                new_tracks.append(self._new(path, status, os.path.basename(path), new_tracks))
        given_up = [track for track in self._mine() if track.status is None]
        for track in given_up:
            self._give_up(track)
        self._tracks += new_tracks
        self._scanned_at = time.monotonic()
        return given_up

    def _mine(self) -> list[Track]:
        return [track for track in self._tracks if track.position.pattern == self.pattern and not track.position.closed]

    def _unknown(self, files: _Files) -> _Files:
        """Find the tracks among the files of the pattern, and return the other files."""
        for track in self._tracks:
            track.status = None
        return {path: status for path, status in files.items() if not self._is_known(path, status, rotated=False)}

    def _survey(self) -> tuple[_Files, _Files]:
        """Return the files of the pattern, and the other files in the folders of the logs, each inode once.

        While logs are renamed in a chain (.1 to .2, then the log to .1), a look may see one twice or not at all. So two
        looks must be equal: then both were true in between. Raise Moved if they differ.
        """
        (first, _), (second, named) = self._read_folders(), self._read_folders()
        names = [{path: inode_of(status) for path, status in view.items()} for view in (first, second)]
        if names[0] != names[1]:
            raise Moved(self.pattern)
        once: dict[Identity, str] = {}
        for path, status in sorted(second.items(), key=lambda item: (item[0] not in named, item[0])):
            once.setdefault(inode_of(status), path)
        files = {path: second[path] for path in once.values()}
        return (
            {path: status for path, status in files.items() if path in named},
            {path: status for path, status in files.items() if path not in named},
        )

    def _read_folders(self) -> tuple[_Files, frozenset[str]]:
        """Return all plain files in the folders of the logs, and the names that match the pattern."""
        folders = {folder for folder, _ in self._logs()}
        files = self.files()
        return {path: status for folder in sorted(folders) for path, status in scan(folder).items()} | files, frozenset(
            files
        )

    def _logs(self) -> dict[tuple[str, str], int]:
        """Return (folder, name) -> first change time in ns of each log that is followed."""
        logs: dict[tuple[str, str], int] = {}
        for track in self._tracks:
            position = track.position
            if position.pattern == self.pattern:
                log = os.path.dirname(position.path), position.base
                logs[log] = min(position.since_ns, logs.get(log, position.since_ns))
        return logs

    def _match_siblings(self, siblings: _Files) -> list[Track]:
        """Find renamed, copied and compressed generations.

        Rotated files that are not older than the log at its first look are new generations.
        """
        logs = self._logs()
        new_tracks: list[Track] = []
        by_age = sorted(siblings.items(), key=lambda item: item[1].st_mtime_ns)
        strangers = [(path, status) for path, status in by_age if not self._is_known(path, status, rotated=True)]
        for path, status in reversed(strangers):
            folder, name = os.path.split(path)
            bases = [base for at, base in logs if at == folder and is_rotation_of(name, base)]
            if not bases or self._goes_on(path, status, rotated=True):
                continue
            if status.st_mtime_ns >= logs[folder, bases[0]] and not self._is_copy(path, status, bases[0]):
                missed = self._new(path, status, bases[0], new_tracks)
                missed.rotated = True
                new_tracks.append(missed)
        return new_tracks

    def _is_copy(self, path: str, status: os.stat_result, base: str) -> bool:
        positions = (track.position for track in self._tracks if track.status)
        return any(may_be_copy(path, inode_of(status), position) for position in positions if position.base == base)

    def _is_known(self, path: str, status: os.stat_result, *, rotated: bool) -> bool:
        """Return whether a generation has this inode and still the bytes that were read."""
        for track in self._tracks:
            position = track.position
            if position.identity != inode_of(status) or track.status:
                continue
            if track.read_to_end == (status.st_size, status.st_mtime_ns) or self._continues(path, position):
                self._place(track, path, status, rotated=rotated or path != position.origin)
                return True
        return False

    def _continues(self, path: str, position: Position) -> bool:
        """Return whether a file continues a generation; an inode alone proves little, since it may be reused."""
        if position.offset:
            return holds(path, position.identity, position)
        return path == position.path or is_rotation_of(os.path.basename(path), position.base)

    def _goes_on(self, path: str, status: os.stat_result, *, rotated: bool) -> bool:
        """Return whether this file is a generation that was copied, compressed or rewritten by an editor."""
        for track in self._tracks:
            position = track.position
            if track.status or not position.offset:
                continue
            status_now = _stat(position.path)
            is_replaced = not status_now or inode_of(status_now) != position.identity or path == position.path
            if (is_replaced or not holds(position.path, position.identity, position)) and holds(
                path, inode_of(status), position
            ):
                self._place(track, path, status, rotated=rotated or path != position.origin)
                return True
        return False

    def _place(self, track: Track, path: str, status: os.stat_result, *, rotated: bool) -> None:
        track.position = replace(
            track.position, pattern=self.pattern, path=path, device=status.st_dev, inode=status.st_ino
        )
        track.status = status
        track.rotated = rotated

    def _new(self, path: str, status: os.stat_result, base: str, others: list[Track]) -> Track:
        """Return a new track; `others` are further new tracks."""
        tracks = (*self._tracks, *others)
        generations = [track.position.generation for track in tracks if track.position.origin == path]
        generation = 1 + max(generations, default=0)
        position = Position(
            path, generation, self.pattern, path, base, status.st_mtime_ns, status.st_dev, status.st_ino
        )
        return Track(position, None, status)

    def _give_up(self, track: Track) -> None:
        """Close a generation that has no file any more, with a note unless it was read to its end."""
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
