"""Is a specialist born, how long does it live, what is the router worth? From measured numbers to a decision; pure.

The screen costs minutes: where parts of a domain's rows do not pull the shared adapter one way, nothing is left to
learn. A domain that passes is forked: a few steps on the domain against equally many on the mixture, from the same
adapter. Life is read from one matrix of scores, adapters x test rows.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hivetune.judge.statistics import ALPHA, Estimate, Interval, alpha_of_look, by_group, jackknife, rows_needed

GRADIENT_PARTS = 8  # of a domain's rows in the screen: 128 patterns of signs, so that p can be as small as 1/128
SCREEN_ALPHA = 0.05
MIN_GAIN = 0.02  # nats a token: below, an adapter more costs memory and turns for nothing that anybody sees
USEFUL_GAIN = 0.05  # what a domain needs enough sessions to see

BirthAnswer = Literal["born", "not-born", "not-enough-evidence"]


EQUAL_WITHIN = 0.02  # nats a token


@dataclass(frozen=True)
class Screen:
    """The screen of a domain. `cosine`: between the mean gradients of two halves. `p`: how often random signs agree as
    well.

    `finite` is false where a gradient was not; then nothing is known.
    """

    cosine: float
    p: float
    finite: bool = True

    @property
    def passed(self) -> bool:
        return self.p <= SCREEN_ALPHA


@dataclass(frozen=True)
class ScoredUnit:
    """One row under several adapters: nats of each, trained tokens, and the group that it belongs to."""

    group: str
    tokens: int
    nats: dict[str, float]


@dataclass(frozen=True)
class Birth:
    """The decision about a fork. `gain`: over equally many steps on the mixture. `over_shared`: over the shared
    adapter.

    Both are nats a token, with intervals corrected for the number of forks. `still_gains`: in words, that the shared
    adapter was trained too little to tell; it is also in the reason.
    """

    answer: BirthAnswer
    reason: str
    gain: Estimate
    over_shared: Estimate
    still_gains: str = ""


def screen(products: Sequence[Sequence[float]] | None) -> Screen:
    """Screen a domain by the inner products [P, P] of its parts' mean gradients; None where one was not finite.

    If the domain pulls nowhere, each part's gradient is noise around zero and its sign is free. So it is an exact test
    over all patterns of signs (Fisher 1935), whose statistic is the sum of the products of different parts.
    """
    if products is None or not all(math.isfinite(value) for line in products for value in line):
        return Screen(0.0, 1.0, finite=False)
    parts = len(products)
    observed, as_well, patterns = 0.0, 0, 0
    for signs in itertools.product((1, -1), repeat=parts - 1):
        all_signs = (1, *signs)
        total = math.fsum(all_signs[i] * all_signs[j] * products[i][j] for i in range(parts) for j in range(i))
        if patterns == 0:
            observed = total  # the first pattern is the one of the data: all signs as they are
        as_well += total >= observed * (1 - 1e-12) if observed > 0 else total >= observed
        patterns += 1
    halves = [range(0, parts, 2), range(1, parts, 2)]
    within = [math.fsum(products[i][j] for i in half for j in half) for half in halves]
    across = math.fsum(products[i][j] for i in halves[0] for j in halves[1])
    length = math.sqrt(max(within[0], 0.0) * max(within[1], 0.0))
    if length == 0:
        return Screen(0.0, 1.0)
    return Screen(across / length, as_well / patterns)


def gain_of(units: Sequence[ScoredUnit], worse: str, better: str, *, alpha: float = ALPHA) -> Estimate:
    """Return how many nats a token `better` is below `worse` on the same rows, sessions as units.

    The value is not a number where a row has no finite loss under one of them.
    """
    columns = [
        [unit.nats[worse] for unit in units],
        [unit.nats[better] for unit in units],
        [float(unit.tokens) for unit in units],
    ]
    if not units or not all(map(math.isfinite, (*columns[0], *columns[1]))):
        return Estimate(math.nan, None, len(units), math.nan)
    grouped = by_group(columns, [unit.group for unit in units])
    return jackknife(grouped, lambda sums: (sums[0] - sums[1]) / sums[2], alpha=alpha)


def decide_birth(units: Sequence[ScoredUnit], forks: int) -> Birth:
    """Decide whether a domain gets a specialist.

    `units`: validation rows of the domain under "fork", "control" and "shared". `forks`: how many were tried, for which
    the level is corrected (Bonferroni).

    It is born when the fork beats both by MIN_GAIN with its whole interval. More steps alone, which the control has
    too, are no reason for an adapter of its own, and neither is a control that more steps have spoilt. A shared adapter
    that itself still gains bears harmless domains: then the reason reports it.
    """
    birth = _decided(units, forks)
    still = gain_of(units, "shared", "control")
    if still.ci95 is None or still.ci95[0] <= 0:
        return birth
    more = f"the shared adapter itself still gains {still.value:+.3f} nats a token here by more steps on all rows"
    more += ": train it until it gains no more, and look again"
    return replace(birth, reason=f"{birth.reason}; {more}", still_gains=more)


def _decided(units: Sequence[ScoredUnit], forks: int) -> Birth:
    gain = gain_of(units, "control", "fork", alpha=ALPHA / forks)
    over_shared = gain_of(units, "shared", "fork", alpha=ALPHA / forks)
    for estimate, beside in ((gain, "as many steps on all rows"), (over_shared, "the shared adapter")):
        if estimate.ci95 is None:
            reason = f"no interval of its gain over {beside} can be made from {estimate.units} sessions"
            return Birth("not-enough-evidence", reason, gain, over_shared)
        low, high = estimate.ci95
        if low > MIN_GAIN:
            continue
        fact = f"{estimate.value:+.3f} nats a token [{low:+.3f}, {high:+.3f}] over {beside}"
        needed = rows_needed(estimate, USEFUL_GAIN)
        if high > USEFUL_GAIN and needed is not None and estimate.units < needed:
            reason = f"{fact}; {needed} sessions in validation would see {USEFUL_GAIN}, there are {estimate.units}"
            return Birth("not-enough-evidence", reason, gain, over_shared)
        return Birth("not-born", f"{fact}: not above {MIN_GAIN}", gain, over_shared)
    assert gain.ci95 is not None
    low, high = gain.ci95
    reason = f"{gain.value:+.3f} nats a token [{low:+.3f}, {high:+.3f}] over as many steps on all rows"
    return Birth("born", reason, gain, over_shared)


# Life: one matrix of scores, adapters x test rows.

# An expert that gets fewer of its family's answers than this is in nobody's way but in memory.
MIN_SHARE, MIN_ANSWERS = 0.005, 1000


@dataclass(frozen=True)
class LifeStep:
    """A change for specialists that serve. `retire`: the shared adapter answers again.

    `merge`: they become one, trained again on the union of their rows.
    """

    kind: Literal["retire", "merge"]
    specialists: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class AnswerCounts:
    """Answers of a release, and of its whole family, since it is served."""

    own: int = 0
    family: int = 0


def is_equal(units: Sequence[ScoredUnit], first: str, second: str, *, look: int = 1) -> Interval | None:
    """Return the interval of their difference when all of it lies within EQUAL_WITHIN, else None.

    Two one-sided tests (Schuirmann 1987), at half the level on each side.
    """
    interval = gain_of(units, first, second, alpha=2 * alpha_of_look(look)).ci95
    if interval is None or not -EQUAL_WITHIN < interval[0] <= interval[1] < EQUAL_WITHIN:
        return None
    return interval


def is_known_better(units: Sequence[ScoredUnit], name: str, *, look: int = 1) -> tuple[bool, str]:
    """Return whether a specialist is better than the shared adapter with its whole interval, and that in words.

    A new shared adapter asks this of the specialists that were forked from an older one.
    """
    estimate = gain_of(units, "shared", name, alpha=alpha_of_look(look))
    if estimate.ci95 is None:
        return False, f"no interval can be made from {estimate.units} test sessions"
    low, high = estimate.ci95
    return low > 0, f"{estimate.value:+.3f} nats a token [{low:+.3f}, {high:+.3f}]"


def life_steps(
    units_of: Mapping[str, Sequence[ScoredUnit]], answers: Mapping[str, AnswerCounts], *, look: int = 1
) -> list[LifeStep]:
    """Decide which specialists are retired or merged.

    `units_of`: specialist -> test rows of its domain, with the nats of "shared" and of every specialist of the family.

    Retired: the shared adapter is known to be less than EQUAL_WITHIN worse on the specialist's domain, or nobody asks.
    Merged: two of those that stay are equal on the rows of both. A specialist with a step is in no second one.
    """
    steps, ended = [], set()
    for name, units in units_of.items():
        counted = answers.get(name, AnswerCounts())
        interval = gain_of(units, "shared", name, alpha=2 * alpha_of_look(look)).ci95
        if interval is not None and interval[1] < EQUAL_WITHIN:
            low, high = interval
            reason = f"the shared adapter has caught up: {name} is [{low:+.3f}, {high:+.3f}] nats a token better"
        elif counted.family >= MIN_ANSWERS and counted.own < MIN_SHARE * counted.family:
            reason = f"nobody asks: {counted.own} of {counted.family} answers since it is served"
        else:
            continue
        steps.append(LifeStep("retire", (name,), reason))
        ended.add(name)
    names = list(units_of)
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            if {first, second} & ended:
                continue
            ci = is_equal([*units_of[first], *units_of[second]], first, second, look=look)
            if ci is not None:
                reason = f"{first} and {second} differ by [{ci[0]:+.3f}, {ci[1]:+.3f}] nats a token on the rows of both"
                steps.append(LifeStep("merge", (first, second), reason))
                ended |= {first, second}
    return steps


@dataclass(frozen=True)
class RoutedDomain:
    """A domain under the router: nats a token that routed is better than shared. `worse`: not known to be within
    bounds.
    """

    domain: str
    rows: int
    gain: float
    interval: Interval | None
    better: bool
    worse: bool


def routed_domains(units_of: Mapping[str, Sequence[ScoredUnit]]) -> list[RoutedDomain]:
    """Judge each domain under the router.

    `units_of`: domain -> its test rows with the nats of "shared" and of "routed", whichever adapter that was.

    No domain may be worse by more than MIN_GAIN. Each is held to its own bound, since harm to one is no chance result
    of many looks. Better is corrected for their number.
    """
    judged = []
    for domain, units in units_of.items():
        same = all(unit.nats["shared"] == unit.nats["routed"] for unit in units)  # nothing of it was routed
        gain = Estimate(0.0, (0.0, 0.0), len(units), 0.0) if same else gain_of(units, "shared", "routed")
        corrected = gain_of(units, "shared", "routed", alpha=ALPHA / len(units_of))
        judged.append(
            RoutedDomain(
                domain=domain,
                rows=len(units),
                gain=gain.value,
                interval=gain.ci95,
                better=corrected.ci95 is not None and corrected.ci95[0] > 0,
                worse=gain.ci95 is None or gain.ci95[0] < -MIN_GAIN,
            )
        )
    return judged
