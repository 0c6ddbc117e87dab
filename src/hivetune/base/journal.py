"""Append-only JSON Lines files: one event a line, each handed to the kernel at once, readable after any crash.

One writer per file. A torn last line is the mark of a writer that died and is left out. Each line carries its CRC-32.
A line that is not what was written (a flipped bit, an edit by hand, no CRC-32) is read as the event `damaged` with its
number. It stops nobody, and whoever looks is told. Every version of Hivetune has written the CRC-32.
"""

import ctypes
import errno
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import write_atomic
from hivetune.base.private import make_folder, open_plain

DAMAGED = "damaged"
TAIL_BYTES = 1 << 16
CHECKSUM = "crc32"
# What one call of `read_after` takes at most, and what it knows a place by.
FOLLOWED_BYTES = 4 << 20
MARK_BYTES = 64
# Kept free on the disk behind the last line: about 300 events, more than a supervisor writes in a pause.
RESERVE_BYTES = 64 << 10
FALLOC_FL_KEEP_SIZE = 1
# The losses of a million validation rows take 30 MB in one line. A longer line is none of ours.
MAX_LINE_BYTES = 256 << 20

_LOSS = (int, float, type(None))  # null: it was not finite
# By file, event and field: what readers take without asking. A line of the event that lacks one is a damaged line.
LINE_FIELDS: Mapping[str, Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "metrics.jsonl": {
        "started": {"step": int},
        "step": {"step": int, "loss": _LOSS},
        "validation": {"step": int, "loss": _LOSS},
        "saved": {"step": int, "place": str},
        "canary": {"step": int, "passed": bool},
    },
    "validation.jsonl": {"validation": {"step": int, "rows": list, "nll": list}},
    "events.jsonl": {
        "supervisor_ended": {"status": str, "steps": int, "restarts": int, "why": str},
        "attempt": {"number": int},
        "failure": {"fault": str, "step": int, "words": str},
        "action": {"action": str, "why": str},
        "isolated": {"words": str},
        "quarantined": {"source": str, "reason": str},
        "from_memory": {"step": int},
        "warning": {"text": str},
        "sample": {"available_bytes": int, "disk_free_bytes": int},
    },
    "amendments.jsonl": {"amendment": {"from_step": int, "rows": list, "reason": str}},
}


class Journal:
    """Appends events to one file. `time` is wall clock seconds; the order is that of the lines, never of the clock.

    Room for the lines to come is reserved on the disk, so that a full one does not stop the telling of it.
    """

    def __init__(self, path: Path):
        make_folder(path.parent)
        self._path = path
        self._pending = b""
        self._handle, self._size_bytes, self._reserved_bytes = -1, 0, 0
        self._open()

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one line. A process's death loses nothing; a power cut may lose the newest lines.

        Raises OSError; what could not be written is kept and comes first the next time.
        """
        entry = {"event": event, "time": round(time.time(), 3), **fields}
        self._pending += _line(entry)
        self.flush()
        return entry

    def flush(self) -> None:
        """Write what a full disk refused. Raises OSError when it still does."""
        while self._pending:
            written = os.write(self._handle, self._pending)
            self._pending = self._pending[written:]
            self._size_bytes += written
        self._reserve()

    def replace(self, entries: Iterable[dict[str, Any]]) -> None:
        """Have these lines alone, atomically. Whoever holds this journal goes on with it. Raises OSError."""
        self.close()
        write_atomic(self._path, b"".join(map(_line, entries)))
        self._open()

    def sync(self) -> None:
        """Also survive a power cut."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Raises OSError when lines are left that could not be written; the file is closed then too."""
        if self._handle < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._handle = open_plain(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size_bytes = _drop_torn_line(self._handle)
        self._reserved_bytes = 0
        self._reserve()

    def _reserve(self) -> None:
        """Blocks for the next lines, taken while there are any. On other systems and disks there is no such promise."""
        if self._size_bytes + RESERVE_BYTES // 2 <= self._reserved_bytes or sys.platform != "linux":
            return
        start, size = ctypes.c_long(self._size_bytes), ctypes.c_long(RESERVE_BYTES)
        if ctypes.CDLL(None).fallocate(self._handle, FALLOC_FL_KEEP_SIZE, start, size) == 0:
            self._reserved_bytes = self._size_bytes + RESERVE_BYTES


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Events in order; a torn last line is left out, a damaged one is `{"event": "damaged", "line": its number}`.

    A file that does not exist has no events. Raises OSError for one that can't be read, or has a line of more than
    MAX_LINE_BYTES.
    """
    try:
        handle = open_plain(path)
    except FileNotFoundError:
        return
    with open(handle, "rb") as file:
        for number, line in enumerate(iter(lambda: _read_line(file, path), b""), 1):
            if not line.endswith(b"\n"):
                return
            yield _entry(line, path) or {"event": DAMAGED, "time": 0.0, "line": number}


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The whole events in the last TAIL_BYTES, in order: enough to tell where something stands, however long it ran."""
    try:
        handle = open_plain(path)
    except FileNotFoundError:
        return []
    with open(handle, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    return [entry for line in (lines[1:] if start else lines) if (entry := _entry(line + b"\n", path))]


@dataclass(frozen=True)
class JournalPlace:
    """How far a journal was read: the byte behind the last whole line, in the file with this inode. `mark`: CRC-32 of
    the bytes before it, since a journal may be written anew (steps that are made again after a crash), and a new file
    may get an old inode."""

    inode: int = 0
    offset: int = 0
    mark: int = 0


@dataclass(frozen=True)
class Followed:
    """The events behind a place, and the place behind them. `anew`: this is another file, read from its beginning, so
    that all that was read before counts no more."""

    entries: tuple[dict[str, Any], ...]
    place: JournalPlace
    anew: bool = False


def read_after(path: Path, place: JournalPlace, most_bytes: int = FOLLOWED_BYTES) -> Followed:
    """What was appended since `place`: about `most_bytes` at once, so ask until there are no more entries.

    A damaged line is an event `damaged`, a torn last one is left for the next time. Raises OSError as `read_journal`.
    """
    try:
        handle = open_plain(path)
    except FileNotFoundError:
        return Followed((), JournalPlace(), anew=place != JournalPlace())
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        start = max(0, place.offset - MARK_BYTES)
        file.seek(start)
        known = status.st_ino == place.inode and zlib.crc32(file.read(place.offset - start)) == place.mark
        offset = place.offset if known and status.st_size >= place.offset else 0
        file.seek(offset)
        lines: list[bytes] = []
        while sum(map(len, lines)) < most_bytes and (line := _read_line(file, path)).endswith(b"\n"):
            lines.append(line)
        end = offset + sum(map(len, lines))
        start = max(0, end - MARK_BYTES)
        file.seek(start)
        after = JournalPlace(status.st_ino, end, zlib.crc32(file.read(end - start)))
    entries = tuple(_entry(line, path) or {"event": DAMAGED, "time": 0.0} for line in lines)
    return Followed(entries, after, anew=offset == 0 and place.offset > 0)


def _line(entry: dict[str, Any]) -> bytes:
    """JSON with the CRC-32 of all that stands before it as the last field."""
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")[:-1]
    return text + f', "{CHECKSUM}": {zlib.crc32(text)}}}\n'.encode()


def _read_line(file: IO[bytes], path: Path) -> bytes:
    """The next line, empty at the end. Raises OSError for one that is too long to be read at once: a sparse file of a
    terabyte is one line of zeros."""
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise OSError(errno.EFBIG, f"has a line of more than {MAX_LINE_BYTES >> 20} MiB", str(path))
    return line


def _entry(line: bytes, path: Path) -> dict[str, Any] | None:
    """The event without its checksum; None for a line that is not what was written, or lacks what readers need."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    if entry.pop(CHECKSUM, None) != zlib.crc32(line.rpartition(f', "{CHECKSUM}": '.encode())[0]):
        return None
    needed = LINE_FIELDS.get(path.name, {}).get(entry["event"], {})
    return entry if all(isinstance(entry.get(name, ...), kind) for name, kind in needed.items()) else None


def _drop_torn_line(handle: int) -> int:
    """The size that is left, in bytes."""
    size = end = os.fstat(handle).st_size
    tail = b""
    while end > 0:
        start = max(0, end - RESERVE_BYTES)
        tail = os.pread(handle, end - start, start)
        newline = tail.rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
    return end
