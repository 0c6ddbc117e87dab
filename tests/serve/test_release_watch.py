"""The watch on a new release: quiet while it is as good as the one before, however often it is asked, else a rollback
with the reason."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.base.database import open_database, transaction
from hivetune.errors import DoesNotFit
from hivetune.release.registry import Release, find, promote, rollback
from hivetune.serve.run import _roll_back
from hivetune.serve.watch import (
    FALSE_ALARMS,
    MIN_ANSWERS,
    WATCH_HOURS,
    Watch,
    due_watches,
    is_raised,
)


class Rollbacks:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.came = threading.Event()

    def __call__(self, label: str, reason: str) -> None:
        self.told.append((label, reason))
        self.came.set()


def watched(rollbacks: Rollbacks) -> Watch:
    """Return a watch in which v1 answered 300 times, with 3 errors, before v2 became champion."""
    watch = Watch(rollbacks, open_database)
    for number in range(300):
        watch.answered("a@1", error=number % 100 == 0)
    watch.keep({"a@2": "a@1"})
    return watch


def register(version: int, *, verdict: str = "deploy", alias: str = "", run: str = "") -> None:
    with closing(open_database()) as database, transaction(database):
        database.execute(
            "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict,"
            " proof, created) VALUES ('a', ?, ?, '', '', '', '', ?, '{}', 0)",
            (version, run, verdict),
        )
        if alias:
            action = {"candidate": "registered", "champion": "promoted"}[alias]
            database.execute("INSERT INTO moves VALUES (NULL, 'a', ?, ?, 0, '', '', 0)", (version, action))


def due(*, canary: bool = False, hours: float = 0.0) -> dict[str, str]:
    with closing(open_database()) as database:
        return due_watches(database, "a", canary=canary, now=time.time() + 3600 * hours)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "check", lambda release: None)


def first_alarm(seed: int, usual: float, rate: float, answers: int) -> int | None:
    """Return after how many answers the alarm is raised, asked at each bad one."""
    draw, bad = random.Random(seed).random, 0
    for count in range(1, answers + 1):
        if draw() < rate:
            bad += 1
            if is_raised(usual, count, bad):
                return count
    return None


def test_the_alarm_is_quiet_on_usual_rates_and_soon_raised_on_worse_ones() -> None:
    """400 lives of 1,000 answers at the usual rate, looked at after each: 4 are expected at 1 %. Three times the usual
    5 % is noticed within 400 answers in at least 95 of 100 lives."""
    raised = sum(first_alarm(seed, 0.05, 0.05, 1000) is not None for seed in range(400))
    assert raised <= 400 * FALSE_ALARMS + 3 * (400 * FALSE_ALARMS) ** 0.5
    assert sum(first_alarm(seed, 0.05, 0.15, 400) is not None for seed in range(100)) >= 95
    assert not any(is_raised(0.02, answers, answers) for answers in range(MIN_ANSWERS))
    assert is_raised(0.02, MIN_ANSWERS, MIN_ANSWERS)


def test_restarts_of_the_gateway_begin_no_alarm_anew(own_home: Path) -> None:
    """With 29 restarts 12 of 400 lives at the usual rate raised one, since each restart began anew; 0 without any."""
    raised: list[str] = []

    def opened() -> sqlite3.Connection:
        database = open_database()
        database.execute("PRAGMA synchronous = OFF")  # two hundred waits for the disk prove nothing here
        return database

    for seed in range(10):
        draw, label = random.Random(seed).random, f"a@{seed}"
        watch = Watch(lambda label, reason: raised.append(label), opened)
        for number in range(3000):
            if number % 300 == 299:
                watch.save()
                watch = Watch(watch.roll_back, opened)
                watch.load()
            watch.keep({label: "a@before"})
            watch.watches[label] = replace(watch.watches[label], usual={"errors": 0.05, "complaints": 0.05})
            watch.answered(label, error=draw() < 0.05)
        assert watch.tallies[label].of("errors", watch.watches[label].begun)[0] == 3000
    assert len(raised) <= 1


@pytest.mark.parametrize(
    ("answers", "is_error", "answer_of", "words"),
    [
        (300, lambda number: number % 100 == 50, lambda number: "", ""),  # as good as before
        (300, lambda number: False, lambda number: "the same answer", ""),  # one thumb, sent often
        (40, lambda number: True, lambda number: "", "answers failed"),
        (40, lambda number: False, lambda number: f"answer-{number}", "complained about"),
    ],
)
def test_errors_and_complaints_roll_back_once_with_the_reason(
    answers: int, is_error: Callable[[int], bool], answer_of: Callable[[int], str], words: str
) -> None:
    rollbacks = Rollbacks()
    watch = watched(rollbacks)
    for number in range(answers):
        watch.answered("a@2", error=is_error(number))
        if answer := answer_of(number):
            watch.complained("a@2", answer)
    assert rollbacks.came.wait(5 if words else 0) == bool(words)
    for label, reason in rollbacks.told:
        assert label == "a@2" and words in reason and "a@1" in reason
    assert len(rollbacks.told) == bool(words), "once, not forty times"


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
    for _ in range(100):  # the thread of the first may not be done yet
        watch.answered("a@2", error=True)
        if rollbacks.came.wait(0.01):
            break
    assert [label for label, _ in rollbacks.told] == ["a@2"]


def test_counts_and_watches_are_saved_now_and_then_and_outlive_the_gateway(own_home: Path) -> None:
    def again() -> Watch:
        found = Watch(Rollbacks(), open_database)
        found.load()
        return found

    watch = watched(Rollbacks())
    watch.save_now_and_then(100.0)
    watch.answered("a@2", error=True)
    watch.complained("a@2", "x")
    watch.save_now_and_then(101.0)
    assert again().tallies["a@2"].answers == 0, "not at every moment"
    watch.save_now_and_then(111.0)
    assert (again().tallies, again().watches) == (watch.tallies, watch.watches)
    watch.keep({"a@2": "a@1"})  # it was a candidate, and was promoted
    assert watch.tallies["a@2"].of("errors", watch.watches["a@2"].begun) == (1, 1)
    watch.keep({})
    assert watch.watches == {}


def test_a_champion_is_watched_for_the_hours_of_its_cycle(own_home: Path, whole: None) -> None:
    register(1)
    register(2, run=f"{own_home}/cycles/a/c1/run")
    with closing(open_database()) as database:
        promote(database, "a@1", by="test")
        assert due() == {}  # a first champion
        promote(database, "a@2", by="test")
        assert due(hours=WATCH_HOURS - 1) == {"a@2": "a@1"} and due(hours=WATCH_HOURS + 1) == {}
        database.execute(
            "INSERT INTO cycles (id, name, opened, opened_for, config) VALUES ('c1', 'a', 1, 'rows', ?)",
            ('{"cycle": {"watch": 3.0}}',),
        )
        assert due(hours=2.9) == {"a@2": "a@1"} and due(hours=3.1) == {}
        rollback(database, "a", by="gateway", reason="worse")
        assert due() == {}, "one rollback never leads to the next"


def test_a_candidate_is_watched_while_it_answers_and_withdrawn(own_home: Path, whole: None) -> None:
    """Five hundred failures of five hundred raised no alarm, and a candidate of any verdict answered."""
    register(1)
    with closing(open_database()) as database:
        promote(database, "a@1", by="test")
    register(2, verdict="iterate", alias="candidate")
    assert due(canary=True) == {}
    register(3, alias="candidate")
    assert due(canary=True) == {"a@3": "a@1"} and due(canary=False) == {}
    came = threading.Event()

    def roll_back(label: str, reason: str) -> None:
        _roll_back(label, reason)
        came.set()

    watch = Watch(roll_back, open_database)
    for _ in range(100):
        watch.answered("a@1", error=False)
    watch.keep(due(canary=True))
    for _ in range(40):
        watch.answered("a@3", error=True)
    assert came.wait(5)
    with closing(open_database()) as database:
        found = find(database, "a@3")
        assert "answers failed" in found.withdrawn and found.aliases == ()
        assert find(database, "a").label == "a@1"
