"""The watch over a new release, as champion or as candidate with a share of the sessions. It requests a rollback if
answers of the release fail, or get complaints, more often than those of the previous release usually did."""

import json
import math
import sqlite3
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from hivetune.base.database import transaction
from hivetune.errors import HivetuneError
from hivetune.release.registry import CROWNED, Release, history, releases, rollback_target

Kind = Literal["errors", "complaints"]
FAULTS: Mapping[Kind, str] = {"errors": "failed", "complaints": "were complained about"}
# The least rate that counts as usual.
FLOOR = 0.02
# Each alarm may be asked after every answer, and is false in at most so many of all watches of an equally good release:
# one of the two is in at most 2 %.
FALSE_ALARMS = 0.01
# Ten requests decide nothing, whatever they say.
MIN_ANSWERS = 20
GRID = 64
SAVE_EVERY_S = 10.0
# Answers that are remembered, so that a thumb that is sent often counts once.
MAX_COMPLAINTS = 10_000
# Of a release that no cycle made.
WATCH_HOURS = 24.0


@dataclass
class Counts:
    """Numbers of answers, of failed answers and of complaints. A complaint is one more judgement of its answer."""

    answers: int = 0
    errors: int = 0
    complaints: int = 0

    def of(self, kind: Kind, begun: "Counts | None" = None) -> tuple[int, int]:
        """Return (number of judged answers since `begun`, number of bad ones among them)."""
        then = begun or Counts()
        answers, complaints = self.answers - then.answers, self.complaints - then.complaints
        return (answers, self.errors - then.errors) if kind == "errors" else (answers + complaints, complaints)


@dataclass(frozen=True)
class Watched:
    """A watched release. `before`: the label of the release to which a rollback returns. `usual`: the highest
    acceptable rates of bad answers; `begun`: the counts of the watched release. Both are those at the beginning of
    the watch."""

    before: str
    usual: Mapping[Kind, float]
    begun: Counts


def evidence(usual: float, answers: int, bad: int) -> float:
    """Return the e-value of `bad` among `answers`: how much likelier they are under a worse rate than `usual`.

    It starts at 1. While the true rate is at most `usual`, the probability that it ever reaches 1 / alpha is at most
    alpha.
    """
    # It grows by p / p0 for each bad answer and by (1 - p) / (1 - p0) for each good one, averaged over the rates p
    # above p0 (a uniform prior on [p0, 1], on a grid). While the true rate is at most p0 it is a supermartingale, so
    # Ville's inequality holds however often one looks (Ramdas et al. 2023, "Game-theoretic statistics and safe
    # anytime-valid inference", Statistical Science 38).
    step = (1 - usual) / GRID
    rates = [usual + step * (number + 0.5) for number in range(GRID)]
    logs = [bad * math.log(rate / usual) + (answers - bad) * math.log((1 - rate) / (1 - usual)) for rate in rates]
    largest = max(logs)
    return math.exp(min(largest, 700)) * math.fsum(math.exp(log - largest) for log in logs) / GRID


def is_raised(usual: float, answers: int, bad: int) -> bool:
    """Return whether the e-value has reached the alarm. Only a bad answer can raise it."""
    # At a rate up to the usual one each of the averaged likelihoods is at most 1, so that nothing need be computed.
    is_worse = answers >= MIN_ANSWERS and bad > usual * answers
    return is_worse and evidence(usual, answers, bad) >= 1 / FALSE_ALARMS


def usual_rate(answers: int, bad: int) -> float:
    """Return the rate that a successor must not exceed: the observed rate plus two standard errors, at least FLOOR."""
    # The centre is Agresti and Coull's (two bad and two good answers added): few answers without a bad one do not mean
    # "never".
    centre = (bad + 2) / (answers + 4)
    return min(0.5, max(FLOOR, centre + 2 * math.sqrt(centre * (1 - centre) / (answers + 4))))


@dataclass(eq=False)
class Watch:
    """The counts of all releases, and the watches. `roll_back(label, reason)` is called once for a worse release, and
    again at its next bad answer if the store could not be written.
    """

    # It may be slow, so it runs in its own thread.
    roll_back: Callable[[str, str], None]
    open_database: Callable[[], sqlite3.Connection]
    tallies: dict[str, Counts] = field(default_factory=dict)
    watches: dict[str, Watched] = field(default_factory=dict)
    _complained: set[str] = field(default_factory=set)
    _raised: set[str] = field(default_factory=set)
    _saved_s: float = -math.inf

    def load(self) -> None:
        """Read the counts and watches that an earlier gateway saved."""
        # The evidence is a function of the counts since a watch began, so a restarted gateway continues it. With 29
        # restarts that each began anew, 12 of 400 watches of an equally good release raised an alarm.
        with closing(self.open_database()) as database:
            for release, text in database.execute("SELECT release, counts FROM served"):
                kept = json.loads(text)
                self.tallies[release] = Counts(*kept["all"])
                if kept["before"]:
                    self.watches[release] = Watched(kept["before"], kept["usual"], Counts(*kept["begun"]))

    def save_now_and_then(self, now_s: float) -> None:
        """Save the counts at most every `SAVE_EVERY_S`. `now_s`: monotonic."""
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self.save()
            self._saved_s = now_s

    def save(self) -> None:
        rows = []
        for label, tally in list(self.tallies.items()):
            watched = self.watches.get(label, Watched("", {}, Counts()))
            kept = {"before": watched.before, "usual": watched.usual, "begun": astuple(watched.begun)}
            rows.append((label, json.dumps({"all": astuple(tally), **kept})))
        with closing(self.open_database()) as database, transaction(database):
            # Only what changed is written, so that a quiet gateway leaves hive.db as it is.
            change = "ON CONFLICT (release) DO UPDATE SET counts = excluded.counts WHERE counts <> excluded.counts"
            database.executemany(f"INSERT INTO served VALUES (?, ?) {change}", rows)

    def keep(self, due: Mapping[str, str]) -> None:
        """Begin the watches in `due` (label -> the previous release), and end all others. If a watched candidate is
        promoted, its watch continues."""
        for label in self.watches.keys() - due.keys():
            del self.watches[label]
        self._raised &= due.keys()
        for label, before in due.items():
            if label in self.watches and self.watches[label].before == before:
                continue
            of_before, own = (self.tallies.setdefault(each, Counts()) for each in (before, label))
            usual = {kind: usual_rate(*of_before.of(kind)) for kind in FAULTS}
            self.watches[label] = Watched(before, usual, replace(own))

    def answered(self, label: str, *, error: bool) -> None:
        """Count an answer of the release `label`, and with `error` a failure."""
        tally = self.tallies.setdefault(label, Counts())
        tally.answers += 1
        tally.errors += error
        if error:
            self._look(label, "errors")

    def complained(self, label: str, answer: str) -> None:
        """Count a thumb down for `answer` once."""
        # The answer counted as good before, so this is one more observation.
        if answer in self._complained:
            return
        if len(self._complained) >= MAX_COMPLAINTS:
            self._complained.clear()
        self._complained.add(answer)
        self.tallies.setdefault(label, Counts()).complaints += 1
        self._look(label, "complaints")

    def _look(self, label: str, kind: Kind) -> None:
        """Ask for a rollback if the alarm of this kind is raised."""
        watched = self.watches.get(label)
        if watched is None or label in self._raised:
            return
        answers, bad = self.tallies[label].of(kind, watched.begun)
        usual = watched.usual[kind]
        if not is_raised(usual, answers, bad):
            return
        self._raised.add(label)
        reason = f"{bad} of {answers} answers {FAULTS[kind]}; at most {usual:.1%} was usual with {watched.before}"

        def roll_back() -> None:
            try:
                self.roll_back(label, reason)
            # A full disk, a busy store: the next bad answer asks again.
            except (HivetuneError, sqlite3.Error, OSError):
                self._raised.discard(label)

        threading.Thread(target=roll_back, daemon=True).start()


def due_watches(database: sqlite3.Connection, name: str, *, canary: bool, now: float) -> dict[str, str]:
    """Return the releases of a name to watch now, as label -> label of the previous release: the champion for the hours
    set in its cycle, and with `canary` the candidate. A first champion, and one that a rollback brought back, are not
    watched.
    """
    due: dict[str, str] = {}
    all_releases = releases(database, name)
    champion = next((release for release in all_releases if "champion" in release.aliases), None)
    if champion is None:
        return due
    for release in all_releases if canary else ():
        # As for the share of the sessions (route.py): the gate said deploy.
        if "candidate" in release.aliases and release.verdict == "deploy" and not release.withdrawn:
            due[release.label] = champion.label
    moves = history(database, name)
    newest = next(move for move in reversed(moves) if move.action in CROWNED)
    before = rollback_target(database, name)
    # A release that was returned to is not held against an older one: one rollback never leads to the next.
    if newest.action == "returned" or before is None or champion.version < before.version:
        return due
    if now < newest.time + 3600 * watch_hours(database, champion):
        due[champion.label] = before.label
    return due


def watch_hours(database: sqlite3.Connection, release: Release) -> float:
    """Return the number of hours for which a new champion is watched: `cycle.watch` of the cycle that made it."""
    row = database.execute(
        "SELECT json_extract(config, '$.cycle.watch') FROM cycles WHERE name = ? AND ? LIKE '%/' || id || '/run'",
        (release.name, release.run),
    ).fetchone()
    return WATCH_HOURS if row is None or row[0] is None else float(row[0])
