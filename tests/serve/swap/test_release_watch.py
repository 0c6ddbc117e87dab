"""The watch on a new champion: quiet while it is as good as the one before, else a rollback with the reason."""

import sqlite3
import threading
from contextlib import closing

import pytest

from hivetune.base.database import open_database
from hivetune.errors import DoesNotFit
from hivetune.release.registry import Release, find, promote, rollback
from hivetune.serve.gateway import run
from hivetune.serve.swap.wanted import Checks, DesiredState
from hivetune.serve.swap.watch import Watch


class Rollbacks:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.came = threading.Event()

    def __call__(self, label: str, reason: str) -> None:
        self.told.append((label, reason))
        self.came.set()


def watched(rollbacks: Rollbacks) -> Watch:
    """Return a watch in which v1 answered 300 times, with 3 errors, before v2 became champion."""
    watch = Watch(rollbacks, open_database, busy=lambda: False)
    watch.champions({"a": "a@1"}, {})
    for number in range(300):
        watch.answered("a@1", error=number % 100 == 0, seconds=1.0, tokens=100)
    watch.champions({"a": "a@2"}, {"a@2": "a@1"})
    return watch


def test_as_good_as_before_is_left_alone() -> None:
    rollbacks = Rollbacks()
    watch = watched(rollbacks)
    for number in range(300):
        watch.answered("a@2", error=number % 100 == 50, seconds=1.2, tokens=100)
    assert rollbacks.told == []


def test_errors_complaints_and_slowness_roll_back_with_the_reason() -> None:
    for kind, words in (("error", "answers failed"), ("slow", "twice as long"), ("down", "complained about")):
        rollbacks = Rollbacks()
        watch = watched(rollbacks)
        for number in range(40):
            watch.answered("a@2", error=kind == "error", seconds=3.0 if kind == "slow" else 1.0, tokens=100)
            if kind == "down":
                watch.complained("a@2", f"answer-{number}")
        assert rollbacks.came.wait(5)
        ((label, reason),) = rollbacks.told  # once, not forty times
        assert label == "a@2" and words in reason and "a@1" in reason


def test_a_release_that_was_returned_to_is_not_held_against_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rollback never leads to the next, not even after a restart of the gateway."""
    monkeypatch.setattr(Release, "check", lambda release: None)
    monkeypatch.setattr(
        run, "wanted", lambda database, names, checks: DesiredState(champions={"a": find(database, "a").label})
    )
    rollbacks, again = Rollbacks(), Rollbacks()
    watch, restarted = (Watch(one, open_database, busy=lambda: False) for one in (rollbacks, again))
    with closing(open_database()) as database:
        for version in (1, 2, 3):
            database.execute(
                "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict,"
                " proof, created) VALUES ('a', ?, '', '', '', '', '', 'deploy', '{}', 0)",
                (version,),
            )
            promote(database, f"a@{version}", by="test")
        run._read(run.GatewaySettings(), watch, Checks())
        for _ in range(40):
            watch.answered("a@3", error=True)
        assert rollbacks.came.wait(5) and "a@2" in rollbacks.told[0][1]
        rollback(database, "a", by="gateway", reason=rollbacks.told[0][1])
    for each in (watch, restarted):
        run._read(run.GatewaySettings(), each, Checks())
        for _ in range(40):
            each.answered("a@2", error=True)
    assert not again.came.wait(0.2) and len(rollbacks.told) == 1


def test_a_rollback_that_the_store_refuses_is_asked_for_again() -> None:
    rollbacks = Rollbacks()
    watch = watched(rollbacks)
    refused = threading.Event()

    def full(label: str, reason: str) -> None:
        refused.set()
        raise DoesNotFit("the disk is full")

    watch.roll_back = full
    for _ in range(40):
        watch.answered("a@2", error=True)
    assert refused.wait(5)
    watch.roll_back = rollbacks
    for _ in range(100):  # the thread of the first may still be putting the alarm back
        watch.answered("a@2", error=True)
        if rollbacks.came.wait(0.01):
            break
    assert [label for label, _ in rollbacks.told] == ["a@2"]


def test_a_first_champion_and_ten_answers_decide_nothing() -> None:
    rollbacks = Rollbacks()
    watch = Watch(rollbacks, open_database)
    watch.champions({"a": "a@1"}, {})
    for _ in range(100):
        watch.answered("a@1", error=True)
    second = watched(rollbacks)
    for _ in range(10):
        second.answered("a@2", error=True)
    assert rollbacks.told == []


def test_counts_outlive_the_gateway() -> None:
    watch = watched(Rollbacks())
    watch.save()
    again = Watch(Rollbacks(), open_database)
    again.load()
    assert (again.tallies["a@1"].answers, again.tallies["a@1"].errors) == (300, 3)
    with closing(open_database()) as database:
        assert isinstance(database, sqlite3.Connection)
        assert database.execute("SELECT answers FROM served WHERE release = 'a@1'").fetchone() == (300,)


def test_a_busy_machine_and_short_answers_say_nothing_of_speed() -> None:
    rollbacks = Rollbacks()
    watch = watched(rollbacks)
    for _ in range(60):
        watch.answered("a@2", error=False, seconds=10.0, tokens=2)
    watch.busy = lambda: True
    for _ in range(60):
        watch.answered("a@2", error=False, seconds=10.0, tokens=100)
    assert rollbacks.told == []


def test_a_thumb_down_that_is_sent_forty_times_is_one_complaint() -> None:
    rollbacks = Rollbacks()
    watch = watched(rollbacks)
    for _ in range(40):
        watch.answered("a@2", error=False, seconds=1.0, tokens=100)
        watch.complained("a@2", "the same answer")
    assert watch.tallies["a@2"].complaints == 1 and rollbacks.told == []


def test_counts_are_saved_now_and_then() -> None:
    """Another process watches them. They are not saved again without an answer, nor at every moment."""

    def saved() -> list[tuple[int, int]]:
        with closing(open_database()) as database:
            return database.execute("SELECT answers, errors FROM served ORDER BY release").fetchall()

    watch = watched(Rollbacks())
    watch.save_now_and_then(100.0)
    assert saved() == [(300, 3)]
    watch.answered("a@2", error=True)
    watch.save_now_and_then(101.0)
    assert saved() == [(300, 3)]
    watch.save_now_and_then(111.0)
    assert saved() == [(300, 3), (1, 1)]
