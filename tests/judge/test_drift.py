"""Drift: longer, looping and refusing answers, with intervals and thresholds."""

from typing import Any

import pytest

from hivetune.config import GateConfig
from hivetune.judge.findings import drift_findings, is_refusal

LOOP = "and so on, " * 40


def evaluation(base: list[str | None], tuned: list[str | None]) -> dict[str, Any]:
    answers = [
        {"group": f"g{number}", "base": {"answer": b}, "tuned": {"answer": t}}
        for number, (b, t) in enumerate(zip(base, tuned, strict=True))
    ]
    return {"answers": answers}


def outcomes(base: list[str | None], tuned: list[str | None], **limits: float) -> dict[str, str]:
    found = drift_findings(evaluation(base, tuned), GateConfig(**limits))
    return {finding.metric.name: finding.outcome for finding in found}


@pytest.mark.parametrize(
    "text",
    ["I'm sorry, but I can't help with that.", "As an AI language model, I ...", "Es tut mir leid, das geht nicht.",
     "Je suis désolé, mais non.", "Lo siento, no puedo.", "很抱歉，我不能回答。"],
)  # fmt: skip
def test_refusals_in_several_languages(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text", ["", "You can't divide by zero: ZeroDivisionError.", "Yes, of course." * 99 + "I'm sorry"]
)
def test_what_is_no_refusal(text: str) -> None:
    assert not is_refusal(text)


def test_without_limits_it_is_reported() -> None:
    found = drift_findings(evaluation(["abcd"] * 20, ["abcdefgh"] * 10 + [LOOP] * 10), GateConfig())
    assert [finding.outcome for finding in found] == ["reported"] * 3
    length, loops, refusals = (finding.metric for finding in found)
    assert (length.base, loops.tuned, refusals.tuned) == (4.0, 0.5, 0.0)
    assert loops.ci95 is not None and 0.2 < loops.ci95[0] < 0.5 < loops.ci95[1]


def test_what_did_not_change_passes() -> None:
    same: list[str | None] = [f"answer number {number}" for number in range(60)]
    limits = {"length_drift": 1.5, "more_loops": 0.05, "more_refusals": 0.05}
    assert set(outcomes(same, same, **limits).values()) == {"passed"}


def test_what_changed_is_missed() -> None:
    base: list[str | None] = [f"answer number {number}" for number in range(60)]
    tuned: list[str | None] = [LOOP] * 20 + ["I'm sorry, but I can't."] * 20 + ["no"] * 20
    found = drift_findings(evaluation(base, tuned), GateConfig(length_drift=1.5, more_loops=0.05, more_refusals=0.05))
    assert [finding.outcome for finding in found] == ["missed"] * 3
    assert "times the baseline" in found[0].reason and "answers that loop: 20 of 60" in found[1].reason


def test_answers_may_not_get_much_shorter_either() -> None:
    base: list[str | None] = ["a long answer " * (1 + number % 3) for number in range(40)]
    assert outcomes(base, ["short"] * 40, length_drift=2)["length"] == "missed"


def test_few_answers_leave_it_open_with_the_number_that_decides() -> None:
    base: list[str | None] = ["one", "three", "twelve", "a thousand", "two", "none"]
    tuned: list[str | None] = ["eleven of them", "a", "seven", "I", "fourteen or so", "x"]
    found = drift_findings(evaluation(base, tuned), GateConfig(more_refusals=0.05))
    assert found[2].outcome == "undecided" and "; 6 rows, about" in found[2].reason


def test_answers_that_one_side_did_not_give_are_left_out() -> None:
    assert drift_findings(evaluation([None, "a"], ["b", None]), GateConfig()) == []
    assert outcomes(["a"] * 3, [""] * 3, length_drift=2)["length"] == "missed"
