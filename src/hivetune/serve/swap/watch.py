"""Watches a new champion by its own answers, and asks for a rollback when it is worse than the one before.

Three rates, each held against what the champion before had (alarm.py): answers that failed, answers that were slow
(seconds a token above twice that champion's median, waiting for a slot aside), complaints. Speed is not judged while
the machine has more to do than cores: then every release is slow. The counts of each release are kept in hive.db, so
that a restarted gateway knows them.
"""

import math
import os
import sqlite3
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hivetune.base.database import transaction
from hivetune.errors import HivetuneError
from hivetune.release.registry import Move, Release, history, releases
from hivetune.serve.swap.alarm import Alarm, usual_rate

_KINDS = ("errors", "slow", "complaints")
FLOORS = {"errors": 0.02, "slow": 0.10, "complaints": 0.02}
WORDS = {"errors": "failed", "slow": "took more than twice as long a token", "complaints": "were complained about"}
SLOW_FACTOR = 2.0
KEPT_SPEEDS = 500
SAVE_EVERY_S = 10.0
KEPT_COMPLAINTS = 10_000
FEWEST_TOKENS = 8  # of shorter answers the prompt's time says more than the tokens'


def predecessor(moves: Sequence[Move]) -> tuple[int, int] | None:
    """The versions of a champion that is to be watched and of the one before it. `moves`: of its name, oldest first.

    None for a first champion, and after a step back: a release that was returned to is not held against an older one,
    so that one rollback never leads to the next.
    """
    champions = [move for move in moves if move.alias == "champion"]
    if not champions:
        return None
    newest = champions[-1]
    if newest.version is None or newest.previous is None or newest.version < newest.previous:
        return None
    return newest.version, newest.previous


def watched_pair(database: sqlite3.Connection, name: str) -> tuple[Release, Release] | None:
    """The champion that is to be watched and the release before it, while a rollback returns to that."""
    pair = predecessor(history(database, name))
    if pair is None:
        return None
    known = {release.version: release for release in releases(database, name)}
    newest, before = (known[version] for version in pair)
    return (newest, before) if "champion" in newest.aliases and "previous" in before.aliases else None


def _is_busy() -> bool:
    """More runnable threads than cores over the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


@dataclass
class ReleaseCounts:
    """Answers of one release since it was first served."""

    answers: int = 0
    errors: int = 0
    slow: int = 0
    complaints: int = 0


@dataclass(eq=False)
class Watch:
    """`roll_back(label, reason)` is called once for a champion that is worse, and again at a later bad answer where the
    store could not be written. It may be slow, so it has a thread; so has who saves the counts."""

    roll_back: Callable[[str, str], None]
    open_database: Callable[[], sqlite3.Connection]
    busy: Callable[[], bool] = _is_busy
    tallies: dict[str, ReleaseCounts] = field(default_factory=dict)
    _champions: dict[str, str] = field(default_factory=dict)
    _before: dict[str, str] = field(default_factory=dict)
    _alarms: dict[str, dict[str, Alarm]] = field(default_factory=dict)
    _complained: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _speeds: dict[str, deque[float]] = field(default_factory=dict)
    _saved: tuple[float, int] = (-math.inf, 0)  # when, and how many answers and complaints there were

    def load(self) -> None:
        """The counts that an earlier gateway left."""
        database = self.open_database()
        try:
            for release, *counts in database.execute("SELECT release, answers, errors, slow, complaints FROM served"):
                self.tallies[release] = ReleaseCounts(*counts)
        finally:
            database.close()

    def save_now_and_then(self, now_s: float) -> None:
        """What a loop that watches from another process reads, at most `SAVE_EVERY_S` old. `now_s`: monotonic."""
        answers = sum(tally.answers + tally.complaints for tally in list(self.tallies.values()))
        if answers != self._saved[1] and now_s - self._saved[0] >= SAVE_EVERY_S:
            self.save()
            self._saved = now_s, answers

    def save(self) -> None:
        counts = [(name, t.answers, t.errors, t.slow, t.complaints) for name, t in list(self.tallies.items())]
        database = self.open_database()
        try:
            with transaction(database):
                database.executemany("INSERT OR REPLACE INTO served VALUES (?, ?, ?, ?, ?)", counts)
        finally:
            database.close()

    def champions(self, now: Mapping[str, str], previous: Mapping[str, str]) -> None:
        """Who is champion of each name now; `previous`: of each label that is to be watched, the one before it."""
        for name, label in now.items():
            if self._champions.get(name) == label:
                continue
            self._champions[name] = label
            before = previous.get(label)
            if before is None:
                self._alarms.pop(label, None)
                continue
            self._before[label] = before
            known = self.tallies.get(before, ReleaseCounts())
            self._alarms[label] = {
                kind: Alarm(usual_rate(getattr(known, kind), known.answers, FLOORS[kind])) for kind in _KINDS
            }

    def answered(self, label: str, *, error: bool, seconds: float = 0.0, tokens: int = 0) -> None:
        speed = seconds / tokens if tokens >= FEWEST_TOKENS and not self.busy() else None
        slow = speed is not None and self._is_slow(label, speed)
        tally = self.tallies.setdefault(label, ReleaseCounts())
        tally.answers += 1
        tally.errors += error
        tally.slow += slow
        if speed is not None:
            self._speeds.setdefault(label, deque(maxlen=KEPT_SPEEDS)).append(speed)
        self._add(label, errors=error, slow=slow, complaints=False)

    def complained(self, label: str, answer: str) -> None:
        """A thumb down for `answer`, counted once however often it is sent. The answer itself was counted as no
        complaint when it ended; this one more is."""
        if answer in self._complained:
            return
        self._complained[answer] = None
        if len(self._complained) > KEPT_COMPLAINTS:
            self._complained.popitem(last=False)
        self.tallies.setdefault(label, ReleaseCounts()).complaints += 1
        self._add(label, complaints=True)

    def _is_slow(self, label: str, speed: float) -> bool:
        known = self._speeds.get(self._before.get(label, label))
        return known is not None and len(known) >= 20 and speed > SLOW_FACTOR * statistics.median(known)

    def _add(self, label: str, **bad: bool) -> None:
        alarms = self._alarms.get(label, {})
        for kind, value in bad.items():
            if kind not in alarms:
                continue
            alarms[kind].add(value)
            if value and alarms[kind].raised:
                self._raise(label, kind, alarms[kind])
                return

    def _raise(self, label: str, kind: str, alarm: Alarm) -> None:
        alarms = self._alarms.pop(label)
        reason = (
            f"{alarm.bad} of {alarm.answers} answers {WORDS[kind]}; at most {alarm.usual:.1%} was usual with "
            f"{self._before[label]}"
        )

        def roll_back() -> None:
            try:
                self.roll_back(label, reason)
            except (HivetuneError, sqlite3.Error, OSError):  # a full disk, a busy store: the alarm stands
                self._alarms.setdefault(label, alarms)

        threading.Thread(target=roll_back, daemon=True).start()
