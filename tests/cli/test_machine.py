"""`init` writes a config whose rows are where it says; `demo` says first what it lacks."""

import json
from pathlib import Path

import pytest
import typer
from command import hivetune

from hivetune.cli import machine
from hivetune.cli.machine import _release_name, possible_columns
from hivetune.cli.output import MODE
from hivetune.config import DataConfig, RunConfig, parse_config
from hivetune.errors import DataRefused
from hivetune.machine.findings import Judgement, MachineFinding
from hivetune.release.registry import check_release_name
from hivetune.train.plan.run import propose

ROW = json.dumps({"prompt": "Where is it?", "completion": "Here."}) + "\n"


@pytest.mark.parametrize("stem", ["base", "x" * 200, "a" * 63 + " b", "日本", "Größe & co", "-x-"])
def test_the_release_of_a_config_can_be_registered(stem: str) -> None:
    assert check_release_name(_release_name(stem))
    assert _release_name("Tickets März") == "tickets-marz"


def test_no_config_is_written_for_rows_that_are_all_held_out(tmp_path: Path) -> None:
    """`train` refused what `init` called ready to train."""
    (tmp_path / "rows.jsonl").write_text(ROW)
    data = {"path": str(tmp_path / "rows.jsonl"), "test": 0.999, "validation": 0}
    with pytest.raises(DataRefused, match="is left to train on"):
        propose(parse_config({"model": "m", "data": data}), None)


def test_a_split_that_misses_its_share_is_said_in_the_config(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}", "session": f"s{i % 5}"} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    proposal = propose(parse_config({"model": "m", "data": {"path": str(tmp_path / "rows.jsonl")}}), None)
    missed = proposal.report["groups"]["missed"]
    text = machine._config_text(proposal, "rows.jsonl", tmp_path / "c.yaml", confirmed=True)
    assert missed and all(f"# {sentence}: rows with one question" in text for sentence in missed)


def test_the_likeliest_mapping_is_proposed_unless_other_files_need_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mapping holds for all files: one for a stray file rejected all rows of the others."""
    topics = ("parcel", "letter", "crate", "barrel")
    rows = [{"wish": f"Where is the {t}?", "told": f"In Bonn, {t}.", "more": f"Our {t}."} for t in topics]
    rows[0]["seldom"] = "a column that most rows lack is left out too"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(model="m", data=DataConfig(path=str(tmp_path)))
    assert possible_columns(config) == {"prompt": "wish", "completion": "told"}
    told = capsys.readouterr()
    assert "prompt=wish,completion=told   left out: more, seldom" in told.out and "--columns MAPPING" in told.err
    mapped = config.model_copy(update={"data": DataConfig(path=str(tmp_path), columns={"prompt": "wish"})})
    assert possible_columns(mapped) is None
    (tmp_path / "good.jsonl").write_text(ROW)
    assert possible_columns(config) is None and "good.jsonl needs none" in capsys.readouterr().err


def test_a_machine_that_cannot_train_is_one_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal = MachineFinding("no-torch", "fatal", "torch is missing", "", "pip install torch")
    monkeypatch.setattr(machine, "judge_machine", lambda facts, dtype: Judgement((fatal,)))
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(typer.Exit) as raised:
        machine.doctor()
    document = json.loads(capsys.readouterr().out)
    assert raised.value.exit_code == 4 and not document["fit"]
    assert document["error"]["message"] == "cannot train here: torch is missing"


def test_a_demo_without_the_converter_ends_before_it_trains(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_CONVERTERS", str(own_home / "none"))
    refused = hivetune("demo")
    assert refused.returncode == 4 and "hint: run hivetune fetch llama.cpp" in refused.stderr
    assert not (own_home / "demo").exists()
