"""bench/card.py on a processor with tiny sizes: it runs, what it found is whole on the disk, a cut leaves it valid."""

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def card(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / "card.py"), "--out", str(out), "--device", "cpu", "--tiny", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    ElementTree.parse(out / "card.svg")
    assert "| part | ended |" in (out / "card.md").read_text()
    found: dict[str, Any] = json.loads((out / "card.json").read_text())
    return found


@pytest.mark.slow
def test_facts_correctness_and_a_size(tmp_path: Path) -> None:
    parts = card(tmp_path, "--minutes", "5", "--parts", "facts", "correct", "0.5b")["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "facts": "done",
        "correct": "done",
        "0.5b": "done",
    }
    assert parts["facts"]["found"]["torch"] and parts["facts"]["found"]["doctor"]["fit"]
    correct = parts["correct"]["found"]
    assert correct["wrong"] == [] and 0 < correct["worst"]["float32"] < 1e-4
    assert 0 < correct["llama float32 fused native"]["worst_tensor"] < 1e-3
    replayed = correct["llama float32 fused torch graphs"]
    assert replayed["equals_eager"] and 0 < replayed["gradient"] < 1e-4
    steps = parts["0.5b"]["found"]
    for name in ("agents", "plain", "full", "agents graphs", "full graphs"):
        assert steps[name]["samples_per_s"] > 0 and steps[name]["predicted_peak_bytes"] > 0
    assert steps["kernels"]["product"] > 0 and steps["graphs"] == 3


def test_a_part_that_is_cut_off_leaves_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that says something, prints something else and then goes on for ever."""
    monkeypatch.syspath_prepend(str(BENCH))
    import card as tool
    from oncard.report import Report

    (tmp_path / "card.py").write_text(
        'import json, signal\nprint("a warning", flush=True)\n'
        'print(json.dumps({"key": "agents", "value": {"samples_per_s": 3.0}}), flush=True)\nsignal.pause()\n'
    )
    monkeypatch.setattr(tool, "HERE", tmp_path)
    report = Report(tmp_path, device="cpu")
    arguments = argparse.Namespace(out=tmp_path, device="cpu", tiny=True)
    assert tool.run_part("0.5b", arguments, report, 2.0) == "cut off"
    found = json.loads((tmp_path / "card.json").read_text())["parts"]["0.5b"]["found"]
    assert found == {"printed": "a warning", "agents": {"samples_per_s": 3.0}}
    (tmp_path / "card.py").write_text('raise SystemExit("the card is gone")\n')
    assert tool.run_part("job", arguments, report, 60.0) == "failed"
    assert json.loads((tmp_path / "card.json").read_text())["parts"]["job"]["found"] == {"error": "the card is gone"}


def test_each_finding_is_on_the_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from oncard.report import Report, plot

    report = Report(tmp_path, device="cpu")
    for number in range(3):
        report.note("0.5b", f"set {number}", {"samples_per_s": float(number)})
        parts = json.loads((tmp_path / "card.json").read_text())["parts"]
        assert len(parts["0.5b"]["found"]) == number + 1 and parts["0.5b"]["status"] == "under way"
    report.end("0.5b", "done", 1.0)
    assert (tmp_path / "card.svg").read_text().count("<rect") == 3
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    ElementTree.fromstring(plot([]))
