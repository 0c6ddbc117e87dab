"""Paired statistics for "is the tuned model better?": intervals, and the n that a decision needs. Pure, stdlib.

Rows are answered by both models, so every interval is about the difference on the same rows. Rows that belong together
(one session) are one unit of the bootstrap: resampling them singly would count one conversation many times.
"""

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Interval = tuple[float, float]
Columns = Sequence[Sequence[float]]

RESAMPLES = 2000
# About 0.3 s of plain Python: 400 rows get 2,000 resamples, larger sets fewer, and never below 400 (the 2.5 % quantile
# of 400 resamples rests on its ten lowest, and at that many rows the sum is close to normal anyway).
MOST_DRAWS = 1_000_000
FEWEST_RESAMPLES = 400
FEWEST_UNITS = 5  # below, an interval would be an invention


@dataclass(frozen=True)
class Estimate:
    """A statistic, its 95 % interval, and the independent units (rows or groups) it rests on."""

    value: float
    ci95: Interval | None
    units: int
    unit_sd: float  # standard error of `value` times sqrt(units): what `rows_needed` scales


def by_group(columns: Columns, groups: Sequence[Hashable]) -> list[list[float]]:
    """The columns summed within each group, groups in order of first appearance."""
    order: dict[Hashable, int] = {}
    for group in groups:
        order.setdefault(group, len(order))
    sums = [[0.0] * len(order) for _ in columns]
    for column, total in zip(columns, sums, strict=True):
        for value, group in zip(column, groups, strict=True):
            total[order[group]] += value
    return sums


def paired_bootstrap(
    columns: Columns, statistic: Callable[[Sequence[float]], float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """The statistic of the columns' sums, with a 95 % percentile interval from resampled units.

    columns: one sequence per quantity, all of the same length n (one entry per unit); `statistic` gets their sums, so
    that a ratio of sums (nats per token) is weighted as the whole is. The percentiles are widened for small n by
    sqrt(n / (n - 1)) and Student's t (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", 3.4.1).
    With fewer than FEWEST_UNITS units the interval is None.
    """
    n = len(columns[0])
    value = statistic([math.fsum(column) for column in columns])
    if n < FEWEST_UNITS:
        return Estimate(value, None, n, math.nan)
    resamples = max(min(resamples, MOST_DRAWS // n), min(resamples, FEWEST_RESAMPLES))
    draw = random.Random(seed).random  # the one generator whose sequence Python promises to keep between versions
    found = []
    for _ in range(resamples):
        chosen = [int(draw() * n) for _ in range(n)]
        found.append(statistic([sum([column[i] for i in chosen]) for column in columns]))
    found.sort()
    mean = math.fsum(found) / resamples
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in found) / (resamples - 1))
    tail = NormalDist().cdf(-t_quantile_975(n - 1) * math.sqrt(n / (n - 1)))
    return Estimate(value, (_quantile(found, tail), _quantile(found, 1 - tail)), n, deviation * math.sqrt(n))


def paired_proportions(base: Sequence[bool], tuned: Sequence[bool]) -> Estimate:
    """Share that succeeds, tuned - base, on the same rows; Bonett and Price's adjusted Wald interval (2012).

    It keeps its coverage for small n and for rows on which both models always agree, where a bootstrap says [0, 0].
    """
    n = len(base)
    if n == 0:
        return Estimate(math.nan, None, 0, math.nan)
    gained, lost = discordant(base, tuned)
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    sd = math.sqrt(up + down - (up - down) ** 2)
    half = NormalDist().inv_cdf(0.975) * sd / math.sqrt(n + 2)
    ci95 = None if n < FEWEST_UNITS else (max(up - down - half, -1.0), min(up - down + half, 1.0))
    return Estimate((gained - lost) / n, ci95, n, sd)


def discordant(base: Sequence[bool], tuned: Sequence[bool]) -> tuple[int, int]:
    """(rows only the tuned model answers, rows only the base answers)."""
    pairs = list(zip(base, tuned, strict=True))
    return sum(t and not b for b, t in pairs), sum(b and not t for b, t in pairs)


def mcnemar_p(gained: int, lost: int) -> float:
    """Exact two-sided p of McNemar's test: were as many rows gained as lost by chance?"""
    n, k = gained + lost, min(gained, lost)
    tail: int = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / (1 << n))


def rows_needed(estimate: Estimate, effect: float) -> int | None:
    """Units at which an effect of this size would be seen with 80 % power at 95 %; None without a measured spread."""
    if effect <= 0 or not math.isfinite(estimate.unit_sd):
        return None
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return max(FEWEST_UNITS, math.ceil((z * estimate.unit_sd / effect) ** 2))


def t_quantile_975(degrees: int) -> float:
    """97.5 % quantile of Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).

    From 4 degrees on it is within 0.5 % of the tables.
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
