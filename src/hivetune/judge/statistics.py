"""Paired statistics for "is the tuned model better?": intervals, and the n that a decision needs. Pure, stdlib.

Rows are answered by both models, so every interval is about the difference on the same rows. Rows that belong together
(one session) are one unit: taken singly they would count one conversation many times.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

Interval = tuple[float, float]
Columns = Sequence[Sequence[float]]

MIN_UNITS = 5  # below, an interval would be an invention
MIN_SEQUENTIAL = 20
# What a row that was not drawn may lose: nats per token, or spreads of the rows that were drawn. These and SKEW_FACTOR
# are chosen by simulation (docs/evaluate.md); a sample of 40 shows a third of a log-normal skewness.
UNSEEN_NATS, UNSEEN_SPREADS, SKEW_FACTOR = 1.75, 5.0, 4.0
# Fewer units than FEW_UNITS can miss one row in twenty (0.95^72 = 2.5 %). Such a row may lose FEW_UNSEEN_NATS: a model
# that guesses among 50,000 tokens needs 10.8 nats a token, a base model about 3. No row can gain as much.
FEW_UNITS, FEW_UNSEEN_NATS = 72, 8.0
MIN_DEGREES = 4.0  # below, `t_quantile` is off by more than 0.5 %
ALPHA = 0.05
MIN_TIMES = 4
MIN_NOISE, BEYOND_REPEATS = 1.1, 1.75
BUSY_SHARE = 0.25  # of all cores that other programs use: one of the two of a small machine for half of the time


@dataclass(frozen=True)
class Estimate:
    """A statistic, its 95 % interval, and the independent units (rows or groups) it rests on.

    `unit_sd`: standard error of `value` times sqrt(units), which `rows_needed` scales. `plain`: the interval without
    what `ci95` allows for in few or skewed units, where the two differ. `unseen`: what rows that were not drawn may
    take from the value, times the units, where there are FEW_UNITS or more.
    """

    value: float
    ci95: Interval | None
    units: int
    unit_sd: float
    plain: Interval | None = None
    unseen: float = 0.0

    def reversed(self) -> "Estimate":
        """Return the estimate with the opposite sign, a gain where less is better. Zero stays 0, not -0."""
        ci95, plain = (None if i is None else (0.0 - i[1], 0.0 - i[0]) for i in (self.ci95, self.plain))
        return replace(self, value=0.0 - self.value, ci95=ci95, plain=plain)


@dataclass(frozen=True)
class _Spread:
    """A statistic of n units, its standard error with degrees of freedom, and the skewness of single units."""

    value: float
    error: float
    degrees: float
    skewness: float
    logarithmic: bool


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


def merge_groups(groups: Sequence[str], keys: Sequence[Hashable]) -> list[str]:
    """Return the group of each row, where rows with an equal key that is not None share the first one's group."""
    first: dict[Hashable, str] = {}
    leads: dict[str, str] = {}

    def lead(group: str) -> str:
        while (next_group := leads.get(group, group)) != group:
            group = next_group
        return group

    for group, key in zip(groups, keys, strict=True):
        leader = lead(first.setdefault(key, group)) if key is not None else group
        if (mine := lead(group)) != leader:
            leads[mine] = leader
    return [lead(group) for group in groups]


def jackknife(
    columns: Columns,
    statistic: Callable[[Sequence[float]], float],
    *,
    positive: bool = False,
    alpha: float = ALPHA,
) -> Estimate:
    """Return the statistic of the columns' sums, with an interval at level 1 - `alpha` from leaving out one unit at a
    time.

    columns: one sequence per quantity, all of the same length n (one entry per unit); `statistic` gets their sums, so
    that a ratio of sums (nats per token) has the weights of the whole. Tukey's variance (1958) and Student's t, its
    degrees by `_degrees`. `positive`: of a ratio or a mean of times, whose error is a factor, the interval is made on
    the logarithm. Measured coverage: docs/proof/judge.json; percentiles of resamples held the truth in 91 to 94 % of
    cases at n = 10. With fewer than MIN_UNITS units, or if the statistic depends on one unit, the interval is None.
    """
    n = len(columns[0])
    spread = _spread(columns, statistic, positive) if n >= MIN_UNITS else None
    if spread is None:
        return Estimate(statistic([math.fsum(column) for column in columns]), None, n, math.nan)
    return _student(spread, n, alpha)


def _student(spread: _Spread, n: int, alpha: float) -> Estimate:
    value, half = spread.value, t_quantile(1 - alpha / 2, spread.degrees) * spread.error
    scale = spread.error * math.sqrt(n)
    if spread.logarithmic:
        return Estimate(value, (value * math.exp(-half), value * math.exp(half)), n, value * scale)
    return Estimate(value, (value - half, value + half), n, scale)


def _spread(columns: Columns, statistic: Callable[[Sequence[float]], float], positive: bool = False) -> _Spread | None:
    """Leave out one unit at a time; return None where the statistic rests on one unit or is not finite."""
    n = len(columns[0])
    sums = [math.fsum(column) for column in columns]
    value = statistic(sums)
    units = zip(*columns, strict=True)
    try:
        without = [statistic([total - part for total, part in zip(sums, unit, strict=True)]) for unit in units]
    except ZeroDivisionError:
        return None
    logarithmic = positive and min(value, *without) > 0
    figures = [math.log(figure) for figure in without] if logarithmic else without
    if not all(map(math.isfinite, figures)):
        return None
    mean = math.fsum(figures) / n
    away = [mean - figure for figure in figures]  # large where the unit that was left out is
    squares = [figure * figure for figure in away]
    total = math.fsum(squares)
    skewness = math.fsum(figure**3 for figure in away) / n / (total / n) ** 1.5 if total else 0.0
    return _Spread(value, math.sqrt((n - 1) / n * total), _degrees(squares), skewness, logarithmic)


def loss_difference(sums: Sequence[float]) -> float:
    """Return nats per token, tuned - base, from the sums of [base nll, tuned nll, tokens]."""
    return (sums[1] - sums[0]) / sums[2]


def loss_estimate(columns: Columns, *, alpha: float = ALPHA) -> Estimate:
    """Return `loss_difference` of [base nll, tuned nll, tokens] per unit, with an interval for few or skewed units.

    Either bound is the further of two. One is the jackknife's, whose t is raised by SKEW_FACTOR times the first term of
    Edgeworth's expansion for skewness (Hall 1992). The other allows for rows that were not drawn: n rows exclude no
    more, at 97.5 %, than that a share of ln(40) / n of all is of another kind. Such rows may lose UNSEEN_NATS or
    UNSEEN_SPREADS spreads, and FEW_UNSEEN_NATS below FEW_UNITS: 20 rows that gain a little say little about one row in
    twenty. `plain` is the jackknife's interval.
    """
    n = len(columns[0])
    spread = _spread(columns, loss_difference) if n >= MIN_UNITS else None
    if spread is None:
        return jackknife(columns, loss_difference, alpha=alpha)
    plain, z = _student(spread, n, alpha), NormalDist().inv_cdf(1 - ALPHA / 2)
    unseen = math.log(2 / ALPHA) * max(UNSEEN_NATS, UNSEEN_SPREADS * plain.unit_sd)
    loss = unseen if n >= FEW_UNITS else max(unseen, math.log(2 / ALPHA) * FEW_UNSEEN_NATS)
    skew = SKEW_FACTOR * spread.skewness * (2 * z * z + 1) / (6 * math.sqrt(n)) * spread.error
    low, high = plain.ci95 or (plain.value, plain.value)
    low = min(low - max(0.0, -skew), plain.value - unseen / n)
    high = max(high + max(0.0, skew), plain.value + loss / n)
    return replace(plain, ci95=(low, high), plain=plain.ci95, unseen=unseen)


def _degrees(squares: Sequence[float]) -> float:
    """Return degrees of freedom of a variance from n squared deviations: fewer where a few of them make most of it.

    Satterthwaite's (1946), by the sample's kurtosis; at most n - 2, since a ratio is known by two sums. With n - 1 the
    intervals of skewed times held the truth in 92 to 93 % of cases at n = 10, with these in 93 to 94 %.
    """
    n, total = len(squares), math.fsum(squares)
    if total == 0:
        return float(n - 1)
    kurtosis = n * math.fsum(square * square for square in squares) / (total * total)
    return max(MIN_DEGREES, min(n - 2, 2 * n / max(kurtosis - (n - 3) / (n - 1), 2 * n / (n - 1))))


def paired_proportions(
    base: Sequence[bool], tuned: Sequence[bool], groups: Sequence[Hashable] | None = None, *, alpha: float = ALPHA
) -> Estimate:
    """Return the share that succeeds, tuned - base, on the same rows, with Bonett and Price's adjusted Wald interval
    (2012).

    It keeps its coverage for small n and for rows on which both models always agree, where the rows alone would say 0.
    `groups`: rows of one session are not independent; n is then what as many independent rows would say (`_effective`).
    Where the exact test of McNemar, over groups, can't tell the two models apart, the interval reaches one row beyond 0
    on either side: five rows gained of five are p = 0.06.
    """
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
    plain = (max(up - down - half, -1.0), min(up - down + half, 1.0))
    (nets,) = by_group([differences], range(n) if groups is None else groups)
    if mcnemar_p(sum(net > 0 for net in nets), sum(net < 0 for net in nets)) <= alpha:
        return Estimate(value, plain, units, unit_sd)
    edge = 1 / (rows + 2)
    return Estimate(value, (min(plain[0], -edge), max(plain[1], edge)), units, unit_sd, plain)


def proportion(values: Sequence[bool], groups: Sequence[Hashable] | None = None) -> Estimate:
    """Return a share with Wilson's interval (1927), which does not collapse at 0 and 1. `groups`: as for pairs."""
    if not values:
        return Estimate(math.nan, None, 0, math.nan)
    share = sum(values) / len(values)
    units, rows, z = _effective([float(value) for value in values], groups, ALPHA)
    if units < MIN_UNITS:
        return Estimate(share, None, units, math.nan)
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows**2))
    sd = math.sqrt(middle * (1 - middle) * units / rows)
    return Estimate(share, (max(0.0, middle - half), min(1.0, middle + half)), units, sd)


def _effective(values: Sequence[float], groups: Sequence[Hashable] | None, alpha: float) -> tuple[int, float, float]:
    """Return (groups, independent rows that would say as much, quantile) of rows that come in groups.

    Kish's design effect: the variance of the mean with whole groups as units, by that with single rows, at least 1/2;
    where all values are equal it can't be seen, and each group counts as one row. The quantile is Student's then, since
    that variance rests on the groups alone (Korn and Graubard 1998).
    """
    n = len(values)
    if groups is None or len(set(groups)) == n:
        return n, float(n), NormalDist().inv_cdf(1 - alpha / 2)
    mean = math.fsum(values) / n
    (sums,) = by_group([[value - mean for value in values]], groups)
    units = len(sums)
    if units < MIN_UNITS:
        return units, float(units), math.nan
    single = math.fsum((value - mean) ** 2 for value in values) / n
    whole = math.fsum(total * total for total in sums) / n * units / (units - 1)
    rows = n / max(0.5, whole / single) if single else float(units)
    return units, rows, t_quantile(1 - alpha / 2, units - 1)


def discordant(base: Sequence[bool], tuned: Sequence[bool]) -> tuple[int, int]:
    """Return (rows only the tuned model answers, rows only the base answers)."""
    pairs = list(zip(base, tuned, strict=True))
    return sum(t and not b for b, t in pairs), sum(b and not t for b, t in pairs)


def mcnemar_p(gained: int, lost: int) -> float:
    """Return the exact two-sided p of McNemar's test: were as many rows gained as lost by chance?"""
    n, k = gained + lost, min(gained, lost)
    tail: int = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / (1 << n))


def rows_needed(estimate: Estimate, effect: float) -> int | None:
    """Return the units that show an effect of this size with 80 % power at 95 %; None without a measured spread."""
    if effect <= 0 or not math.isfinite(estimate.unit_sd):
        return None
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    for_spread = (z * estimate.unit_sd / effect) ** 2
    needed = math.ceil(for_spread + estimate.unseen / effect)
    if estimate.unseen and needed < FEW_UNITS:
        allowance = max(estimate.unseen, math.log(2 / ALPHA) * FEW_UNSEEN_NATS)
        needed = min(FEW_UNITS, math.ceil(for_spread + allowance / effect))
    return max(MIN_UNITS, needed)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values adjusted for their number (Holm 1979), in their order: alpha holds for each alone."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def alpha_of_look(look: int, alpha: float = ALPHA) -> float:
    """Return the error level of the `look`-th judgement of one champion, counted from 1: alpha / (look (look + 1)).

    The shares of all looks to come add up to alpha, so that an equal model takes the champion's place with at most
    alpha however often one looks. 95 % intervals every night do so with 53 % within 30 nights, tested one-sided. The
    second look needs 1.3 times the rows of the first, the thirtieth 2.5 times (80 % power).
    """
    return alpha / (look * (look + 1))


def anytime_interval(estimate: Estimate, expected_units: int, alpha: float = ALPHA) -> Interval | None:
    """Return an interval that holds at every n at once, so that a pair may be checked while its rows come in.

    The asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024, Annals of Statistics
    52, theorem 2.2), tightest near `expected_units`; there it is about 1.5 times as wide as one for that n alone. None
    with fewer than `MIN_SEQUENTIAL` units: it rests on a variance that is known well.
    """
    n = estimate.units
    if n < MIN_SEQUENTIAL or not math.isfinite(estimate.unit_sd):
        return None
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / expected_units
    grown = n * rho2 + 1
    half = estimate.unit_sd * math.sqrt(2 * grown / (n * n * rho2) * math.log(math.sqrt(grown) / alpha))
    return estimate.value - half, estimate.value + half


def p_value(estimate: Estimate) -> float:
    """Return the two-sided p of "no difference", by Student's t of the standard error; 1 where nothing is known."""
    if estimate.units < MIN_UNITS or not estimate.unit_sd > 0:
        return 1.0
    t, degrees = abs(estimate.value) * math.sqrt(estimate.units) / estimate.unit_sd, estimate.units - 1
    # Student's t as a normal score (Wallace 1959); within 1.5 % of the tables from 4 degrees on.
    z = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return 2 * NormalDist().cdf(-z)


def t_quantile(share: float, degrees: float) -> float:
    """Return a quantile of Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).

    Within 0.5 % of the tables: at 97.5 % from 4 degrees on, at 99.95 % from 5.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def noise_of(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return (noise, repeats) of equal work that was timed again and again, in the order of time; None below four
    times.

    noise: how many times as long it took at slow moments as at fast ones (90th / 10th percentile). repeats: the same,
    as the differences between one time and the next alone would make it. A machine that merely jitters has both alike,
    whatever it is; a load that comes and stays moves the first and not the second.
    """
    if len(seconds) < MIN_TIMES or not all(math.isfinite(s) and s > 0 for s in seconds):
        return None
    ordered = sorted(math.log(s) for s in seconds)
    steps = sorted(abs(math.log(after / before)) for before, after in itertools.pairwise(seconds))
    # The median of |a - b| of two normal values of spread s is 0.954 s; a tenth lies beyond 1.2816 s on either side.
    repeats = 2 * 1.2816 * _quantile(steps, 0.5) / 0.954
    return math.exp(_quantile(ordered, 0.9) - _quantile(ordered, 0.1)), math.exp(repeats)


def was_busy(noise: float, repeats: float) -> bool:
    """Return whether another program ran during a part of the measurement: the times spread more than neighbouring
    times differ.

    Of 2,000 simulated quiet machines at most 2.2 % are called busy, with 13, 26 or 50 times, jitter of 2 to 30 % and
    rare outliers. A load that makes half of the times 1.5 times as long is found in 98.9 % and more at 5 % jitter. A
    fixed limit of 1.3 called every second quiet machine of a shared cloud busy. A spread below a tenth is never called
    busy: no threshold is that fine.
    """
    return noise > max(MIN_NOISE, math.pow(repeats, BEYOND_REPEATS))


def is_busy(others_share: float | None) -> bool:
    """Return whether other programs used so much of the machine that measured times are unreliable."""
    return others_share is not None and others_share >= BUSY_SHARE


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between neighbours, as numpy does by default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (position - low)
