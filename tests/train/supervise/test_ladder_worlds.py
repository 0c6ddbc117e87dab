"""The ladder against many worlds: what can be survived is survived, and whatever happens it comes to an end."""

import collections
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import STEPS, World, after_isolation, draw, kinds, play

from hivetune.machine.facts import catalogue
from hivetune.train.supervise.ladder import Bounds, Failure, Reply, next_action

CARD, HOST = Bounds(on_device=True), Bounds()
RESTARTS_OF_ONE, RESTARTS_OF_TWO = 5, 10
WORLDS = 2_000


@pytest.mark.parametrize("name", kinds(random.Random(0)))
def test_one_fault_takes_at_most_five_restarts(name: str) -> None:
    for seed in range(50):
        status, history = play(World([kinds(random.Random(seed))[name]], CARD, random.Random(seed)))
        assert (status, len(history) <= RESTARTS_OF_ONE) == ("done", True)


def test_what_can_be_survived_is_survived() -> None:
    """Up to three faults at random places, some of them at the same one."""
    ended: collections.Counter[str] = collections.Counter()
    for seed in range(WORLDS):
        names, faults = draw(seed)
        status, history = play(World(faults, CARD, random.Random(seed)))
        ended[status] += 1
        assert len(history) <= RESTARTS_OF_ONE * len(names) and (len(names) > 2 or len(history) <= RESTARTS_OF_TWO)
    assert ended["done"] >= WORLDS - 1  # three faults at one step can take more than the six failures


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(kinds(random.Random(0)), 2)))
def test_two_faults_at_one_step(first: str, second: str) -> None:
    for step in (1, STEPS // 2):
        faults = [dict(kinds(random.Random(step))[name]) for name in (first, second)]
        for fault in faults:
            if fault.get("step", -1) >= 0:
                fault["step"] = step
            if "row" in fault:
                fault["row"] = step * 4 + 1
        status, history = play(World(faults, CARD, random.Random(step)))
        assert (status, len(history) <= RESTARTS_OF_TWO) == ("done", True)


# What happens at an attempt: its fault, where, whether something was safe since, and what an isolation would say.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([fault.id for fault in catalogue() if fault.retry and not fault.waits_for]),
        st.integers(-1, 2),
        st.sampled_from(["nothing"] * 6 + ["state", "row"]),
        st.booleans(),
    ),
    min_size=40,
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(events=EVENTS, bounds=st.sampled_from([HOST, CARD, replace(CARD, attempts=1), replace(HOST, attempts=5)]))
def test_whatever_happens_attempts_without_progress_are_bounded(
    events: list[tuple[str, int, str, bool]], bounds: Bounds
) -> None:
    history: list[Failure] = []
    action = Reply("again", "")
    durable = quarantined = idle = 0
    for fault, step, progress, is_row in events:
        durable, quarantined = durable + (progress == "state"), quarantined + (progress == "row")
        failure = Failure(fault, step, durable, quarantined, action.rungs, action.tried)
        idle = 0 if not history or failure.progressed(history[-1]) else idle + 1
        history.append(failure)
        assert idle <= bounds.attempts
        now = replace(bounds, on_device=bounds.on_device and "cpu" not in action.rungs)
        action = next_action(history, now)
        if action.kind == "isolate":
            action = after_isolation(history, is_row, now)
            quarantined += is_row
        if idle + 1 >= bounds.attempts and history[-1].quarantined == quarantined:
            assert action.kind == "stop"
        assert action.kind in ("again", "change", "stop")
        if action.kind == "stop":
            return
