"""The logs of one pattern that are renamed, copied, compressed or truncated: where each is, and which is to be read.

A generation is the life of one file's content. It is recognised by device and inode while these lead to the same bytes
(hashes of the first and the last 4 KiB that were read), else by these bytes in a renamed or compressed copy.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import IO

from hivetune.data.files.find import files_below, is_storable, matching_files
from hivetune.data.files.unpack import COMPRESSED, DAMAGED, unpacked
from hivetune.data.intake.interactions import read_cursors

SAMPLE_BYTES = 4096
SKIPPED_BYTES = 1 << 20  # at once, up to the place where reading goes on
UNREADABLE = (OSError, *DAMAGED)


Identity = tuple[int, int]  # device and inode


class Moved(Exception):
    """A file is no longer where it was, so the folder must be read again."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position in one generation.

    `origin` is its first path, `path` its last one, `base` the name of its log while it is written, `since_ns` the
    change time when it was first seen. `line` counts finished lines, `offset` bytes of the decompressed content.
    `pattern` is the pattern that follows it. `closed`: rotated and read to the end, or gone (inode 0). `skipping`:
    inside of a line that is too large.
    """

    origin: str
    generation: int
    pattern: str
    path: str
    base: str
    since_ns: int
    device: int
    inode: int
    offset: int = 0
    line: int = 0
    head: str = ""
    tail: str = ""
    closed: bool = False
    skipping: bool = False

    @property
    def identity(self) -> Identity:
        return self.device, self.inode

    @property
    def key(self) -> str:
        return f"jsonl:{self.origin}#{self.generation}"

    def dump(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def is_packed(path: str) -> bool:
    return path.endswith(COMPRESSED)


@contextlib.contextmanager
def open_unpacked(path: str, identity: Identity, start: int = 0) -> Iterator[IO[bytes]]:
    """Open the content of a plain, .gz or .zst file at byte `start`. Raise Moved if another file has this name now, or
    none.

    Logs may have been renamed since the folder was read. Raise OSError, DAMAGED, or MachineNotFit without zstandard.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise Moved(path) from None
    with file:
        if inode_of(os.fstat(file.fileno())) != identity:
            raise Moved(path)
        content = unpacked(file, path)
        if content is file:
            file.seek(start)
        else:
            while start and (skipped := content.read(min(start, SKIPPED_BYTES))):
                start -= len(skipped)
        yield content


def sample_hash(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def inode_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def holds(path: str, identity: Identity, position: Position) -> bool:
    """Return whether the file begins with the bytes that `position` has read. Raise Moved."""
    if position.offset == 0:
        return True
    size = min(position.offset, SAMPLE_BYTES)
    try:
        for start, sample in {(0, position.head), (position.offset - size, position.tail)}:  # of a short file equal
            with open_unpacked(path, identity, start) as file:
                if sample_hash(file.read(size)) != sample:
                    return False
    except UNREADABLE:
        return False
    return True


def may_be_copy(path: str, identity: Identity, of: Position) -> bool:
    """Return whether one file begins with the other, by samples from both ends of the shorter one. Raise Moved.

    A log is copied before it is truncated, which takes seconds for a large one; meanwhile both have the same rows.
    """
    try:
        with open_unpacked(path, identity) as file, open_unpacked(of.path, of.identity) as other_file:
            heads = file.read(SAMPLE_BYTES), other_file.read(SAMPLE_BYTES)
            size = min(map(len, heads))
            if heads[0] and not heads[1]:
                return False  # a new, empty log has no copies
            if heads[0][:size] != heads[1][:size]:
                return False
            if size < SAMPLE_BYTES or is_packed(path) or is_packed(of.path):
                return True
            end = min(os.fstat(file.fileno()).st_size, os.fstat(other_file.fileno()).st_size) - SAMPLE_BYTES
            file.seek(end)
            other_file.seek(end)
            return file.read(SAMPLE_BYTES) == other_file.read(SAMPLE_BYTES)
    except UNREADABLE:
        return True  # it is still written; the next look decides


def is_rotation_of(name: str, base: str) -> bool:
    """Return whether a name is a rotation of `base`: chat.jsonl.1, chat-20260101.jsonl.gz, chat.1.jsonl."""
    stem, suffix = os.path.splitext(base)
    if not name.startswith(stem):  # most are told so, without patterns for each pair of a file and a log
        return False
    tail = r"[\d.T:_-]*(\.gz|\.zst)?$"
    behind = re.match(rf"{re.escape(base)}[._-]\d{tail}", name)
    inside = re.match(rf"{re.escape(stem)}[._-]\d[\d.T:_-]*?{re.escape(suffix)}(\.gz|\.zst)?$", name)
    return bool(behind or inside)


def scan(folder: str) -> dict[str, os.stat_result]:
    """Return path -> status of the plain files in a folder, without files that vanish meanwhile."""
    files = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    files[entry.path] = entry.stat()
    return files


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
        self.documents: list[str] = []  # the files of the pattern that are not logs, as `files` saw them last
        self._notes = notes
        self._tracks: list[Track] = []
        # The tracks by inode, and by the size and hash of their first sample: there may be thousands, of all patterns.
        self._by_inode: dict[Identity, list[Track]] = {}
        self._by_head: dict[int, dict[str, list[Track]]] = {}
        self._last_generation: Counter[str] = Counter()  # of each origin
        self._scanned_at = 0.0

    def load(self, database: sqlite3.Connection) -> None:
        cursors = read_cursors(database, "jsonl:").values()
        self._tracks = [Track(Position(**json.loads(text)), text) for text in cursors]
        for position in (track.position for track in self._tracks):
            self._last_generation[position.origin] = max(self._last_generation[position.origin], position.generation)

    def waiting(self) -> list[str]:
        return [track.waiting for track in self._tracks if track.waiting]

    def files(self) -> _Files:
        """Return the logs of the pattern now: a file, the JSON Lines files of a folder, or the matches of a glob."""
        files: _Files = {}
        paths = [path for path in self._paths() if os.path.isfile(path)]
        self.documents = [path for path in paths if path.endswith(DOCUMENTS)]
        for path in paths:
            if not path.endswith(DOCUMENTS) and (status := _stat(path)):
                files[path] = status
        return files

    def _paths(self) -> list[str]:
        if os.path.isdir(self.pattern):
            paths = [path for path in files_below(self.pattern) if path.endswith(LOGS + DOCUMENTS)]
        elif os.path.lexists(self.pattern) or not glob.has_magic(self.pattern):
            paths = [self.pattern]
        else:
            paths = [*matching_files(self.pattern)]
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
            if not self._goes_on(path, status):
                new_tracks.append(self._new(path, status, os.path.basename(path)))
        given_up = [track for track in self._mine() if track.status is None]
        for track in given_up:
            position = track.position
            if track.read_to_end is None or (not is_packed(position.path) and track.read_to_end[0] != position.offset):
                self._notes.append(
                    f"{position.origin}: replaced, cut off or removed; lines after {position.line} may be lost"
                )
            track.position = replace(position, closed=True, inode=0)
        self._tracks += new_tracks
        self._scanned_at = time.monotonic()
        return given_up

    def _mine(self) -> list[Track]:
        return [track for track in self._tracks if track.position.pattern == self.pattern and not track.position.closed]

    def _unknown(self, files: _Files) -> _Files:
        """Find the tracks among the files of the pattern, and return the other files."""
        self._by_inode, self._by_head = {}, {}
        for track in self._tracks:
            track.status = None
            position = track.position
            self._by_inode.setdefault(position.identity, []).append(track)
            if position.offset:
                heads = self._by_head.setdefault(min(position.offset, SAMPLE_BYTES), {})
                heads.setdefault(position.head, []).append(track)
        unknown: _Files = {}
        for path, status in files.items():
            if known := self._known(path, status):
                self._place(known, path, status)
            else:
                unknown[path] = status
        return unknown

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

        Rotated files that are not older than the log at its first look are new generations. A file of a log that
        another pattern follows is left to that collection.
        """
        logs = self._logs()
        strangers: list[tuple[str, os.stat_result]] = []
        new_tracks: list[Track] = []
        for path, status in sorted(siblings.items(), key=lambda item: item[1].st_mtime_ns):
            track = self._known(path, status)
            if track is None:
                strangers.append((path, status))
            elif (os.path.dirname(track.position.path), track.position.base) in logs:
                self._place(track, path, status, rotated=True)
        for path, status in reversed(strangers):
            folder, name = os.path.split(path)
            bases = [base for at, base in logs if at == folder and is_rotation_of(name, base)]
            if not bases or self._goes_on(path, status, rotated=True):
                continue
            logs_now = [t.position for t in self._tracks if t.status and t.position.base == bases[0]]
            if status.st_mtime_ns >= logs[folder, bases[0]] and not any(
                may_be_copy(path, inode_of(status), position) for position in logs_now
            ):
                missed = self._new(path, status, bases[0])
                missed.rotated = True
                new_tracks.append(missed)
        return new_tracks

    def _known(self, path: str, status: os.stat_result) -> Track | None:
        """Return the generation that has this inode and still the bytes that were read."""
        for track in self._by_inode.get(inode_of(status), ()):
            position = track.position
            if track.status:
                continue
            # An inode alone proves little, since it may be reused.
            same_name = path == position.path or is_rotation_of(os.path.basename(path), position.base)
            if track.read_to_end == (status.st_size, status.st_mtime_ns) or (
                holds(path, position.identity, position) if position.offset else same_name
            ):
                return track
        return None

    def _goes_on(self, path: str, status: os.stat_result, *, rotated: bool = False) -> bool:
        """Return whether this file is a generation that was copied, compressed or rewritten by an editor."""
        for track in self._begun_as(path, inode_of(status)):
            position = track.position
            own = _stat(position.path)
            is_replaced = not own or inode_of(own) != position.identity
            if (is_replaced or not holds(position.path, position.identity, position)) and holds(
                path, inode_of(status), position
            ):
                self._place(track, path, status, rotated=rotated)
                return True
        return False

    def _begun_as(self, path: str, identity: Identity) -> list[Track]:
        """Return the tracks without a file that begin as this file does, the ones of which most was read first. Raise
        Moved.
        """
        try:
            with open_unpacked(path, identity) as file:
                head = file.read(SAMPLE_BYTES)
        except UNREADABLE:
            return []
        sizes = [size for size in self._by_head if size <= len(head)]
        tracks = (track for size in sizes for track in self._by_head[size].get(sample_hash(head[:size]), ()))
        return sorted((t for t in tracks if not t.status), key=lambda t: t.position.offset, reverse=True)

    def _place(self, track: Track, path: str, status: os.stat_result, *, rotated: bool = False) -> None:
        track.position = replace(
            track.position, pattern=self.pattern, path=path, device=status.st_dev, inode=status.st_ino
        )
        track.status = status
        track.rotated = rotated or path != track.position.origin

    def _new(self, path: str, status: os.stat_result, base: str) -> Track:
        self._last_generation[path] += 1
        generation = self._last_generation[path]
        position = Position(
            path, generation, self.pattern, path, base, status.st_mtime_ns, status.st_dev, status.st_ino
        )
        return Track(position, None, status)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
