"""The kernel's traces of a process's death: its log lines and out-of-memory counters.

Traces that can't be read (container, no permission) are empty.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from hivetune.base.kernel import system_text

KMSG = Path("dev/kmsg")
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
    """The kernel's log from now on. `root` replaces `/` in tests."""

    def __init__(self, root: Path = Path("/")):
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.open(root / KMSG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)

    def lines(self, pid: int) -> list[str]:
        """Return the new relevant lines that are not about another process than `pid`."""
        relevant = ((line, OF_PROCESS.search(line)) for line in self._read() if RELEVANT.search(line))
        return [line for line, of in relevant if of is None or int(of[1] or of[2]) == pid][-LINE_LIMIT:]

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def _read(self) -> Iterator[str]:
        while self._handle is not None:
            try:
                record = os.read(self._handle, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the ring buffer has overwritten lines: go on with the oldest one
                continue
            except OSError:
                return
            if not record:
                return
            yield record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0]


def oom_kills(root: Path = Path("/")) -> int:
    """Return the number of out-of-memory kills, of the machine plus our cgroups; only differences mean something."""
    counts = [root / "proc/vmstat"]
    for line in system_text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            counts.append(root / "sys/fs/cgroup" / line[3:].strip("/") / "memory.events")
    found = (re.search(r"^oom_kill (\d+)$", system_text(path), re.MULTILINE) for path in counts)
    return sum(int(count[1]) for count in found if count)


def settle_kernel(seconds: float = 0.05) -> None:
    """Wait until the kernel has written its lines, which it does just after a death."""
    time.sleep(seconds)
