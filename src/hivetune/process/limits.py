"""How long a worker may be silent: learned from its own steps, with other limits while it loads, validates or saves."""

import math
from collections import deque
from dataclasses import dataclass, field

from hivetune.config import SuperviseConfig

WINDOW = 64
# Nine of ten steps are shorter: long documents make some steps several times longer than the median.
QUANTILE = 0.9


@dataclass
class LearnedLimits:
    """`hang_factor` times the usual step, at least `hang_floor_s`; the first step belongs to the start-up (compilers).

    `usual_start_s`: what an earlier worker with the same settings took until its first step was done, if one was.
    """

    settings: SuperviseConfig
    usual_start_s: float | None = None
    start_s: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _kind: str = "s"
    _started: bool = False

    def beat(self, kind: str, elapsed_s: float) -> None:
        if not self._started:
            self.start_s += elapsed_s
        if kind == "t":
            if self._kind == "t":
                self._steps.append(elapsed_s)
            self._started = True
        self._kind = kind

    def allowed_s(self) -> float:
        if self._kind in "sk" or not self._started:
            return self._allowed_start_s()
        if self._kind == "v":
            return self.settings.evaluate_timeout_s
        if self._kind == "c":
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
