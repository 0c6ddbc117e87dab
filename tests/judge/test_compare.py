"""Two sides' answers become one document that the gate reads like an evaluation."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivetune.config import EvalConfig
from hivetune.judge import compare
from hivetune.judge.answers import Prompt, PromptAnswer
from hivetune.judge.compare import SideAnswers, comparison_document
from hivetune.judge.findings import Thresholds
from hivetune.judge.gate import judge

CHECKER = {"name": "contains_any", "any": ["yes"]}
NOTHING = Thresholds(loss_gain=None, latency_ratio=None, memory_ratio=None)


def prompt(number: int, **changes: Any) -> Prompt:
    fields = {"row": number, "id": f"id{number}", "source": f"f:{number}", "group": f"g{number}", "agent": "a"}
    asked = {"messages": ({"role": "user", "content": f"question {number}"},), "tools": (), "checker": CHECKER}
    return Prompt(**{**fields, **asked, "category": None, "said": f"question {number}", "reference": "yes", **changes})


def side(label: str, texts: list[str | None], seconds: float, **costs: float) -> SideAnswers:
    answers = {
        prompt(number).key: PromptAnswer(text, True, 3, seconds if number < 10 else None, seconds / 2)
        for number, text in enumerate(texts)
        if text is not None
    }
    return SideAnswers(label, "release", answers, costs)


def metrics(document: dict[str, Any]) -> dict[str, Any]:
    return {metric.name: metric for metric in judge(document, NOTHING).metrics}


def test_success_and_times_are_paired_by_row() -> None:
    prompts = [prompt(number) for number in range(20)]
    document = comparison_document(
        prompts,
        side("a@1", ["no"] * 10 + ["yes"] * 10, 2.0, tokens_per_second=10.0, peak_memory_bytes=1e9),
        side("a@2", ["yes"] * 20, 1.0, tokens_per_second=20.0, peak_memory_bytes=2e9),
        "no loss here",
        {},
    )
    found = metrics(document)
    assert (found["success"].base, found["success"].tuned, found["success"].n) == (0.5, 1.0, 20)
    assert (found["latency_s"].base, found["latency_s"].tuned, found["latency_s"].n) == (2.0, 1.0, 10)
    assert found["peak_memory_bytes"].difference == 1e9
    assert document["tuned"]["latency_p95_s"] == 1.0 and document["tuned"]["first_token_p50_s"] == 0.5
    assert document["not_compared"] == {"loss": "no loss here"} and document["problems"] == []


def test_speed_is_that_of_answers_timed_in_turns_and_no_figure_of_another_day() -> None:
    """Three tokens an answer: a side's own figure, from an earlier load of the machine, is not held beside it."""
    texts: list[str | None] = ["yes"] * 20
    sides = side("a@1", texts, 2.0, tokens_per_second=100.0), side("a@2", texts, 1.0, tokens_per_second=10.0)
    document = comparison_document([prompt(number) for number in range(20)], *sides, "none", {})
    assert (document["base"]["tokens_per_second"], document["tuned"]["tokens_per_second"]) == (1.5, 3.0)
    old = {**document, "base": {**document["base"], "tokens_per_second": 100.0}}  # as earlier versions wrote it
    speed = metrics(old)["tokens_per_second"]
    assert (speed.base, speed.tuned, speed.n) == (1.5, 3.0, 10)
    assert speed.ci95 == pytest.approx((1.5, 1.5))
    untimed = {**old, "answers": [{**a, "base": {**a["base"], "seconds": None}} for a in old["answers"]]}
    assert metrics(untimed)["tokens_per_second"].base is None


def test_a_busy_machine_is_why_a_time_is_undecided() -> None:
    rng = random.Random(2)
    prompts = [prompt(number) for number in range(21)]
    sides = []
    for label in ("a", "b"):
        answers = {one.key: PromptAnswer("yes", True, 5, rng.uniform(0.2, 2.0), 0.1) for one in prompts}
        sides.append(SideAnswers(label, "release", answers, {}))
    config = Thresholds(loss_gain=None, memory_ratio=None, latency_ratio=1.1)
    reasons = []
    for share in (0.1, 0.8):
        verdict = judge(comparison_document(prompts, *sides, "none", {"others_share": share}), config)
        assert verdict.verdict == "not-enough-evidence"
        latency = next(metric for metric in verdict.metrics if metric.name == "latency_s")
        assert (latency.needed is None) == (share == 0.8)
        reasons.append(verdict.reasons[0])
    assert "needed to decide" in reasons[0] and "busy" not in reasons[0]
    assert "undecided, since the machine was busy: other programs used 80% of its cores" in reasons[1]
    assert "needed" not in reasons[1]


def test_an_answer_that_is_missing_is_a_problem_and_no_failure() -> None:
    document = comparison_document(
        [prompt(number) for number in range(6)],
        side("a", ["yes"] * 5 + [None], 1.0),
        side("b", ["yes"] * 6, 1.0),
        "none",
        {},
    )
    assert [problem["problem"] for problem in document["problems"]] == ["no answer"]
    assert metrics(document)["success"].n == 5


def test_a_broken_checker_of_a_row_is_listed() -> None:
    broken = prompt(0, checker={"name": "contains_all"})
    document = comparison_document([broken], side("a", ["yes"], 1.0), side("b", ["yes"], 1.0), "none", {})
    assert len(document["problems"]) == 2 and "needs 'all'" in document["problems"][0]["problem"]
    assert document["answers"][0]["base"]["success"] is None


def test_recorded_figures_stand_in_for_a_side() -> None:
    figures = SideAnswers("before.yaml", "recorded", {}, {}, {"latency_s": 20.1, "success": 0.987})
    document = comparison_document([prompt(0)], figures, side("b", ["yes"], 1.0), "none", {})
    assert document["base"]["latency_s"] == 20.1 and document["base"]["recorded"] and document["problems"] == []


def test_the_base_of_a_run_answers_the_rows_of_a_file(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hint names --run, which was left out of account beside --rows: `base` answered no file."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say one.", "completion": "one"}\n')
    run: Any = SimpleNamespace(
        folder=tmp_path / "run", config=SimpleNamespace(max_length=64, cycle=SimpleNamespace(name=None))
    )
    asked = []

    def find(text: str, of: Any, quant: str) -> Any:
        asked.append((text, of))
        return SimpleNamespace(label=text, identity=text, figures=None)

    answered = [side(name, ["yes"], 1.0) for name in ("base", "x")]
    monkeypatch.setattr(compare, "find_artefact", find)
    monkeypatch.setattr(compare, "_answer", lambda *arguments: answered)
    document = compare.compare_pair(
        "base", "x", EvalConfig(general=False), run=run, rows=[str(tmp_path / "rows.jsonl")]
    ).document
    assert asked == [("base", run), ("x", run)]
    assert document["rows_from"] == str(tmp_path / "rows.jsonl") and document["snapshot"] is None
    assert "rows that are given as a file" in document["not_compared"]["loss"]


def test_the_key_of_a_prompt_is_all_that_is_asked() -> None:
    other = ({"role": "user", "content": "else"},)
    keys = {prompt(0).key, prompt(0, messages=other).key, prompt(0, tools=({"type": "function"},)).key}
    assert len(keys) == 3 and prompt(0, reference="x", row=7).key == prompt(0).key


def test_the_noise_is_that_of_a_token_of_each_timed_answer() -> None:
    """Both sides of twenty answers take twice as long in the second half: the machine, not a side."""
    prompts = [prompt(number) for number in range(40)]
    rng = random.Random(1)
    sides = []
    for label, speed in (("a", 0.02), ("b", 0.05)):
        answers = {}
        for number in range(20):
            token_s = speed * rng.uniform(0.95, 1.05) * (2 if number >= 10 else 1)
            answers[prompts[number].key] = PromptAnswer("yes", True, 21, 0.3 + 20 * token_s, 0.3)
        sides.append(SideAnswers(label, "release", answers, {}))
    document = comparison_document(prompts, *sides, "none", {})
    assert document["noise"] == pytest.approx(2, abs=0.15) and document["repeat_noise"] < 1.15
    verdict = judge(document, Thresholds(loss_gain=None, memory_ratio=None, latency_ratio=9))
    assert any("the machine was busy: equal work took up to 2" in reason for reason in verdict.reasons)
