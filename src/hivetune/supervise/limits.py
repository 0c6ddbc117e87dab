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
    """`hang_factor` times the usual step, at least `hang_floor_s`; the first step belongs to the start-up."""

    settings: SuperviseConfig
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _kind: str = "s"
    _started: bool = False

    def beat(self, kind: str, elapsed_s: float) -> None:
        if kind == "t":
            if self._kind == "t":
                self._steps.append(elapsed_s)
            self._started = True
        self._kind = kind

    def allowed_s(self) -> float:
        if self._kind in "sk" or not self._started:
            return self.settings.start_timeout_s
        if self._kind == "v":
            return self.settings.evaluate_timeout_s
        if self._kind == "c":
            return self.settings.save_timeout_s
        return max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_s)

    @property
    def usual_s(self) -> float:
        """The rolling step time; 0 before two steps were seen."""
        if not self._steps:
            return 0.0
        return sorted(self._steps)[math.ceil(QUANTILE * len(self._steps)) - 1]
