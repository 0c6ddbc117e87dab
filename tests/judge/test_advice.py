"""Advice comes from what was measured, and from nothing else."""

from typing import Any

import pytest

from hivetune.judge.advice import Curve, advise
from hivetune.records import Metric

NO_ROWS: dict[str, Any] = {"rows": []}


def curve(train: list[float], validation: list[tuple[int, float]], norm: float = 0.5, **changes: Any) -> Curve:
    steps = [(step, loss, norm) for step, loss in enumerate(train, 1)]
    fields = {"rollbacks": 0, "per_epoch": 40.0, "learning_rate": 2e-4, "clip": 1.0, "trained_rows": 320}
    return Curve(steps, validation, **{**fields, **changes})


def falling(first: float, last: float, steps: int = 120) -> list[float]:
    return [last + (first - last) * 0.96**step for step in range(steps)]


GOOD = curve(falling(3.0, 2.2), [(30, 2.5), (60, 2.4), (90, 2.37), (120, 2.36)])


def said(found: Curve, **more: Any) -> list[str]:
    evaluation = {"rows": more.get("rows", [])}
    return [advice.said for advice in advise(found, evaluation, more.get("contradictory", ()), more.get("metrics", ()))]


def test_a_run_that_went_well_gets_no_advice() -> None:
    assert said(GOOD) == []
    assert said(curve([], [])) == []


def test_over_trained_names_the_epochs_that_are_enough() -> None:
    found = said(curve(falling(3.0, 1.9), [(30, 2.5), (60, 2.4), (90, 2.45), (120, 2.6)]))
    assert len(found) == 1 and "lowest at step 60 of 120 (2.400)" in found[0] and "epochs: 1.5 is enough" in found[0]


def test_under_trained_when_validation_still_falls() -> None:
    found = said(curve(falling(3.0, 1.0), [(40, 2.9), (80, 2.6), (120, 2.3)]))
    assert len(found) == 1 and found[0].startswith("under-trained") and "now 3 epochs" in found[0]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (curve([3.0] * 40, [(10, 2.5), (20, 2.9)], norm=5.0), "within the first epoch"),
        (curve([2.0] * 30 + [2.5] * 30, []), "training loss rose from 2.000"),
        (curve(falling(3.0, 2.2), [], rollbacks=2), "went back 2 times"),
    ],
)
def test_a_rate_that_is_too_high(found: Curve, why: str) -> None:
    (one,) = said(found)
    assert one.startswith("learning_rate 0.0002 is too high") and why in one


def test_clipped_gradients_are_said_beside_a_rate_that_is_too_high() -> None:
    (one,) = said(curve([3.0] * 40, [(10, 2.5), (20, 2.9)], norm=5.0))
    assert "100% of the gradients were clipped" in one
    assert said(curve(falling(3.0, 2.2), [(120, 2.3)], norm=5.0)) == []


def test_too_few_rows_when_the_trained_ones_are_known_by_heart() -> None:
    found = said(curve(falling(3.0, 0.5), [(40, 2.5), (80, 2.4), (120, 2.39)]))
    assert len(found) == 1 and found[0].startswith("too few rows") and "320 trained rows" in found[0]


def row(number: int, change: float, agent: str = "a") -> dict[str, Any]:
    return {"source": f"f:{number}", "agent": agent, "tokens": 10, "base": 20.0, "tuned": 20.0 + 10 * change}


def test_rows_that_got_worse_are_shown_with_the_agent_they_are_of() -> None:
    rows = [row(number, -0.5) for number in range(30)] + [row(50 + number, 0.1 * number, "b") for number in range(1, 8)]
    (one,) = advise(GOOD, {"rows": rows}, (), ())
    assert one.said.startswith("7 of 37 held-out rows got worse, 7 of them of agent 'b'")
    assert one.rows[0] == "f:57: +0.700 nats a token" and len(one.rows) == 5
    assert advise(GOOD, {"rows": rows[:31]}, (), ()) == ()
    assert advise(GOOD, {"rows": [{**row(0, 1.0), "tuned": "not finite"}]}, (), ()) == ()


def test_contradictory_rows_are_named() -> None:
    (one,) = advise(GOOD, NO_ROWS, ("f:3", "f:9"), ())
    assert one.said.startswith("contradictory: 2 trained rows") and one.rows == ("f:3", "f:9")


def test_the_n_that_decides_and_how_to_get_it() -> None:
    open_one = Metric("success", 0.1, 0.2, 0.1, (-0.1, 0.3), 40, 0.0, False, True, 180)
    passed = Metric("loss", 2.0, 1.0, -1.0, (-1.2, -0.8), 92, 0.0, True, True)
    assert said(GOOD, metrics=(open_one, passed)) == [
        "success: about 180 rows decide it, 40 are there: answer more held-out rows (eval.prompts, data.test)"
    ]
