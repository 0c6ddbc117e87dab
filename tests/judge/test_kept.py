"""Forgetting: which answers are frozen, and what a candidate that loses some of them is told."""

from typing import Any

from hivetune.judge.findings import Thresholds, frozen_findings, kept_questions
from hivetune.judge.frozen import MAX_WINS, WINS_PER_RELEASE, choose_wins


def row(number: int, base: bool | None, tuned: bool | None, origin: str = "win", **changes: Any) -> dict[str, Any]:
    fields = {"id": f"id{number}", "source": f"r:{number}", "agent": "a", "category": None, "checker": {"name": "x"}}
    return {**fields, "origin": origin, "base": {"success": base}, "tuned": {"success": tuned}, **changes}


def test_a_past_win_must_be_kept_whatever_the_baseline_says() -> None:
    found = kept_questions({"frozen": [row(1, False, False), row(2, True, True), row(3, False, True)]}, ("win",))
    assert (found.n, found.kept, found.lost) == (3, 2, ("r:1",))


def test_of_other_questions_only_what_the_baseline_knew() -> None:
    rows = [row(1, False, False, "general"), row(2, True, False, "general"), row(3, True, True, "general")]
    found = kept_questions({"frozen": rows}, ("general",))
    assert (found.n, found.kept, found.lost) == (2, 1, ("r:2",))


def test_too_many_lost_is_missed_and_names_them() -> None:
    rows = [row(number, True, number >= 3) for number in range(20)]
    (found,) = frozen_findings({"frozen": rows}, Thresholds())
    assert found.outcome == "missed" and found.metric.tuned == 0.85 and found.metric.threshold == 0.9
    assert "17 of 20" in found.reason and "r:0, r:1, r:2" in found.reason
    (kept,) = frozen_findings({"frozen": rows}, Thresholds(least_kept=0.85))
    assert kept.outcome == "passed"


def test_general_questions_are_reported_unless_asked_for() -> None:
    rows = [row(number, True, number >= 10, "general") for number in range(20)]
    (found,) = frozen_findings({"frozen": rows}, Thresholds())
    assert (found.outcome, found.metric.name, found.metric.required) == ("reported", "kept_general", False)
    (required,) = frozen_findings({"frozen": rows}, Thresholds(least_general=0.8))
    assert required.outcome == "missed"


def test_few_questions_and_questions_without_an_answer_decide_nothing() -> None:
    (few,) = frozen_findings({"frozen": [row(1, True, False)]}, Thresholds())
    assert few.outcome == "reported" and "too few" in few.reason
    rows = [row(number, True, None if number == 0 else True) for number in range(20)]
    (open_one,) = frozen_findings({"frozen": rows}, Thresholds())
    assert open_one.outcome == "undecided" and "1 could not be checked" in open_one.reason
    assert frozen_findings({"frozen": []}, Thresholds()) == [] and frozen_findings({}, Thresholds()) == []


def test_wins_are_what_training_won_of_every_agent() -> None:
    answers = [row(number, number % 2 == 0, number % 5 != 0, agent="ab"[number % 3 == 0]) for number in range(100)]
    answers += [row(200, False, True, checker=None), row(201, False, False)]
    chosen = choose_wins(answers, 0)
    assert len(chosen) == WINS_PER_RELEASE and all(one["tuned"]["success"] for one in chosen)
    assert not any(one["base"]["success"] for one in chosen) and {one["agent"] for one in chosen} == {"a", "b"}
    assert choose_wins(list(reversed(answers)), 0) == chosen
    assert len(choose_wins(answers, MAX_WINS - 3)) == 3 and choose_wins(answers, MAX_WINS) == []
