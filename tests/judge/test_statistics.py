"""Intervals that mean what they say: coverage on known truths, the same numbers on every machine."""

import math
import random
import time

import pytest

from hivetune.judge.statistics import (
    by_group,
    discordant,
    mcnemar_p,
    paired_bootstrap,
    paired_proportions,
    rows_needed,
    t_quantile_975,
)


def ratio(sums: list[float]) -> float:
    return (sums[1] - sums[0]) / sums[2]


def paired_rows(seed: int, n: int, shift: float) -> list[list[float]]:
    """nll of base and tuned, and tokens: lengths differ, and the shift per token is the truth."""
    rng = random.Random(seed)
    tokens = [float(rng.randint(5, 60)) for _ in range(n)]
    base = [t * (2.0 + rng.gauss(0, 0.3)) for t in tokens]
    tuned = [b + t * (shift + rng.gauss(0, 0.2)) for b, t in zip(base, tokens, strict=True)]
    return [base, tuned, tokens]


def test_the_value_is_weighted_by_tokens() -> None:
    estimate = paired_bootstrap([[10.0] * 5 + [0.0], [0.0] * 5 + [0.0], [1.0] * 5 + [95.0]], ratio)
    assert estimate.value == pytest.approx(-0.5)


def test_the_same_rows_give_the_same_interval() -> None:
    rows = paired_rows(1, 40, -0.1)
    first, second = paired_bootstrap(rows, ratio), paired_bootstrap(rows, ratio)
    assert first == second
    # The draws rest on random.Random.random() alone, which Python keeps between versions: these digits are the record.
    assert first.ci95 == pytest.approx((-0.175767, -0.034598), abs=1e-6)


@pytest.mark.parametrize("n", [8, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int) -> None:
    inside = 0
    for seed in range(300):
        low, high = paired_bootstrap(paired_rows(seed, n, -0.1), ratio, resamples=400, seed=seed).ci95 or (1, 0)
        inside += low <= -0.1 <= high
    # 95 % of 300 is 285; three standard errors are 11, and the percentile interval may miss 1 % more at n = 8.
    assert inside >= 271


def test_proportions_hold_the_truth_as_often_as_they_say() -> None:
    inside = 0
    for seed in range(400):
        rng = random.Random(seed)
        base = [rng.random() < 0.4 for _ in range(30)]
        tuned = [rng.random() < 0.4 if rng.random() < 0.5 else b for b in base]
        low, high = paired_proportions(base, tuned).ci95 or (1, 0)
        inside += low <= 0 <= high
    assert inside >= 367  # 95 % of 400 less three standard errors


def test_models_that_always_agree_are_not_known_to_be_equal() -> None:
    low, high = paired_proportions([True] * 30, [True] * 30).ci95 or (0, 0)
    assert -0.15 < low < 0 < high < 0.15


def test_a_few_rows_give_no_interval() -> None:
    assert paired_bootstrap(paired_rows(1, 4, 0.0), ratio).ci95 is None
    assert paired_proportions([True] * 4, [False] * 4).ci95 is None
    assert paired_proportions([], []).ci95 is None


def test_groups_are_resampled_whole() -> None:
    """Each of six rows repeated twenty times in a group says no more than the six."""
    once = paired_rows(3, 6, -0.1)
    many = [[value for value in column for _ in range(20)] for column in once]
    groups = [i // 20 for i in range(120)]
    grouped = paired_bootstrap(by_group(many, groups), ratio)
    single = paired_bootstrap(many, ratio)
    assert grouped.ci95 == pytest.approx(paired_bootstrap(once, ratio).ci95)
    assert grouped.ci95 and single.ci95
    assert grouped.ci95[1] - grouped.ci95[0] > 3 * (single.ci95[1] - single.ci95[0])


def test_four_hundred_rows_take_well_under_two_seconds() -> None:
    start = time.process_time()
    paired_bootstrap(paired_rows(5, 400, -0.1), ratio)
    assert time.process_time() - start < 2.0  # measured 0.15 s; a factor for slow machines


def test_rows_needed_is_the_number_that_decides() -> None:
    few = paired_bootstrap(paired_rows(2, 40, -0.1), ratio)
    needed = rows_needed(few, 0.02)
    assert needed is not None
    low, high = paired_bootstrap(paired_rows(4, needed, -0.02), ratio).ci95 or (0, 0)
    # 80 % power means that the effect lies 2.8 standard errors from zero: the interval is 1.4 effects wide on either
    # side of it or less; the spread is itself estimated from 40 rows.
    assert (high - low) / 2 < 0.02
    assert rows_needed(few, 0.0) is None


def test_mcnemar_is_the_exact_binomial() -> None:
    assert discordant([True, False, False], [True, True, False]) == (1, 0)
    assert mcnemar_p(0, 0) == 1
    assert mcnemar_p(0, 5) == pytest.approx(2 * 0.5**5)
    assert mcnemar_p(5, 5) == 1


@pytest.mark.parametrize(("degrees", "table"), [(4, 2.7764), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_student_quantiles(degrees: int, table: float) -> None:
    assert math.isclose(t_quantile_975(degrees), table, rel_tol=5e-3)
