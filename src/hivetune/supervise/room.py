"""A full disk is a pause: whether there is room again, and writes that wait until there is."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hivetune.base.disk import FULL_DISK
from hivetune.machine.inventory import disk_free_bytes
from hivetune.run.folder import EVENTS
from hivetune.supervise.events import Events

LOOK_S = 5.0


def has_room(folder: Path, size_bytes: int) -> bool:
    """Whether `size_bytes` can be taken on the disk of `folder`: taken and given back, since a quota shows in nothing
    that can be read."""
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


def write_when_there_is_room(run: Path, write: Callable[[], None]) -> None:
    """What ends a run is written, however long the disk stays full; Ctrl-C ends the waiting. Raises other errors."""
    if _written(write):
        return
    with Events(run / EVENTS) as events:
        events.append("disk_wait", reclaimed_bytes=0, free_bytes=disk_free_bytes(run))
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
