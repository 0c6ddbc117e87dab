"""The reader of JSON Lines files that others write, and meanwhile rename, copy, compress or truncate.

A file is known by its inode and the hash of the KiB before the place where reading stopped; then it is read on. Any
other file is read from its start: what was stored before is a duplicate by its content, so no rotation stores a row
twice, and none is lost while a file with it is there.
"""

import glob
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO

from hivetune.base.paths import quoted, spelled
from hivetune.data.files.find import files_below, matching_files, name_problem
from hivetune.data.files.kinds import source_of
from hivetune.data.files.unpack import COMPRESSED, DAMAGED, unpacked
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursors
from hivetune.data.intake.sources.delivered import Batches, Reader, is_complete, rows_of_line
from hivetune.data.intake.sources.documents import DocumentReader
from hivetune.data.raw import MAX_ROW_BYTES
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError

TAIL_BYTES = 1024  # before the place where reading stopped, by which a file is known again
KEPT_BYTES = 4096  # of a line that is larger than any row
SILENT_S = 60.0  # a writer may hold a renamed log open for a while
DOCUMENTS = (".json", ".csv", ".tsv", ".parquet", ".json.gz", ".csv.gz", ".tsv.gz", ".json.zst", ".csv.zst", ".tsv.zst")
_NUMBER = r"[._-]\d[\d.T:_-]*"  # of a rotation: .1, -20260101
_PACKED = rf"(?:{'|'.join(map(re.escape, COMPRESSED))})?"
_LOG = re.compile(rf".+\.(?:jsonl|ndjson)(?:{_NUMBER})?{_PACKED}\Z")
_BATCH_ROWS, _BATCH_BYTES = 1000, 1 << 20
_KEY = "jsonl:"
State = tuple[int, int, int, int]  # device, inode, size, mtime_ns


@dataclass(frozen=True, slots=True)
class Position:
    """The place where reading stopped: after `offset` bytes and `line` finished lines.

    `tail` is the hash of the bytes before it. `state` is that of a file that was read to its end.
    """

    device: int
    inode: int
    offset: int = 0
    line: int = 0
    tail: str = ""
    state: State | None = None

    @property
    def cursor(self) -> Cursor:
        return Cursor(f"{_KEY}{self.device}:{self.inode}", json.dumps(asdict(self)))


class JsonlReader(Reader):
    """The Reader of a file, glob or folder of JSON Lines, with their rotations. It finds the other files in it."""

    def __init__(self, pattern: str):
        super().__init__(pattern)
        self._pattern = os.path.abspath(os.path.expanduser(pattern))
        self._positions: dict[tuple[int, int], Position] = {}
        self._documents: dict[str, bool] = {}  # path -> whether it came after the first look
        self._given: set[str] = set()

    def found(self) -> Sequence[Reader]:
        """Return the readers of the files of the pattern that are not logs, each once."""
        new = {path: came_later for path, came_later in self._documents.items() if path not in self._given}
        self._given.update(new)
        return [DocumentReader(path, came_later=came_later) for path, came_later in new.items()]

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        if not follow and not self._paths():
            fault = "holds no JSON Lines and no documents" if os.path.exists(self._pattern) else "does not exist"
            raise UsageError(
                f"{spelled(self.name)} {fault}", hint="give a file, a folder with *.jsonl, or a glob in quotes"
            )
        for text in read_cursors(database, _KEY).values():
            entry = json.loads(text)
            position = Position(**{**entry, "state": tuple(entry["state"]) if entry["state"] else None})
            self._positions[position.device, position.inode] = position
        came_later = False
        while True:
            self.waiting = []
            paths = self._paths()
            for path in paths:
                if path.endswith(DOCUMENTS):
                    self._documents.setdefault(path, came_later)
            came_later = True
            logs = _logs(paths)
            for path, state in logs.items():
                yield from self._read(path, state, follow=follow, stop=stop)
            # A log that was renamed meanwhile may have another name now than any that was read.
            if {state[:2] for state in logs.values()} == {state[:2] for state in _logs(self._paths()).values()}:
                yield None

    def _paths(self) -> list[str]:
        """Return the files of the pattern that are there now, without links."""
        if os.path.isdir(self._pattern):
            found: Iterable[str] = (
                path for path in files_below(self._pattern) if _LOG.match(path) or path.endswith(DOCUMENTS)
            )
        elif os.path.lexists(self._pattern) or not glob.has_magic(self._pattern):
            found = [self._pattern, *_rotations(self._pattern)]
        else:
            found = [*matching_files(self._pattern), *matching_files(f"{self._pattern}[._-][0-9]*")]
        paths = sorted({os.path.realpath(path) for path in found if os.path.isfile(path)})
        problems = {path: problem for path in paths if (problem := name_problem(path)) is not None}
        for path, (why, hint) in problems.items():
            self.note(f"{path!a} is not read: {why}; {hint}")
        return [path for path in paths if path not in problems]

    def _read(self, path: str, state: State, *, follow: bool, stop: threading.Event) -> Iterator[Batch]:
        """Yield the next rows of a file. Raise UsageError if it may not be read."""
        known = self._positions.get(state[:2])
        if known is not None and known.state == state:
            return
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return  # renamed: the next look finds it under its new name
        except PermissionError:
            raise UsageError(f"{spelled(path)} is not readable", hint=f"chmod u+r {quoted(path)}") from None
        with file:
            now = os.fstat(file.fileno())
            state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
            is_silent = time.time() - now.st_mtime > SILENT_S
            lines = _Lines(file, path, self._positions.get(state[:2]) or Position(*state[:2]))
            if not lines.position.offset:
                self._check_format(path)
            while not (lines.at_end or stop.is_set()):
                before = lines.position
                deliveries = lines.take(is_over=not follow or is_silent, is_silent=is_silent)
                if lines.is_waiting:
                    self.waiting.append(f"{path}:{lines.position.line + 1}")
                elif lines.at_end:
                    lines.position = replace(lines.position, state=state)
                if lines.position != before or deliveries:
                    yield Batch(path, deliveries, lines.position.cursor)
                    self._positions[state[:2]] = lines.position

    def _check_format(self, path: str) -> None:
        """Note a file whose rows are not its lines: a program's session, text in UTF-16, objects over several lines."""
        try:
            source = source_of(path, path)
        except (UsageError, DataRefused) as error:
            self.note(f"{error.message}: {error.hint}")
            return
        kind = source.encoding or source.kind
        if kind != "jsonl":
            self.note(
                f"{spelled(path)}: its lines are no rows; as a file it is read ({kind}): train from the file, by"
                " data.path, instead of the store"
            )


class _Lines:
    """The lines of an open file from a position on, or from its start if it has other bytes there now.

    `at_end`: nothing more can be read. `is_waiting`: its last line is not complete.
    """

    def __init__(self, file: IO[bytes], path: str, position: Position):
        self._file, self._path = file, path
        self._is_packed = path.endswith(COMPRESSED)
        self.at_end = self.is_waiting = False
        self.position = replace(position, state=None)
        if self._is_packed or self._tail() != position.tail:
            self.position = replace(self.position, offset=0, line=0, tail="")
            file.seek(0)
        self._content = unpacked(file, path)

    def _tail(self) -> str:
        """Return the hash of the bytes before the position, and go there."""
        start = max(0, self.position.offset - TAIL_BYTES)
        self._file.seek(start)
        tail = self._file.read(self.position.offset - start)
        return hashlib.blake2b(tail, digest_size=16).hexdigest() if tail else ""

    def take(self, *, is_over: bool, is_silent: bool) -> list[Delivery]:
        """Return the rows of the next lines, as many as make a batch, and move the position behind them.

        `is_over`: a last line without a line feed is taken if it is a whole row; `is_silent`: else it is refused.
        """
        deliveries: list[Delivery] = []
        offset, line = self.position.offset, self.position.line
        while len(deliveries) < _BATCH_ROWS and offset - self.position.offset < _BATCH_BYTES and not self.at_end:
            try:
                text, size, is_ended = self._line()
            except DAMAGED as error:
                self.at_end = True
                refused = RowRefused("broken-file", f"damaged compression ({error}): restore the file")
                deliveries += self._deliveries(line, b"", refused)
                break
            refused_line = RowRefused("line-too-large") if size > MAX_ROW_BYTES else None
            if not is_ended:
                self.at_end = True
                if text and not (is_over and refused_line is None and is_complete(text)):
                    if not is_silent:
                        self.is_waiting = True
                        break
                    refused_line = RowRefused("truncated-line")
            if text:
                deliveries += self._deliveries(line, text, refused_line)
            offset, line = offset + size + is_ended, line + is_ended
        self.position = replace(self.position, offset=offset, line=line)
        if not self._is_packed:
            self.position = replace(self.position, tail=self._tail())
        return deliveries

    def _line(self) -> tuple[bytes, int, bool]:
        """Return the next line without blank space and the zeros of a file that was truncated under its writer, its
        size without the line feed, and whether it has one. Of a line that is larger than any row only the beginning is
        kept.
        """
        text = piece = self._content.readline(MAX_ROW_BYTES + 1)
        size = len(text)
        while size > MAX_ROW_BYTES and not piece.endswith(b"\n"):
            text = text[:KEPT_BYTES]
            piece = self._content.readline(MAX_ROW_BYTES + 1)
            if not piece:
                break
            size += len(piece)
        is_ended = piece.endswith(b"\n")
        return text.strip(b"\0 \t\r\n"), size - is_ended, is_ended

    def _deliveries(self, line: int, text: bytes, refused: RowRefused | None) -> list[Delivery]:
        """Return the rows of one line, or its refusal."""
        place = f"{self._path}:{line + 1}"
        try:
            if refused is not None:
                raise refused
            return [Delivery(self._path, place, row, raw=text) for row in rows_of_line(text)]
        except RowRefused as error:
            return [Delivery(self._path, place, error, raw=text)]


def is_document(path: str) -> bool:
    """Return whether a file is there that is no log by its name."""
    return path.endswith(DOCUMENTS) and os.path.isfile(path)


def _logs(paths: Sequence[str]) -> dict[str, State]:
    """Return the logs among these files and their states, the oldest first."""
    states = ((path, _state(path)) for path in paths if not path.endswith(DOCUMENTS))
    there = [(path, state) for path, state in states if state is not None]
    return dict(sorted(there, key=lambda log: (log[1][3], log[0])))


def _state(path: str) -> State | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _rotations(log: str) -> list[str]:
    """Return the files beside a log whose names are rotations of its own: chat.jsonl.1, chat-20260101.jsonl.gz."""
    folder, name = os.path.split(log)
    stem, suffix = map(re.escape, os.path.splitext(name))
    rotation = re.compile(rf"{stem}(?:{suffix}{_NUMBER}|{_NUMBER}?{suffix}){_PACKED}\Z")
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, one) for one in os.listdir(folder) if one != name and rotation.match(one)]
