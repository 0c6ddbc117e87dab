"""Two sides' answers become one document, which is judged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated import row_info

from hivetune.config import EvalConfig, GateConfig
from hivetune.judge import evaluate
from hivetune.judge.evaluate import SideAnswers, comparison_document, times_decide
from hivetune.judge.rows import Prompt
from hivetune.judge.verdict import judge
from hivetune.llama.ask import Answer
from hivetune.records import Message

CHECKER = {"name": "contains_any", "any": ["yes"]}


def prompt(number: int, checker: dict[str, Any] = CHECKER, **changes: Any) -> Prompt:
    messages = (Message("user", f"question {number}"), Message("assistant", "yes"))
    fields = {"row": number, "id": f"id{number}", "source": f"f:{number}", "messages": messages, **changes}
    return Prompt(row_info(**fields), f"g{number}", checker)


def side(label: str, texts: list[str | None], seconds: float, peak_memory_bytes: int | None = None) -> SideAnswers:
    answers = {prompt(n).key: Answer(text, True, 9.0, 3, 3) for n, text in enumerate(texts) if text is not None}
    times = {prompt(number).key: seconds for number in range(min(10, len(texts)))}
    return SideAnswers(label, "release", answers, times, peak_memory_bytes)


def metrics(document: dict[str, Any]) -> dict[str, Any]:
    verdict = judge(document, GateConfig(loss_gain=None), beside_base=False)
    return {metric.name: metric for metric in verdict.metrics}


def test_success_and_times_are_paired_by_row() -> None:
    prompts = [prompt(number) for number in range(20)]
    document = comparison_document(
        prompts,
        [side("a@1", ["no"] * 10 + ["yes"] * 10, 2.0, 10**9), side("a@2", ["yes"] * 20, 1.0, 2 * 10**9)],
        "no loss here",
        {},
    )
    found = metrics(document)
    assert (found["success"].base, found["success"].tuned, found["success"].n) == (0.5, 1.0, 20)
    assert (found["latency_s"].base, found["latency_s"].tuned, found["latency_s"].n) == (2.0, 1.0, 10)
    assert found["peak_memory_bytes"].gain == -1.0
    assert document["not_compared"] == {"loss": "no loss here"} and document["problems"] == []


def test_an_answer_that_is_missing_is_a_problem_and_no_failure() -> None:
    document = comparison_document(
        [prompt(number) for number in range(6)],
        [side("a", ["yes"] * 5 + [None], 1.0), side("b", ["yes"] * 6, 1.0)],
        "none",
        {},
    )
    assert [problem["problem"] for problem in document["problems"]] == ["no answer"]
    assert metrics(document)["success"].n == 5


def test_a_broken_checker_of_a_row_is_listed() -> None:
    broken = prompt(0, checker={"name": "contains_all"})
    document = comparison_document([broken], [side("a", ["yes"], 1.0), side("b", ["yes"], 1.0)], "none", {})
    assert len(document["problems"]) == 2 and "needs 'all'" in document["problems"][0]["problem"]
    assert document["answers"][0]["base"]["success"] is None


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
        return SimpleNamespace(label=text, identity=text, endpoint=None)

    answered = [side(name, ["yes"], 1.0) for name in ("base", "x")]
    monkeypatch.setattr(evaluate, "find_artefact", find)
    monkeypatch.setattr(evaluate, "_answer", lambda *arguments: answered)
    document = evaluate.compare_pair("base", "x", EvalConfig(), run=run, rows=[str(tmp_path / "rows.jsonl")])
    assert asked == [("base", run), ("x", run)]
    assert document["rows_from"] == str(tmp_path / "rows.jsonl") and document["snapshot"] is None
    assert "rows that are given as a file" in document["not_compared"]["loss"]


def test_the_key_of_a_prompt_is_all_that_is_asked() -> None:
    other = (Message("user", "else"), Message("assistant", "yes"))
    keys = {prompt(0).key, prompt(0, messages=other).key, prompt(0, tools=({"type": "function"},)).key}
    assert len(keys) == 3 and prompt(0, row=7).key == prompt(0).key


def test_times_that_straddle_their_limit_are_taken_again() -> None:
    def times(factors: list[float]) -> list[dict[str, float]]:
        return [
            {f"p{i}": 1.0 for i in range(len(factors))},
            {f"p{i}": f for i, f in enumerate(factors)},
        ]

    groups = {f"p{i}": f"g{i}" for i in range(20)}
    few = {key: groups[key] for key in ("p0", "p1")}
    assert times_decide(times([1.1, 1.2] * 10), groups) and times_decide(times([3.0, 3.1] * 10), groups)
    assert not times_decide(times([0.2, 2.9] * 10), groups)
    assert times_decide(times([0.2, 2.9]), few)  # too few for an interval: more of the same would not help
