"""The limits of a child's silence: fixed, or learned from its own steps, and longer while it loads or saves."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from hivetune.config import SuperviseConfig
from hivetune.process.protocol import Beat

STEPS_REMEMBERED = 64
# The quantile of step times that is used, since long documents make some steps much longer than the median.
QUANTILE = 0.9
# After these beats silence lasts as long as compilers and disks need.
LOADING = (Beat.STARTING, Beat.PREPARING, Beat.MEASURED)


class Limits(Protocol):
    """The limit of silence."""

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        """Record a beat, `elapsed_s` watched seconds after the previous one."""

    def allowed_s(self) -> float:
        """Return the watched seconds of silence after which the child counts as hung."""


@dataclass
class FixedLimits:
    """Fixed limits: `start_s` until the first item, then by the last beat."""

    start_s: float = 900.0
    item_s: float = 600.0
    validate_s: float = 1800.0
    save_s: float = 600.0
    _last: Beat = Beat.STARTING
    _started: bool = False

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        self._last = beat
        self._started = self._started or beat is Beat.ITEM

    def allowed_s(self) -> float:
        if self._last in LOADING or not self._started:
            return self.start_s
        return {Beat.VALIDATING: self.validate_s, Beat.SAVING: self.save_s}.get(self._last, self.item_s)


@dataclass
class LearnedLimits:
    """Learned limits: `hang_factor` times the usual step, at least `hang_floor_s`.

    The first step belongs to the start, because it compiles. `usual_start_s` is the start time of an earlier worker
    with the same settings, if there was one.
    """

    settings: SuperviseConfig
    usual_start_s: float | None = None
    start_s: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _last: Beat = Beat.STARTING
    _started: bool = False

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        if not self._started:
            self.start_s += elapsed_s
        if beat is Beat.ITEM:
            if self._last in (Beat.ITEM, Beat.WAITING):
                self._steps.append(elapsed_s)
            self._started = True
        self._last = beat

    def allowed_s(self) -> float:
        if self._last in LOADING or not self._started:
            return self._allowed_start_s()
        if self._last is Beat.VALIDATING:
            return self.settings.evaluate_timeout_s
        if self._last is Beat.SAVING:
            return self.settings.save_timeout_s
        return max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_s)

    @property
    def started(self) -> bool:
        return self._started

    @property
    def usual_s(self) -> float:
        """The rolling step time, 0 before two steps."""
        if not self._steps:
            return 0.0
        return sorted(self._steps)[math.ceil(QUANTILE * len(self._steps)) - 1]

    def _allowed_start_s(self) -> float:
        if self.usual_start_s is None:
            return self.settings.start_timeout_s
        learned_s = max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_start_s)
        return min(self.settings.start_timeout_s, learned_s)
