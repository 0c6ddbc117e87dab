"""A series of numbers by step that stays small however long a run is: when there are too many, neighbours are joined.

Each bucket keeps mean, minimum and maximum of its points, so that a spike of one step in 100,000 is still drawn. Adding
a point costs the same for the first as for the millionth.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

MAX_BUCKETS = 320  # two pixels of a chart for each
# The smoothed line is an exponential mean over so many steps, or over this share of all so far if that is more.
SMOOTHED_STEPS, SMOOTHED_SHARE = 10, 0.02


@dataclass
class Bucket:
    """Neighbouring points. `step` and `time` are those of the last one. `smoothed`: the exponential mean there."""

    step: int
    time: float
    total: float
    low: float
    high: float
    smoothed: float
    count: int = 1

    @property
    def mean(self) -> float:
        return self.total / self.count

    def join(self, later: "Bucket") -> None:
        """Add the points of the next bucket."""
        self.step, self.time, self.smoothed = later.step, later.time, later.smoothed
        self.total += later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.count += later.count


@dataclass
class Series:
    """Points in the order of their steps. `count`: how many there are. `last`: the newest value."""

    buckets: list[Bucket] = field(default_factory=list)
    count: int = 0
    last: float | None = None
    _width: int = 1
    _smoothed: float = 0.0

    def add(self, step: int, value: float, time: float = 0.0) -> None:
        """Add a point. `step` is above that of every point before."""
        self.count += 1
        self.last = value
        share = 1 / min(self.count, max(SMOOTHED_STEPS, self.count * SMOOTHED_SHARE))
        self._smoothed += share * (value - self._smoothed)
        point = Bucket(step, time, value, value, value, self._smoothed)
        if self.buckets and self.buckets[-1].count < self._width:
            self.buckets[-1].join(point)
            return
        self.buckets.append(point)
        if len(self.buckets) > MAX_BUCKETS:
            self._halve()

    def step_at(self, time: float) -> int:
        """Return the newest step at that time, 0 before the first."""
        number = bisect_right(self.buckets, time, key=lambda bucket: bucket.time)
        return self.buckets[number - 1].step if number else 0

    def _halve(self) -> None:
        """Join each two neighbours. An odd last one stays as it is and is filled further."""
        joined = self.buckets[::2]
        for bucket, later in zip(joined, self.buckets[1::2], strict=False):
            bucket.join(later)
        self.buckets, self._width = joined, self._width * 2
