"""How long a child may be silent: by fixed limits, or learned from its own steps; longer while it loads or saves."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from hivetune.config import SuperviseConfig
from hivetune.process.protocol import Beat

STEPS_REMEMBERED = 64
# Nine of ten steps are shorter: long documents make some steps several times longer than the median.
QUANTILE = 0.9
# Silence after these lasts as long as compilers and disks take.
LOADING = (Beat.STARTING, Beat.PREPARING, Beat.MEASURED)


class Limits(Protocol):
    """Decides how long silence may last."""

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        """A beat came, `elapsed_s` seconds of watched time after the one before."""

    def allowed_s(self) -> float:
        """Watched seconds of silence after which the child counts as hung."""


@dataclass
class FixedLimits:
    """The same limits all along: `start_s` until the first item, then by the last beat."""

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
    """`hang_factor` times the usual step, at least `hang_floor_s`; the first step belongs to the start-up (compilers).

    `usual_start_s`: what an earlier worker with the same settings took until its first step was done, if one was.
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
        """The rolling step time; 0 before two steps were seen."""
        if not self._steps:
            return 0.0
        return sorted(self._steps)[math.ceil(QUANTILE * len(self._steps)) - 1]

    def _allowed_start_s(self) -> float:
        if self.usual_start_s is None:
            return self.settings.start_timeout_s
        learned_s = max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_start_s)
        return min(self.settings.start_timeout_s, learned_s)
