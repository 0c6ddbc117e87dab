"""Every abstract state has an action, every action makes progress or waits until a time, and none is taken twice."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cycle.world import NOW, after, check

from hivetune.config import CycleConfig
from hivetune.cycle.decide import HEAVY, STATIONS, FailedAct, Observation, OpenCycle, Permission, decide

LONGEST_CHAIN = 30  # restore, roll back, close, wait, open, nine stations, close, and waits between them
AUTO = CycleConfig(name="demo", after_rows=10, hours=8.0)
ASK = AUTO.model_copy(update={"promote": "ask"})
BOTH = (False, True)
ALLOWED = (
    Permission(),
    Permission(False, None, NOW + 3600, "shut"),
    Permission(False, None, NOW - 3600, "the clock was set"),
)
SERVED = (("demo@2", "demo@2"), ("demo@2", "demo@1"), ("demo@2", None))


def failures(*kinds: str) -> tuple[FailedAct | None, ...]:
    made: list[FailedAct | None] = [None]
    for kind, times, at, how in itertools.product(kinds, (1, 3), (NOW - 1, NOW - 1e6), ("", "final", "patient")):
        made.append(FailedAct(kind, times, at, "why", how == "final", how == "patient"))  # type: ignore[arg-type]
    return tuple(made)


SUBSETS = tuple(
    frozenset(station for station, there in zip(STATIONS, mask, strict=True) if there)
    for mask in itertools.product(BOTH, repeat=len(STATIONS))
)
# With an open cycle: every set of artefacts, as a disk may lose any of them.
OPEN = (
    SUBSETS,
    ((None, False), (False, False), (False, True), (True, False)),  # passed, and whether a replay is due
    ("", "forgotten"),
    ("", "slow"),  # withdrawn
    (NOW - 60, NOW - 1e6),  # promoted at
    (*failures("train"), *failures("replay")[4::4]),
    ALLOWED[:2],
    (AUTO, ASK),
    (0.0, 9.0),  # hours spent
)
# Without one, or with what comes before it.
OTHER = (
    BOTH,  # paused
    SERVED,
    ("", "slow"),  # watch failed
    (None, OpenCycle("a"), OpenCycle("a", done=frozenset(STATIONS[:-1]), passed=True, promoted_at=NOW - 60)),
    (0, 3),  # forgotten rows
    BOTH,  # known
    BOTH,  # asked
    (0, 1, 10),  # new groups
    ("", "no rows"),
    failures("open", "restore")[::6],
    ((0, 0.0), (1, NOW - 1), (2, NOW + 1e6)),  # failed cycles
    ALLOWED,
    (None, 9.0),  # predicted hours
    (0, 2),  # disk needed, where 1 is free
)


def open_state(
    done: Any, gate: Any, void: Any, withdrawn: Any, promoted_at: Any, failed: Any, allowed: Any, *more: Any
) -> tuple[Observation, CycleConfig]:
    (passed, due), (settings, spent) = gate, more
    cycle = OpenCycle("a", "rows", done, passed, void, withdrawn, spent, 0.0, promoted_at, due)
    return Observation(open=cycle, failed=failed, allowed=allowed, desired="demo@1", served="demo@1"), settings


def other_state(*values: Any) -> tuple[Observation, CycleConfig]:
    paused, served, watch, cycle, forgotten, known, asked, groups, bad, failed, cool, allowed, hours, disk = values
    before = (paused, *served, "why", watch, cycle, forgotten, known, asked, groups, bad, failed, *cool, allowed)
    return Observation(*before, hours, None, 1, disk), AUTO


def states(every: int) -> Iterator[tuple[Observation, CycleConfig]]:
    """Yield each `every`-th state. `every` has no divisor in common with the numbers of values."""
    for parts, make in ((OPEN, open_state), (OTHER, other_state)):
        for number in range(0, math.prod(map(len, parts)), every):
            values = []
            for part in reversed(parts):
                number, index = divmod(number, len(part))
                values.append(part[index])
            yield make(*reversed(values))


def check_states(every: int, chains: int) -> Counter[str]:
    """Decide each `every`-th state and then the state that the action leaves. From each `chains`-th of these follow the
    loop until it waits."""
    seen: Counter[str] = Counter()
    for number, (observed, settings) in enumerate(states(every)):
        action = decide(observed, settings, NOW)
        check(action, observed, settings, NOW)
        assert not (action.kind in HEAVY and not observed.allowed.now)
        if action.kind != "wait":
            again = decide(after(action, observed, settings, NOW), settings, NOW)
            assert again.kind != action.kind, (observed, action, again)
        seen[action.kind] += 1
        if number % chains == 0:
            follow(observed, settings)
    return seen


def follow(observed: Observation, settings: CycleConfig) -> None:
    """Follow the loop to a wait, without deciding anything twice within one cycle."""
    taken: list[str] = []
    while (action := decide(observed, settings, NOW)).kind != "wait":
        taken.append(action.kind)
        assert len(taken) < LONGEST_CHAIN, taken
        observed = after(action, observed, settings, NOW)
    rounds = 1 + taken.count("close")
    assert max(Counter(taken).values(), default=0) <= rounds, taken


def test_one_state_of_twenty_three() -> None:
    seen = check_states(every=23, chains=10)
    assert seen.keys() >= {"wait", "restore", "roll_back", "rebuild", "open", "close", "replay", *STATIONS}
    assert seen.total() > 50_000


@pytest.mark.proof
def test_every_state(record_property: Callable[[str, object], None]) -> None:
    seen = check_states(every=1, chains=100)
    assert seen.total() >= 1_000_000
    record_property("states", seen.total())
    for kind, count in sorted(seen.items()):
        record_property(kind, count)
