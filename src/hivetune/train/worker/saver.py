"""When the state is saved, and by whom: the loop only copies it, a thread hashes and writes.

Two places: the standby in memory (every few seconds, survives the worker) and a checkpoint on disk (by Young's rule,
survives the machine). How each is written: hivetune/run/standby.py and hivetune/run/checkpoints.py.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hivetune.base.disk import DISK, Disk
from hivetune.run import checkpoints
from hivetune.run.checkpoints import MEAN_TIME_BETWEEN_FAULTS_S, Files
from hivetune.run.standby import Standby
from hivetune.train.worker.checkpoint import TrainState, to_files

# The standby is written as often as it is cheap, so that even a card that dies every few seconds gets on; and so often
# that at most max(30 s, one step) is lost: the waiting, the writing, and the step under way.
STANDBY_AT_SOONEST_S = 1.0
STANDBY_AT_LATEST_S = 25.0
MOST_BLOCKING = 0.01
MOST_WRITING = 0.02
FIRST_SAVE_S = 10.0
# After a save that failed (full disk), the next try; doubled each time.
_RETRY_S = 30.0
LONGEST_RETRY_S = 600.0

Place = Literal["standby", "disk"]


@dataclass(frozen=True)
class Saved:
    """One write that ended. `blocking_s`: how long the loop stood still; `error`: None, or why it failed."""

    place: Place
    step: int
    seconds: float
    blocking_s: float
    error: OSError | None


class Saver:
    """`after_step` at every step; `save` when it must be on disk now (best validation, stop, end). One per run."""

    def __init__(
        self,
        run: Path,
        *,
        standby: Standby | None = None,
        every_s: float | None = None,
        mean_time_between_faults_s: float = MEAN_TIME_BETWEEN_FAULTS_S,
        disk: Disk = DISK,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._standby, self._every_s, self._disk, self._clock = run, standby, every_s, disk, clock
        self._mean_time_between_faults_s = mean_time_between_faults_s
        self._buffer = bytearray()
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []
        self._disk_at = self._standby_at = clock()
        self._disk_cost_s = self._standby_cost_s = self._blocking_s = self._retry_s = 0.0
        self._saved_once = False

    def after_step(self, state: Callable[[], TrainState]) -> None:
        """Begin a write if one is due; `state` is called only then. Returns as soon as the state is copied.

        Raises NotFinite. A disk that fails does not stop training: see `ended`.
        """
        place = self.due
        if place is not None:
            self._begin(place, state())

    @property
    def due(self) -> Place | None:
        """What a write is due to, now."""
        if self._thread is not None and self._thread.is_alive():
            return None  # a slow disk stretches the interval by itself
        now = self._clock()
        if now - self._disk_at >= self.interval_s:
            return "disk"
        standby = self._standby is not None and now - self._standby_at >= self._standby_interval_s
        return "standby" if standby else None

    def save(self, state: TrainState) -> None:
        """On disk when this returns. Raises OSError, NotFinite."""
        self.wait()
        self._begin("disk", state)
        self.wait()
        error = self._ended[-1].error
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Give back the memory of the copy, 12 bytes a trained parameter: nothing follows for now."""
        self.wait()
        self._buffer = bytearray()

    def forget(self) -> None:
        """What the standby holds is doubtful: nobody may go on from it."""
        self.wait()
        if self._standby is not None:
            self._standby.clear()

    def ended(self) -> list[Saved]:
        """The writes that ended since the last call, for the run's metrics."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def interval_s(self) -> float:
        """Between two checkpoints on disk, as of now: the setting, else Young's rule from the measured cost."""
        if self._retry_s:
            return self._retry_s
        if self._every_s is not None:
            return self._every_s
        if not self._saved_once:
            return FIRST_SAVE_S
        return checkpoints.checkpoint_interval_s(
            self._disk_cost_s,
            self._mean_time_between_faults_s,
            blocking_s=self._blocking_s,
            most_blocking=MOST_BLOCKING,
        )

    @property
    def _standby_interval_s(self) -> float:
        cheap_s = max(self._blocking_s / MOST_BLOCKING, self._standby_cost_s / MOST_WRITING)
        return min(max(STANDBY_AT_SOONEST_S, cheap_s), STANDBY_AT_LATEST_S)

    def _begin(self, place: Place, state: TrainState) -> None:
        started = self._clock()
        files = to_files(state, self._buffer)
        blocking_s = self._clock() - started
        self._blocking_s = blocking_s if not self._blocking_s else 0.5 * (self._blocking_s + blocking_s)
        self._standby_at = started
        if place == "disk":
            self._disk_at = started
        arguments = (place, state.step, files, blocking_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="saver")
        self._thread.start()

    def _write(self, place: Place, step: int, files: Files, blocking_s: float) -> None:
        started = self._clock()
        error = None
        try:
            if self._standby is not None:
                self._standby.write(step, files)
                self._standby_cost_s = self._clock() - started
            if place == "disk":
                checkpoints.commit_within(self._run, step, files, disk=self._disk)
        except OSError as problem:
            error = problem
        seconds = self._clock() - started
        if place == "disk":
            self._retry_s = min(max(_RETRY_S, 2 * self._retry_s), LONGEST_RETRY_S) if error else 0.0
            self._disk_cost_s = seconds
            self._saved_once = True
        self._ended.append(Saved(place, step, seconds, blocking_s, error))
