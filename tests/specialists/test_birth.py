"""The screen and the fork, as numbers: what is born, what is not, and how often by chance."""

import math
import random

import pytest

from hivetune.specialists.decide import GRADIENT_PARTS, SCREEN_ALPHA, ScoredUnit, decide_birth, gain_of, screen


def products(shift: float, seed: int, size: int = 200) -> list[list[float]]:
    """Of GRADIENT_PARTS random gradients around a common direction of this length."""
    said = random.Random(seed)
    parts = [
        [shift / math.sqrt(size) + said.gauss(0, 1 / math.sqrt(size)) for _ in range(size)]
        for _ in range(GRADIENT_PARTS)
    ]
    return [[math.fsum(a * b for a, b in zip(one, other, strict=True)) for other in parts] for one in parts]


def test_parts_that_pull_nowhere_pass_as_seldom_as_the_level_says() -> None:
    passed = sum(screen(products(0.0, seed)).passed for seed in range(400))
    # Binomial(400, 0.05) is above 32 in 0.6 % of cases; the seeds are fixed.
    assert passed <= 32
    assert SCREEN_ALPHA == 0.05


def test_parts_that_pull_one_way_pass() -> None:
    found = [screen(products(1.0, seed)) for seed in range(50)]
    assert all(one.passed for one in found)
    assert min(one.cosine for one in found) > 0.5


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_gradients_that_are_nothing_or_not_finite_do_not_pass(value: float) -> None:
    assert not screen([[value] * GRADIENT_PARTS] * GRADIENT_PARTS).passed


def units(
    gain: float, noise: float, count: int, *, over_shared: float | None = None, seed: int = 0
) -> list[ScoredUnit]:
    """Rows of 10 tokens on which the fork is `gain` nats a token better than the control."""
    said = random.Random(seed)
    found = []
    for number in range(count):
        tokens, control = 10, 20 + said.gauss(0, 3)
        fork = control - tokens * (gain + said.gauss(0, noise))
        shared = fork + tokens * (gain if over_shared is None else over_shared)
        found.append(ScoredUnit(f"s{number}", tokens, {"control": control, "fork": fork, "shared": shared}))
    return found


def test_a_clear_gain_is_born_and_says_by_how_much() -> None:
    birth = decide_birth(units(0.15, 0.1, 60), forks=3)
    assert birth.answer == "born"
    assert birth.gain.ci95 is not None and birth.gain.ci95[0] > 0.02
    assert "as many steps on all rows" in birth.reason


def test_what_more_steps_alone_would_give_is_no_expert() -> None:
    assert decide_birth(units(0.0, 0.05, 80), forks=1).answer == "not-born"


def test_a_control_that_was_spoilt_is_no_reason() -> None:
    birth = decide_birth(units(0.3, 0.05, 80, over_shared=0.0), forks=1)
    assert birth.answer == "not-born" and "the shared adapter" in birth.reason


def test_a_shared_adapter_that_still_gains_is_said() -> None:
    """One that was trained too little bears a harmless domain: whoever reads of the birth must know."""
    words = "the shared adapter itself still gains"
    assert words in decide_birth(units(0.15, 0.1, 60, over_shared=0.5), forks=1).reason
    assert words not in decide_birth(units(0.15, 0.1, 60), forks=1).reason


def test_too_few_sessions_are_said_with_the_number_that_is_needed() -> None:
    birth = decide_birth(units(0.05, 0.4, 20), forks=2)
    assert birth.answer == "not-enough-evidence"
    assert "sessions in validation would see" in birth.reason
    assert decide_birth(units(0.5, 0.1, 3), forks=1).answer == "not-enough-evidence"


def test_more_forks_ask_for_more() -> None:
    """The level is shared by all that are tried in one round."""
    wide, narrow = (decide_birth(units(0.1, 0.2, 60), forks=forks).gain.ci95 for forks in (20, 1))
    assert wide is not None and narrow is not None
    assert wide[0] < narrow[0] and wide[1] > narrow[1]


def test_rows_of_one_session_count_as_one() -> None:
    apart = units(0.1, 0.2, 60)
    together = [ScoredUnit(f"s{number // 12}", one.tokens, one.nats) for number, one in enumerate(apart)]
    assert gain_of(together, "control", "fork").units == 5


def test_a_loss_that_is_not_finite_gives_no_interval() -> None:
    rows = [*units(0.2, 0.1, 40), ScoredUnit("x", 10, {"control": math.nan, "fork": 1.0, "shared": 1.0})]
    assert decide_birth(rows, forks=1).answer == "not-enough-evidence"


def test_false_births_by_chance_alone() -> None:
    """Forks that are worth nothing: two tries in each of 200 rounds."""
    born = sum(
        any(decide_birth(units(0.0, 0.15, 50, seed=2 * round_ + fork), forks=2).answer == "born" for fork in (0, 1))
        for round_ in range(200)
    )
    assert born <= 10  # 5 % of the rounds, and the bound is above 0.02 besides
