"""What `init` writes, read from elsewhere: its rows are where the file says, and are counted once."""

import json
import zipfile
from pathlib import Path

import pytest
from command import hivetune

from hivetune.cli.init import _config_text, _name_of, _relative_paths, _release_name, init
from hivetune.config import load_config, parse_config
from hivetune.data.files.find import find_sources
from hivetune.data.files.kinds import refuse_foreign
from hivetune.errors import DataRefused, UsageError
from hivetune.release.registry import check_release_name
from hivetune.train.plan.propose import propose

ROW = json.dumps({"prompt": "Where is it?", "completion": "Here."}) + "\n"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("rows.jsonl", "there/rows.jsonl"),
        ("../other/*.csv", "there/../other/*.csv"),
        ("store", "store"),
        ("-", "-"),
        ("~/rows.jsonl", "~/rows.jsonl"),
        ("/data/rows.jsonl", "/data/rows.jsonl"),
        ("https://example.org/rows.jsonl", "https://example.org/rows.jsonl"),
    ],
)
def test_rows_lie_beside_the_file_that_names_them(
    written: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/run.yaml").write_text(f"model: m\ndata: {{path: {json.dumps(written)}}}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("there/run.yaml")).data.path == found
    assert load_config(Path("there/run.yaml"), ["data.path=rows.jsonl"]).data.path == "rows.jsonl"
    (tmp_path / "there/run.yaml").write_text(f"model: m\ndata: {{path: [{json.dumps(written)}, store]}}\n")
    assert load_config(Path("there/run.yaml")).data.path == [found, "store"]
    monkeypatch.chdir(tmp_path / "there")
    assert load_config(Path("run.yaml")).data.path == [written, "store"]


def test_a_plan_for_rows_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: smollm2-135m\ndata: {path: nowhere.jsonl}\n")
    command = ["plan", str(config), "--card", "H200"]
    refused = hivetune(*command)
    assert refused.returncode == 2 and "nowhere.jsonl does not exist" in refused.stderr and not refused.stdout
    said = hivetune(*command, "--rows", "9", "--tokens", "9")
    assert said.returncode == 0 and "9 rows of" in said.stdout


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("https://example.org/rows.jsonl", "curl -LO https://example.org/rows.jsonl"),
        ("someone/their-rows", "hf download someone/their-rows --repo-type dataset"),
        ("hf://datasets/someone/their-rows/config", "hf download someone/their-rows --repo-type dataset"),
        ("rows.jsonl", "give a file, a folder"),
    ],
)
def test_what_is_elsewhere_has_a_next_step(
    path: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        find_sources(path)
    assert step in refused.value.hint


def test_an_archive_is_named_for_what_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.zip", "w") as archive:
        archive.writestr("xl/workbook.xml", "<x/>")
    with pytest.raises(UsageError, match="a ZIP archive or an Office file") as refused:
        refuse_foreign((tmp_path / "file.zip").read_bytes()[:4096], "file.zip")
    assert "save each sheet as CSV" in refused.value.hint


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ("rows.v2.jsonl", "rows"),
        ("logs/*.jsonl", "logs"),
        ("logs/**/*.jsonl", "logs"),
        ("logs/chats-[0-9]*.jsonl", "chats"),
        ("rows [1].jsonl", "rows [1]"),
        ("*", "rows"),
    ],
)
def test_a_config_is_named_after_its_rows(rows: str, name: str, tmp_path: Path) -> None:
    for made in ("rows.v2.jsonl", "rows [1].jsonl"):
        (tmp_path / made).touch()
    assert _name_of((tmp_path if rows != "*" else Path("/")) / rows) == name


def test_standard_input_is_no_place_for_rows_of_a_config() -> None:
    with pytest.raises(UsageError, match="can be read once"):
        init(["-"])


def test_a_config_in_a_linked_folder_finds_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/deep")
    (tmp_path / "rows.jsonl").write_text(ROW)
    monkeypatch.chdir(tmp_path)
    assert (Path("link") / str(_relative_paths(Path("link"), "rows.jsonl"))).exists()


@pytest.mark.parametrize("stem", ["base", "x" * 200, "a" * 63 + " b", "日本", "Größe & co", "-x-"])
def test_the_release_of_a_config_can_be_registered(stem: str) -> None:
    assert check_release_name(_release_name(stem))


def test_no_config_is_written_for_rows_that_are_all_held_out(tmp_path: Path) -> None:
    """`train` refused what `init` called ready to train."""
    (tmp_path / "rows.jsonl").write_text(ROW)
    settings = parse_config(
        {"model": "m", "data": {"path": str(tmp_path / "rows.jsonl"), "test": 0.999, "validation": 0}}
    )
    with pytest.raises(DataRefused, match="is left to train on"):
        propose(settings, None)


def test_a_split_that_misses_its_share_is_said_in_the_config(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}", "session": f"s{i % 5}"} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = parse_config({"model": "m", "data": {"path": str(tmp_path / "rows.jsonl")}})
    proposal = propose(settings, None)
    missed = proposal.report["groups"]["missed"]
    text = _config_text(proposal, "rows.jsonl", "hivetune train c.yaml", tmp_path / "c.yaml", None)
    assert missed and all(f"# {sentence}: rows with one question" in text for sentence in missed)
