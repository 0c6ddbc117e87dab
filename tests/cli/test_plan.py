"""`hivetune plan` as people and scripts call it."""

import json
import re
from pathlib import Path

import pytest
from command import hivetune

LARGE = "Qwen/Qwen2.5-14B-Instruct"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "question " * 20, "completion": "answer " * 20})
    rows.write_text(f"{row}\n" * 50)
    path = tmp_path / "config.yaml"
    path.write_text(f"model: smollm2-135m\ndata: {{path: {rows}}}\nmax_length: 512\n")
    return path


def test_json_is_one_document_with_everything(config: Path) -> None:
    ended = hivetune("plan", config, "--card", "R9700", "--json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["schema"] == 1 and document["fits"] is True
    assert document["parameters"] == 134_515_008
    assert sum(document["memory"]["parts"].values()) == document["memory"]["peak_bytes"] <= document["limit_bytes"]
    assert document["hours_range"][0] < document["hours"] < document["hours_range"][1]
    assert set(document["disk_bytes"]) == {"checkpoints", "best checkpoint", "adapter", "export"}
    assert document["workload"]["rows"] == 40  # 50 in the file, 10 % each held out for validation and test


def test_people_read_where_memory_goes_and_what_fits(config: Path) -> None:
    ended = hivetune("plan", config, "--card", "H200", "--set", "model=Qwen/Qwen2.5-7B-Instruct")
    assert ended.returncode == 0, ended.stderr
    for word in ("H200", "activations", "optimizer", "full fine-tuning pays", "time: between"):
        assert word in " ".join(ended.stdout.split()), word


def test_several_models_are_a_row_each(config: Path) -> None:
    models = ("--model", "Qwen/Qwen2.5-0.5B-Instruct", "--model", LARGE)
    ended = hivetune("plan", config, "--card", "MI50", "--memory", "4", *models)
    assert ended.returncode == 0, ended.stderr
    head, small, large = (line.split("\t") for line in ended.stdout.splitlines())
    assert head[:2] == ["model", "fits"]
    assert (small[:2], large[:2]) == (["Qwen/Qwen2.5-0.5B-Instruct", "yes"], [LARGE, "no"])


def test_what_does_not_fit_ends_with_5_and_what_would(config: Path) -> None:
    ended = hivetune("plan", config, "--card", "MI50", "--memory", "4", "--set", f"model={LARGE}", "--json")
    assert ended.returncode == 5
    assert "this would fit: --set" in ended.stderr and "of Instinct MI50" in ended.stderr
    document = json.loads(ended.stdout)
    assert document["fits"] is False and document["error"]["type"] == "DoesNotFit"
    assert document["refusal"] in document["error"]["message"]


def test_a_disk_without_room_for_the_checkpoints_ends_with_5(config: Path, small_disk: Path) -> None:
    """The export, which is most of the disk space, may be made on another disk, or never."""
    ended = hivetune("plan", config, "--set", f"output={small_disk / 'run'}", "--json")
    assert ended.returncode == 5, ended.stderr
    document = json.loads(ended.stdout)
    assert document["fits"] is False and document["step_s"] > 0
    assert re.search(r"checkpoints and adapter need \d+ MB of disk, and \d+ MB are free", document["refusal"])
    assert "output=FOLDER" in document["error"]["hint"]
