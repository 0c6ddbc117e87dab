"""The gate of a cycle: what replaces the champion, what does not, and how often chance does."""

from dataclasses import replace

import pytest
from contests import LOSS_ONLY, HeldOutWorld, contest

from hivetune.config import GateConfig
from hivetune.cycle.gate import Comparisons, judge_cycle

KNOWN = 70


def situation(better: float, fresh: float | None = None, *, seed: int = 1, rows: int = 110, champion: float = 0.3):
    """Return an evaluation: the champion is `champion` better than the base, the candidate `better` on the rows that it
    knew, and `fresh` on the others."""
    world = HeldOutWorld(seed, rows)
    known = min(KNOWN, rows)
    base, champions = world.model(), world.model(champion)
    return contest(world, base, champions, world.model(better, fresh=fresh, known=known), known)


def test_a_better_candidate_takes_its_place() -> None:
    found = judge_cycle(situation(0.5), LOSS_ONLY)
    assert found.passed
    assert {rival: part.verdict for rival, part in found.parts.items()} == dict.fromkeys(("base", "champion"), "deploy")
    assert found.fresh_rows == 40
    assert any(reason.startswith("against the champion: loss: gain") for reason in found.reasons)


@pytest.mark.parametrize(
    ("better", "fresh", "verdict", "words"),
    [
        (0.3, None, {"not-enough-evidence", "iterate", "abort"}, "against the"),
        (0.1, None, {"abort"}, "against the champion: loss"),
        (0.0, 1.5, {"abort"}, "against the champion: earlier rows: gain -0."),  # learned what is new, right or wrong
        (1.2, 0.0, {"iterate"}, "against the champion: fresh rows: gain -0."),  # knows the old rows by heart
    ],
)
def test_what_does_not(better: float, fresh: float | None, verdict: set[str], words: str) -> None:
    found = judge_cycle(situation(better, fresh), LOSS_ONLY)
    assert found.verdict in verdict
    assert not found.passed
    assert any(words in reason for reason in found.reasons)


def test_worse_than_the_base_is_never_better() -> None:
    found = judge_cycle(situation(-0.2, champion=-0.6), LOSS_ONLY)
    assert found.verdict == "abort"
    assert found.parts["champion"].verdict == "deploy"
    assert all(reason.startswith("against the base: ") for reason in found.reasons)


def test_the_first_candidate_is_held_against_the_base_at_its_look() -> None:
    world = HeldOutWorld(5, 120)
    base, candidate = world.model(), world.model(0.09)
    document = world.evaluation(base, candidate)
    first, thirtieth = (judge_cycle(Comparisons(document, look=look), LOSS_ONLY) for look in (1, 30))
    assert first.passed and first.fresh_rows == 120
    assert thirtieth.verdict == "not-enough-evidence"


def test_few_rows_keep_the_champion() -> None:
    found = judge_cycle(situation(0.35, rows=16), LOSS_ONLY)
    assert found.verdict == "not-enough-evidence"


def test_a_loss_that_is_not_finite_ends_it() -> None:
    contests = situation(0.5)
    assert contests.champion is not None
    rows = [dict(row) for row in contests.champion["rows"]]
    rows[7]["tuned"] = "not finite"
    found = judge_cycle(replace(contests, champion={**contests.champion, "rows": rows}), LOSS_ONLY)
    assert found.verdict == "abort"
    assert any("not finite" in reason for reason in found.reasons)


def test_rows_that_are_not_finite_for_anybody_are_left_out_and_counted() -> None:
    """Otherwise they would stop every later candidate."""
    contests, broken = situation(0.5), {"base": "not finite", "tuned": "not finite"}
    assert contests.champion is not None
    spoiled = [
        {**document, "rows": [{**row, **(broken if n < 3 else {})} for n, row in enumerate(document["rows"])]}
        for document in (contests.base, contests.champion)
    ]
    found = judge_cycle(replace(contests, base=spoiled[0], champion=spoiled[1]), LOSS_ONLY)
    assert found.passed
    assert found.reasons[-1] == "3 held-out rows are not finite for a rival either, and say nothing"


def test_frozen_questions_that_were_lost_keep_the_champion() -> None:
    contests = situation(0.5)
    frozen = [
        {
            "origin": "win",
            "source": f"w:{n}",
            "prompt": f"{n}?",
            "base": {"success": True},
            "tuned": {"success": n % 2 == 0},
        }
        for n in range(20)
    ]
    assert contests.champion is not None
    found = judge_cycle(replace(contests, base={**contests.base, "frozen": frozen}), LOSS_ONLY)
    assert found.verdict == "iterate"
    assert any("frozen questions kept: 10 of 20" in reason for reason in found.reasons)


def test_success_is_not_to_be_won_again_from_every_champion() -> None:
    """`gate.success_gain: 0.1` is required against the base; ten cycles can't each gain a tenth."""
    config = GateConfig(success_gain=0.1)
    contests = situation(0.5)
    answers = [
        {"source": f"f:{n}", "group": f"g{n}", "base": side(n % 3 == 0), "tuned": side(n % 10 != 0)} for n in range(64)
    ]
    alike = [{**answer, "base": answer["tuned"]} for answer in answers]
    assert contests.champion is not None
    found = judge_cycle(
        replace(contests, base={**contests.base, "answers": answers}, champion={**contests.champion, "answers": alike}),
        config,
    )
    assert found.passed


def test_success_that_was_lost_against_the_champion_keeps_it() -> None:
    """The checked answers fall from 35.6 to 2.2 %, although the loss is better and no setting requires success."""
    contests = situation(0.5)
    answers = [{"source": f"f:{n}", "group": f"g{n}", "base": side(n < 16), "tuned": side(n == 0)} for n in range(45)]
    assert contests.champion is not None
    found = judge_cycle(replace(contests, champion={**contests.champion, "answers": answers}), LOSS_ONLY)
    assert found.verdict == "iterate" and not found.passed
    assert "success" in found.reasons[0] and "significantly worse" in found.reasons[0]


def side(success: bool) -> dict[str, object]:
    return {"success": success, "ended": True, "seconds": 1.0}


@pytest.mark.parametrize(
    ("right_before", "right_now", "verdict"),
    [(30, 70, "deploy"), (70, 70, "not-enough-evidence"), (70, 30, "abort"), (None, None, "not-enough-evidence")],
)
def test_after_an_upgrade_of_the_base_answers_decide(
    right_before: int | None, right_now: int | None, verdict: str
) -> None:
    """The losses of two base models are of other tokens. Without checked answers nobody replaces the champion."""
    contests = situation(0.5)
    assert contests.champion is not None
    answers = []
    if right_before is not None and right_now is not None:
        answers = [
            {
                "id": f"r{n}",
                "source": f"f:{n}",
                "group": f"g{n}",
                "base": side(n < right_before),
                "tuned": side(n < right_now),
            }
            for n in range(100)
        ]
    other = {"rows": [], "answers": answers, "base": {}, "tuned": {}, "not_compared": {"loss": "another base model"}}
    found = judge_cycle(replace(contests, champion=other), LOSS_ONLY)
    assert found.verdict == verdict
    assert found.passed == (verdict == "deploy")
