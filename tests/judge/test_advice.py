"""Advice comes from what was measured, and from nothing else."""

from typing import Any

import pytest

from hivetune.judge.verdict import Curve, advise


def curve(*validations: tuple[int, float]) -> Curve:
    return Curve(validations, 40.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (curve((30, 2.5), (60, 2.4), (90, 2.37), (120, 2.36)), ()),
        (curve(), ()),
        (
            curve((30, 2.5), (60, 2.4), (90, 2.45), (120, 2.6)),
            ("over-trained", "lowest at step 60 of 120 (2.400)", "epochs: 1.5 is enough"),
        ),
        (curve((40, 2.9), (80, 2.6), (120, 2.3)), ("under-trained", "now 3 epochs")),
    ],
)
def test_a_run_that_was_too_long_or_too_short(found: Curve, words: tuple[str, ...]) -> None:
    said = [advice.said for advice in advise(found, {"rows": []})]
    assert len(said) == bool(words) and all(word in said[0] for word in words)


def row(number: int, change: float, agent: str = "a") -> dict[str, Any]:
    return {"source": f"f:{number}", "agent": agent, "tokens": 10, "base": 20.0, "tuned": 20.0 + 10 * change}


def test_rows_that_got_worse_are_shown_with_the_agent_they_are_of() -> None:
    good = curve()
    rows = [row(number, -0.5) for number in range(30)] + [row(50 + number, 0.1 * number, "b") for number in range(1, 8)]
    (one,) = advise(good, {"rows": rows})
    assert one.said.startswith("7 of 37 held-out rows got worse, 7 of them of agent 'b'")
    assert one.rows[0] == "f:57: +0.700 nats a token" and len(one.rows) == 5
    assert advise(good, {"rows": rows[:31]}) == ()
    assert advise(good, {"rows": [{**row(0, 1.0), "tuned": "not finite"}]}) == ()
