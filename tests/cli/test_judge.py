"""What `hivetune gate` says to do next."""

import pytest

from hivetune.cli.judge import what_next
from hivetune.judge.findings import said_of_passed
from hivetune.records import Metric, Verdict


def success(n: int, *, required: bool) -> Metric:
    return Metric("success", None, None, None, None, n, 0.0, None, required)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (success(0, required=True), "eval.checker"),  # more rows would be as unchecked as these
        (success(9, required=True), "hold out more rows"),
        (success(0, required=False), "hold out more rows"),
    ],
)
def test_where_no_answer_is_checked_the_next_step_is_a_checker(metric: Metric, words: str) -> None:
    assert words in what_next(Verdict("not-enough-evidence", (), (metric,)))


def test_a_metric_that_more_rows_would_decide_is_open_and_not_failed() -> None:
    asked = [
        {"passed": passed, "needed": needed}
        for passed, needed in ((True, None), (False, None), (False, 22), (None, None))
    ]
    assert [said_of_passed(metric) for metric in asked] == ["yes", "no", "open", "reported"]


def test_a_verdict_that_does_not_rest_on_checkers_keeps_its_next_step() -> None:
    assert "answers in eval.json" in what_next(Verdict("abort", (), (success(0, required=True),)))
