"""Every path to every verdict, as a table of situations. No verdict beyond its evidence."""

import random
from dataclasses import asdict
from typing import Any

import pytest

from hivetune.config import GateConfig
from hivetune.judge.verdict import judge, passed_text
from hivetune.records import Metric, Verdict

LOSS_ONLY = {"success_gain": None}
NO_LOSS = {"loss_gain": None, "success_gain": 0.0}


def evaluation(
    n: int = 90,
    shift: float = -0.3,
    noise: float = 0.2,
    answers: int = 64,
    rates: tuple[float, float] = (0.3, 0.8),
    seconds: tuple[float, float] = (1.0, 1.0),
    memory: tuple[float | None, float | None] = (1e9, 1.1e9),
    sessions: tuple[int, int] = (0, 0),
    **changes: Any,
) -> dict[str, Any]:
    """What eval.json has. `sessions`: of the rows and of the answers, 0 where each is on its own."""
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
    for found, count in zip((rows, replies), sessions, strict=True):
        for number, one in enumerate(found if count else ()):
            one["group"] = f"session{number % count}"
    sides = {side: {"peak_memory_bytes": size} for side, size in zip(("base", "tuned"), memory, strict=True)}
    return {"rows": rows, "answers": replies, **sides, "frozen": [], "not_compared": {}, **changes}


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


def rows_of(gains: list[float]) -> dict[str, Any]:
    """Rows on which the tuned model is better by `gains` nats per token, and nothing else."""
    document = evaluation(n=len(gains), noise=0.0, answers=0, memory=(None, None))
    for row, gain in zip(document["rows"], gains, strict=True):
        row["tuned"] = row["base"] - row["tokens"] * gain
    return document


def checked(document: dict[str, Any], base: list[bool], tuned: list[bool]) -> dict[str, Any]:
    """The document with answers that were checked."""
    same = {"ended": True, "seconds": 1.0}
    answers = [
        {"source": f"f:{n}", "group": f"g{n}", "base": {"success": b, **same}, "tuned": {"success": t, **same}}
        for n, (b, t) in enumerate(zip(base, tuned, strict=True))
    ]
    return {**document, "answers": answers}


def polite(document: dict[str, Any]) -> dict[str, Any]:
    """The document with answers that begin as a help desk's do."""
    for number, answer in enumerate(document["answers"]):
        answer["tuned"]["answer"] = ("I'm sorry to hear that. Try to turn it off.", "对不起，请重新启动。")[number % 2]
    return document


def varying(document: dict[str, Any]) -> dict[str, Any]:
    """The document with times that a busy machine took."""
    rng = random.Random(7)
    for answer in document["answers"]:
        answer["tuned"]["seconds"] = 1.5 * rng.choice((0.1, 0.5, 2.4))
    return document


def frozen(number: int, base: bool | None, tuned: bool | None, origin: str = "win") -> dict[str, Any]:
    shown = {"id": f"id{number}", "source": f"r:{number}", "prompt": f"What is\n {number}?"}
    return {**shown, "origin": origin, "base": {"success": base}, "tuned": {"success": tuned}}


WHY = "llama.cpp can't serve this model here: unknown architecture"
OF_ANSWERS = ("success", "min_success", "ended", "latency_s", "max_seconds", "peak_memory_bytes", "max_gb")
UNSERVED = evaluation(answers=0, memory=(None, None), not_compared=dict.fromkeys(OF_ANSWERS, WHY))
KEPT_WORDS = 'frozen questions kept: 85.0 %, 17 of 20 questions that were answered rightly before, lost: "What is 0?"'
# Situation -> (evaluation, settings of the gate, verdict, a part of a reason).
SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "better": (evaluation(), {}, "deploy", "loss (nats per token): "),
    # Ten of 60 answers of this kind were refusals, and held a better model back.
    "better, and sorry to hear that": (polite(evaluation()), {}, "deploy", "loss (nats per token): "),
    "better, success required and shown": (evaluation(), {"success_gain": 0.1}, "deploy", "success: "),
    "worse": (evaluation(shift=0.3), LOSS_ONLY, "abort", "missed by more than the tolerance"),
    "worse answers of few": (evaluation(n=3, rates=(0.9, 0.1)), {"success_gain": 0.0}, "abort", "success: "),
    "slightly and surely worse": (evaluation(n=200, shift=0.01, noise=0.01), LOSS_ONLY, "iterate", "missed"),
    "identical adapter": (evaluation(shift=0.0, noise=0.0), LOSS_ONLY, "iterate", "enough to see the tolerance 0.02"),
    "too few rows to tell": (
        evaluation(n=12, shift=-0.05, noise=0.4),
        LOSS_ONLY,
        "not-enough-evidence",
        "in all would decide",
    ),
    "too few rows for an interval": (evaluation(n=3), LOSS_ONLY, "not-enough-evidence", "too few"),
    "no held-out rows": (evaluation(n=0), LOSS_ONLY, "not-enough-evidence", "no held-out rows"),
    "enough rows, about nothing": (evaluation(1500, 0.0, 0.1), LOSS_ONLY, "iterate", "not shown, although"),
    # A gain on 90 rows of two sessions is a gain on two conversations.
    "two sessions": (evaluation(sessions=(2, 0)), {}, "not-enough-evidence", "open, since 2 sessions are too few"),
    "better, less than asked": (evaluation(), {"loss_gain": 0.6}, "iterate", "missed"),
    "better loss, worse answers": (evaluation(rates=(0.8, 0.3)), {"success_gain": 0.0}, "abort", "success: "),
    "better loss, success unknown": (
        evaluation(answers=10, rates=(0.5, 0.55)),
        {"success_gain": 0.05},
        "not-enough-evidence",
        "success: ",
    ),
    # They were "iterate", since "5 sessions are enough to see 0.02"; the sign test over 5 groups can't tell.
    "60 gained in 5 sessions": (
        evaluation(n=0, answers=60, rates=(0.0, 1.0), sessions=(0, 5)),
        {**NO_LOSS, "tolerance": 0.02},
        "not-enough-evidence",
        "5 sessions measured, about 72 rows in all would decide",
    ),
    "success required, no checker": (
        evaluation(answers=0),
        {"success_gain": 0.05},
        "not-enough-evidence",
        "no held-out row has a checker",
    ),
    "no answer checked": (
        checked(evaluation(), [None] * 64, [None] * 64),  # type: ignore[list-item]
        {},
        "deploy",
        "no answer was checked: neither the held-out rows nor eval.checker name a checker",
    ),
    "much slower": (evaluation(seconds=(1.0, 4.0)), {}, "abort", "at most 50 % more than the base: missed by more"),
    "slower by a hair": (evaluation(seconds=(1.0, 1.55)), {"tolerance": 0.1}, "iterate", "than the base: missed"),
    "times of a busy machine": (
        varying(evaluation(answers=300)),
        {"tolerance": 0.5},
        "not-enough-evidence",
        "evaluate again on a quiet machine",
    ),
    "times of a busy machine, few rows": (  # it asked for 5,522 rows, of which 50 would have been timed
        varying(evaluation(answers=33)),
        {"tolerance": 0.5},
        "not-enough-evidence",
        "evaluate again on a quiet machine",
    ),
    "times of three sessions": (evaluation(sessions=(0, 3)), {}, "not-enough-evidence", "since 3 sessions are too few"),
    "latency not measured": (evaluation(answers=0), {}, "not-enough-evidence", "seconds per answer"),
    "too much memory": (evaluation(memory=(1e9, 2e9)), {}, "iterate", "gain -100.0 %; required: at most 50 % more"),
    "memory not measured": (evaluation(memory=(1e9, None)), {}, "not-enough-evidence", "peak memory: it was not"),
    "nothing required": (evaluation(), {"loss_gain": None}, "iterate", "requires no metric"),
    "not served": (UNSERVED, {}, "deploy", "not compared: success, success alone, ended by itself, seconds per answer"),
    "not served, success required": (UNSERVED, {"min_success": 0.5}, "not-enough-evidence", WHY),
    "success shown": (alone(), {"min_success": 0.98}, "deploy", "required: at least 98 %: passed"),
    "success missed": (alone(rate=0.9), {"min_success": 0.98}, "iterate", "missed"),
    "success open": (alone(n=60), {"min_success": 0.98}, "not-enough-evidence", "60 rows measured, about 573"),
    "too few answers": (alone(n=3), {"min_success": 0.98}, "not-enough-evidence", "too few for an interval"),
    "fast enough": (alone(), {"max_seconds": 12}, "deploy", "at most 12 s"),
    "too slow": (alone(seconds=15), {"max_seconds": 12}, "iterate", "missed"),
    "small enough": (alone(), {"max_gb": 10}, "deploy", "at most 10 GB"),
    "just small enough": (alone(memory=10e9), {"max_gb": 10}, "deploy", "at most 10 GB"),
    "too large": (alone(memory=11e9), {"max_gb": 10}, "iterate", "missed"),
    "memory unknown": (alone(memory=None), {"max_gb": 10}, "not-enough-evidence", "not measured"),
    "a loss that nobody has is not required": (alone(), {}, "iterate", "gate.success_gain"),
    "three of 20 frozen questions lost": (
        evaluation(frozen=[frozen(n, n == 9, n >= 3) for n in range(20)]),
        {},
        "iterate",
        KEPT_WORDS,
    ),
    "two of 20 lost": (evaluation(frozen=[frozen(n, True, n >= 2) for n in range(20)]), {}, "deploy", "loss"),
    # Of the user's own questions only what the base knows must be kept.
    "own questions that nobody knows": (
        evaluation(frozen=[frozen(n, n >= 10, n >= 10, "own") for n in range(20)]),
        {},
        "deploy",
        "kept: 100.0 %",
    ),
    "one frozen question lost": (evaluation(frozen=[frozen(1, True, False)]), {}, "deploy", "loss"),
    "a frozen question unchecked": (
        evaluation(frozen=[frozen(n, True, None if n == 0 else True) for n in range(20)]),
        {},
        "not-enough-evidence",
        "1 of 20 questions could not be",
    ),
    # Significant is not enough: 2e-10 nats on each row, which float32 can't resolve.
    "a gain that is no gain": (rows_of([2e-10] * 80), {"beside": False}, "iterate", "not shown"),
    "no gain on few rows": (rows_of([0.0] * 8), {"beside": False}, "not-enough-evidence", "in all would decide"),
    # 60 rows can't tell a gain from one row in twenty that is lost; 72 can.
    "a gain on 60 rows": (
        rows_of([0.25, 0.35] * 30),
        {"beside": False},
        "not-enough-evidence",
        "about 72 rows in all would decide",
    ),
    "a gain on 72 rows": (rows_of([0.25, 0.35] * 36), {"beside": False}, "deploy", "passed"),
    # The sign test's exact p is 0.06 for five rows and 0.03 for six.
    "five of five gained": (checked(rows_of([]), [False] * 5, [True] * 5), NO_LOSS, "not-enough-evidence", "5 gained"),
    "six of six gained": (checked(rows_of([]), [False] * 6, [True] * 6), NO_LOSS, "deploy", "6 gained"),
    "five of five lost": (checked(rows_of([]), [True] * 5, [False] * 5), NO_LOSS, "not-enough-evidence", "5 lost"),
    "six of six lost": (checked(rows_of([]), [True] * 6, [False] * 6), NO_LOSS, "abort", "6 lost"),
}


def said(document: dict[str, Any], *, look: int | None = None, **settings: Any) -> Verdict:
    # What is required beside the base alone is left out where there is nothing beside it.
    beside_base = settings.pop("beside", settings.get("loss_gain", 0.0) is not None or bool(document["rows"]))
    if "loss" in document["not_compared"] and not settings:
        beside_base = False
    return judge(document, GateConfig(**settings), look=look, beside_base=beside_base)


def metric_of(verdict: Verdict, name: str) -> Metric:
    return next(metric for metric in verdict.metrics if metric.name == name)


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
    loss = metric_of(verdict, "loss")
    assert verdict.verdict == expected and "f:7" in verdict.reasons[0]
    assert (loss.base, loss.tuned, loss.gain, loss.passed) == (None, None, None, False)


def test_the_interval_of_a_reason_has_the_level_at_which_it_decides() -> None:
    """A "95 % interval" that was 99.99 %: the thirtieth look at one champion."""
    late, plain = said(evaluation(), look=30), metric_of(said(evaluation()), "loss")
    loss = metric_of(late, "loss")
    assert loss.interval is not None and plain.interval is not None
    assert loss.level == pytest.approx(1 - 0.05 / 930) and plain.level == 0.95
    assert loss.interval[0] < plain.interval[0]
    assert "99.99 % interval" in late.reasons[0] and "95 % interval" not in late.reasons[0]


def test_later_looks_need_more_even_where_rows_hardly_differ() -> None:
    """With 80 tight rows the interval was the same at looks 1, 2, 30 and 300: the floor ignored the level."""
    document = evaluation(n=80, shift=-0.05, noise=0.001)
    intervals = [metric_of(said(document, look=look), "loss").interval or (0, 0) for look in (1, 2, 30, 300)]
    widths = [high - low for low, high in intervals]
    assert widths == sorted(widths) and widths[2] > 1.5 * widths[0]


def test_the_table_is_complete_and_adds_up() -> None:
    verdict = said(evaluation(), success_gain=0.1)
    assert [metric.name for metric in verdict.metrics] == ["loss", "success", "ended", "latency_s", "peak_memory_bytes"]
    for metric in verdict.metrics:
        assert metric.base is not None and metric.tuned is not None and metric.gain is not None
        assert metric.required == (metric.passed is not None)
        worse = metric.name in ("loss", "latency_s", "peak_memory_bytes")
        assert (metric.gain > 0) == (metric.tuned < metric.base if worse else metric.tuned > metric.base)
    assert asdict(said(evaluation())) == asdict(said(evaluation()))
    assert not any("checked" in reason for reason in verdict.reasons)


def test_what_is_significantly_worse_never_deploys_unless_a_setting_says_so() -> None:
    """Answers fell from 35.6 to 2.2 % while the loss got better."""
    rng = random.Random(3)
    better = rows_of([rng.gauss(0.8, 0.3) for _ in range(100)])
    document = checked(better, [n < 16 for n in range(45)], [n == 0 for n in range(45)])
    verdict = said(document, beside=False)
    success = metric_of(verdict, "success")
    assert verdict.verdict == "iterate" and success.interval is not None
    assert success.passed is False and not success.required
    assert any("worse: the whole interval" in reason for reason in verdict.reasons[: verdict.decisive])
    for settings in ({"tolerance": 0.6}, {"success_gain": -0.6}):
        assert said(document, beside=False, **settings).verdict == "deploy"


def test_what_nobody_measured_is_not_said_to_be_no_worse() -> None:
    for answers, word in ((0, "reported"), (64, "yes")):
        assert passed_text(metric_of(said(evaluation(answers=answers), **LOSS_ONLY), "success")) == word


def test_times_that_a_quiet_machine_would_decide_are_open() -> None:
    """The table said "no" where the reason below it said "open"."""
    verdict = said(varying(evaluation(answers=300)), tolerance=0.5)
    assert passed_text(metric_of(verdict, "latency_s")) == "open"
    assert passed_text(metric_of(said(evaluation(seconds=(1.0, 4.0))), "latency_s")) == "no"
