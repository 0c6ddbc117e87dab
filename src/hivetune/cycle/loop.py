"""The loop of the cycle: look, then open a cycle, continue the open one, or wait. One for each name."""

import errno
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Literal

from hivetune.base.database import open_database
from hivetune.base.disk import FULL_DISK, home, lock
from hivetune.base.journal import Journal
from hivetune.base.private import make_folder
from hivetune.config import RunConfig
from hivetune.cycle.domains import Domain, domain_config, domains_of, write_domain
from hivetune.cycle.notify import Notice, NoticeKind, send_notice
from hivetune.cycle.record import (
    JOURNAL,
    NOW,
    PAUSED,
    CycleEnd,
    CycleRow,
    OpenedFor,
    begin_cycle,
    begin_station,
    cycles_of,
    fail_station,
    gate_of,
    loop_folder,
    newly_rolled_back,
    release_of,
)
from hivetune.cycle.rows import LookCache, RowsNow, cycle_id, read_rows_now
from hivetune.cycle.stations import OverBudget, WindowEnded, Work, close_cycle, run_cycle, settings_then
from hivetune.cycle.window import Permission, allowed_now, parse_window
from hivetune.data.files.find import refuse_read_once
from hivetune.data.intake.collect import Collected, collect, parse_sources
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, MachineNotFit, Stopped, UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.models.fetch import fetch_model
from hivetune.records import Progress, silent
from hivetune.release.registry import champion_of, check_release_name, desired, forgotten_rows
from hivetune.serve.capture import SOURCE

UNWRITABLE = (*FULL_DISK, errno.EROFS)  # errors of a disk that a person or time mends
FAILURES = (HivetuneError, OSError, sqlite3.OperationalError)
LISTEN_EVERY_S = 0.5
SILENT_S = 10.0  # after which a source that brings nothing and does not end is left for the next look
LOOK_AGAIN_S = 60.0  # a wait for something that has no time of its own ends with the next look
MAX_FAILURES = 3  # of one station in a row; then the cycle is closed
RETRY_S = 120.0  # after a failed station
COOL_S = 86_400.0  # after a failed cycle: what failed three times costs at most one training a day
MIN_WINDOW_S = 60.0  # a worker needs a third of it to start
_NOTICES: dict[CycleEnd, NoticeKind] = {
    "promoted": "promote",
    "ready": "ask",
    "rolled_back": "rollback",
    "failed": "stuck",
}


@dataclass(frozen=True)
class Look:
    """What the loop saw, and what it does now, with its reason. `again_at`: the end of a wait, seconds since 1970.
    `champion`: the release that is served, None before the first."""

    do: Literal["wait", "open", "continue"]
    reason: str
    again_at: float = 0.0
    champion: str | None = None
    open: CycleRow | None = None
    opens_for: OpenedFor = "rows"
    rows: RowsNow = field(default_factory=RowsNow)
    allowed: Permission = field(default_factory=Permission)

    def waits(self, reason: str, until: float | None = None) -> "Look":
        """Return a wait, which never ends in the past: a clock may have been set back."""
        return replace(self, do="wait", reason=reason, again_at=max(until or 0.0, self.again_at))


@dataclass
class Listener:
    """The output of the loop: a line of words, and a progress bar by its label."""

    say: Callable[[str], None] = lambda words: None
    progress: Callable[[str], Progress] = lambda label: silent


def look(config: RunConfig, name: str, cache: LookCache, now: float, domain: Domain | None = None) -> Look:
    """Return what the loop does next. Changes nothing but the snapshot of the rows, which is found or made. `domain`:
    its cycle is looked at, with the rows that were read for its name. Raises Busy and DoesNotFit where hive.db can't
    be used now, HivetuneError for a damaged champion."""
    leader = name if domain is None else domain.of
    folder = loop_folder(leader)
    with closing(open_database()) as database:
        champion, cycles = champion_of(database, leader), cycles_of(database, name)
        label = None if champion is None else champion.label
        opened = next((cycle for cycle in cycles if cycle.closed is None), None)
        asked = (folder / NOW).exists() if opened is None else opened.opened_for == "request"
        allowed = allowed_now(parse_window(config.cycle.window), now, asked=asked)
        seen = Look("wait", "", now + LOOK_AGAIN_S, label, opened, allowed=allowed)
        if (folder / PAUSED).exists():
            return seen.waits("paused by a person")
        if opened is not None:
            return _look_at_open(seen, opened, now)
        rows = cache.rows if domain is not None else read_rows_now(config, database, name, champion, cache)
        forgotten = 0 if champion is None else forgotten_rows(database, champion.snapshot)
    seen = replace(seen, rows=rows)
    if cycles and cycles[-1].end == "failed" and not asked:
        failed_at = cycles[-1].closed or 0.0
        if failed_at <= now < failed_at + COOL_S:
            return seen.waits(f"cycle {cycles[-1].id} failed: {cycles[-1].reason}", failed_at + COOL_S)
    ended = [cycle for cycle in cycles if cycle.end != "failed"]
    opens_for: OpenedFor = "request" if asked else "rows"
    if domain is not None:
        if any(cycle.champion == label for cycle in ended):
            return seen.waits(f"{name} follows the next promotion of {leader}")
        reason = f"{name}: {domain.value!r} has enough rows, and {label} is new"
    elif forgotten and not any(cycle.opened_for == "rebuild" and cycle.champion == label for cycle in ended):
        reason, opens_for = f"{label} holds {forgotten} forgotten rows", "rebuild"
    elif lacks := _lacks(config, rows, 1 if asked else config.cycle.after_rows):
        return seen.waits(lacks)
    elif rows.snapshot is not None and cycle_id(rows.snapshot, config, champion) in {cycle.id for cycle in ended}:
        return seen.waits("a cycle of these rows, settings and champion is closed already")
    else:
        reason = "asked for by a person" if asked else f"{rows.groups} new groups, {allowed.reason}"
    if rows.snapshot is None:
        return seen.waits(f"the rows can't be used: {rows.problem}")
    if not allowed.now:
        return seen.waits(allowed.reason, allowed.again)
    if champion is not None:
        champion.check()  # now, not after hours of training: the candidate is compared with it
    return replace(seen, do="open", reason=reason, again_at=0.0, opens_for=opens_for)


def _look_at_open(seen: Look, cycle: CycleRow, now: float) -> Look:
    """Return whether the open cycle continues now."""
    if cycle.failed_at is not None:
        retry_at = cycle.failed_at + RETRY_S
        if cycle.failed_at <= now < retry_at:
            return seen.waits(f"{cycle.station} failed and is tried again: {cycle.words}", retry_at)
    if not seen.allowed.now:
        return seen.waits(f"cycle {cycle.id}: {seen.allowed.reason}", seen.allowed.again)
    if seen.allowed.until is not None and seen.allowed.until - now < MIN_WINDOW_S:
        return seen.waits(f"cycle {cycle.id}: what is left of the window is too short")
    return replace(seen, do="continue", reason=f"cycle {cycle.id} is open", again_at=0.0)


def _lacks(config: RunConfig, rows: RowsNow, enough: int) -> str:
    """Return what a new cycle is waiting for, without a known time, or ""."""
    if rows.problem:
        return f"the rows can't be used: {rows.problem}"
    if rows.groups < enough:
        return f"{rows.groups} of {enough} new groups"
    budget = config.cycle.hours
    if budget is not None and rows.hours is not None and rows.hours > budget:
        return f"the plan: {rows.hours:.3g} hours of training are above the budget of {budget:g}"
    if shutil.disk_usage(home()).free < rows.disk_bytes:
        # Without what is free: it moves, and each wait that reads otherwise is a line of the journal on that disk.
        return f"a cycle needs {rows.disk_bytes >> 20:,} MiB, the disk has less"
    return ""


@dataclass
class Loop:
    """The loop of one config. Make it with `opened`, which holds its lock. `failure`: of the newest station that was
    tried, None after a success."""

    config: RunConfig
    name: str
    journal: Journal
    listener: Listener
    cache: LookCache = field(default_factory=LookCache)
    clock: Callable[[], float] = time.time
    failure: HivetuneError | None = None
    _told: dict[str, str] = field(default_factory=dict)  # by topic what was said last: nothing is said twice in a row

    def run(self, *, once: bool = False) -> Look:
        """Run until told to stop, or with `once` until there is nothing to do now. Returns the last look."""
        while True:
            wait_s = LOOK_AGAIN_S
            try:
                seen = self.step()
                self._told.pop("look", None)
                if seen.do == "wait" and once:
                    return seen
                wait_s = max(0.0, min(seen.again_at - self.clock(), LOOK_AGAIN_S)) if seen.do == "wait" else 0.0
            except FAILURES as error:
                is_bug = isinstance(error, OSError) and error.errno not in UNWRITABLE
                if isinstance(error, Stopped) or once or is_bug:
                    raise
                self._report("look", f"cannot read its state and tries again: {error}")
                # What is damaged needs a person; a full disk, a lock and a machine that is busy end by themselves.
                if isinstance(error, HivetuneError) and not isinstance(error, Busy | DoesNotFit | MachineNotFit):
                    self._send("stuck", self.name, str(error).partition("\n")[0])
            self._sleep(wait_s)

    def step(self) -> Look:
        """Look once, and do what was decided: for the name, else for the first of its domains that needs something."""
        self._collect()
        with closing(open_database()) as database:
            for release in newly_rolled_back(database, self.name):
                self._send("rollback", release.label, release.withdrawn)
        seen = self._do(self.config, None)
        if seen.do != "wait" or self.config.cycle.by is None or seen.rows.snapshot is None:
            return seen
        with closing(open_database()) as database:
            champion = champion_of(database, self.name)
            served = {name for name in desired(database) if name.startswith(f"{self.name}-")}
        domains = [] if champion is None else domains_of(self.config, seen.rows.snapshot.pool())
        if champion is not None and (gone := served - {domain.name for domain in domains}):
            names = ", ".join(sorted(gone))
            self._report("domains", f"{names}: too few rows are left to train again; what is served stays")
        for domain in domains:
            assert champion is not None, "without one there are no domains"
            found = self._do(domain_config(self.config, domain, champion), domain)
            if found.do != "wait":
                return found
        return seen

    def _do(self, config: RunConfig, domain: Domain | None) -> Look:
        """Look at one name, write the decision down, and do it."""
        name = self.name if domain is None else domain.name
        seen = look(config, name, self.cache, self.clock(), domain)
        if seen.do != "wait" or self._told.get(name) != seen.reason:
            self._told[name] = seen.reason
            decided = {"do": seen.do, "reason": seen.reason, "again_at": seen.again_at}
            self.journal.append("decision", now=self.clock(), **decided)
            self.listener.say(f"{'waits' if seen.do == 'wait' else seen.do}: {seen.reason}")
        if seen.do == "open":
            self._open(config, name, seen, domain)
        elif seen.do == "continue" and seen.open is not None:
            self._continue(seen.open)
        return seen

    def _open(self, config: RunConfig, name: str, seen: Look, domain: Domain | None) -> None:
        """Open a cycle: its settings are written down. The same rows, settings and champion are the same cycle."""
        assert seen.rows.snapshot is not None, "looked at"
        with closing(open_database()) as database:
            champion = champion_of(database, self.name)
            if champion is not None and domain is None:
                freeze_wins(champion)  # its right answers are questions that no later candidate may lose
            cycle = CycleRow(
                id=cycle_id(seen.rows.snapshot, config, champion),
                name=name,
                opened=self.clock(),
                opened_for=seen.opens_for,
                config=config.model_dump(mode="json", exclude={"cycle": {"notify"}}),  # it goes into releases
                champion=None if champion is None else champion.label,
            )
            make_folder(cycle.folder)
            if domain is not None:
                write_domain(cycle, domain)
            begin_cycle(database, cycle)
        (loop_folder(self.name) / NOW).unlink(missing_ok=True)
        self.journal.append("opened", cycle=cycle.id, opened_for=seen.opens_for)

    def _continue(self, cycle: CycleRow) -> None:
        """Continue the cycle to its end, the end of the window, or a failure."""
        work = Work(cycle, settings_then(cycle), partial(self._allowed, cycle), partial(self._station, cycle))
        work.progress = self.listener.progress
        try:
            end, reason = run_cycle(work)
        except WindowEnded:
            return
        except Stopped:
            raise
        except FAILURES as error:
            self._fail(cycle, error)
            return
        self.failure = None
        self._close(cycle, end, reason)

    @contextmanager
    def _station(self, cycle: CycleRow, name: str) -> Iterator[list[str]]:
        """Write the beginning and the end of a station. Yields what is told of it."""
        with closing(open_database()) as database:
            begin_station(database, cycle, name)
        self.journal.append("begin", cycle=cycle.id, station=name)
        self.journal.sync()
        self.listener.say(name)
        words: list[str] = []
        outcome = "failed"
        try:
            yield words
            outcome = "done"
            self._told.clear()  # what is told after a success is news again
        except (WindowEnded, Stopped) as error:
            outcome, words = ("paused" if isinstance(error, WindowEnded) else "stopped"), [error.message]
            raise
        except FAILURES as error:
            words = [str(error).partition("\n")[0]]
            raise
        finally:
            with suppress(OSError):  # the station's own error is the one to tell
                self.journal.append("end", cycle=cycle.id, station=name, outcome=outcome, words="; ".join(words))
            self.listener.say(f"{name} {outcome}: {'; '.join(words)}")

    def _fail(self, cycle: CycleRow, error: Exception) -> None:
        """Count a failure. A full disk and another process are waited for; refused rows fail at once."""
        text = str(error).partition("\n")[0]
        is_full = isinstance(error, DoesNotFit) or (isinstance(error, OSError) and error.errno in UNWRITABLE)
        self.failure = error if isinstance(error, HivetuneError) else HivetuneError(text)
        with closing(open_database()) as database:
            counts = not (is_full or isinstance(error, Busy))
            failures = fail_station(database, cycle, text, self.clock(), counts=counts)
        if is_full:
            self._send("disk", self.name, text)
        if isinstance(error, DataRefused | OverBudget) or failures >= MAX_FAILURES:
            self._close(cycle, "failed", text)

    def _close(self, cycle: CycleRow, end: CycleEnd, reason: str) -> None:
        reason = close_cycle(cycle, end, reason, self.clock())
        self.journal.append("closed", cycle=cycle.id, end=end, reason=reason)
        self.listener.say(f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}")
        with closing(open_database()) as database:
            release = release_of(database, cycle)
        if kind := _NOTICES.get(end):
            self._send(kind, cycle.name if release is None else release.label, reason)
        elif end == "refused" and gate_of(cycle).get("verdict") == "abort":
            self._send("worse", cycle.name, reason)

    def _allowed(self, cycle: CycleRow) -> Permission:
        """Return whether work may continue. A person's pause ends it too."""
        if (loop_folder(self.name) / PAUSED).exists():
            return Permission(False, reason="paused by a person")
        window = parse_window(self.config.cycle.window)
        return allowed_now(window, self.clock(), asked=cycle.opened_for == "request")

    def _send(self, kind: NoticeKind, release: str, reason: str) -> None:
        """Send a notice once: a disk that stays full is told once."""
        notice, command = Notice(kind, release, reason), self.config.cycle.notify
        topic = f"notice: {kind} of {release}"
        if not command or self._told.get(topic) == notice.sentence:
            return
        self._told[topic] = notice.sentence
        problem = send_notice(notice, command)
        self.journal.append("notice", kind=kind, problem=problem)
        if problem:
            self.listener.say(f"a notice was not sent: {problem}")

    def _report(self, topic: str, text: str) -> None:
        """Write a problem down, once until it changes or ends (an empty text)."""
        if self._told.get(topic, "") == text:
            return
        self._told[topic] = text
        if text:
            self.listener.say(text)
            with suppress(OSError):  # a full disk is told by the station that needs it
                self.journal.append("problem", words=text)

    def _sleep(self, wait_s: float) -> None:
        """Sleep up to `wait_s`, less when a person speaks (cycle pause, resume, now)."""
        files = [loop_folder(self.name) / word for word in (PAUSED, NOW)]
        before, deadline = [path.exists() for path in files], time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0 and before == [path.exists() for path in files]:
            time.sleep(min(left_s, LISTEN_EVERY_S))

    def _collect(self) -> None:
        """Collect from each source. One that is missing is skipped: the cycle continues with the others' rows."""
        for source in self.config.cycle.sources:
            try:
                problem = _collect_from(source)
            except (HivetuneError, OSError) as error:
                problem = str(error).partition("\n")[0]
            self._report(f"collect {source}", problem and f"nothing is collected from one source: {problem}")
        paths = self.config.data.path
        if "store" not in ([paths] if isinstance(paths, str) else paths) and (captured := _captured_answers()):
            text = f"{captured} rated answers that the gateway captured are not learned: data.path has no `store`"
            self._report("store", text)


def _collect_from(source: str) -> str:
    """Collect from a source; return why nothing comes from a server that is gone, or ""."""
    stop, delivered, changed = Event(), 0, time.monotonic()

    def give_up_when_silent(collected: Collected) -> None:
        nonlocal delivered, changed
        if (total := collected.total().delivered) != delivered:
            delivered, changed = total, time.monotonic()
        elif time.monotonic() - changed > SILENT_S:
            stop.set()

    readers = parse_sources([source])
    collect(readers, follow=False, stop=stop, tick=give_up_when_silent)
    notes = [note for reader in readers for note in reader.notes]
    return ["no answer", *notes][-1] if stop.is_set() else ""


def _captured_answers() -> int:
    query = "SELECT count(*) FROM interactions WHERE source LIKE ? AND feedback IS NOT NULL"
    with closing(open_database()) as database:
        return int(database.execute(query, (f"{SOURCE}:%",)).fetchone()[0])


@contextmanager
def opened(config: RunConfig, listener: Listener) -> Iterator[Loop]:
    """Yield the loop of this config, which no other process may run meanwhile. Raises Busy, UsageError."""
    name = release_name(config)
    folder = loop_folder(name)
    with ExitStack() as stack:
        stack.enter_context(lock(folder, hint="see what it does: hivetune cycle status"))
        journal = stack.enter_context(Journal(folder / JOURNAL))
        fetch_model(config.model, listener.progress("preparing the model"), config.template)
        yield Loop(config, name, journal, listener)


def release_name(config: RunConfig) -> str:
    """Return the name of the releases of a config. Raises UsageError for a config whose cycle can't run."""
    parse_window(config.cycle.window)
    parse_sources(config.cycle.sources)
    refuse_read_once(config.data.path)
    if config.cycle.name is None:
        raise UsageError("'cycle.name' is missing: the name of the releases", hint="cycle: {name: helpdesk}")
    return check_release_name(config.cycle.name)
