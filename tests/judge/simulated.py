"""Simulated evaluations with a known truth: a kind of interval, n units, rows or sessions, and what the interval says.

Sessions have one to five rows that share an effect. Each world gives (what is printed, the truth).
"""

import math
import random
from collections.abc import Callable
from typing import Any

from hivetune.data.snapshot import RowInfo
from hivetune.judge.statistics import Interval, by_group, jackknife, paired_proportions, proportion

World = Callable[[int, random.Random, bool], tuple[Interval | None, float]]
SIZES = (10, 30, 100)


def loss(n: int, rng: random.Random, sessions: bool, shift: float = -0.1) -> list[list[float]]:
    """nll of base and tuned, and tokens, summed by session. Lengths differ; the shift is a token's."""
    columns: list[list[float]] = [[], [], []]
    groups = []
    for unit in range(n):
        effect = rng.gauss(0, 0.15) if sessions else 0.0
        for _ in range(rng.randint(1, 5) if sessions else 1):
            tokens = float(rng.randint(5, 60))
            base = tokens * max(0.1, 2 + rng.gauss(0, 0.3))
            row = (base, base + tokens * (shift + effect + rng.gauss(0, 0.2)), tokens)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            groups.append(unit)
    return by_group(columns, groups)


def difference(sums: list[float]) -> float:
    return (sums[1] - sums[0]) / sums[2]


def loss_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    return jackknife(loss(n, rng, sessions), difference).interval, -0.1


def answers(n: int, rng: random.Random, sessions: bool) -> tuple[list[bool], list[bool], list[int]]:
    """40 % of the base's answers are right and 61 % of the tuned model's; those of a session often go together."""
    base, tuned, groups = [], [], []
    for unit in range(n):
        shared = rng.random(), rng.random()
        for _ in range(rng.randint(1, 5) if sessions else 1):
            mine = [one if sessions and rng.random() < 0.6 else rng.random() for one in shared]
            base.append(mine[0] < 0.4)
            tuned.append(base[-1] if rng.random() < 0.3 else mine[1] < 0.7)
            groups.append(unit)
    return base, tuned, groups


def success_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    return paired_proportions(*answers(n, rng, sessions)).interval, 0.7 * (0.7 - 0.4)


def share_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    _, tuned, groups = answers(n, rng, sessions)
    return proportion(tuned, groups).interval, 0.3 * 0.4 + 0.7 * 0.7


def times(n: int, rng: random.Random, sessions: bool) -> list[list[float]]:
    """Seconds of both sides and answers: skewed as times are, the second side 0.8 times the first."""
    columns: list[list[float]] = [[], [], []]
    groups = []
    for unit in range(n):
        moment = rng.gauss(0, 0.4)
        for _ in range(rng.randint(1, 5) if sessions else 1):
            seconds = math.exp(rng.gauss(0, 0.5) + moment)
            row = (seconds, 0.8 * seconds * math.exp(rng.gauss(0, 0.3) - 0.045), 1.0)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            groups.append(unit)
    return by_group(columns, groups)


MEAN_S = math.exp((0.5**2 + 0.4**2) / 2)


def time_ratio_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    return jackknife(times(n, rng, sessions), lambda s: s[1] / s[0], positive=True).interval, 0.8


def time_difference_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    return jackknife(times(n, rng, sessions), difference).interval, -0.2 * MEAN_S


def mean_time_world(n: int, rng: random.Random, sessions: bool) -> tuple[Interval | None, float]:
    return jackknife(times(n, rng, sessions), lambda s: s[0] / s[2], positive=True).interval, MEAN_S


WORLDS: dict[str, World] = {
    "loss": loss_world,
    "success": success_world,
    "share": share_world,
    "time_ratio": time_ratio_world,
    "time_difference": time_difference_world,
    "mean_time": mean_time_world,
}


def row_info(**fields: Any) -> RowInfo:
    """A held-out row with what a test says of it."""
    names = ("interaction_id", "agent", "category", "session", "time", "checker")
    return RowInfo(
        **{**dict.fromkeys(names), "row": 0, "id": "id", "source": "f", "split": "test", "tools": (), **fields}
    )
