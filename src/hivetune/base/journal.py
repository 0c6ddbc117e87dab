"""Append-only journals in JSON Lines: one event per line, each written at once, readable after any crash.

Each file has one writer. A torn last line, which a dead writer leaves, is ignored. A line that is no event is read as
the event `damaged` with its number, so that readers continue and can report it.
"""

import errno
import json
import os
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
# The most that one call of `read_after` reads, and the bytes by which it recognises a place.
FOLLOWED_BYTES = 4 << 20
MARK_BYTES = 64
# The losses of a million validation rows take 30 MB in one line. Hivetune writes no longer line.
MAX_LINE_BYTES = 256 << 20

_LOSS = (int, float, type(None))  # null if it was not finite
# The fields that readers rely on, by file and event. A line without one of them is damaged.
LINE_FIELDS: Mapping[str, Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "metrics.jsonl": {
        "started": {"step": int},
        "step": {"step": int, "loss": _LOSS},
        "validation": {"step": int, "loss": _LOSS},
        "saved": {"step": int},
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
        "warning": {"text": str},
        "sample": {"available_bytes": int, "disk_free_bytes": int},
    },
    "amendments.jsonl": {"amendment": {"from_step": int, "rows": list, "reason": str}},
}


class Journal:
    """A journal to append to. `time` is the wall clock in seconds; only the order of lines counts."""

    def __init__(self, path: Path):
        make_folder(path.parent)
        self._path = path
        self._pending = b""
        self._handle = -1
        self._open()

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one line, which survives the death of the process; a power cut may lose the newest lines.

        Raise OSError; then the line is kept and written before the next one.
        """
        entry = {"event": event, "time": round(time.time(), 3), **fields}
        self._pending += _line(entry)
        self.flush()
        return entry

    def flush(self) -> None:
        """Write the lines that a full disk refused. Raise OSError if it still does."""
        while self._pending:
            written = os.write(self._handle, self._pending)
            self._pending = self._pending[written:]

    def replace(self, entries: Iterable[dict[str, Any]]) -> None:
        """Replace all lines atomically, and continue with the new file. Raise OSError."""
        self.close()
        write_atomic(self._path, b"".join(map(_line, entries)))
        self._open()

    def sync(self) -> None:
        """Flush the lines to the disk, so that they survive a power cut."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file. Raise OSError if lines could not be written."""
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
        _drop_torn_line(self._handle)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in order, without a torn last line; a damaged one is {"event": "damaged", "line": number}.

    A missing file has no events. Raise OSError for an unreadable file or a line of more than MAX_LINE_BYTES.
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
    """Return the events in the last TAIL_BYTES, which is enough for the state of a long run."""
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
    """A place in a journal: the end of the last whole line, in the file with this inode.

    `mark` is the CRC-32 of the bytes before it, since a journal may be replaced after a crash, and a new file may get
    an old inode.
    """

    inode: int = 0
    offset: int = 0
    mark: int = 0


@dataclass(frozen=True)
class Followed:
    """The events after a place, and the new place. `again`: the file was replaced and is read from the start."""

    entries: tuple[dict[str, Any], ...]
    place: JournalPlace
    anew: bool = False


def read_after(path: Path, place: JournalPlace, max_bytes: int = FOLLOWED_BYTES) -> Followed:
    """Return the events since `place`, about `max_bytes` at once, so call it until there are none.

    A damaged line is an event `damaged`; a torn last line is left for the next call. Raise OSError as `read_journal`.
    """
    try:
        handle = open_plain(path)
    except FileNotFoundError:
        return Followed((), JournalPlace(), anew=place != JournalPlace())
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        start = max(0, place.offset - MARK_BYTES)
        file.seek(start)
        is_same = status.st_ino == place.inode and zlib.crc32(file.read(place.offset - start)) == place.mark
        offset = place.offset if is_same and status.st_size >= place.offset else 0
        file.seek(offset)
        lines: list[bytes] = []
        end = offset
        while end - offset < max_bytes and (line := _read_line(file, path)).endswith(b"\n"):
            lines.append(line)
            end += len(line)
        start = max(0, end - MARK_BYTES)
        file.seek(start)
        after = JournalPlace(status.st_ino, end, zlib.crc32(file.read(end - start)))
    entries = tuple(_entry(line, path) or {"event": DAMAGED, "time": 0.0} for line in lines)
    return Followed(entries, after, anew=offset == 0 and place.offset > 0)


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _read_line(file: IO[bytes], path: Path) -> bytes:
    """Return the next line, empty at the end. Raise OSError for a too long one, such as a sparse file of zeros."""
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise OSError(errno.EFBIG, f"has a line of more than {MAX_LINE_BYTES >> 20} MiB", str(path))
    return line


def _entry(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the event, None for a damaged line or one without a needed field."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    needed = LINE_FIELDS.get(path.name, {}).get(entry["event"], {})
    return entry if all(isinstance(entry.get(name, ...), kind) for name, kind in needed.items()) else None


def _drop_torn_line(handle: int) -> None:
    """Remove a torn last line."""
    size = end = os.fstat(handle).st_size
    tail = b""
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        tail = os.pread(handle, end - start, start)
        newline = tail.rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
