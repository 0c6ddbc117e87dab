"""Faulty use: two loops of one name, a config without one, commands to a missing loop, a source that is gone."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cycle.small import NAME, append_rows, make_config, make_rows
from serve.hive import add_release

import hivetune.cycle.acts.run
import hivetune.cycle.loop
from hivetune.base.database import open_database
from hivetune.base.disk import home, lock
from hivetune.base.journal import read_journal
from hivetune.config import load_config
from hivetune.cycle.acts.slices import ActContext, ends_with_window
from hivetune.cycle.decide import Action
from hivetune.cycle.ledger import CycleRow, cycles_of, loop_folder
from hivetune.cycle.loop import Listener, opened
from hivetune.cycle.observe import release_of
from hivetune.cycle.window import Clocks
from hivetune.data.forget import forget
from hivetune.release.dry_export import DryExport
from hivetune.run.folder import read_resolved

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
    assert cycle("pause", "..")[0] == 2 and not (own_home / "paused").exists()


def test_a_dry_run_says_what_would_be_done_and_does_nothing(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 50))
    code, document = cycle(str(config), "--dry-run")
    assert code == 0 and document["action"]["kind"] == "open" and document["observed"]["new_groups"] == 50
    assert not (loop_folder(NAME) / "cycle.jsonl").exists()


def test_a_person_speaks_to_the_loop_and_a_lost_source_holds_nothing_up(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = iter([Clocks(9000.0, 10.0, 10.0), Clocks(12605.0, 15.0, 3615.0), Clocks(500.0, 20.0, 3620.0)])
    monkeypatch.setattr(hivetune.cycle.loop, "read_clocks", lambda: next(clocks))
    monkeypatch.setattr(hivetune.cycle.loop, "SILENT_S", 1.0)
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
    assert len(told("problem")) == 1 and "nothing is collected" in told("problem")[0]
    assert told("clock") == ["the machine slept for 3600 s", "the clock was set back by 12110 s"]


def test_a_pause_fails_no_act(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pauses of an evaluation ended its cycle as failed, and each pause delayed the next try."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 50))

    def evaluate(action: Action, context: ActContext) -> str:
        if action.kind == "snapshot":  # any act that is not a training
            (loop_folder(NAME) / "paused").touch()
            ends_with_window(context, "preparing rows")(1, 2)
        return act(action, context)

    act = hivetune.cycle.loop.act
    monkeypatch.setattr(hivetune.cycle.loop, "act", evaluate)
    with opened(load_config(make_config(tmp_path)), Listener()) as loop:
        assert loop.step().kind == "open"
        for _ in range(4):
            assert loop.step().kind == "snapshot"
            assert loop.step().reason == "paused by a person"
            (loop_folder(NAME) / "paused").unlink()
    outcomes = [entry for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry["event"] == "outcome"]
    assert {(entry["outcome"], entry["words"]) for entry in outcomes[1:]} == {("paused", "paused by a person")}


def told(event: str) -> list[str]:
    return [entry["words"] for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry["event"] == event]


def test_settings_and_rows_that_change_while_a_cycle_is_open(own_home: Path, tmp_path: Path) -> None:
    """The cycle keeps the settings that it was opened with, and ends when one of its rows was forgotten."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    config = make_config(tmp_path)
    with opened(load_config(config), Listener()) as loop:
        assert loop.step().kind == "open"
    with opened(load_config(config, ["learning_rate=0.5", "cycle.after_rows=50"]), Listener()) as loop:
        assert loop.step().kind == "snapshot"
        (run,) = loop_folder(NAME).glob("*/run")
        assert read_resolved(run)[0].learning_rate == 0.01
        with closing(open_database()) as database:
            forget(database, "session", "s3")
        action = loop.step()
        assert action.kind == "close" and "1 of its rows were forgotten" in action.reason
        assert loop.step().reason == "59 new groups, no window is set"
        with closing(open_database()) as database:
            before, after = cycles_of(database, NAME)
    assert (before.end, after.config["learning_rate"]) == ("given_up", 0.5)


def test_an_act_that_leaves_nothing_is_a_failure(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be repeated without end: a release registered from a home behind a link was once not found."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    with opened(load_config(make_config(tmp_path)), Listener()) as loop:
        assert [loop.step().kind for _ in range(2)] == ["open", "snapshot"]
        monkeypatch.setattr(hivetune.cycle.loop, "act", lambda action, context: "it is trained")
        assert [loop.step().kind for _ in range(3)] == ["train", "train", "wait"]
    (failed,) = (entry for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry.get("outcome") == "failed")
    assert "its result was missing after the first time" in failed["words"]


def test_what_could_not_be_exported_is_not_trained(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The act failed and left its run, which was trained before its export failed."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    dry = DryExport(conversations=0, unwritten="no converter")
    monkeypatch.setattr(hivetune.cycle.acts.run, "dry_export", lambda run: dry)
    with opened(load_config(make_config(tmp_path)), Listener()) as loop:
        assert [loop.step().kind for _ in range(2)] == ["open", "snapshot"]
        action = loop.step()
    assert action.kind == "wait" and "no converter" in action.reason


def test_a_home_behind_a_link_finds_its_releases(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(own_home)
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "link"))
    assert home() == own_home.resolve()
    run = tmp_path / "link" / "cycles" / NAME / "c" / "run"
    with closing(open_database()) as database:
        label = add_release(tmp_path, NAME, 1)
        database.execute("UPDATE releases SET run = ?", (str(run),))
        found = release_of(database, CycleRow("c", NAME, 0.0, "rows", {}, "", None))
    assert found is not None and found.label == label


def test_a_champion_that_is_lost_for_good_is_told(own_home: Path, tmp_path: Path) -> None:
    """Its files are damaged, its run is gone and there was no champion before. A person must know, once."""
    tell = tmp_path / "tell"
    tell.write_text(f'#!/bin/sh\nprintf "%s\n" "$1" >> {tmp_path}/told\n')
    tell.chmod(0o755)
    config = make_config(tmp_path, notify={"command": [str(tell)]})
    label = add_release(tmp_path, NAME, 1, champion=True)
    shutil.rmtree(tmp_path / f"run-{NAME}-1")
    (adapter,) = (own_home / "releases" / NAME / "1").glob("adapter_model.safetensors")
    adapter.chmod(0o600)
    adapter.write_bytes(b"damaged")
    with opened(load_config(config), Listener()) as loop:
        assert loop.step().kind == "restore"
        assert loop.step().kind == "wait"  # a minute; then it is tried again
    (said,) = (tmp_path / "told").read_text().splitlines()
    assert said.startswith(f"the cycle of {NAME} can't continue: {label} can't be served")


class Enough(Exception):
    """An exception that ends a loop."""


def test_what_is_damaged_is_told_once_and_the_loop_goes_on(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person mends it while the loop runs. Until then nothing is served differently."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    tell = tmp_path / "tell"
    tell.write_text(f"#!/bin/sh\ncat >> {tmp_path}/notices\n")
    tell.chmod(0o755)
    with opened(load_config(make_config(tmp_path, notify={"command": [str(tell)]})), Listener()) as loop:
        assert [loop.step().kind for _ in range(2)] == ["open", "snapshot"]
        (run,) = loop_folder(NAME).glob("*/run")
        good = (run / "run.json").read_text()
        (run / "run.json").write_text(good[: len(good) // 2])
        looks: list[float] = []

        def look_three_times(wait_s: float) -> None:
            looks.append(wait_s)
            if len(looks) == 3:
                raise Enough

        monkeypatch.setattr(loop, "_sleep", look_three_times)
        with pytest.raises(Enough):
            loop.run()
        (run / "run.json").write_text(good)
        monkeypatch.setattr(hivetune.cycle.loop, "act", lambda action, context: "it is trained")
        assert loop.step().kind == "train"
    assert len(told("problem")) == 1 and "run.json" in told("problem")[0]
    assert "run.json" in (tmp_path / "notices").read_text()
