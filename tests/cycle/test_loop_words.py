"""The loop's messages: a lasting condition is reported once, and again when it comes back."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer

import hivetune.cycle.loop
from hivetune.base.database import open_database
from hivetune.base.journal import Journal
from hivetune.cli.cycle import _run
from hivetune.config import parse_config
from hivetune.cycle.acts.slices import ActContext
from hivetune.cycle.decide import Action, Observation
from hivetune.cycle.ledger import acts_of, begin_act, end_act
from hivetune.cycle.loop import Listener, Loop
from hivetune.errors import MachineNotFit

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def loop(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """Return a loop that always decides for the same act, collects from a file, and notifies a program."""
    told = tmp_path / "tell"
    told.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/told\n')
    told.chmod(0o755)
    (tmp_path / "came.jsonl").write_text("")
    tree = {
        "model": "tiny",
        "data": {"path": "store"},
        "cycle": {
            "name": "demo",
            "sources": [str(tmp_path / "came.jsonl")],
            "notify": {"command": [str(told)]},
        },
    }
    monkeypatch.setattr(hivetune.cycle.loop, "observe", lambda *_: Observation())
    monkeypatch.setattr(hivetune.cycle.loop, "decide", lambda *_: Action("warm", "a test", 0.0))
    open_database().close()
    with Journal(tmp_path / "cycle.jsonl") as journal:
        yield Loop(parse_config(tree, "a test"), "demo", journal, Listener())


def acts(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | str) -> None:
    """Set what the next acts do, in order."""
    left = iter(outcomes)

    def act(*_: Any) -> str:
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(hivetune.cycle.loop, "act", act)


def test_a_full_disk_is_told_once_until_something_was_done(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are collected meanwhile are another matter."""
    acts(monkeypatch, FULL, FULL, "3 steps", FULL)
    for _ in range(2):
        loop.step()
    assert len((tmp_path / "told").read_text().splitlines()) == 1
    loop.step()
    loop.step()
    first, second = (tmp_path / "told").read_text().splitlines()
    assert first == second and "waits for room on the disk" in first


@pytest.mark.parametrize(("details", "told"), [({}, False), ({"rolled_back": "demo@2"}, True)])
def test_a_champion_that_was_restored_was_not_rolled_back(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, details: dict[str, str], told: bool
) -> None:
    def act(_: Action, context: ActContext) -> str:
        context.details |= details
        return "demo@2 was restored from its run"

    monkeypatch.setattr(hivetune.cycle.loop, "act", act)
    monkeypatch.setattr(hivetune.cycle.loop, "decide", lambda *_: Action("restore", "a test", 0.0))
    loop.step()
    assert (tmp_path / "told").exists() == told


def test_a_source_that_is_lost_twice_is_said_twice(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts(monkeypatch, *["done"] * 5)
    said: list[str] = []
    loop.listener.say = said.append
    source = tmp_path / "came.jsonl"
    for there in (False, False, True, False):
        source.write_text("") if there else source.unlink(missing_ok=True)
        loop.step()
    assert len([words for words in said if words.startswith("nothing is collected")]) == 2


def test_a_source_that_is_lost_holds_up_no_other(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of all sources behind it were never collected."""
    acts(monkeypatch, "done")
    there = tmp_path / "there.jsonl"
    there.write_text('{"prompt": "What is honey?", "completion": "Food of bees."}\n')
    sources = [str(tmp_path / "lost.jsonl"), str(there)]
    loop.config = loop.config.model_copy(update={"cycle": loop.config.cycle.model_copy(update={"sources": sources})})
    said: list[str] = []
    loop.listener.say = said.append
    loop.step()
    with closing(open_database()) as database:
        assert database.execute("SELECT count(*) FROM interactions").fetchone() == (1,)
    (told,) = (words for words in said if words.startswith("nothing is collected from one source"))
    assert "lost.jsonl" in told


def test_a_store_that_can_t_be_read_in_the_middle_of_an_act_is_a_failure_of_it(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an outcome the act would be shown as going on."""
    acts(monkeypatch, sqlite3.OperationalError("disk I/O error"))
    loop.step()
    with closing(open_database()) as database:
        assert [(act.outcome, act.words) for act in acts_of(database, "demo")] == [("failed", "disk I/O error")]


@pytest.mark.parametrize("given_up", [False, True])
def test_once_ends_with_the_exit_code_of_what_failed(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given_up: bool
) -> None:
    """This holds too when its cycle was closed for it."""
    acts(monkeypatch, MachineNotFit("no model server"))
    loop.step()
    if given_up:
        with closing(open_database()) as database:
            number = begin_act(database, "demo", None, "close", 1.0)
            end_act(database, number, "done", 2.0, "cycle c1 failed: no model server", {"end": "failed"})
    monkeypatch.setattr(hivetune.cycle.loop, "decide", lambda *_: Action("wait", "a test", 0.0))
    with pytest.raises(typer.Exit) as raised:
        _run(loop, once=True)
    assert "no model server" in capsys.readouterr().err
    assert raised.value.exit_code == MachineNotFit.exit_code
