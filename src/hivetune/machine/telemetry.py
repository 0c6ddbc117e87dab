"""Samples of the machine during a run, for the diagnosis of a fault: memory, load, cards, and the kernel's messages.

The sources are psutil, AMD's sysfs (hwmon), nvidia-smi and /dev/kmsg. Sensors and messages that can't be read
(container, no permission) are left out. `root` replaces `/` in tests.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from hivetune.base.kernel import system_text
from hivetune.machine.drivers import read_amd, read_nvidia

# The values of a card that change during a run, and what its memory is.
SENSORS = ("memory_bytes", "used_bytes", "temperature_c", "watts", "busy_percent", "hot")


def sample(pid: int | None, folder: Path, root: Path = Path("/")) -> dict[str, Any]:
    """Return the current use of the machine, of the process tree of `pid`, and of the cards."""
    measured: dict[str, Any] = {
        "available_bytes": psutil.virtual_memory().available,
        "disk_free_bytes": psutil.disk_usage(str(folder)).free,
        "load": round(os.getloadavg()[0], 2),
    }
    if pid is not None:
        measured |= {"resident_bytes": resident_bytes(pid)}
    if cards := [*read_amd(root), *read_nvidia()]:
        measured["cards"] = [{name: card[name] for name in SENSORS if name in card} for card in cards]
    return measured


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants, 0 if it has ended."""
    resident = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                resident += each.memory_info().rss
    return resident


LINE_LIMIT = 200
RELEVANT = re.compile(
    r"amdgpu|kfd|drm|NVRM|Xid|nvidia|MES |qcm fence|gfxhub|AMD-Vi|PCIe|pciehp|mce:|oom|Out of memory|page allocation"
    r"|Killed process|segfault|traps:|I/O error|nvme|ata\d|EXT4-fs error|XFS|BTRFS|read-only"
)
# Lines in which the kernel names a process; those about other processes are ignored.
OF_PROCESS = re.compile(
    r"(?:Killed process |pid=|oom_reaper: reaped process )(\d+)|\[(\d+)\](?:: segfault| trap | general protection)"
)


class KernelLog:
    """The new lines of the kernel's log since this object was made."""

    def __init__(self, root: Path = Path("/")):
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)

    def lines(self, pid: int) -> list[str]:
        """Return the relevant new lines, without those about a process other than `pid`."""
        relevant = ((line, OF_PROCESS.search(line)) for line in self._read() if RELEVANT.search(line))
        return [line for line, of in relevant if of is None or int(of[1] or of[2]) == pid][-LINE_LIMIT:]

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def _read(self) -> Iterator[str]:
        while self._handle is not None:
            try:
                record = os.read(self._handle, 8192)
            except BrokenPipeError:  # the ring buffer has overwritten lines: go on with the oldest one
                continue
            except OSError:  # BlockingIOError: there are no more
                return
            if not record:
                return
            yield record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0]


def oom_kills(root: Path = Path("/")) -> int:
    """Return the number of out-of-memory kills so far, of the machine plus this process's cgroup."""
    # They overlap, so only differences mean something.
    counts = [root / "proc/vmstat"]
    if mine := re.search(r"^0::/?(.*)$", system_text(root / "proc/self/cgroup"), re.MULTILINE):
        counts.append(root / "sys/fs/cgroup" / mine[1] / "memory.events")
    found = (re.search(r"^oom_kill (\d+)$", system_text(path), re.MULTILINE) for path in counts)
    return sum(int(count[1]) for count in found if count)
