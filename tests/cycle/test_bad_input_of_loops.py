"""Faulty use: two loops of one name, a config without one, commands to a missing loop, a source that is gone; and what
the loop tells, once."""

import errno
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

import hivetune.cycle.loop
from hivetune.base.database import open_database
from hivetune.base.disk import home, lock
from hivetune.base.journal import read_journal
from hivetune.config import load_config
from hivetune.cycle.loop import FIRST_RETRY_S, Listener, opened
from hivetune.cycle.record import CycleRow, begin_cycle, cycles_of, end_cycle, loop_folder, release_of
from hivetune.cycle.stations import Work, ensure_run
from hivetune.data.forget import forget
from hivetune.errors import MachineNotFit
from hivetune.run.folder import read_resolved

pytestmark = pytest.mark.slow


def cycle(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "hivetune", "cycle", *arguments, "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def told(event: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry["event"] == event]


def teller(folder: Path) -> list[str]:
    """Return a command that writes each notice on a line of `folder/notices`."""
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\ncat >> {folder}/notices\necho >> {folder}/notices\n")
    path.chmod(0o755)
    return [str(path)]


def notices(folder: Path) -> list[str]:
    path = folder / "notices"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []


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
    assert code == 0 and document["look"]["do"] == "open" and document["look"]["rows"]["groups"] == 50
    assert not (loop_folder(NAME) / "cycle.jsonl").exists()


def test_a_person_speaks_to_the_loop_and_a_lost_source_holds_nothing_up(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivetune.cycle.loop, "SILENT_S", 1.0)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 12))
    there = tmp_path / "there.jsonl"
    there.write_text('{"prompt": "What is honey?", "completion": "Food of bees."}\n')
    config = make_config(tmp_path, sources=["redis://127.0.0.1:1/0?stream=s", str(there)])
    with opened(load_config(config), Listener()) as loop:
        assert loop.step().reason == "12 of 40 new groups"
        assert cycle("pause")[0] == 0
        assert loop.step().reason == "paused by a person"
        assert cycle("resume")[0] == 0 and cycle("now")[0] == 0
        assert loop.step().do == "open"
        assert not (loop_folder(NAME) / "now").exists()
    code, document = cycle("status")
    assert code == 0 and document["cycles"][0]["cycles"][0]["opened_for"] == "request"
    assert ["nothing is collected" in entry["words"] for entry in told("problem")] == [True]
    with closing(open_database()) as database:
        assert database.execute("SELECT count(*) FROM interactions").fetchone() == (1,)


def test_a_pause_fails_nothing(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pauses of an evaluation ended its cycle as failed, and each pause delayed the next try."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 50))

    def run_cycle(work: Work) -> Any:
        with work.long("evaluate", "scoring") as (_, progress):
            (loop_folder(NAME) / "paused").touch()
            progress(1, 2)

    monkeypatch.setattr(hivetune.cycle.loop, "run_cycle", run_cycle)
    with opened(load_config(make_config(tmp_path)), Listener()) as loop:
        assert loop.step().do == "open"
        for _ in range(4):
            assert loop.step().do == "continue"
            assert loop.step().reason == "paused by a person"
            (loop_folder(NAME) / "paused").unlink()
    assert {(entry["outcome"], entry["words"]) for entry in told("end")} == {("paused", "paused by a person")}


def test_settings_and_rows_that_change_while_a_cycle_is_open(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle keeps the settings that it was opened with, and ends when one of its rows was forgotten."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    config = make_config(tmp_path)
    with opened(load_config(config), Listener()) as loop:
        assert loop.step().do == "open"
    straight = hivetune.cycle.loop.run_cycle

    def only_the_run(work: Work) -> Any:
        ensure_run(work)
        raise MachineNotFit("a test")

    with opened(load_config(config, ["learning_rate=0.5", "cycle.after_rows=50"]), Listener()) as loop:
        monkeypatch.setattr(hivetune.cycle.loop, "run_cycle", only_the_run)
        assert loop.step().do == "continue"
        (run,) = loop_folder(NAME).glob("*/run")
        assert read_resolved(run)[0].learning_rate == 0.01
        with closing(open_database()) as database:
            forget(database, "session", "s3")
        monkeypatch.setattr(hivetune.cycle.loop, "run_cycle", straight)
        assert "is tried again" in loop.step().reason
        now = loop.clock
        loop.clock = lambda: now() + FIRST_RETRY_S
        loop.step()
        assert loop.step().reason == "59 new groups, no window is set"
        with closing(open_database()) as database:
            before, after = cycles_of(database, NAME)
    assert (before.end, before.reason) == ("given_up", "1 of its rows were forgotten")
    assert after.config["learning_rate"] == 0.5


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MachineNotFit("no model server")])
def test_failures_are_tried_again_and_told_once(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A full disk is waited for; another failure ends the cycle at its third time."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))

    def run_cycle(work: Work) -> Any:
        with work.station("train"):
            raise error

    monkeypatch.setattr(hivetune.cycle.loop, "run_cycle", run_cycle)
    is_full = isinstance(error, OSError)
    with opened(load_config(make_config(tmp_path, notify=teller(tmp_path))), Listener()) as loop:
        assert loop.step().do == "open"
        clock = [loop.clock()]
        loop.clock = lambda: clock[0]
        pauses = []
        for _ in range(3):
            assert loop.step().do == "continue"
            seen = loop.step()
            assert seen.do == "wait"
            pauses.append(round(seen.again_at - clock[0]))
            clock[0] = seen.again_at
        assert loop.failure is not None
        with closing(open_database()) as database:
            (found,) = cycles_of(database, NAME)
    assert pauses[:2] == ([60, 60] if is_full else [60, 120])
    assert found.end == (None if is_full else "failed")
    (said,) = notices(tmp_path)
    assert ("waits for room on the disk" if is_full else "can't continue: no model server") in said


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


class Enough(Exception):
    """An exception that ends a loop."""


def test_a_champion_that_is_lost_for_good_is_told_once(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are damaged, its run is gone and there was no champion before. The loop goes on: a person mends it."""
    config = make_config(tmp_path, notify=teller(tmp_path))
    label = add_release(tmp_path, NAME, 1, champion=True)
    shutil.rmtree(tmp_path / f"run-{NAME}-1")
    (adapter,) = (own_home / "releases" / NAME / "1").glob("adapter_model.safetensors")
    adapter.chmod(0o600)
    adapter.write_bytes(b"damaged")
    with opened(load_config(config), Listener()) as loop:
        looks: list[float] = []

        def look_three_times(wait_s: float) -> None:
            looks.append(wait_s)
            if len(looks) == 3:
                raise Enough

        monkeypatch.setattr(loop, "_sleep", look_three_times)
        with pytest.raises(Enough):
            loop.run()
    assert looks == [60.0] * 3
    (said,) = notices(tmp_path)
    assert label in said and "can't continue" in said


def test_a_rollback_by_the_gateway_is_told_once(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, notify=teller(tmp_path))
    label = add_release(tmp_path, NAME, 1)
    with closing(open_database()) as database:
        promoted = CycleRow("c", NAME, 1.0, "rows", {}, "", None)
        begin_cycle(database, promoted)
        end_cycle(database, promoted, "promoted", "better", 2.0)
        run, reason = str(promoted.run), "30 of 60 answers failed"
        database.execute("UPDATE releases SET run = ?, withdrawn = ?", (run, reason))
    with opened(load_config(config), Listener()) as loop:
        loop.step()
        loop.step()
    assert notices(tmp_path) == [f"Hivetune: {label} was rolled back: {reason}"]


def test_captured_answers_that_no_cycle_learns_are_told(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with closing(open_database()) as database:
        database.execute(
            "INSERT INTO interactions (id, content_id, source, feedback, row)"
            " VALUES ('a', 'a', 'gateway:demo@1', 1, '{}')"
        )
    with opened(load_config(config), Listener()) as loop:
        loop.step()
        loop.step()
    assert [entry["words"] for entry in told("problem")] == [
        "1 rated answers that the gateway captured are not learned: data.path has no `store`"
    ]
