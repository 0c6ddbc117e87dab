"""Who gets which pack: each pack once whatever happens to the workers, and a round takes no longer than it must."""

import heapq
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.train.worker.exchange.handout import Handout, Paces


@dataclass(frozen=True)
class Sim:
    """`speeds`: tokens a second of each worker, 0 for one that never answers. `dies`: worker -> second of its death."""

    speeds: tuple[float, ...]
    dies: dict[int, float]


def play(handout: Handout, costs: list[int], sim: Sim, says=lambda worker, pack, time: "right") -> float:
    """One round in simulated time; the seconds until it is done. Fails when nothing can happen any more."""
    alive = set(range(len(sim.speeds)))
    busy: set[int] = set()
    ends: list[tuple[float, int, int]] = []
    now, first = 0.0, []
    deaths = sorted((time, worker) for worker, time in sim.dies.items())
    while not handout.done(alive, now):
        assert now < 1e6, "the round does not end"
        for worker in sorted(alive - busy):
            pack = handout.take(worker, alive, now)
            if pack is not None:
                busy.add(worker)
                if sim.speeds[worker]:
                    heapq.heappush(ends, (now + costs[pack] / sim.speeds[worker], worker, pack))
        times = [ends[0][0]] if ends else []
        times += [deaths[0][0]] if deaths else []
        late_s = handout.next_late_s(now)
        times += [] if late_s is None else [now + late_s]
        assert times, "everybody waits, and nothing can happen"
        now = min(times)
        while deaths and deaths[0][0] <= now:
            _, worker = heapq.heappop(deaths)
            alive.discard(worker)
            handout.lose(worker)
            ends = [end for end in ends if end[1] != worker]
            heapq.heapify(ends)
        while ends and ends[0][0] <= now:
            _, worker, pack = heapq.heappop(ends)
            busy.discard(worker)
            if handout.give(worker, pack, says(worker, pack, now), now):
                first.append(pack)
    assert sorted(first) == list(range(len(costs)))
    return now


def learned(speeds: tuple[float, ...]) -> Paces:
    return Paces({worker: 1 / speed for worker, speed in enumerate(speeds) if speed})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_pack_counts_once_whatever_happens(data) -> None:
    workers = data.draw(st.integers(1, 6))
    speeds = (100.0, *data.draw(st.lists(st.sampled_from([0.0, 1.0, 30.0, 100.0]), min_size=workers, max_size=workers)))
    times = st.floats(0, 20)
    dies = data.draw(st.dictionaries(st.integers(1, workers), times, max_size=workers))
    costs = data.draw(st.lists(st.integers(0, 400), max_size=12))
    checked = data.draw(st.sets(st.integers(0, 11)))
    handout = Handout(costs, checked, Paces() if data.draw(st.booleans()) else learned(speeds))
    play(handout, costs, Sim(speeds, dies))
    assert all(not check.wrong and not check.undecided for check in handout.comparisons())


@pytest.mark.parametrize("silent", [False, True])
def test_workers_as_fast_as_each_other_do_not_wait_for_each_other(silent: bool) -> None:
    """Two packs for five: each alone would be later than all together, if packs could be divided. Nobody took one."""
    speeds = (100.0, 100.0, 100.0, 1.0, 100.0, 100.0)
    sim = Sim((*speeds, 0.0), {}) if silent else Sim(speeds, {})
    paces = learned((*speeds, 400.0) if silent else speeds)  # the fastest of all stopped answering
    assert play(Handout([32, 224], {0}, paces), [32, 224], sim) < 60


def test_a_death_costs_the_pack_it_had_and_no_other() -> None:
    costs, speeds = [100] * 8, (100.0, 100.0)
    handout = Handout(costs, (), learned(speeds))
    seconds = play(handout, costs, Sim(speeds, {1: 1.5}))
    assert handout.again == 1 and seconds == pytest.approx(1 + 6, abs=0.01)


def test_a_stopped_worker_is_waited_for_five_times_as_long_as_it_usually_takes() -> None:
    costs = [100] * 8
    handout = Handout(costs, (), learned((100.0, 100.0)))
    seconds = play(handout, costs, Sim((100.0, 0.0), {}))
    assert handout.again == 1 and 7 <= seconds <= 8.5


@pytest.mark.parametrize("packs", [4, 8, 16])
def test_a_worker_at_a_third_of_the_speed_costs_at_most_15_percent(packs: int) -> None:
    """Of what can be had with whole packs; a few ones do not divide by the speeds."""
    costs, speeds = [100] * packs, (100.0, 100.0 / 3)
    seconds = play(Handout(costs, (), learned(speeds)), costs, Sim(speeds, {}))
    ideal = min(max(packs - slow, 3 * slow) for slow in range(packs + 1))
    assert seconds <= 1.15 * ideal


def test_random_costs_are_shared_out_nearly_as_well_as_they_can_be() -> None:
    numbers = random.Random(1)
    for _ in range(50):
        costs = [numbers.randint(60, 140) for _ in range(24)]
        speeds = (100.0, numbers.uniform(30, 100), numbers.uniform(30, 100))
        seconds = play(Handout(costs, (), learned(speeds)), costs, Sim(speeds, {}))
        assert seconds <= 1.15 * sum(costs) / sum(speeds)


def test_a_liar_is_outvoted_by_two_and_named() -> None:
    costs, speeds = [100] * 6, (100.0, 100.0, 100.0)
    handout = Handout(costs, {0, 1, 2, 3, 4, 5}, learned(speeds))
    play(handout, costs, Sim(speeds, {}), lambda worker, pack, _: "wrong" if worker == 2 else "right")
    checks = handout.comparisons()
    assert {worker for check in checks for worker in check.wrong} == {2}
    assert not any(check.undecided for check in checks)


def test_of_two_the_one_that_does_not_repeat_itself_is_wrong() -> None:
    numbers = random.Random(2)
    handout = Handout([100], {0}, learned((100.0, 100.0)))
    says = lambda worker, pack, time: str(numbers.random()) if worker == 1 else "right"  # noqa: E731
    play(handout, [100], Sim((100.0, 100.0), {}), says)
    assert [check.wrong for check in handout.comparisons()] == [(1,)]


def test_two_that_both_repeat_themselves_are_undecided() -> None:
    handout = Handout([100], {0}, learned((100.0, 100.0)))
    play(handout, [100], Sim((100.0, 100.0), {}), lambda worker, pack, _: str(worker))
    assert [check.undecided for check in handout.comparisons()] == [True]
