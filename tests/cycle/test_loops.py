"""The loop beside its work: what it waits for, what it tells and how often, what a person says to it, its memory."""

import errno
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from command import hivetune
from cycle.small import NAME, append_rows, make_config, make_rows
from serve.hive import add_release

from hivetune.base.database import open_database
from hivetune.base.disk import lock
from hivetune.base.journal import read_journal
from hivetune.cli.output import MODE
from hivetune.cli.serve import _run as run_loop
from hivetune.config import load_config
from hivetune.cycle import loop as loops
from hivetune.cycle import stations
from hivetune.cycle.loop import COOL_S, MAX_SENTENCE_CHARS, RETRY_S, Look, Loop, look, notice, opened, send_notice
from hivetune.cycle.record import CycleRow, Domain, begin_cycle, cycles_of, end_cycle, loop_folder, trained_rows
from hivetune.cycle.rows import RowsNow
from hivetune.cycle.stations import Work, ensure_run
from hivetune.data.forget import forget
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused, DoesNotFit, MachineNotFit
from hivetune.run.folder import read_resolved

CYCLE = CycleRow("a1", NAME, 10.0, "rows", {"model": "tiny"}, None)
REFUSAL = "12 of 60 answers failed; at most 5.0% was usual with helpdesk@3"
Instead = Callable[[Callable[[Work], Any]], None]


def cycle(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = hivetune("cycle", *arguments, "--json")
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def told(event: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(loop_folder(NAME) / "cycle.jsonl") if entry["event"] == event]


def program(folder: Path, text: str) -> str:
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def teller(folder: Path) -> list[str]:
    """Return a command that writes each notice on a line of `folder/notices`."""
    return [program(folder, f"cat >> {folder}/notices; echo >> {folder}/notices")]


def notices(folder: Path) -> list[str]:
    path = folder / "notices"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Instead:
    """Return a function that sets what a cycle does instead of its stations."""
    return lambda work: monkeypatch.setattr(stations, "run_cycle", work)


@pytest.mark.slow
def test_refusals_say_what_to_do_and_a_dry_run_does_nothing(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 50))
    seen = look(load_config(config), NAME, RowsNow(), 1e9)
    assert (seen.do, seen.rows.groups) == ("open", 50)
    assert not (loop_folder(NAME) / "cycle.jsonl").exists()
    with lock(loop_folder(NAME)):
        code, document = cycle(str(config), "--once")
        assert code == 75 and "hivetune cycle status" in document["error"]["hint"]
    for setting, words in (("cycle.name=null", "cycle.name"), ("cycle.window=late", "22:00-06:00")):
        code, document = cycle(str(config), "--dry-run", "--set", setting)
        assert code == 2 and words in json.dumps(document["error"])
    code, document = cycle("pause", "nobody")
    assert code == 2 and "no loop of nobody" in document["error"]["message"]
    assert cycle("pause", "..")[0] == 2 and not (own_home / "paused").exists()


@pytest.mark.slow
def test_a_person_speaks_to_the_loop_and_a_lost_source_holds_nothing_up(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SILENT_S", 1.0)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 12))
    there, missing = tmp_path / "there.jsonl", "redis://127.0.0.1:1/0?stream=s"
    there.write_text('{"prompt": "What is honey?", "completion": "Food of bees."}\n')
    with opened(load_config(make_config(tmp_path, sources=[missing, str(there)]))) as loop:
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


@pytest.mark.slow
def test_a_file_whose_columns_need_a_mapping_is_left_out_and_told(own_home: Path, tmp_path: Path) -> None:
    """It stopped the whole cycle."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    answers = [{"question": "Who pays the fee?", "answer": f"Office {n}", "country": n % 7} for n in range(30)]
    append_rows(tmp_path / "app.jsonl", answers)
    config = load_config(make_config(tmp_path, notify=teller(tmp_path)))
    paths = [str(tmp_path / name) for name in ("rows.jsonl", "app.jsonl")]
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": paths})})
    with opened(config) as loop:
        seen = loop.step()
    assert (seen.do, seen.rows.groups) == ("open", 60)
    words = f"30 rows as of {tmp_path}/app.jsonl:1 (unread-column)"
    assert [words in entry["words"] for entry in told("problem")] == [True]
    assert [words in text for text in notices(tmp_path)] == [True]
    with pytest.raises(DataRefused, match="unread-column"):
        check(config.data).refuse(1.0)


@pytest.fixture
def loop(own_home: Path, tmp_path: Path) -> Any:
    """A loop whose cycle is open, with a clock that stands still and a command that is told."""
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    with opened(load_config(make_config(tmp_path, notify=teller(tmp_path)))) as opened_loop:
        assert opened_loop.step().do == "open"
        moment = opened_loop.clock()
        opened_loop.clock = lambda: moment
        yield opened_loop


def later(loop: Loop, seconds: float) -> None:
    moment = loop.clock() + seconds
    loop.clock = lambda: moment


@pytest.mark.slow
def test_a_nightly_cycle_begins_at_the_same_time_each_night(own_home: Path, tmp_path: Path, instead: Instead) -> None:
    """It waited for the end of the watch on its champion, and began later each night."""
    instead(lambda work: ("promoted", "better"))
    nights = [datetime(2026, 6, day, 22).timestamp() for day in (10, 11)]
    with opened(load_config(make_config(tmp_path, window="22:00-06:00"))) as loop:
        for night, begins_s in enumerate(nights):
            append_rows(tmp_path / "rows.jsonl", make_rows(1000 * night, 60))
            loop.clock = lambda begins_s=begins_s: begins_s - 1  # type: ignore[misc]
            assert loop.step().do == "wait"
            later(loop, 1)
            assert [loop.step().do for _ in range(3)] == ["open", "continue", "wait"]
    assert [entry["now"] for entry in told("decision") if entry["do"] == "open"] == nights


@pytest.mark.slow
def test_a_pause_fails_nothing(loop: Loop, instead: Instead) -> None:
    """Three pauses of an evaluation ended its cycle as failed, and each pause delayed the next try."""

    def evaluate(work: Work) -> Any:
        with work.station("evaluate"):
            (loop_folder(NAME) / "paused").touch()
            work.progress(1, 2)

    instead(evaluate)
    for _ in range(4):
        assert loop.step().do == "continue"
        assert loop.step().reason == "paused by a person"
        (loop_folder(NAME) / "paused").unlink()
    assert {(entry["outcome"], entry["words"]) for entry in told("end")} == {("paused", "paused by a person")}


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MachineNotFit("no model server")])
def test_failures_are_tried_again_and_told_once(loop: Loop, instead: Instead, tmp_path: Path, error: Exception) -> None:
    """A full disk is waited for; another failure ends the cycle at its third time, and the next one waits a day."""

    def train(work: Work) -> Any:
        with work.station("train"):
            raise error

    instead(train)
    is_full = isinstance(error, OSError)
    for number in range(3):
        assert loop.step().do == "continue" and loop.failure is not None
        seen = loop.step()
        is_last = number == 2 and not is_full
        assert seen.do == "wait" and ("failed: no model server" if is_last else "is tried again") in seen.reason
        later(loop, RETRY_S)
    with closing(open_database()) as database:
        (found,) = cycles_of(database, NAME)
    assert found.end == (None if is_full else "failed")
    (said,) = notices(tmp_path)
    assert ("waits for room on the disk" if is_full else "can't continue: no model server") in said
    later(loop, COOL_S)
    assert loop.step().do == ("continue" if is_full else "open")


@pytest.mark.slow
def test_settings_and_rows_that_change_while_a_cycle_is_open(
    loop: Loop, instead: Instead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle keeps the settings that it was opened with, and ends when one of its rows was forgotten."""
    straight = stations.run_cycle

    def only_the_run(work: Work) -> Any:
        ensure_run(work)
        raise MachineNotFit("a test")

    loop.config = loop.config.model_copy(update={"learning_rate": 0.5})
    instead(only_the_run)
    assert loop.step().do == "continue"
    (run,) = loop_folder(NAME).glob("*/run")
    assert read_resolved(run)[0].learning_rate == 0.01
    with closing(open_database()) as database:
        forget(database, "session", "s3")
    instead(straight)
    later(loop, RETRY_S)
    assert loop.step().do == "continue"
    assert loop.step().reason == "59 new groups"
    with closing(open_database()) as database:
        before, after = cycles_of(database, NAME)
    assert (before.end, before.reason) == ("given_up", "1 of its rows were forgotten")
    assert after.config["learning_rate"] == 0.5


@pytest.mark.slow
def test_rollbacks_and_captured_answers_that_nobody_learns_are_told_once(own_home: Path, tmp_path: Path) -> None:
    """A rollback of the name, of a domain of it, and of another name that only begins alike."""
    domain = replace(CYCLE, id="b2", name=f"{NAME}-it", domain=Domain(NAME, "agent", "it"))
    promoted = [CYCLE, domain, replace(CYCLE, id="c3", name=f"{NAME}-other")]
    labels = [add_release(tmp_path, cycle.name, number) for number, cycle in enumerate(promoted, 1)]
    with closing(open_database()) as database:
        for cycle in promoted:
            begin_cycle(database, cycle)
            end_cycle(database, cycle, "promoted", "better", 2.0)
            database.execute("UPDATE releases SET run = ? WHERE name = ?", (str(cycle.run), cycle.name))
            move = "INSERT INTO moves VALUES (NULL, ?, 1, 'withdrawn', 3, '', ?, 0)"
            database.execute(move, (cycle.name, REFUSAL))
        columns = "(id, content_id, source, feedback, row)"
        database.execute(f"INSERT INTO interactions {columns} VALUES ('a', 'a', 'gateway:demo@1', 1, '{{}}')")
    with opened(load_config(make_config(tmp_path, notify=teller(tmp_path)))) as loop:
        loop.step()
        loop.step()
    with closing(open_database()) as database:
        ends = [cycles_of(database, cycle.name)[0].end for cycle in promoted]
    assert ends == ["rolled_back", "rolled_back", "promoted"]
    assert notices(tmp_path) == [f"Hivetune: {label} was rolled back: {REFUSAL}" for label in labels[:2]]
    said = "1 rated answer that the gateway captured is not learned: data.path has no `store`"
    assert [entry["words"] for entry in told("problem")] == [said]


def test_a_loop_that_failed_prints_one_document(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed its result, and the error as a second document behind it: no JSON."""
    monkeypatch.setattr(MODE, "json", True)
    failure = DoesNotFit("the disk broke")
    loop = SimpleNamespace(name="helpdesk", failure=failure, run=lambda once: Look("wait", "train failed"))
    with pytest.raises(typer.Exit) as raised:
        run_loop(loop, once=True)  # type: ignore[arg-type]
    document = json.loads(capsys.readouterr().out)
    assert (raised.value.exit_code, document["name"], document["error"]["message"]) == (5, "helpdesk", "the disk broke")


@pytest.mark.slow
def test_a_champion_that_is_damaged_is_told_once_and_the_loop_goes_on(own_home: Path, tmp_path: Path) -> None:
    label = add_release(tmp_path, NAME, 1, champion=True)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 60))
    (adapter,) = (own_home / "releases" / NAME / "1").glob("adapter_model.safetensors")
    adapter.chmod(0o600)
    adapter.write_bytes(b"damaged")
    looks: list[float] = []

    def look_three_times(wait_s: float) -> None:
        looks.append(wait_s)
        if len(looks) == 3:
            raise KeyboardInterrupt

    config = load_config(make_config(tmp_path, notify=teller(tmp_path)))
    with opened(config) as loop, pytest.raises(KeyboardInterrupt):
        loop.sleep = look_three_times
        loop.run()
    assert looks == [60.0] * 3
    (said,) = notices(tmp_path)
    assert label in said and "can't continue" in said


def test_the_same_cycle_is_opened_once_and_again_only_after_a_failure(own_home: Path) -> None:
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        begin_cycle(database, replace(CYCLE, opened=11.0))
        end_cycle(database, CYCLE, "failed", "no disk", 20.0)
        asked = replace(CYCLE, opened=25.0, opened_for="request", config={"model": "tiny", "budget": 9})
        begin_cycle(database, asked)
        begin_cycle(database, CYCLE)
        assert cycles_of(database, NAME) == [asked]  # a person's request counts, and one before it no longer does
        end_cycle(database, CYCLE, "refused", "worse", 30.0, trained={"x", "y"})
        begin_cycle(database, replace(CYCLE, opened=40.0))
        found = cycles_of(database, NAME)[0]
        assert (found.end, found.reason, found.closed, found.config) == ("refused", "worse", 30.0, asked.config)
        assert trained_rows(database, NAME) == {"x", "y"} and not trained_rows(database, "other")


def test_a_command_gets_its_own_words_and_the_document(tmp_path: Path) -> None:
    path = program(tmp_path, f'printf "%s|" "$@" > {tmp_path}/said; cat > {tmp_path}/read')
    told = notice("rolled_back", "helpdesk@4", REFUSAL)
    assert send_notice(told, [path, "-t", "a b; touch x"]) == ""
    assert (tmp_path / "said").read_text() == "-t|a b; touch x|"
    text = f"Hivetune: helpdesk@4 was rolled back: {REFUSAL}"
    about = {"schema": 1, "kind": "rollback", "release": "helpdesk@4", "reason": REFUSAL, "text": text}
    assert json.loads((tmp_path / "read").read_text()) == told == {**about, "time": told["time"]}
    dirty = notice("failed", "helpdesk", "first\r\nBcc: x@example.org\x1b[2J" + "a" * 900)["text"]
    assert dirty.startswith("Hivetune: the cycle of helpdesk can't continue: first Bcc: x@example.org")
    assert dirty.isprintable() and len(dirty) == len("Hivetune: ") + MAX_SENTENCE_CHARS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exit 3", "tell ended with 3"),
        ("exec <&-; sleep 60 & wait", "tell was ended after"),
        (None, "can't be started"),
    ],
)
def test_a_command_that_fails_hangs_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    monkeypatch.setattr(loops, "SEND_TIMEOUT_S", 1.0 if text and "sleep" in text else 20.0)
    path = program(tmp_path, text) if text else str(tmp_path / "missing")
    assert problem in send_notice(notice("failed", "helpdesk", "why"), [path])
