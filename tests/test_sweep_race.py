"""Who leaves a race: the worse half where the rows show it, nobody where they do not."""

import random

from hivetune.sweep import RowLosses, losers

ROWS = range(60)
TOKENS = dict.fromkeys(ROWS, 10)
ALONE = {row: str(row) for row in ROWS}


def losses(worse: float, noise: float, seed: int) -> RowLosses:
    """The same hard and easy rows for everybody; `worse` nats a token above them."""
    numbers, hard = random.Random(seed), random.Random(0)
    return {row: 10 * (hard.uniform(0.5, 3) + worse + numbers.gauss(0, noise)) for row in ROWS}


def test_the_worse_half_stops_where_the_rows_show_it() -> None:
    race = {number: losses(worse, 0.02, number) for number, worse in enumerate([0.0, 0.3, 0.01, 0.5])}
    stopped = losers(race, TOKENS, ALONE, looks=2)
    assert {one.variant for one in stopped} == {1, 3} and {one.leader for one in stopped} == {0}
    assert "above the leader" in stopped[0].why


def test_nobody_stops_who_can_not_be_told_from_the_leader() -> None:
    wrong = 0
    for seed in range(200):
        race = {number: losses(0.0, 0.2, 10 * seed + number) for number in range(4)}
        wrong += bool(losers(race, TOKENS, ALONE, looks=2))
    # The leader is chosen by the same rows, so that a comparison errs more often than its level says.
    assert wrong <= 0.1 * 200


def test_rows_of_one_session_count_once() -> None:
    race = {0: losses(0.0, 0.05, 1), 1: losses(0.05, 0.05, 2)}
    assert losers(race, TOKENS, ALONE, looks=2)
    assert not losers(race, TOKENS, {row: "one" for row in ROWS}, looks=2)


def test_rows_that_only_some_have_a_number_for_do_not_count() -> None:
    short = {row: value for row, value in losses(0.5, 0.02, 1).items() if row % 2}
    assert [one.variant for one in losers({0: losses(0.0, 0.02, 2), 1: short}, TOKENS, ALONE, looks=2)] == [1]
    assert losers({0: losses(0.0, 0.02, 2), 1: {}}, TOKENS, ALONE, looks=2) == []
    assert losers({}, TOKENS, ALONE, looks=2) == []
