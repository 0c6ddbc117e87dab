"""How long an expert lives: one matrix of scores {base, shared, experts} x test rows, and what follows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hivetune.judge.statistics import ALPHA, Estimate, Interval, alpha_of_look
from hivetune.routing.birth import LEAST_GAIN, ScoredUnit, gain_of

EQUAL_WITHIN = 0.02  # nats a token
# An expert that gets fewer of its family's answers than this is in nobody's way but in memory.
LEAST_SHARE, ASKED_ENOUGH = 0.005, 1000


@dataclass(frozen=True)
class LifeStep:
    """`retire`: the shared adapter answers again. `merge`: `experts` become one, trained anew on the union of their
    rows."""

    kind: Literal["retire", "merge"]
    experts: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class AnswerCounts:
    """Answers of a release, and of all of its family, since it is served."""

    own: int = 0
    family: int = 0


def is_equal(units: Sequence[ScoredUnit], one: str, other: str, *, look: int = 1) -> Interval | None:
    """The interval of their difference when all of it lies within EQUAL_WITHIN (two one-sided tests, Schuirmann 1987,
    at half the level on each side), else None."""
    interval = gain_of(units, one, other, alpha=2 * alpha_of_look(look)).ci95
    if interval is None or not -EQUAL_WITHIN < interval[0] <= interval[1] < EQUAL_WITHIN:
        return None
    return interval


def is_known_better(units: Sequence[ScoredUnit], name: str, *, look: int = 1) -> tuple[bool, str]:
    """Whether an expert is better than the shared adapter with its whole interval, and that in words: what a new shared
    adapter asks of the experts that were forked from an older one."""
    estimate = gain_of(units, "shared", name, alpha=alpha_of_look(look))
    if estimate.ci95 is None:
        return False, f"no interval can be made from {estimate.units} test sessions"
    low, high = estimate.ci95
    return low > 0, f"{estimate.value:+.3f} nats a token [{low:+.3f}, {high:+.3f}]"


def life_steps(
    units_of: Mapping[str, Sequence[ScoredUnit]], asked: Mapping[str, AnswerCounts], *, look: int = 1
) -> list[LifeStep]:
    """`units_of`: expert -> test rows of its domain, with the nats of "shared" and of every expert of the family.

    Retired: the shared adapter is known to be less than EQUAL_WITHIN worse on the expert's domain, or nobody asks.
    Merged: two of those that stay are equal on the rows of both. An expert with a step is in no second one.
    """
    steps, gone = [], set()
    for name, units in units_of.items():
        counted = asked.get(name, AnswerCounts())
        interval = gain_of(units, "shared", name, alpha=2 * alpha_of_look(look)).ci95
        if interval is not None and interval[1] < EQUAL_WITHIN:
            low, high = interval
            why = f"the shared adapter has caught up: {name} is [{low:+.3f}, {high:+.3f}] nats a token better"
        elif counted.family >= ASKED_ENOUGH and counted.own < LEAST_SHARE * counted.family:
            why = f"nobody asks: {counted.own} of {counted.family} answers since it is served"
        else:
            continue
        steps.append(LifeStep("retire", (name,), why))
        gone.add(name)
    names = list(units_of)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            if {one, other} & gone:
                continue
            both = is_equal([*units_of[one], *units_of[other]], one, other, look=look)
            if both is not None:
                why = f"{one} and {other} differ by [{both[0]:+.3f}, {both[1]:+.3f}] nats a token on the rows of both"
                steps.append(LifeStep("merge", (one, other), why))
                gone |= {one, other}
    return steps


@dataclass(frozen=True)
class RoutedDomain:
    """A domain under the router: routed minus shared, nats a token better; `worse`: not known to be within bounds."""

    domain: str
    rows: int
    gain: float
    interval: Interval | None
    better: bool
    worse: bool


def routed_domains(units_of: Mapping[str, Sequence[ScoredUnit]]) -> list[RoutedDomain]:
    """`units_of`: domain -> its test rows with the nats of "shared" and of "routed", whoever that was.

    No domain may be worse by more than LEAST_GAIN: each by its own bound, since harm to one is no chance result of many
    looks for it. Better is corrected for their number.
    """
    found = []
    for domain, units in units_of.items():
        same = all(unit.nats["shared"] == unit.nats["routed"] for unit in units)  # nothing of it was routed
        own = Estimate(0.0, (0.0, 0.0), len(units), 0.0) if same else gain_of(units, "shared", "routed")
        corrected = gain_of(units, "shared", "routed", alpha=ALPHA / len(units_of))
        found.append(
            RoutedDomain(
                domain=domain,
                rows=len(units),
                gain=own.value,
                interval=own.ci95,
                better=corrected.ci95 is not None and corrected.ci95[0] > 0,
                worse=own.ci95 is None or own.ci95[0] < -LEAST_GAIN,
            )
        )
    return found
