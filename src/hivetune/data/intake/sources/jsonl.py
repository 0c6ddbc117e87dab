"""The reader of JSON Lines files that others write, and meanwhile rename, copy, compress or truncate.

A file is known by its inode, the hash of its first KiB and that of the KiB before the place where reading stopped; then
it is read on. Any other file is read from its start. What was stored before is a duplicate by its content, so no
rotation stores a row twice, and none is lost while a file with it is there.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from hivetune.base.paths import quoted, spelled
from hivetune.data.files.find import files_below, is_storable, matching_files
from hivetune.data.files.kinds import source_of
from hivetune.data.files.unpack import COMPRESSED, DAMAGED, unpacked
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursors, storable
from hivetune.data.intake.sources.delivered import Batches, is_complete, rows_of_line
from hivetune.data.raw import MAX_ROW_BYTES
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError

SAMPLE_BYTES = 1024
SILENT_S = 60.0  # a writer may hold a renamed log open for a while
LOGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
DOCUMENTS = (".json", ".csv", ".tsv", ".parquet", ".json.gz", ".csv.gz", ".tsv.gz", ".json.zst", ".csv.zst", ".tsv.zst")
_BATCH_ROWS, _BATCH_BYTES = 1000, 1 << 20
_KEY = "jsonl:"
_LOG_KEY = "log:"  # of each log that was ever looked at: it is known, and by which pattern
Inode = tuple[int, int]  # device and inode


class Moved(Exception):
    """Another file has this name now, or none: the folder must be looked at again."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position in one file, which was last called `path`.

    `offset` counts bytes of its unpacked content, `line` finished lines. `head` and `tail` are hashes of its first
    bytes and of those before `offset`, SAMPLE_BYTES at most. `state` is the size and mtime_ns of a file that was read
    to its end.
    """

    path: str
    device: int
    inode: int
    offset: int = 0
    line: int = 0
    head: str = ""
    tail: str = ""
    state: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        return f"{_KEY}{self.device}:{self.inode}"


class JsonlReader:
    """The Reader of a file, glob or folder of JSON Lines."""

    def __init__(self, pattern: str):
        self.name = pattern
        self.notes: list[str] = []
        self.poll_s = 0.2
        self.waiting: list[str] = []
        self._pattern = os.path.abspath(os.path.expanduser(pattern))
        self._positions: dict[Inode, Position] = {}
        self._logs: dict[str, str] = {}  # known log -> its pattern
        self._documents: list[str] = []
        self._given: set[str] = set()

    def has_files(self) -> bool:
        return bool(self.paths())

    def paths(self) -> list[str]:
        """Return the logs that are there now, without links."""
        if os.path.isdir(self._pattern):
            found = [path for path in files_below(self._pattern) if path.endswith(LOGS + DOCUMENTS)]
        elif os.path.lexists(self._pattern) or not glob.has_magic(self._pattern):
            found = [self._pattern]
        else:
            found = [*matching_files(self._pattern)]
        paths = sorted({os.path.realpath(path) for path in found})
        for path in paths:
            if not is_storable(path):
                self._note(f"{path!a} is not read: its name is not UTF-8; rename it")
        paths = [path for path in paths if is_storable(path) and os.path.isfile(path)]
        self._documents = [path for path in paths if path.endswith(DOCUMENTS)]
        return [path for path in paths if not path.endswith(DOCUMENTS)]

    def new_documents(self) -> list[str]:
        """Return the files of the pattern that are not logs, each once and after a look at the logs; documents.py reads
        them.
        """
        found = [path for path in self._documents if path not in self._given]
        self._given.update(found)
        return found

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        stored = (json.loads(text) for text in read_cursors(database, _KEY).values())
        for entry in stored:
            position = Position(**{**entry, "state": tuple(entry["state"]) if entry["state"] else None})
            self._positions[position.device, position.inode] = position
        if not follow and not self.has_files():
            fault = "is not JSON Lines, or a folder of it" if os.path.exists(self.name) else "does not exist"
            raise UsageError(
                f"{spelled(self.name)} {fault}", hint="give a file, a folder with *.jsonl, or a glob in quotes"
            )
        stored_logs = read_cursors(database, _LOG_KEY).items()
        self._logs = {key.removeprefix(_LOG_KEY): pattern for key, pattern in stored_logs}
        while not stop.is_set():
            self.waiting = []
            logs = self.paths()
            is_new = False
            for log in logs:
                if log not in self._logs:
                    try:
                        yield from self._begin(log, logs)
                    except Moved:
                        is_new = True
            for path, status, rotated in self._look(logs):
                try:
                    for batch in self._read(path, status, follow=follow and not rotated):
                        is_new = True
                        yield batch
                        if stop.is_set():
                            return
                except Moved:  # the next look finds it under its new name
                    is_new = True
            if not is_new:
                yield None

    def _begin(self, log: str, logs: list[str]) -> Iterator[Batch]:
        """Yield what must be stored before the first row of a log is: positions at the end of the files that were
        rotated before, which are not asked for, and at last that the log is known. Raise Moved.
        """
        try:
            before = os.stat(log)
            rotated = [(path, os.stat(path)) for path in sorted(_rotations([log]) - set(logs))]
            after = os.stat(log)
        except FileNotFoundError:
            raise Moved from None
        if _inode(before) != _inode(after):
            raise Moved  # it may be among the rotated ones
        for path, status in rotated:
            inode = _inode(status)
            if inode not in self._positions:
                position = Position(path, *inode, state=_state(status))
                yield Batch(path, cursor=_cursor(position))
                self._positions[inode] = position
        pattern = storable(self._pattern)
        yield Batch(log, cursor=Cursor(_LOG_KEY + log, pattern))
        self._logs[log] = pattern

    def _look(self, logs: list[str]) -> list[tuple[str, os.stat_result, bool]]:
        """Return (path, status, whether it is rotated) of each file that may have something new, rotated ones first.

        A known log may be gone, rotated with rows that were not read.
        """
        pattern = storable(self._pattern)
        gone = {log for log, of_pattern in self._logs.items() if of_pattern == pattern}.difference(logs)
        known = [log for log in logs if log in self._logs]
        files = [(path, True) for path in sorted(_rotations([*known, *gone]).difference(logs), reverse=True)]
        found: dict[Inode, tuple[str, os.stat_result, bool]] = {}
        for path, is_rotated in (*files, *((log, False) for log in known)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                position = self._positions.get(_inode(status))
                if position is None or position.state != _state(status):
                    found[_inode(status)] = (path, status, is_rotated)
        return list(found.values())

    def _read(self, path: str, status: os.stat_result, *, follow: bool) -> Iterator[Batch]:
        """Yield the next rows of a file. Raise Moved, UsageError if it may not be read."""
        inode = _inode(status)
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            raise Moved from None
        except PermissionError:
            raise UsageError(f"{spelled(path)} is not readable", hint=f"chmod u+r {quoted(path)}") from None
        with file:
            now = os.fstat(file.fileno())
            if _inode(now) != inode:
                raise Moved
            is_silent = time.time() - now.st_mtime > SILENT_S
            lines = _Lines(file, self._positions.get(inode) or Position(path, *inode), path)
            while not lines.at_end:
                before = lines.position
                deliveries = lines.take(is_over=not follow or is_silent, is_silent=is_silent)
                if not before.offset:
                    self._check_format(path)
                if lines.is_waiting:
                    self.waiting.append(f"{path}:{lines.position.line + 1}")
                elif lines.at_end:
                    lines.position = replace(lines.position, state=_state(now))
                if lines.position != before or deliveries:
                    position = lines.position
                    yield Batch(path, deliveries, _cursor(position))
                    self._positions[inode] = position

    def _check_format(self, path: str) -> None:
        """Note a file whose rows are not its lines: a program's session, text in UTF-16, objects over several lines."""
        try:
            source = source_of(path, path)
        except (UsageError, DataRefused) as error:
            self._note(f"{error.message}: {error.hint}")
            return
        kind = source.encoding or source.kind
        if kind != "jsonl":
            self._note(
                f"{spelled(path)}: its lines are no rows; as a file it is read ({kind}): train from the file, by"
                " data.path, instead of the store"
            )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


class _Lines:
    """The lines of an open file from a position on, or from its start if it has other bytes there now.

    `at_end`: nothing more can be read. `is_waiting`: its last line is not complete.
    """

    def __init__(self, file: IO[bytes], position: Position, path: str):
        self._head = self._tail = b""
        self.at_end = self.is_waiting = False
        self.position = replace(position, path=path, state=None)
        try:
            self._content = unpacked(file, path)
            self._head = self._content.read(min(position.offset, SAMPLE_BYTES))
            start = max(position.offset - SAMPLE_BYTES, 0)
            if self._content is file:
                file.seek(start)
            else:
                self._skip(start - len(self._head))
            kept = self._head[start:] if self._content is not file else b""
            self._tail = kept + self._content.read(position.offset - start - len(kept))
            is_known = (_hash(self._head), _hash(self._tail)) == (position.head, position.tail)
        except DAMAGED:
            is_known = False
        if position.offset and not is_known:
            self.position = replace(self.position, offset=0, line=0)
        if not self.position.offset:
            file.seek(0)
            self._content, self._head, self._tail = unpacked(file, path), b"", b""

    def _skip(self, size: int) -> None:
        while size > 0 and (skipped := self._content.read(min(size, _BATCH_BYTES))):
            size -= len(skipped)

    def take(self, *, is_over: bool, is_silent: bool) -> list[Delivery]:
        """Return the rows of the next lines, as many as make a batch, and move the position behind them.

        `is_over`: a last line without a line feed is taken if it is a whole row; `is_silent`: else it is refused.
        """
        deliveries: list[Delivery] = []
        consumed = 0
        while len(deliveries) < _BATCH_ROWS and consumed < _BATCH_BYTES:
            try:
                text, size = self._line()
            except DAMAGED as error:
                self.at_end = True
                refused = RowRefused("broken-file", f"damaged compression ({error}): restore the file")
                return [*deliveries, *self._deliveries(b"", refused)]
            if not text.endswith(b"\n"):
                self.at_end = True
                if text.strip(b"\0 \t\r"):
                    if is_over and size <= MAX_ROW_BYTES and is_complete(text):
                        deliveries += self._deliveries(text)
                    elif is_silent:
                        deliveries += self._deliveries(text, RowRefused("truncated-line"))
                    else:
                        self.is_waiting = True
                        return deliveries
                self._move(text, size, lines=0)
                return deliveries
            if size > MAX_ROW_BYTES + 1:
                deliveries += self._deliveries(text, RowRefused("line-too-large"))
            elif text.strip(b"\0 \t\r\n"):
                deliveries += self._deliveries(text[:-1])
            self._move(text, size, lines=1)
            consumed += size
        return deliveries

    def _line(self) -> tuple[bytes, int]:
        """Return the next line and its size; of one that is larger than any row the first and the last bytes."""
        text = self._content.readline(MAX_ROW_BYTES + 1)
        size = len(text)
        if size <= MAX_ROW_BYTES or text.endswith(b"\n"):
            return text, size
        first, last = text[:SAMPLE_BYTES], text[-SAMPLE_BYTES:]
        while not last.endswith(b"\n") and (text := self._content.readline(MAX_ROW_BYTES + 1)):
            size += len(text)
            last = (last + text)[-SAMPLE_BYTES:]
        return first + last, size

    def _move(self, text: bytes, size: int, *, lines: int) -> None:
        self._head = (self._head + text)[:SAMPLE_BYTES]
        self._tail = (self._tail + text)[-SAMPLE_BYTES:]
        line, offset = self.position.line + lines, self.position.offset + size
        self.position = replace(self.position, offset=offset, line=line, head=_hash(self._head), tail=_hash(self._tail))

    def _deliveries(self, text: bytes, refused: RowRefused | None = None) -> list[Delivery]:
        """Return the rows of one line, or its refusal."""
        path = self.position.path
        place = f"{path}:{self.position.line + 1}"
        rows: list[dict[str, Any] | RowRefused]
        try:
            rows = [refused] if refused else [*rows_of_line(text)]
        except RowRefused as error:
            rows = [error]
        return [Delivery(path, place, row, raw=text) for row in rows]


def _cursor(position: Position) -> Cursor:
    return Cursor(position.key, json.dumps(asdict(position)))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino


def _rotations(logs: Sequence[str]) -> set[str]:
    """Return the files beside the logs whose names are rotations of theirs: chat.jsonl.1, chat-20260101.jsonl.gz."""
    names: dict[str, list[str]] = {}
    for log in logs:
        folder, name = os.path.split(log)
        names.setdefault(folder, []).append(name)
    found: set[str] = set()
    for folder, bases in names.items():
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            rotated = (entry for entry in entries if any(is_rotation_of(entry.name, base) for base in bases))
            found.update(entry.path for entry in rotated if entry.is_file())
    return found


def is_rotation_of(name: str, base: str) -> bool:
    """Return whether a name is a rotation of `base`: chat.jsonl.1, chat-20260101.jsonl.gz, chat.1.jsonl."""
    stem, suffix = os.path.splitext(base)
    if not name.startswith(stem):  # most are told so, without patterns for each pair of a file and a log
        return False
    packed = "|".join(map(re.escape, COMPRESSED))
    behind = re.match(rf"{re.escape(base)}[._-]\d[\d.T:_-]*({packed})?$", name)
    inside = re.match(rf"{re.escape(stem)}[._-]\d[\d.T:_-]*?{re.escape(suffix)}({packed})?$", name)
    return bool(behind or inside)
