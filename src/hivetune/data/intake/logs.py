"""The reader of logs, which other programs write and may rename, copy, compress or truncate meanwhile.

A log is recognized by its inode and the hash of the KiB before the place where reading stopped; reading then continues
there. Any other file is read from its start: rows that are stored already are duplicates by content. So no rotation
stores a row twice, and no row is lost while a file with it exists.
"""

import glob
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from io import BufferedReader

from hivetune.base.paths import quoted, spelled
from hivetune.data.files.find import check_storable, files_below, is_document, matching_files, name_problem
from hivetune.data.files.kinds import refuse_foreign
from hivetune.data.files.rows import byte_lines, too_large
from hivetune.data.files.unpack import COMPRESSED, DAMAGED, blocks_of
from hivetune.data.intake.interactions import Batch, Delivery, read_cursors
from hivetune.data.intake.reader import Batches, Reader, delivered, rows_of_text
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

# The bytes before the place where reading stopped, by which a file is known again.
TAIL_BYTES = 1024
# A writer may hold a renamed log open for a while, and finish its last line.
SILENT_S = 60.0
# What a rotation adds to a name: .1, -20260101.
_NUMBER = r"[._-]\d[\d.T:_-]*"
_PACKED = rf"(?:{'|'.join(map(re.escape, COMPRESSED))})?"
_LOG = re.compile(rf".+\.(?:jsonl|ndjson)(?:{_NUMBER})?{_PACKED}\Z")
_BATCH_ROWS, _BATCH_BYTES = 1000, 1 << 20
_KEY = "jsonl:"


@dataclass(frozen=True, slots=True)
class Position:
    """The place where reading stopped: after `offset` bytes and `line` complete lines.

    `tail`: the hash of the bytes before it. `state`: size and modification time of a file that was read to its end.
    """

    device: int
    inode: int
    offset: int = 0
    line: int = 0
    tail: str = ""
    state: str = ""

    @property
    def cursor(self) -> tuple[str, str]:
        return f"{_KEY}{self.device}:{self.inode}", json.dumps(asdict(self))


class FileReader(Reader):
    """The Reader of the logs of a file, glob or folder, including rotated ones. Raise UsageError for files that are not
    logs.
    """

    def __init__(self, pattern: str):
        super().__init__(pattern)
        check_storable(pattern)
        if pattern == "-" or is_document(pattern):
            complete = "standard input" if pattern == "-" else f"{spelled(pattern)} is a complete file, and"
            message = f"{complete} is not collected: logs, tables and streams are, which grow"
            raise UsageError(message, hint="train on the file as it is, beside the store: data.path: [store, FILE]")
        if os.path.isfile(pattern):
            with open(pattern, "rb") as file:
                refuse_foreign(file.read(16), pattern, pattern)
        self._pattern = os.path.abspath(os.path.expanduser(pattern))
        self._positions: dict[tuple[int, int], Position] = {}

    def batches(self, database: sqlite3.Connection, follow: bool) -> Batches:
        for text in read_cursors(database, _KEY):
            position = Position(**json.loads(text))
            self._positions[position.device, position.inode] = position
        logs = self._logs()
        if not logs and not follow:
            fault = "contains no JSON Lines" if os.path.exists(self._pattern) else "does not exist"
            hint = "give a log, a folder with *.jsonl, or a glob in quotes"
            raise UsageError(f"{spelled(self.name)} {fault}", hint=hint)
        while True:
            self.waiting = []
            for path, status in logs.items():
                yield from self._read_log(path, status, follow=follow)
            known, logs = set(map(_identity, logs.values())), self._logs()
            # A log that was renamed meanwhile may have another name now than any that was read.
            if known == set(map(_identity, logs.values())):
                yield None
                logs = self._logs()

    def _logs(self) -> dict[str, os.stat_result]:
        """Return path -> stat of the logs that match the pattern now, links excluded, the oldest first."""
        if os.path.isdir(self._pattern):
            inside = list(files_below(self._pattern))
            found: Iterable[str] = filter(_LOG.match, inside)
            for path in filter(is_document, inside):
                self.note(f"{spelled(path)} is a complete file, and is not collected: train on it as it is")
        elif os.path.lexists(self._pattern) or not glob.has_magic(self._pattern):
            found = [self._pattern, *_rotations(self._pattern)]
        else:
            found = [*matching_files(self._pattern), *matching_files(f"{self._pattern}[._-][0-9]*")]
            found = [path for path in found if not is_document(path)]
        there: dict[str, os.stat_result] = {}
        for path in {os.path.realpath(path) for path in found if os.path.isfile(path)}:
            if (problem := name_problem(path)) is not None:
                self.note(f"{path!a} is not read: {problem[0]}; {problem[1]}")
            elif (status := _status(path)) is not None:
                there[path] = status
        return dict(sorted(there.items(), key=lambda log: (log[1].st_mtime_ns, log[0])))

    def _read_log(self, path: str, status: os.stat_result, *, follow: bool) -> Iterator[Batch]:
        """Yield the next rows of a log. Raise UsageError if it may not be read."""
        known = self._positions.get(_identity(status))
        if known is not None and known.state == _state(status):
            return
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return  # renamed: the next look finds it under its new name
        except PermissionError:
            raise UsageError(f"{spelled(path)} is not readable", hint=f"chmod u+r {quoted(path)}") from None
        with file:
            # Of the open file: the name may be another's by now.
            now = os.fstat(file.fileno())
            identity, is_silent = _identity(now), time.time() - now.st_mtime > SILENT_S
            position = self._positions.get(identity, Position(*identity))
            packed = path.rpartition(".")[2] if path.endswith(COMPRESSED) else ""
            # An inode that was given out again holds other bytes before the place.
            if packed or not position.tail or _tail(file, position.offset) != position.tail:
                position = Position(*identity)
            file.seek(position.offset)
            lines = byte_lines(blocks_of(file, packed))
            is_over = is_waiting = False
            while not is_over:
                before, deliveries = position, list[Delivery]()
                offset, number = before.offset, before.line
                try:
                    for line in lines:
                        place, text = f"{path}:{number + 1}", line.data.strip(b"\0 \t\r\n")
                        is_over = not line.ended
                        if (refused := too_large(line.size)) is not None and (line.ended or is_silent):
                            deliveries.append(Delivery(path, place, refused, raw=text))
                        elif text and not line.ended and (follow or not _is_complete(text)) and not is_silent:
                            is_waiting = True
                            self.waiting.append(place)
                            break
                        elif text:
                            deliveries += delivered(path, place, text, rows_of_text)
                        offset, number = offset + line.size + line.ended, number + line.ended
                        if len(deliveries) >= _BATCH_ROWS or offset - before.offset >= _BATCH_BYTES:
                            break
                    else:
                        is_over = True
                except DAMAGED as error:
                    is_over = True
                    problem = RowRefused("broken-file", f"{error}: restore the file")
                    deliveries.append(Delivery(path, f"{path}:{number + 1}", problem))
                tail, state = "" if packed else _tail(file, offset), _state(now) if is_over and not is_waiting else ""
                position = Position(*identity, offset, number, tail, state)
                if position != before or deliveries:
                    yield Batch(path, deliveries, position.cursor)
                    self._positions[identity] = position


def _tail(file: BufferedReader, offset: int) -> str:
    """Return the hash of the bytes before `offset`; "" at the beginning of a file, and if the file is shorter than
    that.
    """
    start = max(0, offset - TAIL_BYTES)
    tail = os.pread(file.fileno(), offset - start, start)
    # A log may be truncated between its last line and this: such a place is never gone on from.
    is_whole = len(tail) == offset - start > 0
    return hashlib.blake2b(tail, digest_size=16).hexdigest() if is_whole else ""


def _is_complete(line: bytes) -> bool:
    """Return whether a last line without a line feed is a complete row."""
    # No prefix of a JSON object is one.
    try:
        parse_row(line)
    except RowRefused:
        return False
    return True


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _state(status: os.stat_result) -> str:
    """Return a text that changes whenever the file is written to."""
    return f"{status.st_size}:{status.st_mtime_ns}"


def _rotations(log: str) -> list[str]:
    """Return the files beside a log that are its rotations by name: chat.jsonl.1, chat-20260101.jsonl.gz."""
    folder, name = os.path.split(log)
    stem, suffix = map(re.escape, os.path.splitext(name))
    rotation = re.compile(rf"{stem}(?:{suffix}{_NUMBER}|{_NUMBER}?{suffix}){_PACKED}\Z")
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, one) for one in os.listdir(folder) if one != name and rotation.match(one)]
