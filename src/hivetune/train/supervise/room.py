"""A full disk is a pause: whether there is room again, writes that wait until there is, a journal that never fails."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivetune.base.disk import FULL_DISK
from hivetune.base.journal import Journal
from hivetune.machine.inventory import disk_free_bytes
from hivetune.run.folder import EVENTS

LOOK_S = 5.0


class Events(Journal):
    """The supervisor's journal, RUN/events.jsonl, which must never be the reason that a run ends.

    On a full disk its lines wait in memory, in their order, until there is room. Other errors of the disk are raised.
    """

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        try:
            return super().append(event, **fields)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            return {"event": event, **fields}

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise


def has_room(folder: Path, size_bytes: int) -> bool:
    """Return whether `size_bytes` can be taken on the disk of `folder`.

    The room is allocated and freed again, because no call reports a quota.
    """
    if disk_free_bytes(folder) < size_bytes:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return False
    return True


def write_with_retries(run: Path, write: Callable[[], None], on_wait: Callable[[str], None]) -> None:
    """Write what ends a run, however long the disk stays full; Ctrl-C ends the wait. Raises other errors.

    `on_wait` gets the reason for the wait.
    """
    if _written(write):
        return
    with Events(run / EVENTS) as events:
        events.append("disk_wait", reclaimed_bytes=0, free_bytes=disk_free_bytes(run))
        on_wait(f"the disk of {run} is full: the run waits for room to write its result")
        while not _written(write):
            time.sleep(LOOK_S)
        events.append("disk_ready", free_bytes=disk_free_bytes(run))


def _written(write: Callable[[], None]) -> bool:
    try:
        write()
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return False
    return True
