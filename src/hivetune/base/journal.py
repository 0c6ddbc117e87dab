"""Append-only JSON Lines files: one event a line, each flushed to the kernel, readable after any crash.

One writer per file. A reader accepts a torn last line (the writer died in the middle) and nothing else.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to one file. `time` is wall clock seconds; the order is that of the lines, never of the clock."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one line and flush it. A process's death loses nothing; a power cut may lose the newest lines."""
        entry = {"event": event, "time": round(time.time(), 3), **fields}
        self._file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        return entry

    def sync(self) -> None:
        """Also survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Events in order; a torn last line is left out. A file that does not exist has no events."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
