"""How a worker of the benchmark talks to the clock: one JSON line when ready, one after each step, "go" in between.

Standard library only: workers run in the environments of the peers.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Clock:
    """The worker's side. Its pipes are given by number, because libraries print to standard output."""

    def __init__(self) -> None:
        self._in = os.fdopen(int(os.environ["BENCH_IN"]), "r")
        self._out = os.fdopen(int(os.environ["BENCH_OUT"]), "w")
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())

    def tell(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def wait(self) -> float:
        """Blocks until it is this worker's turn; the time at which its turn began. Ends the worker at "end"."""
        line = self._in.readline().strip()
        if line != "go":
            sys.exit(0)
        return time.perf_counter()


def forget_peak() -> None:
    """From here on `peak_bytes` is what is held from now on (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most that was resident since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
