"""Paired statistics for "is the tuned model better?": intervals, and the rows that a decision needs. Pure, stdlib.

Both models answer the same rows, so every interval is about the difference on the same rows. Rows that belong together
(one session) are one unit: taken singly they would count one conversation many times.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

Interval = tuple[float, float]
Columns = Sequence[Sequence[float]]

ALPHA = 0.05
MIN_UNITS = 5  # below, an interval would be an invention
POWER_Z = NormalDist().inv_cdf(0.8)
# Edgeworth's first term for skewness is taken this many times, since a sample of 40 shows a third of a log-normal's
# skewness. Chosen by simulation, as is what follows (decision 0150).
SKEW_FACTOR = 6.0
# Fewer units than these can miss a kind of row that one in twenty is of (0.95^72 = 2.5 %). On such a row the tuned
# model may lose this many nats per token: a model that guesses among 50,000 tokens needs 10.8, a base model about 3.
SEEN_UNITS, UNSEEN_NATS = 72, 8.0


@dataclass(frozen=True)
class Estimate:
    """A statistic, its interval at level 1 - alpha, and the number of independent units (rows or groups) that it is
    based on.

    `unit_sd`: standard error of `value` times sqrt(units), from which `rows_needed` extrapolates. `least_units`: number
    of units below which a rule for small samples keeps the interval wide, however small the variance. `skewness`: that
    of the values of single units.
    """

    value: float
    interval: Interval | None
    units: int
    unit_sd: float
    least_units: int = MIN_UNITS
    skewness: float = 0.0

    def scaled(self, factor: float, offset: float = 0.0) -> "Estimate":
        """Return the estimate of `factor * value + offset`. Zero stays 0, not -0."""
        interval = self.interval
        if interval is not None:
            low, high = sorted(0.0 + factor * end + offset for end in interval)
            interval = low, high
        value = 0.0 + factor * self.value + offset
        return replace(self, value=value, interval=interval, unit_sd=abs(factor) * self.unit_sd)


def by_group(columns: Columns, groups: Sequence[Hashable]) -> list[list[float]]:
    """Return the columns summed within each group, groups in order of first appearance."""
    order: dict[Hashable, int] = {}
    for group in groups:
        order.setdefault(group, len(order))
    sums = [[0.0] * len(order) for _ in columns]
    for column, total in zip(columns, sums, strict=True):
        for value, group in zip(column, groups, strict=True):
            total[order[group]] += value
    return sums


def jackknife(
    columns: Columns, statistic: Callable[[Sequence[float]], float], *, positive: bool = False, alpha: float = ALPHA
) -> Estimate:
    """Return the statistic of the columns' sums, with an interval from leaving out one unit at a time.

    columns: one sequence per quantity, all of length n (one entry per unit); `statistic` is called with their sums.
    `positive`: the interval is computed on the logarithm. With fewer than MIN_UNITS units, or if the statistic depends
    on one unit, the interval is None.
    """
    # Sums, so that a ratio of them (nats per token) has the weights of the whole. The error of a ratio or of a mean of
    # times is a factor, therefore the logarithm.
    n, sums = len(columns[0]), [math.fsum(column) for column in columns]
    value = statistic(sums)
    unknown = Estimate(value, None, n, math.nan)
    if n < MIN_UNITS:
        return unknown
    units = zip(*columns, strict=True)
    try:
        without = [statistic([total - part for total, part in zip(sums, unit, strict=True)]) for unit in units]
    except ZeroDivisionError:
        return unknown
    logarithmic = positive and min(value, *without) > 0
    figures = [math.log(figure) for figure in without] if logarithmic else without
    if not all(map(math.isfinite, figures)):
        return unknown
    mean = math.fsum(figures) / n
    away = [mean - figure for figure in figures]  # large where the unit that was left out is
    total = math.fsum(figure * figure for figure in away)
    skewness = math.fsum(figure**3 for figure in away) / n / (total / n) ** 1.5 if total else 0.0
    # Tukey's variance (1958), and Student's t with n - 2 degrees, since a ratio is known by two sums. Times are skewed:
    # of ten, a 95 % interval held their mean in 93.0 % of draws with n - 2 degrees, and in 93.6 % with n - 3.
    error = math.sqrt((n - 1) / n * total)
    half = t_quantile(1 - alpha / 2, n - (3 if logarithmic else 2)) * error
    interval = (value * math.exp(-half), value * math.exp(half)) if logarithmic else (value - half, value + half)
    unit_sd = error * math.sqrt(n) * (value if logarithmic else 1.0)
    return Estimate(value, interval, n, unit_sd, skewness=skewness)


def time_ratio(base: Sequence[float], tuned: Sequence[float], groups: Sequence[Hashable]) -> Estimate:
    """Return the ratio of the total time of `base` to that of `tuned`, with its interval."""
    # A ratio, since a busy machine slows both by a factor.
    return jackknife(by_group([base, tuned], groups), lambda sums: sums[1] / sums[0], positive=True)


def loss_difference(sums: Sequence[float]) -> float:
    """Return the difference tuned - base in nats per token, from the sums of [base nll, tuned nll, tokens]."""
    return (sums[1] - sums[0]) / sums[2]


def loss_estimate(columns: Columns, *, alpha: float = ALPHA) -> Estimate:
    """Return `loss_difference` of [base nll, tuned nll, tokens] per unit, with an interval for few or skewed units.

    The interval does not rule out harm in fewer than one row in twenty.
    """
    estimate, z = jackknife(columns, loss_difference, alpha=alpha), NormalDist().inv_cdf(1 - alpha / 2)
    if estimate.interval is None:
        return estimate
    n, (low, high) = estimate.units, estimate.interval
    # Wider on the side of the skewness, by SKEW_FACTOR times the first term of Edgeworth's expansion (Hall 1992).
    skew = SKEW_FACTOR * estimate.skewness * (2 * z * z + 1) / 6 * estimate.unit_sd / n
    low, high = low + min(0.0, skew), high + max(0.0, skew)
    if n >= SEEN_UNITS:
        return replace(estimate, interval=(low, high))
    # Fewer exclude no more, at this level, than that a share of ln(2 / alpha) / n of all rows is of a kind that was not
    # drawn and loses UNSEEN_NATS: 20 rows that gain a little say little about one row in twenty.
    unseen = math.log(2 / alpha) * UNSEEN_NATS
    high, gain = max(high, estimate.value + unseen / n), -estimate.value
    least = min(SEEN_UNITS, math.ceil(unseen / gain)) if gain > 0 else SEEN_UNITS
    return replace(estimate, interval=(low, high), least_units=least)


def paired_proportions(
    base: Sequence[bool], tuned: Sequence[bool], groups: Sequence[Hashable], *, alpha: float = ALPHA
) -> Estimate:
    """Return the difference of success shares, tuned - base, on the same rows, with Bonett and Price's adjusted Wald
    interval (2012).

    `groups`: the group of each row; rows of one group (a session) are not independent, so n is the number of
    independent rows with as much evidence (`_effective`).
    """
    # It keeps its coverage for small n and for rows on which both always agree, where the rows alone would say 0.
    n = len(base)
    if n == 0:
        return Estimate(math.nan, None, 0, math.nan)
    gained, lost = discordant(base, tuned)
    differences = [float(t) - float(b) for b, t in zip(base, tuned, strict=True)]
    units, rows, z = _effective(differences, groups, alpha)
    up, down = (gained * rows / n + 1) / (rows + 2), (lost * rows / n + 1) / (rows + 2)
    sd = math.sqrt(up + down - (up - down) ** 2)
    half = z * sd / math.sqrt(rows + 2)
    value, unit_sd = (gained - lost) / n, sd * math.sqrt(units / rows)
    if units < MIN_UNITS:
        return Estimate(value, None, units, unit_sd)
    low, high = max(up - down - half, -1.0), min(up - down + half, 1.0)
    (nets,) = by_group([differences], groups)
    if sign_test_p(sum(net > 0 for net in nets), sum(net < 0 for net in nets)) <= alpha:
        return Estimate(value, (low, high), units, unit_sd)
    # Where the exact sign test over groups can't tell the two models apart, the interval reaches one row beyond 0 on
    # either side: five rows gained of five are p = 0.06.
    edge = 1 / (rows + 2)
    # Of fewer units not even a gain in each is significant.
    least = max(math.ceil(math.log2(2 / alpha)), units + 1 if low > 0 or high < 0 else MIN_UNITS)
    return Estimate(value, (min(low, -edge), max(high, edge)), units, unit_sd, least)


def proportion(values: Sequence[bool], groups: Sequence[Hashable]) -> Estimate:
    """Return a share with Wilson's interval (1927), which does not collapse at 0 and 1. `groups`: as for pairs."""
    share = sum(values) / len(values) if values else math.nan
    units, rows, z = _effective([float(value) for value in values], groups, ALPHA)
    if units < MIN_UNITS:
        return Estimate(share, None, units, math.nan)
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows**2))
    sd = math.sqrt(middle * (1 - middle) * units / rows)
    return Estimate(share, (max(0.0, middle - half), min(1.0, middle + half)), units, sd)


def _effective(values: Sequence[float], groups: Sequence[Hashable], alpha: float) -> tuple[int, float, float]:
    """Return (groups, number of independent rows with as much evidence, quantile) for rows in groups."""
    n = len(values)
    if len(set(groups)) == n:
        return n, float(n), NormalDist().inv_cdf(1 - alpha / 2)
    mean = math.fsum(values) / n
    (sums,) = by_group([[value - mean for value in values]], groups)
    units = len(sums)
    if units < MIN_UNITS:
        return units, float(units), math.nan
    # Kish's design effect: the variance of the mean with whole groups as units, by that with single rows, at least 1/2;
    # where all values are equal it can't be seen, and each group counts as one row. The quantile is Student's then,
    # since that variance rests on the groups alone (Korn and Graubard 1998).
    single = math.fsum((value - mean) ** 2 for value in values) / n
    whole = math.fsum(total * total for total in sums) / n * units / (units - 1)
    rows = n / max(0.5, whole / single) if single else float(units)
    return units, rows, t_quantile(1 - alpha / 2, units - 1)


def discordant(base: Sequence[bool], tuned: Sequence[bool]) -> tuple[int, int]:
    """Return (number of rows that only the tuned model answers right, number that only the base does)."""
    pairs = list(zip(base, tuned, strict=True))
    return sum(t and not b for b, t in pairs), sum(b and not t for b, t in pairs)


def sign_test_p(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of the sign test, whose hypothesis is that gains and losses are equally
    likely.
    """
    n, k = gained + lost, min(gained, lost)
    tail: int = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / (1 << n))


def rows_needed(estimate: Estimate, effect: float, alpha: float = ALPHA) -> int:
    """Return the number of units that show an effect of this size with 80 % power at level 1 - alpha; `least_units`
    without a measured spread.
    """
    if effect <= 0 or not math.isfinite(estimate.unit_sd):
        return estimate.least_units
    z = NormalDist().inv_cdf(1 - alpha / 2) + POWER_Z
    return max(estimate.least_units, math.ceil((z * estimate.unit_sd / effect) ** 2))


def alpha_of_look(look: int | None) -> float:
    """Return the error level of the `look`-th candidate (from 1) that is compared with one champion: alpha / (look
    (look + 1)); ALPHA if `look` is None."""
    # The shares of all looks to come add up to alpha, so that an equal model takes the champion's place with at most
    # alpha however often one looks. 95 % intervals every night do so with 53 % within 30 nights, tested one-sided. The
    # second look needs 1.3 times the rows of the first, the thirtieth 2.5 times (80 % power).
    return ALPHA if look is None else ALPHA / (look * (look + 1))


def t_quantile(share: float, degrees: float) -> float:
    """Return a quantile of Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).

    Within 0.5 % of the tables: at 97.5 % from 3 degrees on (0.8 % at 2), at 99.95 % from 5.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))
