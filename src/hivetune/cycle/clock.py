"""The clocks of this machine: of the wall, awake, since the boot, and the zone in which people read them."""

import contextlib
import os
import time
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hivetune.cycle.window import Clocks

_LOCALTIME = Path("/etc/localtime")


def read_clocks() -> Clocks:
    awake_s = time.monotonic()
    return Clocks(time.time(), awake_s, time.clock_gettime(time.CLOCK_BOOTTIME))


def local_zone() -> tzinfo:
    """The zone that this machine tells time in, with its changes of the year; a rule in POSIX's own form ("CET-1CEST")
    gives the offset of today."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name and not _LOCALTIME.exists():
        return UTC
    with contextlib.suppress(ZoneInfoNotFoundError, ValueError, OSError):
        if name and not os.path.isabs(name):
            return ZoneInfo(name)
        with open(name or _LOCALTIME, "rb") as file:
            return ZoneInfo.from_file(file)
    return datetime.now().astimezone().tzinfo or UTC
