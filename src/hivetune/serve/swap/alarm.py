"""Is a new champion worse than the one before? Asked after every answer, so the test must hold at every look. Pure.

An e-value grows by p / p0 for each bad answer and by (1 - p) / (1 - p0) for each good one, averaged over the rates p
above p0 (a uniform prior on [p0, 1], on a grid). While the true rate is at most p0 it is a supermartingale that starts
at 1, so by Ville's inequality it ever reaches 1 / alpha with probability at most alpha, however often one looks
(Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference", Statistical Science 38).
"""

import math
from dataclasses import dataclass

FALSE_ALARMS = 0.01
FEWEST = 20  # answers: ten requests decide nothing, whatever they say
GRID = 64


@dataclass
class Alarm:
    """`usual`: the rate of bad answers that is still right, such as what the champion before had, and then some."""

    usual: float
    alpha: float = FALSE_ALARMS
    answers: int = 0
    bad: int = 0

    def add(self, bad: bool) -> None:
        self.answers += 1
        self.bad += bad

    @property
    def evidence(self) -> float:
        """The e-value: how many times likelier a worse rate makes what was seen. Only a bad answer raises it."""
        step = (1 - self.usual) / GRID
        rates = [self.usual + step * (number + 0.5) for number in range(GRID)]
        good = self.answers - self.bad
        logs = [
            self.bad * math.log(rate / self.usual) + good * math.log((1 - rate) / (1 - self.usual)) for rate in rates
        ]
        largest = max(logs)
        return math.exp(min(largest, 700)) * math.fsum(math.exp(log - largest) for log in logs) / GRID

    @property
    def raised(self) -> bool:
        return self.answers >= FEWEST and self.evidence >= 1 / self.alpha


def usual_rate(bad: int, answers: int, floor: float) -> float:
    """A rate to hold a successor against: what was seen, two standard errors more, and at least `floor`.

    Agresti and Coull's centre (two bad and two good answers added), so that no bad answer of few is not "never".
    """
    centre = (bad + 2) / (answers + 4)
    return min(0.5, max(floor, centre + 2 * math.sqrt(centre * (1 - centre) / (answers + 4))))
