"""What may never end as `deploy`: a significant loss, too few or skewed rows."""

import random
from typing import Any

import pytest

from hivetune.config import GateConfig
from hivetune.judge.verdict import judge
from hivetune.records import Verdict


def rows_of(gains: list[float], groups: list[str] | None = None, seed: int = 1) -> list[dict[str, Any]]:
    """Rows on which the tuned model is better by `gains` nats per token."""
    rng = random.Random(seed)
    rows = []
    for number, gain in enumerate(gains):
        tokens = rng.randint(10, 40)
        base = tokens * (2 + rng.gauss(0, 0.3))
        row = {"tokens": tokens, "base": base, "tuned": base - tokens * gain}
        group = f"{number}" if groups is None else groups[number]
        rows.append({"id": f"{number}", "source": f"f:{number}", "group": group, **row})
    return rows


def document(rows: list[dict[str, Any]], answers: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {"rows": rows, "answers": answers or [], "base": {}, "tuned": {}, "not_compared": {}, **more}


def answers_of(base: list[bool], tuned: list[bool]) -> list[dict[str, Any]]:
    """Checked answers."""
    return [
        {
            "source": f"f:{n}",
            "group": f"g{n}",
            "base": {"success": b, "ended": True, "seconds": 1.0},
            "tuned": {"success": t, "ended": True, "seconds": 1.0},
        }
        for n, (b, t) in enumerate(zip(base, tuned, strict=True))
    ]


def gate(evaluation: dict[str, Any], **settings: Any) -> Verdict:
    return judge(evaluation, GateConfig(**settings), beside_base=False)


def better_loss(n: int = 100) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return rows_of([rng.gauss(0.8, 0.3) for _ in range(n)])


BASE = [n < 16 for n in range(45)]
LOSSES = {
    "success": document(better_loss(), answers_of(BASE, [n == 0 for n in range(45)])),  # 35.6 -> 2.2 %
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_significantly_worse_never_deploys(name: str) -> None:
    verdict = gate(LOSSES[name])
    assert verdict.verdict == "iterate"
    metric = next(one for one in verdict.metrics if one.name == name)
    assert metric.passed is False and not metric.required and metric.interval is not None
    assert any("significantly worse" in reason for reason in verdict.reasons[: verdict.decisive])


def test_a_setting_says_which_loss_is_acceptable() -> None:
    assert gate(LOSSES["success"], tolerance=0.6).verdict == "deploy"
    assert gate(LOSSES["success"], success_gain=-0.6).verdict == "deploy"


def test_five_of_five_successes_do_not_deploy_and_six_do() -> None:
    """The sign test's exact p is 0.06 for five rows and 0.03 for six."""
    for n, verdict in ((5, "not-enough-evidence"), (6, "deploy")):
        evaluation = document([], answers_of([False] * n, [True] * n))
        assert gate(evaluation, loss_gain=None, success_gain=0.0).verdict == verdict
        worse = document([], answers_of([True] * n, [False] * n))
        assert (gate(worse, loss_gain=None, success_gain=0.0).verdict == "abort") == (n == 6)


def test_a_gain_that_is_no_gain() -> None:
    """2e-10 nats on each of 60 rows, and nothing at all on few rows, which say nothing either way."""
    assert gate(document(rows_of([2e-10] * 80))).verdict == "iterate"
    assert gate(document(rows_of([0.0] * 8))).verdict == "not-enough-evidence"
    assert gate(document(rows_of([0.0] * 80))).verdict == "iterate"


def test_needed_rows_are_those_that_decide() -> None:
    """A gain that 60 rows can't tell from one row in twenty that is lost is told from 72 rows on."""
    gains = [0.25, 0.35] * 36
    verdict = gate(document(rows_of(gains[:60])))
    assert verdict.verdict == "not-enough-evidence"
    assert "60 rows measured, about 72 rows needed" in verdict.reasons[0]
    assert gate(document(rows_of(gains))).verdict == "deploy"
