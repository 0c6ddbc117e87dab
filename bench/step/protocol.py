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
    """Count anew what `peak_bytes` returns."""
    Path("/proc/self/clear_refs").write_text("5")
    if _on_card():
        sys.modules["torch"].cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the most bytes held since `forget_peak`: by torch on the card, else resident in this process (Linux)."""
    if _on_card():
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def finish() -> None:
    """Wait until the card has done all that was given to it."""
    if _on_card():
        sys.modules["torch"].cuda.synchronize()


def _on_card() -> bool:
    return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_available())


def resident_bytes() -> int:
    """Return how many bytes of this process are in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
