"""Two loops of one name, a config without one, words to a loop that is not there, a source that is gone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cycle.small import NAME, append_rows, make_config, make_rows

from hivetune.base.disk import lock
from hivetune.base.journal import read_journal
from hivetune.config import load_config
from hivetune.cycle.ledger import loop_folder
from hivetune.cycle.loop import Listener, opened

pytestmark = pytest.mark.slow


def cycle(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "hivetune", "cycle", *arguments, "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_refusals_say_what_to_do(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with lock(loop_folder(NAME)):
        code, document = cycle(str(config), "--once")
        assert code == 75 and "hivetune cycle status" in document["error"]["hint"]
    code, document = cycle(str(config), "--set", "cycle.name=null")
    assert code == 2 and "cycle.name" in document["error"]["message"]
    code, document = cycle(str(config), "--dry-run", "--set", "cycle.window=late")
    assert code == 2 and "22:00-06:00" in document["error"]["hint"]
    code, document = cycle("pause", "nobody")
    assert code == 2 and "no loop of nobody" in document["error"]["message"]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 50))
    code, document = cycle(str(config), "--dry-run")
    assert code == 0 and document["action"]["kind"] == "open" and document["observed"]["new_groups"] == 50
    assert not (loop_folder(NAME) / "cycle.jsonl").exists()


def test_a_person_speaks_to_the_loop_and_a_lost_source_holds_nothing_up(own_home: Path, tmp_path: Path) -> None:
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 12))
    config = make_config(tmp_path, sources=["redis://127.0.0.1:1/0?stream=s"])
    with opened(load_config(config), Listener()) as loop:
        assert loop.step().reason == "12 of 40 new groups"
        assert cycle("pause")[0] == 0
        assert loop.step().reason == "paused by a person"
        assert cycle("resume")[0] == 0 and cycle("now")[0] == 0
        assert loop.step().kind == "open"
        assert not (loop_folder(NAME) / "now").exists()
    code, document = cycle("status")
    assert code == 0 and document["cycles"][0]["cycles"][0]["opened_for"] == "request"
    problems = [
        entry["words"] for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry["event"] == "problem"
    ]
    assert len(problems) == 1 and "nothing is collected" in problems[0]
