"""Every path to every verdict, as a table of situations. No verdict beyond its evidence."""

import random
from dataclasses import asdict
from typing import Any

import pytest

from hivetune.judge.findings import Thresholds
from hivetune.judge.gate import judge

LOSS_ONLY = {"success_gain": None, "latency_ratio": None, "memory_ratio": None}


def evaluation(
    n: int = 90,
    shift: float = -0.3,
    noise: float = 0.2,
    answers: int = 64,
    rates: tuple[float, float] = (0.3, 0.8),
    seconds: tuple[float, float] = (1.0, 1.0),
    memory: tuple[float | None, float | None] = (1e9, 1.1e9),
) -> dict[str, Any]:
    rng = random.Random(n * 1000 + int(shift * 100) + answers)
    rows = []
    for row in range(n):
        tokens = rng.randint(10, 40)
        base = tokens * (2 + rng.gauss(0, 0.3))
        rows.append(
            {
                "source": f"f:{row}",
                "group": f"g{row}",
                "tokens": tokens,
                "base": base,
                "tuned": base + tokens * (shift + rng.gauss(0, noise)),
            }
        )
    replies = []
    for row in range(answers):
        sides = {
            side: {"success": rng.random() < rate, "ended": True, "seconds": time * rng.uniform(0.9, 1.1)}
            for side, rate, time in zip(("base", "tuned"), rates, seconds, strict=True)
        }
        replies.append({"source": f"f:{row}", "group": f"g{row}", **sides})
    sides = {
        side: {"tokens_per_second": 50.0, "peak_memory_bytes": size}
        for side, size in zip(("base", "tuned"), memory, strict=True)
    }
    return {"rows": rows, "answers": replies, **sides}


SITUATIONS = {
    "better": (evaluation(), {}, "deploy", "loss: gain"),
    "better, success required and shown": (evaluation(), {"success_gain": 0.1}, "deploy", "success: gain"),
    "worse": (evaluation(shift=0.3), LOSS_ONLY, "abort", "worse by more than the tolerance"),
    "slightly and surely worse": (evaluation(n=200, shift=0.01, noise=0.01), LOSS_ONLY, "abort", "no useful gain"),
    "identical adapter": (evaluation(shift=0.0, noise=0.0), LOSS_ONLY, "abort", "no useful gain"),
    "too few rows to tell": (evaluation(n=12, shift=-0.05, noise=0.4), LOSS_ONLY, "not-enough-evidence", "needed"),
    "too few rows for an interval": (evaluation(n=3), LOSS_ONLY, "not-enough-evidence", "too few"),
    "no held-out rows": (evaluation(n=0), LOSS_ONLY, "not-enough-evidence", "no held-out rows"),
    "enough rows, and still about nothing": (
        evaluation(n=1500, shift=0.0, noise=0.1),
        LOSS_ONLY,
        "iterate",
        "straddles",
    ),
    "better, less than asked": (evaluation(), {**LOSS_ONLY, "loss_gain": 0.6}, "iterate", "less than the required"),
    "nothing, far from what is asked": (
        evaluation(shift=0.0, noise=0.1),
        {**LOSS_ONLY, "loss_gain": 0.6},
        "abort",
        "no useful gain",
    ),
    "better loss, worse answers": (evaluation(rates=(0.8, 0.3)), {"success_gain": 0.0}, "abort", "success: gain"),
    "better loss, success unknown": (
        evaluation(answers=10, rates=(0.5, 0.55)),
        {"success_gain": 0.05},
        "not-enough-evidence",
        "success: gain",
    ),
    "success required, no checker": (
        evaluation(answers=0),
        {**LOSS_ONLY, "success_gain": 0.05},
        "not-enough-evidence",
        "no held-out row has a checker",
    ),
    "much slower": (evaluation(seconds=(1.0, 4.0)), {}, "abort", "beyond 1.5"),
    "slower by a hair": (evaluation(seconds=(1.0, 1.52)), {"tolerance": 0.05}, "iterate", "not shown to stay"),
    "latency not measured": (evaluation(answers=0), {}, "not-enough-evidence", "seconds per answer"),
    "too much memory": (evaluation(memory=(1e9, 2e9)), {}, "iterate", "peak memory: 2 times"),
    "memory not measured": (evaluation(memory=(1e9, None)), {}, "not-enough-evidence", "peak memory: not measured"),
    "nothing required": (evaluation(), {**LOSS_ONLY, "loss_gain": None}, "iterate", "requires no metric"),
    "worse but not required": (
        evaluation(shift=0.3),
        {**LOSS_ONLY, "loss_gain": None, "success_gain": 0.1},
        "deploy",
        "success",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_verdicts(name: str) -> None:
    document, settings, expected, reason = SITUATIONS[name]
    verdict = judge(document, Thresholds.model_validate(settings))
    assert verdict.verdict == expected, verdict.reasons
    assert any(reason in line for line in verdict.reasons), verdict.reasons


@pytest.mark.parametrize(("value", "expected"), [("not finite", "abort"), (None, "not-enough-evidence")])
def test_one_row_that_is_missing_or_not_finite_fails_the_loss(value: object, expected: str) -> None:
    document = evaluation()
    document["rows"][7]["tuned"] = value
    verdict = judge(document, Thresholds())
    loss = next(metric for metric in verdict.metrics if metric.name == "loss")
    assert verdict.verdict == expected
    assert (loss.base, loss.tuned, loss.difference, loss.passed) == (None, None, None, False)
    assert "f:7" in verdict.reasons[0]


def loaded(order: str, load: float = 4.0) -> dict[str, Any]:
    """Equal models on a machine that becomes `load` times slower half-way through; `order` of the two models' turns."""
    document = evaluation(seconds=(1.0, 1.0))
    turns = [(b, side) for b in range(13) for side in (("base", "tuned") if b % 2 == 0 else ("tuned", "base"))]
    if order == "one after the other":
        turns = [(b, side) for side in ("base", "tuned") for b in range(13)]
    for place, (block, side) in enumerate(turns):
        for answer in document["answers"][block * 5 : block * 5 + 5]:
            answer[side]["block"] = block
            answer[side]["seconds"] *= load if place >= 13 else 1
    document |= {"noise": load, "repeat_noise": 1.1}
    return document


def test_a_load_that_comes_half_way_does_not_change_the_verdict_but_is_named() -> None:
    """The situation is a real one: evaluated one after the other, the same adapter was aborted as four times slower."""
    assert judge(loaded("one after the other"), Thresholds()).verdict == "abort"
    verdict = judge(loaded("in turns"), Thresholds())
    assert verdict.verdict == "deploy", verdict.reasons
    latency = next(reason for reason in verdict.reasons if reason.startswith("seconds per answer: "))
    assert latency.endswith("the machine was busy: equal work took up to 4 x")


def test_moments_are_the_units_of_latency_so_that_noise_widens_the_interval() -> None:
    """Each moment in which the machine was busy slows five answers of one model."""
    rng = random.Random(7)
    document = loaded("in turns", 1.0)
    for block in range(13):
        for side in ("base", "tuned"):
            busy = rng.choice((1.0, 1.0, 3.0))
            for answer in document["answers"][block * 5 : block * 5 + 5]:
                answer[side]["seconds"] *= busy

    def width(of: dict[str, Any]) -> float:
        latency = next(metric for metric in judge(of, Thresholds()).metrics if metric.name == "latency_s")
        assert latency.ci95 is not None and latency.n == 64
        return latency.ci95[1] - latency.ci95[0]

    noisy = width(document)
    for answer in document["answers"]:
        for side in ("base", "tuned"):
            del answer[side]["block"]
    assert noisy > 1.5 * width(document)


def test_too_few_moments_are_told_in_answers() -> None:
    document = loaded("in turns", 1.0)
    for block, answer in enumerate(document["answers"]):
        for side in ("base", "tuned"):
            answer[side]["block"] = block % 3
    verdict = judge(document, Thresholds())
    assert verdict.verdict == "not-enough-evidence"
    assert verdict.reasons[0].startswith("seconds per answer: 64 answers are too few for an interval")


def test_a_deploy_without_a_checked_answer_says_so() -> None:
    document = evaluation()
    assert not any("checked" in reason for reason in judge(document, Thresholds()).reasons)
    for answer in document["answers"]:
        answer["base"]["success"] = answer["tuned"]["success"] = None
    verdict = judge(document, Thresholds())
    assert verdict.verdict == "deploy"
    assert verdict.reasons[-1] == "no answer was checked: neither the held-out rows nor eval.checker name a checker"


def test_abort_comes_before_everything() -> None:
    document = evaluation(n=3, rates=(0.9, 0.1))
    assert judge(document, Thresholds(success_gain=0.0)).verdict == "abort"


def test_the_table_is_complete_and_adds_up() -> None:
    verdict = judge(evaluation(), Thresholds(success_gain=0.1))
    names = [metric.name for metric in verdict.metrics]
    assert names == ["loss", "perplexity", "success", "ended", "latency_s", "tokens_per_second", "peak_memory_bytes"]
    for metric in verdict.metrics:
        assert metric.base is not None and metric.tuned is not None
        assert metric.difference == pytest.approx(metric.tuned - metric.base)
        if metric.ci95 is not None and metric.name != "success":  # the adjusted interval is centred beside the rate
            assert metric.ci95[0] <= metric.difference <= metric.ci95[1]
        assert metric.required == (metric.passed is not None)


def test_the_same_evaluation_gives_the_same_verdict() -> None:
    document = evaluation()
    assert asdict(judge(document, Thresholds())) == asdict(judge(document, Thresholds()))


def test_rows_of_one_session_are_one_piece_of_evidence() -> None:
    """A gain on 60 rows of two sessions is a gain on two conversations."""
    document = evaluation()
    for number, row in enumerate(document["rows"]):
        row["group"] = f"session-{number % 2}"
    assert judge(document, Thresholds.model_validate(LOSS_ONLY)).verdict == "not-enough-evidence"


def test_too_few_sessions_are_not_called_rows() -> None:
    document = evaluation()
    for number, row in enumerate(document["rows"]):
        row["group"] = f"session:{number % 4}"
    reason = judge(document, Thresholds()).reasons[0]
    assert reason.startswith("loss: 4 sessions are too few for an interval"), reason


def test_a_loss_beyond_floats_is_reported_as_unmeasured_perplexity() -> None:
    document = evaluation()
    for row in document["rows"]:
        row["tuned"] = row["tokens"] * 1000.0
    verdict = judge(document, Thresholds())
    assert verdict.verdict == "abort"
    assert next(metric for metric in verdict.metrics if metric.name == "perplexity").tuned is None


def test_equal_models_gain_nothing_and_not_less_than_nothing() -> None:
    verdict = judge(evaluation(shift=0.0, noise=0.0), Thresholds.model_validate(LOSS_ONLY))
    assert verdict.verdict == "abort" and verdict.reasons[0].startswith("loss: gain 0, 95 % interval 0 to 0:")
