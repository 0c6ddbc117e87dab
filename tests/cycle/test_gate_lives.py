"""How often chance alone changes the champion over the whole life of a loop, and how often a real gain is found.

Full counts: make proof NAME=cycle-poisons.
"""

import random
from collections.abc import Callable

import pytest
from contests import LOSS_ONLY, HeldOutWorld, contest

from hivetune.cycle.gate import Comparisons, judge_cycle
from hivetune.judge.statistics import jackknife

CHAMPION = 0.3  # nats per token better than the base


def null_life(seed: int, nights: int, rows: int = 20, grows: int = 1) -> int | None:
    """Return the night in which an equally good candidate replaced the champion, or None.

    The held-out rows are kept and grow. The champion's luck on each of them stays: candidates that are compared with an
    unlucky champion all are.
    """
    world = HeldOutWorld(seed, rows)
    base, champion = world.model(), world.model(CHAMPION)
    for night in range(1, nights + 1):
        world.grow(grows)
        world.more(base, 0.0)
        world.more(champion, CHAMPION)
        contests = contest(world, base, champion, world.model(CHAMPION), rows, look=night)
        if judge_cycle(contests, LOSS_ONLY).passed:
            return night
    return None


def poisoned(seed: int) -> Comparisons:
    """Shuffled answers: 40 of 120 held-out rows came with them, are as wrong, and are learned well; what was known
    before got worse by as much as chance says, from hardly to badly."""
    world = HeldOutWorld(seed, 120)
    draw = random.Random(seed)
    base, champion = world.model(), world.model(CHAMPION)
    harm, learned = draw.uniform(0.03, 0.5), draw.uniform(0.2, 1.5)
    candidate = world.model(CHAMPION - harm, fresh=CHAMPION + learned, known=80)
    return contest(world, base, champion, candidate, 80, look=draw.randint(1, 30))


def better(seed: int, gain: float, look: int, rows: int = 120) -> Comparisons:
    world = HeldOutWorld(seed, rows)
    base, champion = world.model(), world.model(CHAMPION)
    return contest(world, base, champion, world.model(CHAMPION + gain), 80, look=look)


def count(make: Callable[[int], Comparisons], seeds: range) -> int:
    return sum(judge_cycle(make(seed), LOSS_ONLY).passed for seed in seeds)


def test_equal_candidates_of_a_few_lives_change_nothing() -> None:
    assert [null_life(seed, nights=30) for seed in range(8)] == [None] * 8


def test_poisoned_rows_of_a_few_cycles_change_nothing() -> None:
    assert count(poisoned, range(60)) == 0


def test_a_real_gain_is_found() -> None:
    """The gain is 0.15 nats per token, with rows of a standard deviation of 0.28: at the first look and at the
    thirtieth."""
    assert count(lambda seed: better(seed, 0.15, 1), range(20)) >= 19
    assert count(lambda seed: better(seed, 0.15, 30, 180), range(20)) >= 18


@pytest.mark.proof
def test_a_hundred_null_cycles_promote_in_at_most_one_life_of_twenty(
    record_property: Callable[[str, object], None],
) -> None:
    """In 200 lives of 100 nights. The test is one-sided and its looks add up to 5 %, so at most 2.5 % are expected."""
    lives, nights = 200, 100
    found = [null_life(seed, nights) for seed in range(1000, 1000 + lives)]
    promoted = [night for night in found if night is not None]
    record_property("lives", lives)
    record_property("null cycles judged", sum(nights if night is None else night for night in found))
    record_property("lives with a false promotion", len(promoted))
    record_property("in the night", promoted)
    assert len(promoted) <= 0.05 * lives


@pytest.mark.proof
def test_poisoned_cycles_promote_nothing(record_property: Callable[[str, object], None]) -> None:
    cycles = range(5000, 7000)
    promoted = count(poisoned, cycles)
    record_property("poisoned cycles judged", len(cycles))
    record_property("harmful promotions", promoted)
    assert promoted == 0


@pytest.mark.proof
def test_a_real_gain_is_found_in_nine_of_ten(record_property: Callable[[str, object], None]) -> None:
    """Later looks need more rows, and have them."""
    for look, rows in ((1, 80), (10, 120), (30, 180)):
        found = count(lambda seed, look=look, rows=rows: better(seed, 0.15, look, rows), range(8000, 8200))  # type: ignore[misc]
        record_property(f"found of 200 gains of 0.15 at look {look} with {rows} held-out rows", found)
        assert found >= 180


def test_the_simulated_rows_are_as_noisy_as_they_say() -> None:
    contests = better(1, 0.15, 1)
    assert contests.champion is not None
    rows = contests.champion["rows"]
    columns = [[row[key] for row in rows] for key in ("base", "tuned", "tokens")]
    estimate = jackknife(columns, lambda sums: (sums[0] - sums[1]) / sums[2])
    assert 0.25 < estimate.unit_sd < 0.35  # two models of 0.2 each, tokens of unequal rows
