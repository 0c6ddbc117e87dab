"""Append-only journals in JSON Lines: one event per line, written with one system call, readable after any crash.

Each file has one writer. A torn last line, which a dead writer leaves, is ignored. A line that is not an event is read
as the event `damaged`, so that readers continue and can count it."""

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.base.private import make_folder, open_plain

DAMAGED = "damaged"
TAIL_BYTES = 1 << 16
# The rows that a rollback leaves out take some MB in one line. Hivetune writes no longer line.
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
        self._handle = _open_at_end(path)

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one line, which survives the death of the process; a power cut may lose the newest lines.

        Raise OSError; the line is then kept in memory and written before the next one.
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
        self._handle = _open_at_end(self._path)

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


@dataclass
class JournalPlace:
    """The position up to which a journal was read."""

    offset: int = 0
    # The line that ends there. A journal may be replaced after a crash, and then has others at the same place.
    last: bytes = b""


class Replaced(Exception):
    """A journal was replaced since it was read: read it again from the start."""


def read_journal(path: Path, place: JournalPlace | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events in order, from `place` on if it is given, which is advanced; a damaged line is {"event":
    "damaged"}.

    A torn last line and a missing file have no events. Raise Replaced, and OSError for an unreadable file or a line of
    more than MAX_LINE_BYTES.
    """
    place = JournalPlace() if place is None else place
    try:
        handle = open_plain(path)
    except FileNotFoundError:
        if place.offset:
            raise Replaced from None
        return
    with open(handle, "rb") as file:
        file.seek(place.offset - len(place.last))
        if file.read(len(place.last)) != place.last:
            raise Replaced
        while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            place.offset, place.last = place.offset + len(line), line
            yield _entry(line, path) or {"event": DAMAGED, "time": 0.0}
    if len(line) == MAX_LINE_BYTES:  # as a sparse file of zeros is one
        raise OSError(errno.EFBIG, f"has a line of more than {MAX_LINE_BYTES >> 20} MiB", str(path))


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
    return [entry for line in (lines[1:] if start else lines) if (entry := _entry(line, path))]


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _entry(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the event in a line; None if the line is damaged or lacks a needed field."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    needed = LINE_FIELDS.get(path.name, {}).get(entry["event"], {})
    return entry if all(isinstance(entry.get(name, ...), kind) for name, kind in needed.items()) else None


def _open_at_end(path: Path) -> int:
    """Open a journal to append to, without a torn last line."""
    handle = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(handle, end)
    return handle
