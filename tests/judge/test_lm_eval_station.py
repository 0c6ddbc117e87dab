"""Standard tasks of two models: by a stand-in for the harness, and by the harness itself where it is installed."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge import lm_eval
from hivetune.judge.lm_eval import measure_tasks

A, B = "http://127.0.0.1:1/v1#one", "http://127.0.0.1:1/v1#two"
# Is asked as the harness is, and writes what it writes: the model whose name is longer is right more often.
STAND_IN = """
import json, os, sys, yaml
settings = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
assert sys.argv[1] == "run" and os.environ["HF_HUB_OFFLINE"] == "1"
task, model = settings["tasks"][0], settings["model_args"]["model"]
if task == "unknown":
    sys.exit("Tasks not found: unknown")
print("asked", model)
out = os.path.join(settings["output_path"], model)
os.makedirs(out)
rows = [float(n % 4 == 0 or model == "two") for n in range(40)]
with open(os.path.join(out, f"samples_{task}_2026.jsonl"), "w") as file:
    for n, value in enumerate(rows):
        file.write(json.dumps({"doc_id": n, "filter": "none", "acc": value}) + "\\n")
with open(os.path.join(out, "results_2026.json"), "w") as file:
    json.dump({"results": {task: {"acc,none": sum(rows) / 40, "acc_stderr,none": 0.01}}}, file)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "lm-eval"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(lm_eval, "_MODULE", "not_installed_here")


def measure(*sides: str, tasks: tuple[str, ...] = ("colours",), **more: Any) -> dict[str, Any]:
    return measure_tasks(sides, tasks, run=None, quant="q8_0", **more)


def test_two_endpoints_are_asked_once_and_compared(stand_in: None, own_home: Path) -> None:
    found = measure(A, B)
    (figure,) = found["figures"]
    assert (figure["base"]["value"], figure["tuned"]["value"], figure["n"]) == (0.25, 1.0, 40)
    assert figure["ci95"][0] > 0.5
    logs = {path: path.stat().st_mtime_ns for path in own_home.glob("lm-eval/*/lm-eval.log")}
    assert len(logs) == 2
    assert measure(A, B) == found
    assert {path: path.stat().st_mtime_ns for path in logs} == logs


def test_a_task_that_was_changed_is_asked_again(stand_in: None, own_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text("task: colours\n")
    measure(A, folder=folder)
    (folder / "colours.yaml").write_text("task: colours\nnum_fewshot: 1\n")
    measure(A, folder=folder)
    assert len(list(own_home.glob("lm-eval/*/lm-eval.log"))) == 2


def test_what_the_harness_says_is_told(stand_in: None) -> None:
    with pytest.raises(HivetuneError, match="Tasks not found: unknown") as caught:
        measure(A, tasks=("unknown",))
    assert "lm-eval.log" in caught.value.hint and "--download" in caught.value.hint


def test_sides_that_can_not_be_asked(stand_in: None, tmp_path: Path) -> None:
    figures = tmp_path / "figures.yaml"
    figures.write_text("latency_s: 20.1\n")
    with pytest.raises(UsageError, match="can't be asked") as caught:
        measure(str(figures))
    assert "http://HOST:PORT/v1#MODEL" in caught.value.hint
    with pytest.raises(UsageError, match="is not a folder"):
        measure(A, folder=tmp_path / "missing")


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(lm_eval, "_MODULE", "not_installed_here")
    with pytest.raises(MachineNotFit, match="not installed") as caught:
        measure(A)
    assert "[lm-eval]" in caught.value.hint


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval")
def test_the_harness_itself_asks_a_tiny_model(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with its rows beside it, words and choices, without a network; the base and a random adapter on it."""
    from serve.hive import add_release, make_home

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "choices": [str(n), str(n + 1)]} for n in range(6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "dataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\ntest_split: test\n"
    common += 'doc_to_text: "{{question}}"\n'
    (folder / "words.yaml").write_text(
        f"task: words\n{common}output_type: generate_until\ndoc_to_target: '{{{{answer}}}}'\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 4, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "choices.yaml").write_text(
        f"task: choices\n{common}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\ndoc_to_target: 1\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    make_home()
    labels = [add_release(tmp_path, "demo", seed) for seed in (1, 2)]
    found = measure(*labels, tasks=("words", "choices"), folder=folder)
    assert {(figure["task"], figure["metric"], figure["n"]) for figure in found["figures"]} == {
        ("words", "exact_match", 6),
        ("choices", "acc", 6),
    }
