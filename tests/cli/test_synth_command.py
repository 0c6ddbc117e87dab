"""`hivetune data synth` as a person meets it."""

import json
import sys
from pathlib import Path

import pytest

from hivetune.cli.main import main

PAGES = Path(__file__).parent.parent / "synth" / "pages"
PACK = 'category = "bees"\npages = ["combcopy(1)", "hivectl(1)"]\n'


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["hivetune", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_rows_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pack, out = tmp_path / "bees.toml", tmp_path / "rows.jsonl"
    pack.write_text(PACK)
    words = ["data", "synth", str(pack), str(PAGES), "--out", str(out), "--rows", "30"]
    assert run([*words, "--json"], monkeypatch) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["rows"], document["maker"]) == (1, 30, "templates")
    page = Path(document["report"]).read_text()
    assert "30 rows made of 30" in page and "<script" not in page
    assert run(words, monkeypatch) == 0
    told = capsys.readouterr().out
    assert "bees\t30" in told and "30 rows, all synthetic" in told and "distinct-2" in told
    assert run(["data", "check", str(out), "--json"], monkeypatch) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["rejected"] == {} and checked["rows_in"] == 30
    assert checked["categories"]["bees"]


def test_rows_that_are_all_there_already_lack_no_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint asked for documents with headings, or for more documentation."""
    document = "# Hives\n\n## Queens\n\nA hive has one queen, and she lays up to two thousand eggs a day.\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "manual.md").write_text(document)
    words = ["data", "synth", str(tmp_path / "docs"), "--out"]
    assert run([*words, str(tmp_path / "a.jsonl")], monkeypatch) == 0
    assert run([*words, str(tmp_path / "b.jsonl"), "--against", str(tmp_path / "a.jsonl")], monkeypatch) == 3
    told = capsys.readouterr().err
    assert "duplicate" in told and "--against" in told and "headings" not in told


def test_the_report_replaces_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = "<h1>Hives</h1><h2>Queens</h2><p>A hive has one queen, and she lays up to two thousand eggs a day.</p>"
    (tmp_path / "manual.html").write_text(document)
    assert run(["data", "synth", str(tmp_path), "--out", str(tmp_path / "manual.jsonl")], monkeypatch) == 2
    assert "would replace" in capsys.readouterr().err
    assert (tmp_path / "manual.html").read_text() == document and not (tmp_path / "manual.jsonl").exists()


def test_without_out_the_categories_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "synth", "--json"], monkeypatch) == 0
    found = {one["category"]: one for one in json.loads(capsys.readouterr().out)["categories"]}
    assert len(found) == 24 and found["python"]["pages"] > 50 and "policycoreutils" in found["selinux"]["install"]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "synth", "sytemd", "--out", str(tmp_path / "x.jsonl")], monkeypatch) == 2
    assert "did you mean 'systemd'?" in capsys.readouterr().err
    pack = tmp_path / "bees.toml"
    pack.write_text('category = "bees"\npages = ["nothing(1)"]\ninstall = "hives"')
    assert run(["data", "synth", str(pack), "--out", str(tmp_path / "x.jsonl")], monkeypatch) == 3
    assert "install documentation: hives" in capsys.readouterr().err
    pack.write_text('category = "bees"\npages = ["ls"]')
    assert run(["data", "synth", str(pack), "--out", str(tmp_path / "x.jsonl")], monkeypatch) == 2
    assert "name(section)" in capsys.readouterr().err
