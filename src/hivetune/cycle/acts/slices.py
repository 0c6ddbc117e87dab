"""What an act is given, and slices of long work.

Training goes in slices that end at a checkpoint before the window does. All long work stands still while somebody waits
for an answer.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from hivetune.base.database import open_database
from hivetune.config import RunConfig
from hivetune.cycle import ledger
from hivetune.cycle.decide import Observation, Permission
from hivetune.errors import HivetuneError
from hivetune.machine.telemetry import Energy, PowerSample, energy_between, sample_power
from hivetune.process.lease import somebody_waits
from hivetune.process.still import STILL_LOOK_S, stands_still
from hivetune.records import Progress, silent
from hivetune.release.registry import Release, champion_of
from hivetune.train.open import Run, load_run
from hivetune.train.supervise.attempt import Terms

LINGER_S = 10.0  # after an answer: the next question of a conversation often comes soon, and going on costs nothing
LOOK_EVERY_S = 5.0  # at what is slower to ask than a lock: is it still allowed, how much energy was taken
MIN_MARGIN_S, RECENT_STEPS = 2.0, 20


class Requests:
    """Tells whether the gateway answers a request now or did a moment ago. It is called a few times a second."""

    def __init__(self) -> None:
        self._waited_at = float("-inf")

    def __call__(self) -> bool:
        if somebody_waits():
            self._waited_at = time.monotonic()
        return time.monotonic() - self._waited_at < LINGER_S


@dataclass
class Slice:
    """One slice of training, as the supervisor asks about it four times a second.

    `allowed` is asked every few seconds, and ends the slice. `clock` is the wall clock, as windows are.
    """

    allowed: Callable[[], Permission]
    yields: bool
    left_kwh: float | None = None
    on_step: Callable[[int], None] = lambda done: None
    clock: Callable[[], float] = time.time
    energy: Energy = field(default_factory=Energy)
    why: str = ""
    still_s: float = 0.0  # how long it stood still
    _still_since: float | None = None
    _now: Permission = field(default_factory=Permission)
    _looked: float = float("-inf")
    _done: tuple[int, float] | None = None  # steps, and when they were done
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _requests: Requests = field(default_factory=Requests)
    _sample: PowerSample = field(default_factory=lambda: sample_power(time.monotonic()))

    def terms(self) -> Terms:
        return Terms(self._step, self._stand_still, self._ends)

    def _step(self, done: int) -> None:
        now = time.monotonic()
        if self._done is not None and done > self._done[0]:
            self._step_s.append((now - self._done[1]) / (done - self._done[0]))
        if self._done is None or done > self._done[0]:
            self._done = (done, now)
        self.on_step(done)

    def _stand_still(self) -> bool:
        still, now = self.yields and self._requests(), time.monotonic()
        if self._still_since is not None:
            self.still_s += now - self._still_since
        self._still_since = now if still else None
        if still:
            self._done = None  # a step that stood still says nothing about how long steps take
        return still

    def _ends(self) -> int:
        """Return 1 to end while the step at hand and its checkpoint still fit, and 2 when the window is over."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            self._now = self.allowed()
            sample = sample_power(self._looked)
            if self._still_since is None:  # what others use meanwhile is not of this training
                self.energy += energy_between(self._sample, sample)
            self._sample = sample
        now = self.clock()
        if self.left_kwh is not None and self.energy.kwh >= self.left_kwh:
            self.why = "the energy of the budget is used up"
            return 1
        if not self._now.now:
            self.why = self._now.reason
            return 1
        # The time for the step at hand, and as long again for its checkpoint.
        margin_s = MIN_MARGIN_S + 2 * max(self._step_s, default=0.0)
        if self._now.until is None or now < self._now.until - margin_s:
            return 0
        self.why = "the window ends"
        return 1 if now < self._now.until else 2


class SliceEnded(HivetuneError):
    """The window, the budget or a person ended a slice of training. Nothing failed."""


@dataclass
class ActContext:
    """The context of an act. `allowed` is asked while the act runs. `details` are stored with its outcome."""

    config: RunConfig
    name: str
    observed: Observation
    reason: str
    allowed: Callable[[], Permission]
    now: float
    progress: Callable[[str], Progress] = lambda label: silent
    details: dict[str, Any] = field(default_factory=dict)

    def cycle(self) -> ledger.CycleRow:
        """Return the open cycle."""
        with closing(open_database()) as database:
            cycle = ledger.open_cycle(database, self.name)
        assert cycle is not None, "decided for an open cycle"
        return cycle

    def champion(self) -> Release | None:
        with closing(open_database()) as database:
            return champion_of(database, self.name)

    def run(self) -> Run:
        return load_run(self.cycle().run)


def ends_with_window(context: ActContext, label: str) -> Progress:
    """Return a progress callback that also ends the work when it is no longer allowed, and pauses it for requests."""
    report = context.progress(label)
    looked = float("-inf")

    def progress(done: int, total: int | None) -> None:
        nonlocal looked
        report(done, total)
        while True:
            if time.monotonic() - looked >= LOOK_EVERY_S:
                looked = time.monotonic()
                allowed = context.allowed()
                if not allowed.now:
                    raise SliceEnded(allowed.reason)
                if allowed.until is not None and time.time() + LOOK_EVERY_S >= allowed.until:  # before the next look
                    raise SliceEnded(f"the window ended first: {allowed.reason}")
            if not stands_still():
                return
            time.sleep(STILL_LOOK_S)

    return progress
