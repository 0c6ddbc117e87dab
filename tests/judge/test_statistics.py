"""Intervals that mean what they say: the same numbers on every machine, whole groups, and the rows that decide."""

import math
import random

import pytest

from hivetune.judge.statistics import (
    alpha_of_look,
    by_group,
    discordant,
    jackknife,
    loss_difference,
    paired_proportions,
    rows_needed,
    sign_test_p,
    t_quantile,
)


def paired_rows(seed: int, n: int, shift: float) -> list[list[float]]:
    """nll of base and tuned, and tokens: lengths differ, and the shift per token is the truth."""
    rng = random.Random(seed)
    tokens = [float(rng.randint(5, 60)) for _ in range(n)]
    base = [t * (2.0 + rng.gauss(0, 0.3)) for t in tokens]
    tuned = [b + t * (shift + rng.gauss(0, 0.2)) for b, t in zip(base, tokens, strict=True)]
    return [base, tuned, tokens]


def test_rows_are_weighted_by_tokens_and_give_the_same_interval_everywhere() -> None:
    estimate = jackknife([[10.0] * 5 + [0.0], [0.0] * 5 + [0.0], [1.0] * 5 + [95.0]], loss_difference)
    assert estimate.value == pytest.approx(-0.5)
    found = jackknife(paired_rows(1, 40, -0.1), loss_difference)
    assert found.interval == pytest.approx((-0.176677, -0.035416), abs=1e-6)


def test_models_that_always_agree_are_not_known_to_be_equal() -> None:
    low, high = paired_proportions([True] * 30, [True] * 30, range(30)).interval or (0, 0)
    assert -0.15 < low < 0 < high < 0.15


def test_a_few_rows_give_no_interval() -> None:
    assert jackknife(paired_rows(1, 4, 0.0), loss_difference).interval is None
    assert jackknife(paired_rows(1, 5, 0.0), loss_difference).interval is not None
    assert paired_proportions([True] * 4, [False] * 4, range(4)).interval is None
    assert paired_proportions([], [], []).interval is None


def test_groups_are_left_out_whole() -> None:
    """Each of six rows repeated twenty times in a group says no more than the six."""
    once = paired_rows(3, 6, -0.1)
    many = [[value for value in column for _ in range(20)] for column in once]
    grouped = jackknife(by_group(many, [i // 20 for i in range(120)]), loss_difference)
    single = jackknife(many, loss_difference)
    assert grouped.interval == pytest.approx(jackknife(once, loss_difference).interval)
    assert grouped.interval and single.interval
    assert grouped.interval[1] - grouped.interval[0] > 3 * (single.interval[1] - single.interval[0])


def test_rows_needed_is_the_number_that_decides() -> None:
    few = jackknife(paired_rows(2, 40, -0.1), loss_difference)
    low, high = jackknife(paired_rows(4, rows_needed(few, 0.02), -0.02), loss_difference).interval or (0, 0)
    # 80 % power means that the effect lies 2.8 standard errors from zero: the interval is 1.4 effects wide on either
    # side of it or less; the spread is itself estimated from 40 rows.
    assert (high - low) / 2 < 0.02
    assert rows_needed(few, 0.0) == few.least_units


def test_the_sign_test_is_the_exact_binomial() -> None:
    assert discordant([True, False, False], [True, True, False]) == (1, 0)
    assert (sign_test_p(0, 0), sign_test_p(5, 5), sign_test_p(0, 5)) == (1, 1, pytest.approx(2 * 0.5**5))


@pytest.mark.parametrize(("degrees", "table"), [(2, 4.3027), (4, 2.7764), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_student_quantiles(degrees: int, table: float) -> None:
    assert math.isclose(t_quantile(0.975, degrees), table, rel_tol=5e-3 if degrees > 2 else 8e-3)


def test_all_looks_together_spend_alpha() -> None:
    assert 0.0499 < math.fsum(alpha_of_look(look) for look in range(1, 100_000)) < 0.05
