"""Every path to every verdict, as a table of situations. No verdict beyond its evidence."""

import random
from dataclasses import asdict
from typing import Any

import pytest

from hivetune.config import GateConfig
from hivetune.judge.verdict import judge, worse_rows
from hivetune.records import Verdict

LOSS_ONLY = {"success_gain": None}


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
        tuned = base + tokens * (shift + rng.gauss(0, noise))
        rows.append({"source": f"f:{row}", "group": f"g{row}", "tokens": tokens, "base": base, "tuned": tuned})
    replies = []
    for row in range(answers):
        sides = {
            side: {"success": rng.random() < rate, "ended": True, "seconds": time * rng.uniform(0.9, 1.1)}
            for side, rate, time in zip(("base", "tuned"), rates, seconds, strict=True)
        }
        replies.append({"source": f"f:{row}", "group": f"g{row}", **sides})
    sides = {side: {"peak_memory_bytes": size} for side, size in zip(("base", "tuned"), memory, strict=True)}
    return {"rows": rows, "answers": replies, **sides, "frozen": [], "not_compared": {}}


def alone(rate: float = 1.0, seconds: float = 10.0, memory: float | None = 8e9, n: int = 300) -> dict[str, Any]:
    """The answers of the tuned model, held against nothing."""
    rng = random.Random(5)
    empty = {"success": None, "ended": None, "seconds": None}
    answers = [
        {
            "source": f"f:{row}",
            "group": f"g{row}",
            "base": empty,
            "tuned": {"success": row < rate * n, "ended": True, "seconds": seconds * rng.uniform(0.9, 1.1)},
        }
        for row in range(n)
    ]
    missing = dict.fromkeys(("loss", "latency_s", "peak_memory_bytes"), "an endpoint has none")
    return {"rows": [], "answers": answers, "base": {}, "tuned": {"peak_memory_bytes": memory}, "not_compared": missing}


SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "better": (evaluation(), {}, "deploy", "loss (nats per token): "),
    "better, success required and shown": (evaluation(), {"success_gain": 0.1}, "deploy", "success: "),
    "worse": (evaluation(shift=0.3), LOSS_ONLY, "abort", "worse by more than the tolerance"),
    "slightly and surely worse": (evaluation(n=200, shift=0.01, noise=0.01), LOSS_ONLY, "iterate", "missed"),
    "identical adapter": (evaluation(shift=0.0, noise=0.0), LOSS_ONLY, "iterate", "enough to see the tolerance 0.02"),
    "too few rows to tell": (evaluation(n=12, shift=-0.05, noise=0.4), LOSS_ONLY, "not-enough-evidence", "needed"),
    "too few rows for an interval": (evaluation(n=3), LOSS_ONLY, "not-enough-evidence", "too few"),
    "no held-out rows": (evaluation(n=0), LOSS_ONLY, "not-enough-evidence", "no held-out rows"),
    "enough rows, and still about nothing": (
        evaluation(n=1500, shift=0.0, noise=0.1),
        LOSS_ONLY,
        "iterate",
        "not shown, although",
    ),
    "better, less than asked": (evaluation(), {"loss_gain": 0.6}, "iterate", "missed"),
    "better loss, worse answers": (evaluation(rates=(0.8, 0.3)), {"success_gain": 0.0}, "abort", "success: "),
    "better loss, success unknown": (
        evaluation(answers=10, rates=(0.5, 0.55)),
        {"success_gain": 0.05},
        "not-enough-evidence",
        "success: ",
    ),
    "success required, no checker": (
        evaluation(answers=0),
        {"success_gain": 0.05},
        "not-enough-evidence",
        "no held-out row has a checker",
    ),
    "much slower": (evaluation(seconds=(1.0, 4.0)), {}, "abort", "at most 50 % more than the base: worse"),
    "slower by a hair": (evaluation(seconds=(1.0, 1.55)), {"tolerance": 0.1}, "iterate", "than the base: missed"),
    "latency not measured": (evaluation(answers=0), {}, "not-enough-evidence", "seconds per answer"),
    "too much memory": (
        evaluation(memory=(1e9, 2e9)),
        {},
        "iterate",
        "gain -100.0 %; required: at most 50 % more",
    ),
    "memory not measured": (evaluation(memory=(1e9, None)), {}, "not-enough-evidence", "peak memory: it was not"),
    "nothing required": (evaluation(), {"loss_gain": None}, "iterate", "requires no metric"),
    "success shown": (alone(), {"min_success": 0.98}, "deploy", "required: at least 98 %: passed"),
    "success missed": (alone(rate=0.9), {"min_success": 0.98}, "iterate", "missed"),
    "success open": (
        alone(n=60),
        {"min_success": 0.98},
        "not-enough-evidence",
        "60 rows measured, about 573",
    ),
    "too few answers": (alone(n=3), {"min_success": 0.98}, "not-enough-evidence", "too few for an interval"),
    "fast enough": (alone(), {"max_seconds": 12}, "deploy", "at most 12 s"),
    "too slow": (alone(seconds=15), {"max_seconds": 12}, "iterate", "missed"),
    "small enough": (alone(), {"max_gb": 10}, "deploy", "at most 10 GB"),
    "just small enough": (alone(memory=10e9), {"max_gb": 10}, "deploy", "at most 10 GB"),
    "too large": (alone(memory=11e9), {"max_gb": 10}, "iterate", "missed"),
    "memory unknown": (alone(memory=None), {"max_gb": 10}, "not-enough-evidence", "not measured"),
    "a loss that nobody has is not required": (alone(), {}, "iterate", "gate.success_gain"),
}


def said(document: dict[str, Any], *, look: int | None = None, beside_base: bool = True, **settings: Any) -> Verdict:
    if "loss" in document.get("not_compared", {}) and len(settings) == 0:
        beside_base = False
    return judge(document, GateConfig.model_validate(settings), look=look, beside_base=beside_base)


@pytest.mark.parametrize("name", SITUATIONS)
def test_verdicts(name: str) -> None:
    document, settings, expected, reason = SITUATIONS[name]
    verdict = said(document, **settings)
    assert verdict.verdict == expected, verdict.reasons
    assert reason in " | ".join(verdict.reasons), verdict.reasons


@pytest.mark.parametrize(("value", "expected"), [("not finite", "abort"), (None, "not-enough-evidence")])
def test_one_row_that_is_missing_or_not_finite_fails_the_loss(value: object, expected: str) -> None:
    document = evaluation()
    document["rows"][7]["tuned"] = value
    verdict = said(document)
    loss = next(metric for metric in verdict.metrics if metric.name == "loss")
    assert verdict.verdict == expected
    assert (loss.base, loss.tuned, loss.gain, loss.passed) == (None, None, None, False)
    assert "f:7" in verdict.reasons[0]


def test_the_interval_of_a_reason_has_the_level_at_which_it_decides() -> None:
    """A "95 % interval" that was 99.99 %: the thirtieth look at one champion."""
    verdict = said(evaluation(), look=30)
    loss, plain = (next(m for m in of.metrics if m.name == "loss") for of in (verdict, said(evaluation())))
    assert loss.interval is not None and plain.interval is not None
    assert loss.level == pytest.approx(1 - 0.05 / 930)
    assert loss.interval[0] < plain.interval[0] and plain.level == 0.95
    assert "99.99 % interval" in verdict.reasons[0] and "95 % interval" not in verdict.reasons[0]


def test_later_looks_need_more_even_where_rows_hardly_differ() -> None:
    """With 80 tight rows the interval was the same at looks 1, 2, 30 and 300: the floor ignored the level."""
    document = evaluation(n=80, shift=-0.05, noise=0.001)
    widths = []
    for look in (1, 2, 30, 300):
        interval = next(m.interval for m in said(document, look=look).metrics if m.name == "loss")
        assert interval is not None
        widths.append(interval[1] - interval[0])
    assert widths == sorted(widths) and widths[2] > 1.5 * widths[0]


def test_sixty_gained_in_five_sessions_are_not_enough() -> None:
    """They were "iterate", since "5 sessions are enough to see 0.02"; the sign test over 5 groups can't tell."""
    document = evaluation(n=0, answers=60, rates=(0.0, 1.0))
    for number, answer in enumerate(document["answers"]):
        answer["group"] = f"session{number % 5}"
    verdict = said(document, loss_gain=None, success_gain=0.0, beside_base=False)
    assert verdict.verdict == "not-enough-evidence"
    assert "5 sessions measured, about 72 rows needed" in verdict.reasons[0]


def test_times_never_decide_against_a_model_by_their_noise() -> None:
    rng = random.Random(7)
    document = evaluation(answers=300)
    for answer in document["answers"]:
        answer["tuned"]["seconds"] = 1.5 * rng.choice((0.1, 0.5, 2.4))
    verdict = said(document, tolerance=0.5)
    assert verdict.verdict == "not-enough-evidence"
    assert "evaluate again on a quiet machine" in verdict.reasons[0]


def test_sessions_are_the_units_of_latency() -> None:
    document = evaluation()
    for number, answer in enumerate(document["answers"]):
        answer["group"] = f"session{number % 3}"
    verdict = said(document)
    assert verdict.verdict == "not-enough-evidence"
    assert "open, since 3 sessions are too few for an interval" in " ".join(verdict.reasons)


def test_a_deploy_without_a_checked_answer_says_so() -> None:
    document = evaluation()
    assert not any("checked" in reason for reason in said(document).reasons)
    for answer in document["answers"]:
        answer["base"]["success"] = answer["tuned"]["success"] = None
    verdict = said(document)
    assert verdict.verdict == "deploy"
    assert verdict.reasons[-1] == "no answer was checked: neither the held-out rows nor eval.checker name a checker"


WHY = "llama.cpp can't serve this model here: unknown architecture"
OF_ANSWERS = ("success", "min_success", "ended", "latency_s", "max_seconds", "peak_memory_bytes", "max_gb")


def test_a_model_that_cant_be_served_is_judged_by_loss_alone_and_says_so() -> None:
    document = {**evaluation(answers=0, memory=(None, None)), "not_compared": dict.fromkeys(OF_ANSWERS, WHY)}
    verdict = said(document)
    assert verdict.verdict == "deploy"
    assert any(reason.startswith("not compared: success") and WHY in reason for reason in verdict.reasons)
    asked = said(document, min_success=0.5)  # what the user asked for stays open
    assert asked.verdict == "not-enough-evidence" and WHY in asked.reasons[0]


def test_abort_comes_before_everything() -> None:
    assert said(evaluation(n=3, rates=(0.9, 0.1)), success_gain=0.0).verdict == "abort"


def test_the_table_is_complete_and_adds_up() -> None:
    verdict = said(evaluation(), success_gain=0.1)
    assert [metric.name for metric in verdict.metrics] == ["loss", "success", "ended", "latency_s", "peak_memory_bytes"]
    for metric in verdict.metrics:
        assert metric.base is not None and metric.tuned is not None and metric.gain is not None
        assert metric.required == (metric.passed is not None)
        worse = metric.name in ("loss", "latency_s", "peak_memory_bytes")
        assert (metric.gain > 0) == (metric.tuned < metric.base if worse else metric.tuned > metric.base)


def test_the_same_evaluation_gives_the_same_verdict() -> None:
    assert asdict(said(evaluation())) == asdict(said(evaluation()))


def test_rows_of_one_session_are_one_piece_of_evidence() -> None:
    """A gain on 60 rows of two sessions is a gain on two conversations."""
    document = evaluation()
    for number, row in enumerate(document["rows"]):
        row["group"] = f"session-{number % 2}"
    verdict = said(document)
    assert verdict.verdict == "not-enough-evidence"
    assert "open, since 2 sessions are too few for an interval" in verdict.reasons[0]


def frozen(number: int, base: bool | None, tuned: bool | None, origin: str = "win") -> dict[str, Any]:
    shown = {"id": f"id{number}", "source": f"r:{number}", "prompt": f"What is\n {number}?"}
    return {**shown, "origin": origin, "base": {"success": base}, "tuned": {"success": tuned}}


def with_frozen(rows: list[dict[str, Any]]) -> Verdict:
    return said({**evaluation(), "frozen": rows})


def test_frozen_questions_that_are_lost_are_named_by_their_words() -> None:
    verdict = with_frozen([frozen(number, number == 9, number >= 3) for number in range(20)])
    assert verdict.verdict == "iterate"
    assert "frozen questions kept: 85.0 %, 17 of 20 questions that were answered rightly" in verdict.reasons[0]
    assert 'lost: "What is 0?", "What is 1?", "What is 2?"' in verdict.reasons[0]
    assert with_frozen([frozen(number, True, number >= 2) for number in range(20)]).verdict == "deploy"  # 90 %


def test_of_the_users_own_questions_only_what_the_base_knows_must_be_kept() -> None:
    rows = [frozen(number, number >= 10, number >= 10, "own") for number in range(20)]
    assert with_frozen(rows).verdict == "deploy"


def test_few_frozen_questions_and_unchecked_ones_decide_nothing() -> None:
    assert with_frozen([frozen(1, True, False)]).verdict == "deploy"
    open_one = with_frozen([frozen(number, True, None if number == 0 else True) for number in range(20)])
    assert open_one.verdict == "not-enough-evidence" and "1 of 20 questions could not be" in open_one.reasons[0]


# What may never end as `deploy`: a significant loss, too few or skewed rows.


def rows_of(gains: list[float]) -> dict[str, Any]:
    """Rows on which the tuned model is better by `gains` nats per token, and nothing else."""
    rng = random.Random(1)
    rows = []
    for number, gain in enumerate(gains):
        tokens = rng.randint(10, 40)
        base = tokens * (2 + rng.gauss(0, 0.3))
        row = {"tokens": tokens, "base": base, "tuned": base - tokens * gain}
        rows.append({"id": f"{number}", "source": f"f:{number}", "group": f"{number}", **row})
    return {"rows": rows, "answers": [], "base": {}, "tuned": {}, "not_compared": {}}


def checked(document: dict[str, Any], base: list[bool], tuned: list[bool]) -> dict[str, Any]:
    """The document with answers that were checked."""
    answers = [
        {
            **{"source": f"f:{n}", "group": f"g{n}"},
            "base": {"success": b, "ended": True, "seconds": 1.0},
            "tuned": {"success": t, "ended": True, "seconds": 1.0},
        }
        for n, (b, t) in enumerate(zip(base, tuned, strict=True))
    ]
    return {**document, "answers": answers}


def gate(evaluation: dict[str, Any], **settings: Any) -> Verdict:
    return judge(evaluation, GateConfig(**settings), beside_base=False)


def test_what_is_significantly_worse_never_deploys_unless_a_setting_says_so() -> None:
    """Answers fell from 35.6 to 2.2 % while the loss got better."""
    rng = random.Random(3)
    better = rows_of([rng.gauss(0.8, 0.3) for _ in range(100)])
    document = checked(better, [n < 16 for n in range(45)], [n == 0 for n in range(45)])
    verdict = gate(document)
    assert verdict.verdict == "iterate"
    metric = next(one for one in verdict.metrics if one.name == "success")
    assert metric.passed is False and not metric.required and metric.interval is not None
    assert any("significantly worse" in reason for reason in verdict.reasons[: verdict.decisive])
    assert gate(document, tolerance=0.6).verdict == gate(document, success_gain=-0.6).verdict == "deploy"


def test_five_of_five_successes_do_not_deploy_and_six_do() -> None:
    """The sign test's exact p is 0.06 for five rows and 0.03 for six."""
    for n, verdict in ((5, "not-enough-evidence"), (6, "deploy")):
        answers = checked(rows_of([]), [False] * n, [True] * n)
        assert gate(answers, loss_gain=None, success_gain=0.0).verdict == verdict
        worse = checked(rows_of([]), [True] * n, [False] * n)
        assert (gate(worse, loss_gain=None, success_gain=0.0).verdict == "abort") == (n == 6)


def test_a_gain_that_is_no_gain() -> None:
    """2e-10 nats on each of 60 rows, and nothing at all on few rows, which say nothing either way."""
    assert gate(rows_of([2e-10] * 80)).verdict == "iterate"
    assert gate(rows_of([0.0] * 8)).verdict == "not-enough-evidence"
    assert gate(rows_of([0.0] * 80)).verdict == "iterate"


def test_needed_rows_are_those_that_decide() -> None:
    """A gain that 60 rows can't tell from one row in twenty that is lost is told from 72 rows on."""
    gains = [0.25, 0.35] * 36
    verdict = gate(rows_of(gains[:60]))
    assert verdict.verdict == "not-enough-evidence"
    assert "60 rows measured, about 72 rows needed" in verdict.reasons[0]
    assert gate(rows_of(gains)).verdict == "deploy"


def lost_row(number: int, change: float) -> dict[str, Any]:
    return {"source": f"f:{number}", "tokens": 10, "base": 20.0, "tuned": 20.0 + 10 * change}


def test_rows_that_got_worse_are_named() -> None:
    rows = [lost_row(number, -0.5) for number in range(30)] + [lost_row(50 + n, 0.1 * n) for n in range(1, 8)]
    (one,) = worse_rows({"rows": rows})
    assert one.startswith("7 of 37 held-out rows got worse, most of all f:57 (+0.700 nats per token), f:56")
    assert worse_rows({"rows": rows[:31]}) == worse_rows({"rows": []}) == ()
    assert worse_rows({"rows": [{**lost_row(0, 1.0), "tuned": "not finite"}]}) == ()
