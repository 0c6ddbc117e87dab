"""What `hivetune eval` and `hivetune register` say to do next."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivetune.cli import release as commands
from hivetune.cli.verdict import next_step_text
from hivetune.errors import HivetuneError
from hivetune.judge.evaluate import read_evaluation
from hivetune.judge.verdict import passed_text
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
    assert words in next_step_text(Verdict("not-enough-evidence", (), (metric,)))


@pytest.mark.parametrize(
    ("open_ones", "said"),
    [
        ({"loss": 90}, "hold out more rows (data.test)"),
        ({"latency_s": 9}, "answer more held-out rows (eval.prompts, data.test)"),
        ({"latency_s": None}, "evaluate again when the machine is quiet: hivetune eval RUN"),
        ({"success": 90, "min_success": 99}, "answer more held-out rows (eval.prompts, data.test)"),
        (
            {"loss": 90, "latency_s": None},
            "hold out more rows (data.test); evaluate again when the machine is quiet: hivetune eval RUN",
        ),
    ],
)
def test_the_next_step_gives_what_the_open_metrics_lack(open_ones: dict[str, int | None], said: str) -> None:
    metrics = [Metric(name, 1, 1, 0, None, 3, 0.0, False, True, needed) for name, needed in open_ones.items()]
    assert next_step_text(Verdict("not-enough-evidence", (), tuple(metrics))) == said


def test_a_metric_that_more_rows_would_decide_is_open_and_not_failed() -> None:
    asked = [
        {"passed": passed, "needed": needed}
        for passed, needed in ((True, None), (False, None), (False, 22), (None, None))
    ]
    assert [passed_text(metric) for metric in asked] == ["yes", "no", "open", "reported"]


def test_a_verdict_that_does_not_rest_on_checkers_keeps_its_next_step() -> None:
    assert "answers in eval.json" in next_step_text(Verdict("abort", (), (success(0, required=True),)))


@pytest.mark.parametrize(
    ("judgement", "said", "state"),
    [
        (None, ["demo@1: registered, not judged", "next: hivetune eval my-run"], {}),
        (
            {
                "verdict": "not-enough-evidence",
                "reasons": ["seconds per answer: the machine was busy", "other"],
                "decisive": 1,
            },
            [
                "demo@1: registered, not-enough-evidence",
                "  seconds per answer: the machine was busy",
                "next: hold out more rows (data.test), or answer more of them (eval.prompts)",
            ],
            {},
        ),
        ({"verdict": "deploy", "reasons": []}, ["demo@1: registered, deploy", "next: hivetune promote demo@1"], {}),
        ({"verdict": "deploy"}, ["demo@1: registered, deploy", "  it is the champion"], {"aliases": ("champion",)}),
        ({"verdict": "deploy"}, ["demo@1: registered, deploy", "  rolled back: slow"], {"withdrawn": "slow"}),
    ],
)
def test_register_says_what_the_gate_said_and_not_to_ask_it_again(
    judgement: dict[str, Any] | None, said: list[str], state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"withdrawn": "", "aliases": ("candidate",), **state}
    release = SimpleNamespace(label="demo@1", verdict=judgement and judgement["verdict"], **facts)
    told: list[str] = []
    monkeypatch.setattr(commands, "find_run", lambda run: Path(run))
    monkeypatch.setattr(commands, "register_run", lambda run, name: (release, True))
    monkeypatch.setattr(commands, "open_database", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(commands, "_document", lambda database, release: {})
    monkeypatch.setattr(commands, "explain_release", lambda database, label: {"judgement": judgement})
    monkeypatch.setattr(commands, "show", told.append)
    monkeypatch.setattr(commands, "emit", lambda document: None)
    commands.register("my-run", "demo")
    assert told == said


def test_not_a_number_in_a_file_is_an_error_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({"rows": [{"base": 1.0, "tuned": float("nan")}], "answers": []}))
    with pytest.raises(HivetuneError) as raised:
        read_evaluation(path)
    assert raised.value.message == f"{path} is damaged, or was changed by hand: NaN is not a number"
