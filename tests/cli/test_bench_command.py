"""`hivetune bench`: every combination of settings, repeated, with mean and standard deviation; nothing is kept."""

import json
from pathlib import Path

import pytest
from command import hivetune
from gguf_families import write_model

from hivetune.cli.train import combinations, summary
from hivetune.errors import UsageError


def test_every_combination_is_run() -> None:
    assert combinations([]) == [[]]
    assert combinations(["lora.r=4,8", "epochs=1,2"]) == [
        ["lora.r=4", "epochs=1"],
        ["lora.r=4", "epochs=2"],
        ["lora.r=8", "epochs=1"],
        ["lora.r=8", "epochs=2"],
    ]


@pytest.mark.parametrize("text", ["lora.r", "=4", "lora.r=4,,8", "lora.r="])
def test_a_grid_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="KEY=A,B"):
        combinations([text])


def test_runs_that_failed_have_no_part_in_the_mean() -> None:
    figures = summary([{"loss_last": 2.0}, {"error": "it does not fit"}, {"loss_last": 4.0}])
    assert figures["loss_last"] == {"mean": 3.0, "sd": pytest.approx(2**0.5)}
    assert summary([{"loss_last": 2.0}])["loss_last"] == {"mean": 2.0, "sd": None}
    assert figures["train_seconds"] == {"mean": None, "sd": None}


@pytest.mark.slow
def test_two_ranks_are_compared_and_nothing_is_kept(tmp_path: Path, own_home: Path) -> None:
    write_model(tmp_path / "model", "llama")
    rows = [{"prompt": f"What is {i} plus {i + 1}?", "completion": f"It is {2 * i + 1}."} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("bench", "rows.jsonl", "--model", "model", "--over", "lora.r=2,4", "--json", "--set", "max_steps=2")
    done = hivetune(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["combinations"]
    assert [line["settings"] for line in found] == [["lora.r=2"], ["lora.r=4"]]
    for line in found:
        assert [(run["seed"], run["steps"]) for run in line["runs"]] == [(0, 2)]
        assert line["figures"]["validation_loss"]["mean"] > 0 and line["figures"]["samples_per_second"]["mean"] > 0
    assert [path.name for path in (own_home / "bench").iterdir() if path.is_dir()] == []
    assert json.loads(hivetune("runs", "--json").stdout)["runs"] == []
