"""The watch on a new champion: when its own answers are worse than those of the one before, it asks for a rollback.

Three rates are held against those of the champion before: answers that failed, answers that were slow, and complaints.
They must tell about the release and not about its traffic. An answer is slow when its tokens took more than twice the
median time of the earlier champion in the same traffic: as many answers at once, as long a prompt, as many prompt
tokens of others beside it. The time of the prompt is left out, and nothing is judged while more threads are runnable
than there are cores. Where several clients ask, an alarm must hold without the client that it comes from most. The
counts are kept in hive.db, so that a restarted gateway knows them.

The cycle asks at every look for two more rates, from the captured answers: those that refuse, and those that are
unusually long or short. Each alarm may be asked after every answer and is false in at most 1 % of all lives of an
equally good release, so one of the five is in at most 5 %. Fewer than 20 answers say nothing.
"""

import math
import os
import sqlite3
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from hivetune.base.database import transaction
from hivetune.errors import HivetuneError
from hivetune.release.registry import Move, Release, history, releases

FLOORS = {"errors": 0.02, "slow": 0.10, "complaints": 0.02}
FAULTS = {"errors": "failed", "slow": "took more than twice as long a token", "complaints": "were complained about"}
SLOW_FACTOR = 2.0
MAX_PACES = 500
SAVE_EVERY_S = 10.0
MAX_COMPLAINTS = 10_000
MIN_TOKENS = 8  # of an answer whose speed is judged
MAIN_SHARE = 0.9  # of the answers: who asks for that many is everybody
MIN_PACES = 20  # of the champion before, in the same traffic


def predecessor(moves: Sequence[Move]) -> tuple[int, int] | None:
    """Return the versions of the champion to watch and of the one before it. `moves`: of its name, oldest first.

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
    """Return the champion to watch and the release before it, while a rollback returns to that."""
    pair = predecessor(history(database, name))
    if pair is None:
        return None
    by_version = {release.version: release for release in releases(database, name)}
    newest, before = (by_version[version] for version in pair)
    return (newest, before) if "champion" in newest.aliases and "previous" in before.aliases else None


def _is_busy() -> bool:
    """Return whether more threads were runnable than there are cores, over the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


FALSE_ALARMS = 0.01
MIN_ANSWERS = 20  # ten requests decide nothing, whatever they say
GRID = 64


@dataclass
class Alarm:
    """A test that may be asked after every answer. `usual`: the rate of bad answers that is still acceptable.

    An e-value grows by p / p0 for each bad answer and by (1 - p) / (1 - p0) for each good one, averaged over the rates
    p above p0 (a uniform prior on [p0, 1], on a grid). While the true rate is at most p0 it is a supermartingale that
    starts at 1. By Ville's inequality it ever reaches 1 / alpha with probability at most alpha, however often one looks
    (Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference", Statistical Science 38).
    """

    usual: float
    alpha: float = FALSE_ALARMS
    answers: int = 0
    bad: int = 0

    def add(self, bad: bool) -> None:
        self.answers += 1
        self.bad += bad

    @property
    def evidence(self) -> float:
        """Return the e-value: how much more likely the answers are under a worse rate. Only a bad answer raises it."""
        step = (1 - self.usual) / GRID
        rates = [self.usual + step * (number + 0.5) for number in range(GRID)]
        good = self.answers - self.bad
        logs = [
            self.bad * math.log(rate / self.usual) + good * math.log((1 - rate) / (1 - self.usual)) for rate in rates
        ]
        largest = max(logs)
        return math.exp(min(largest, 700)) * math.fsum(math.exp(log - largest) for log in logs) / GRID

    @property
    def raised(self) -> bool:
        return self.answers >= MIN_ANSWERS and self.evidence >= 1 / self.alpha

    def reason(self, fault: str, before: str) -> str:
        return f"{self.bad} of {self.answers} answers {fault}; at most {self.usual:.1%} was usual with {before}"


def usual_rate(bad: int, answers: int, floor: float) -> float:
    """Return the rate to hold a successor against: the observed one and two standard errors, at least `floor`.

    The centre is Agresti and Coull's (two bad and two good answers added), so that few answers without a bad one do not
    mean "never".
    """
    centre = (bad + 2) / (answers + 4)
    return min(0.5, max(floor, centre + 2 * math.sqrt(centre * (1 - centre) / (answers + 4))))


@dataclass
class ReleaseCounts:
    """The answers of one release since it was first served."""

    answers: int = 0
    errors: int = 0
    slow: int = 0
    complaints: int = 0


@dataclass(eq=False)
class Watch:
    """The counts and alarms of all releases. `roll_back(label, reason)` is called once for a champion that is worse,
    and again at a later bad answer if the store could not be written. It may be slow, so it runs in its own thread."""

    roll_back: Callable[[str, str], None]
    open_database: Callable[[], sqlite3.Connection]
    busy: Callable[[], bool] = _is_busy
    tallies: dict[str, ReleaseCounts] = field(default_factory=dict)
    _champions: dict[str, str] = field(default_factory=dict)
    _before: dict[str, str] = field(default_factory=dict)
    _alarms: dict[str, dict[str, Alarm]] = field(default_factory=dict)
    _complained: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _by_client: dict[str, dict[str, ReleaseCounts]] = field(default_factory=dict)  # of watched releases
    _paces: dict[str, dict[Hashable, deque[float]]] = field(default_factory=dict)  # by release and traffic
    _usual_paces: dict[str, dict[Hashable, float]] = field(default_factory=dict)  # of watched releases: medians
    _saved: tuple[float, int] = (-math.inf, 0)  # when, and how many answers and complaints there were

    def load(self) -> None:
        """Read the counts that an earlier gateway left."""
        with closing(self.open_database()) as database:
            for release, *counts in database.execute("SELECT release, answers, errors, slow, complaints FROM served"):
                self.tallies[release] = ReleaseCounts(*counts)

    def save_now_and_then(self, now_s: float) -> None:
        """Save the counts at most every `SAVE_EVERY_S`, for the cycle's look at them. `now_s`: monotonic."""
        answers = sum(tally.answers + tally.complaints for tally in list(self.tallies.values()))
        if answers != self._saved[1] and now_s - self._saved[0] >= SAVE_EVERY_S:
            self.save()
            self._saved = now_s, answers

    def save(self) -> None:
        counts = [(name, t.answers, t.errors, t.slow, t.complaints) for name, t in list(self.tallies.items())]
        with closing(self.open_database()) as database, transaction(database):
            database.executemany("INSERT OR REPLACE INTO served VALUES (?, ?, ?, ?, ?)", counts)

    def champions(self, now: Mapping[str, str], previous: Mapping[str, str]) -> None:
        """Take note of the present champions. `previous`: for each label to watch, the release before it."""
        for name, label in now.items():
            if self._champions.get(name) == label:
                continue
            self._champions[name] = label
            before = previous.get(label)
            for memory in (self._alarms, self._by_client, self._usual_paces):
                memory.pop(label, None)
            if before is None:
                continue
            self._before[label] = before
            counts = self.tallies.get(before, ReleaseCounts())
            self._alarms[label] = {
                kind: Alarm(usual_rate(getattr(counts, kind), counts.answers, floor)) for kind, floor in FLOORS.items()
            }
            self._by_client[label] = {}
            paces = self._paces.get(before, {}).items()
            self._usual_paces[label] = {
                traffic: statistics.median(values) for traffic, values in paces if len(values) >= MIN_PACES
            }

    def answered(
        self,
        label: str,
        client: str = "",
        *,
        error: bool,
        seconds: float = 0.0,
        tokens: int = 0,
        traffic: Hashable = None,
    ) -> None:
        """Count an answer. `seconds`: of its `tokens`, without the prompt. `traffic`: what else the machine did."""
        slow = False
        if tokens >= MIN_TOKENS and not self.busy():
            pace = seconds / tokens
            usual = self._usual_paces.get(label, {}).get(traffic)
            slow = usual is not None and pace > SLOW_FACTOR * usual
            self._paces.setdefault(label, {}).setdefault(traffic, deque(maxlen=MAX_PACES)).append(pace)
        self._add(label, client, answers=True, errors=error, slow=slow, complaints=False)

    def complained(self, label: str, answer: str, client: str = "") -> None:
        """Count a thumb down for `answer` once. It counted as good before, so this is one more observation."""
        if answer in self._complained:
            return
        self._complained[answer] = None
        if len(self._complained) > MAX_COMPLAINTS:
            self._complained.popitem(last=False)
        self._add(label, client, complaints=True)

    def _add(self, label: str, client: str, *, answers: bool = False, **bad: bool) -> None:
        tallies = [self.tallies.setdefault(label, ReleaseCounts())]
        if label in self._by_client:
            tallies.append(self._by_client[label].setdefault(client, ReleaseCounts()))
        for tally in tallies:
            tally.answers += answers
            for kind, value in bad.items():
                setattr(tally, kind, getattr(tally, kind) + value)
        alarms = self._alarms.get(label, {})
        for kind, value in bad.items():
            if kind not in alarms:
                continue
            alarms[kind].add(value)
            if value and alarms[kind].raised and self._is_everyones(label, kind, alarms[kind]):
                self._raise(label, kind, alarms[kind])
                return

    def _is_everyones(self, label: str, kind: str, alarm: Alarm) -> bool:
        """Return whether an alarm holds without its most frequent client. It waits until the other clients have enough
        answers, unless they hardly send requests."""
        worst = max(self._by_client[label].values(), key=lambda tally: int(getattr(tally, kind)))
        bad = getattr(worst, kind)
        num_worst = worst.answers + (bad if kind == "complaints" else 0)  # a complaint is one look more at its answer
        if num_worst >= MAIN_SHARE * alarm.answers:
            return True
        return Alarm(alarm.usual, alarm.alpha, alarm.answers - num_worst, alarm.bad - bad).raised

    def _raise(self, label: str, kind: str, alarm: Alarm) -> None:
        alarms = self._alarms.pop(label)
        reason = alarm.reason(FAULTS[kind], self._before[label])

        def roll_back() -> None:
            try:
                self.roll_back(label, reason)
            except (HivetuneError, sqlite3.Error, OSError):  # a full disk, a busy store: the alarm stands
                self._alarms.setdefault(label, alarms)

        threading.Thread(target=roll_back, daemon=True).start()
