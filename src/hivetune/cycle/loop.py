"""The loop of the cycle: look, and restore the champion, open a cycle, continue the open one, or wait. One for each
name."""

import errno
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Literal

from hivetune.base.database import open_database
from hivetune.base.disk import FULL_DISK, home, lock, path_to_store
from hivetune.base.journal import Journal
from hivetune.base.private import make_folder
from hivetune.config import RunConfig
from hivetune.cycle.domains import Domain, domain_config, domains_of, write_domain
from hivetune.cycle.notify import Notice, send_notice
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
    end_station,
    fail_station,
    failed_in_a_row,
    gate_of,
    loop_folder,
    newly_rolled_back,
    release_of,
)
from hivetune.cycle.rows import LookCache, RowsNow, cycle_id, read_rows_now
from hivetune.cycle.stations import BY, OverBudget, WindowEnded, Work, close_cycle, run_cycle, settings_then
from hivetune.cycle.window import Permission, allowed_now, local_zone, parse_window
from hivetune.data.files.find import refuse_read_once
from hivetune.data.intake.collect import Collected, collect
from hivetune.data.intake.sources.parse import parse_sources
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, MachineNotFit, Stopped, UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.models.fetch import fetch_model
from hivetune.records import Progress, silent
from hivetune.release.registry import (
    Release,
    champion_of,
    check_release_name,
    desired,
    forgotten_rows,
    rollback,
)
from hivetune.serve.capture import SOURCE
from hivetune.serve.register import register_run
from hivetune.serve.route import load_release, wanted

UNWRITABLE = (*FULL_DISK, errno.EROFS)  # errors of a disk that a person or time mends
LISTEN_EVERY_S = 0.5
SILENT_S = 10.0  # after which a source that brings nothing and does not end is left for the next look
LOOK_AGAIN_S = 60.0  # a wait for something that has no time of its own ends with the next look
MAX_FAILURES = 3  # of one station in a row; then the cycle is closed
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 3600.0
FIRST_COOL_S, MAX_COOL_S = 3600.0, 7 * 86400.0
MIN_WINDOW_S = 60.0  # a worker needs a third of it to start

Doing = Literal["wait", "restore", "open", "continue"]


@dataclass(frozen=True)
class Look:
    """What the loop saw, and what it does now, with its reason. `again_at`: the end of a wait, seconds since 1970.

    `champion`: the release that should be served, None before the first. `problem`: why it can't be. `forgotten`: rows
    of the champion that were forgotten since. `failed_cycles`: the newest ones, in a row.
    """

    do: Doing
    reason: str
    again_at: float = 0.0
    champion: str | None = None
    problem: str = ""
    open: CycleRow | None = None
    rows: RowsNow = field(default_factory=RowsNow)
    forgotten: int = 0
    failed_cycles: int = 0
    allowed: Permission = field(default_factory=Permission)


@dataclass
class Listener:
    """The output of the loop: a line of words, and a progress bar by its label."""

    say: Callable[[str], None] = lambda words: None
    progress: Callable[[str], Progress] = lambda label: silent


def look(config: RunConfig, name: str, cache: LookCache, now: float) -> Look:
    """Return what the loop does next. Changes nothing but the snapshot of the rows, which is found or made. Raises Busy
    and DoesNotFit where hive.db can't be used now."""
    folder = loop_folder(name)
    paused, asked = (folder / PAUSED).exists(), (folder / NOW).exists()
    with closing(open_database()) as database:
        wants = desired(database).get(name)
        label = None if wants is None else f"{name}@{wants}"
        if paused:
            return Look("wait", "paused by a person", now + LOOK_AGAIN_S, label)
        if wants is not None:
            state = wanted(database, (name,))
            if state.champions.get(name) != label:
                problem = "; ".join(state.problems)
                return Look("restore", f"{label} can't be served: {problem}", champion=label, problem=problem)
        cycles = cycles_of(database, name)
        opened = next((cycle for cycle in cycles if cycle.closed is None), None)
        if opened is not None:
            return _of_open(config, opened, now, label)
        champion = champion_of(database, name)
        forgotten = 0 if champion is None else forgotten_rows(database, champion.snapshot)
        rows = read_rows_now(config, database, name, champion, cache)
    allowed = allowed_at(config, now, asked=asked)
    failed_cycles, failed_at = failed_in_a_row(cycles)
    same = cycle_id(rows.snapshot, config, champion) if rows.snapshot is not None else ""
    known = next((cycle.end != "failed" for cycle in cycles if cycle.id == same), False)
    seen = Look("wait", "", now + LOOK_AGAIN_S, label, "", None, rows, forgotten, failed_cycles, allowed)
    if forgotten and not known:
        return _changed(seen, "open", f"{label} holds {forgotten} forgotten rows")
    cool_at = failed_at + doubled(FIRST_COOL_S, failed_cycles, MAX_COOL_S)
    if failed_cycles and not asked and failed_at <= now < cool_at:
        return _changed(seen, "wait", f"{failed_cycles} cycles failed in a row", cool_at)
    if reason := _lacks(config, rows, known=known, enough=1 if asked else config.cycle.after_rows):
        return _changed(seen, "wait", reason, now + LOOK_AGAIN_S)
    if not allowed.now:
        return _changed(seen, "wait", allowed.reason, later(allowed.again, now))
    return _changed(seen, "open", "asked for by a person" if asked else f"{rows.groups} new groups, {allowed.reason}")


def look_at_domain(config: RunConfig, domain: Domain, champion: Release, shared: Look, now: float) -> Look:
    """Return what a domain's cycle does next: one after each promotion of the shared champion. `shared`: what was seen
    of all rows."""
    with closing(open_database()) as database:
        cycles = cycles_of(database, domain.name)
    opened = next((cycle for cycle in cycles if cycle.closed is None), None)
    if opened is not None:
        return _of_open(config, opened, now, champion.label)
    failed_cycles, failed_at = failed_in_a_row(cycles)
    again_at = failed_at + doubled(FIRST_COOL_S, failed_cycles, MAX_COOL_S)
    seen = _changed(shared, "wait", f"{domain.name} follows the next promotion of {domain.of}", now + LOOK_AGAIN_S)
    if any(cycle.champion == champion.label and cycle.end != "failed" for cycle in cycles):
        return seen
    if failed_cycles and now < again_at:
        return _changed(seen, "wait", f"{failed_cycles} cycles of {domain.name} failed in a row", again_at)
    if not shared.allowed.now:
        return _changed(seen, "wait", shared.allowed.reason, later(shared.allowed.again, now))
    return _changed(seen, "open", f"{domain.name}: {domain.value!r} has enough rows, and {champion.label} is new")


def _changed(seen: Look, do: Doing, reason: str, again_at: float = 0.0) -> Look:
    return Look(**{**vars(seen), "do": do, "reason": reason, "again_at": again_at})


def _of_open(config: RunConfig, cycle: CycleRow, now: float, label: str | None) -> Look:
    """Return whether the open cycle continues now."""
    allowed = allowed_at(config, now, asked=cycle.opened_for == "request")

    def wait(reason: str, until: float | None) -> Look:
        return Look("wait", reason, later(until, now), label, open=cycle, allowed=allowed)

    if cycle.failed_at is not None:
        retry_at = cycle.failed_at + doubled(FIRST_RETRY_S, max(1, cycle.failures), MAX_RETRY_S)
        if cycle.failures < MAX_FAILURES and cycle.failed_at <= now < retry_at:
            return wait(f"{cycle.station} failed and is tried again: {cycle.words}", retry_at)
    if not allowed.now:
        return wait(f"cycle {cycle.id}: {allowed.reason}", allowed.again)
    if allowed.until is not None and allowed.until - now < MIN_WINDOW_S:
        return wait(f"cycle {cycle.id}: what is left of the window is too short", allowed.until)
    return Look("continue", f"cycle {cycle.id} is open", champion=label, open=cycle, allowed=allowed)


def _lacks(config: RunConfig, rows: RowsNow, *, known: bool, enough: int) -> str:
    """Return what a new cycle is waiting for, without a known time, or ""."""
    if rows.problem:
        return f"the rows can't be used: {rows.problem}"
    if known:
        return "a cycle of these rows, settings and champion is closed already"
    if rows.groups < enough:
        return f"{rows.groups} of {enough} new groups"
    budget = config.cycle.hours
    if budget is not None and rows.hours is not None and rows.hours > budget:
        return f"the plan: {rows.hours:.3g} hours of training are above the budget of {budget:g}"
    if shutil.disk_usage(home()).free < rows.disk_bytes:
        # Without what is free: it moves, and each wait that reads otherwise is a line of the journal on that disk.
        return f"a cycle needs {rows.disk_bytes >> 20:,} MiB, the disk has less"
    return ""


def allowed_at(config: RunConfig, now: float, *, asked: bool = False) -> Permission:
    """Return what the window says."""
    return allowed_now(parse_window(config.cycle.window), now, local_zone(), asked=asked)


def doubled(first_s: float, times: int, longest_s: float) -> float:
    """Return the pause after `times` failures: doubled with each."""
    return min(longest_s, first_s * 2.0 ** min(times - 1, 32))


def later(moment: float | None, now: float) -> float:
    """Return the end of a wait, never in the past: a clock may have been set back."""
    return moment if moment is not None and moment > now else now + LOOK_AGAIN_S


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
    domain: Domain | None = None
    _domains: dict[str, "Loop"] = field(default_factory=dict)
    _last_wait: str = ""
    _problems: dict[str, str] = field(default_factory=dict)  # what can't be done now, and why: said once
    _sent: set[str] = field(default_factory=set)  # sentences of notices, since something succeeded

    def run(self, *, once: bool = False) -> Look:
        """Run until told to stop, or with `once` until there is nothing to do now. Returns the last look."""
        while True:
            try:
                seen = self.step()
                self._problems.pop("look", None)
                wait_s = max(0.0, min(seen.again_at - self.clock(), LOOK_AGAIN_S)) if seen.do == "wait" else 0.0
            except (HivetuneError, OSError, sqlite3.OperationalError) as error:
                if isinstance(error, Stopped) or once or not _passes(error):
                    raise
                self._report_once("look", f"cannot read its state and tries again: {error}")
                if isinstance(error, UsageError):  # what is damaged needs a person; other causes end by themselves
                    self._send(Notice("stuck", self.name, str(error).partition("\n")[0]))
                seen, wait_s = None, LOOK_AGAIN_S
            if once and seen is not None and seen.do == "wait":
                return seen
            self._sleep(wait_s)

    def step(self) -> Look:
        """Look once, and do what was decided."""
        self._collect()
        with closing(open_database()) as database:
            rolled_back = newly_rolled_back(database, self.name)
        for release, reason in rolled_back:
            self._send(Notice("rollback", release.label, reason))
        seen = look(self.config, self.name, self.cache, self.clock())
        self._do(seen)
        if seen.do == "wait" and self.config.cycle.by is not None and seen.rows.snapshot is not None:
            return self._look_at_domains(seen)
        return seen

    def _look_at_domains(self, seen: Look) -> Look:
        """Do what the first domain needs that needs something. Those without enough rows keep their releases."""
        assert seen.rows.snapshot is not None, "looked at"
        with closing(open_database()) as database:
            champion = champion_of(database, self.name)
            served = {name for name in desired(database) if name.startswith(f"{self.name}-")}
        if champion is None:
            return seen
        domains = domains_of(self.config, seen.rows.snapshot.pool())
        if gone := served - {domain.name for domain in domains}:
            names = ", ".join(sorted(gone))
            self._report_once("domains", f"{names}: too few rows are left to train again; what is served stays")
        for domain in domains:
            config = domain_config(self.config, domain, champion)
            loop = self._domains.setdefault(domain.name, Loop(config, domain.name, self.journal, self.listener))
            loop.config, loop.domain, loop.clock = config, domain, self.clock
            found = look_at_domain(config, domain, champion, seen, self.clock())
            loop._do(found)
            if found.do != "wait":
                self.failure = loop.failure
                return found
        return seen

    def _do(self, seen: Look) -> None:
        """Write a decision down and do it."""
        if seen.do != "wait" or seen.reason != self._last_wait:
            self._last_wait = seen.reason if seen.do == "wait" else ""
            decided = {"do": seen.do, "reason": seen.reason, "again_at": seen.again_at}
            self.journal.append("decision", now=self.clock(), **decided)
            self.listener.say(f"{'waits' if seen.do == 'wait' else seen.do}: {seen.reason}")
        if seen.do == "restore":
            self._restore(seen)
        elif seen.do == "open":
            self._open(seen)
        elif seen.do == "continue":
            assert seen.open is not None
            self._continue(seen.open)

    def _open(self, seen: Look) -> None:
        """Open a cycle: its rows and settings are written down. The same rows, settings and champion are the same."""
        assert seen.rows.snapshot is not None, "looked at"
        request = loop_folder(self.name) / NOW
        opened_for: OpenedFor = "rebuild" if seen.forgotten else "request" if request.exists() else "rows"
        with closing(open_database()) as database:
            champion = champion_of(database, self.name if self.domain is None else self.domain.of)
            if champion is not None and self.domain is None:
                freeze_wins(champion)  # its right answers are questions that no later candidate may lose
            cycle = CycleRow(
                id=cycle_id(seen.rows.snapshot, self.config, champion),
                name=self.name,
                opened=self.clock(),
                opened_for=opened_for,
                config=self.config.model_dump(mode="json", exclude={"cycle": {"notify"}}),  # it goes into releases
                pool=path_to_store(seen.rows.snapshot.folder),
                champion=None if champion is None else champion.label,
            )
            make_folder(cycle.folder)
            if self.domain is not None:
                write_domain(cycle, self.domain)
            begin_cycle(database, cycle)
        request.unlink(missing_ok=True)
        self.journal.append("opened", cycle=cycle.id, opened_for=opened_for)

    def _continue(self, cycle: CycleRow) -> None:
        """Continue the cycle to its end, the end of the window, or a failure."""
        config = settings_then(cycle)
        if cycle.failures >= MAX_FAILURES:
            self._close(cycle, "failed", f"{cycle.station} failed: {cycle.words}")
            return
        work = Work(
            cycle,
            config,
            lambda: self._allowed(cycle),
            lambda name: self._station(cycle, name),
            self.listener.progress,
        )
        try:
            end, reason = run_cycle(work)
        except WindowEnded:
            return
        except Stopped:
            raise
        except (HivetuneError, OSError, sqlite3.OperationalError) as error:
            self._fail(cycle, error)
        else:
            self.failure = None
            self._close(cycle, end, reason)

    @contextmanager
    def _station(self, cycle: CycleRow, name: str) -> Iterator[list[str]]:
        """Write the beginning and the end of a station. Yields what is told of it."""
        with closing(open_database()) as database:
            begin_station(database, cycle, name, self.clock())
        self.journal.append("begin", cycle=cycle.id, station=name)
        self.journal.sync()
        self.listener.say(name)
        words: list[str] = []
        outcome = "failed"
        try:
            yield words
            outcome = "done"
            self._sent.clear()
        except WindowEnded as error:
            outcome, words = "paused", [error.message]
            raise
        except Stopped:
            outcome = "stopped"
            raise
        except (HivetuneError, OSError, sqlite3.OperationalError) as error:
            words = [str(error).partition("\n")[0]]
            raise
        finally:
            with suppress(OSError):
                self.journal.append("end", cycle=cycle.id, station=name, outcome=outcome, words="; ".join(words))
            self.listener.say(f"{name} {outcome}: {'; '.join(words)}")
            if outcome != "failed":
                with closing(open_database()) as database:
                    end_station(database, cycle)

    def _fail(self, cycle: CycleRow, error: Exception) -> None:
        """Count a failure. A full disk and another process are waited for; refused rows fail at once."""
        text = str(error).partition("\n")[0]
        is_full = isinstance(error, DoesNotFit) or (isinstance(error, OSError) and error.errno in UNWRITABLE)
        counts = not (is_full or isinstance(error, Busy))
        self.failure = error if isinstance(error, HivetuneError) else HivetuneError(text)
        with closing(open_database()) as database:
            failures = fail_station(database, cycle, text, self.clock(), counts=counts)
        if is_full:
            self._send(Notice("disk", self.name, text))
        if isinstance(error, DataRefused | OverBudget) or failures >= MAX_FAILURES:
            self._close(cycle, "failed", text)

    def _close(self, cycle: CycleRow, end: CycleEnd, reason: str) -> None:
        reason = close_cycle(cycle, end, reason, self.clock())
        self.journal.append("closed", cycle=cycle.id, end=end, reason=reason)
        self.listener.say(f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}")
        with closing(open_database()) as database:
            release = release_of(database, cycle)
        label = self.name if release is None else release.label
        if end == "promoted":
            self._send(Notice("promote", label, reason))
        elif end == "ready":
            self._send(Notice("ask", label, reason))
        elif end == "rolled_back":
            self._send(Notice("rollback", label, reason))
        elif end == "failed":
            self._send(Notice("stuck", self.name, reason))
        elif end == "refused" and gate_of(cycle).get("verdict") == "abort":
            self._send(Notice("worse", self.name, reason))

    def _restore(self, seen: Look) -> None:
        """Restore the champion's files from its run. If that is damaged too, return to the champion before."""
        with closing(open_database()) as database:
            champion = champion_of(database, self.name)
        if champion is None:
            raise UsageError(
                f"{self.name} has no champion to restore", hint=f"run hivetune promote {self.name}@VERSION"
            )
        try:
            restored, _ = register_run(Path(champion.run), champion.name)
            if restored.label != champion.label:
                raise UsageError(f"its run now has another adapter: {champion.run}")
            restored.check()
        except (Busy, DoesNotFit, MachineNotFit):  # says nothing of the champion: it is restored when that is mended
            raise
        except HivetuneError as error:
            with closing(open_database()) as database:
                back, _ = rollback(database, champion.label, by=BY, reason=f"it is damaged: {error.message}")
                by_cycle = any(
                    (release := release_of(database, cycle)) is not None and release.label == champion.label
                    for cycle in cycles_of(database, self.name)
                )
            if not by_cycle:  # else its cycle is marked at the next look, and told
                self._send(Notice("rollback", champion.label, seen.reason))
            self.journal.append("restored", words=f"{back.label} is the champion again: {champion.label} is damaged")
            return
        load_release(restored)  # whole, and yet without what is served: a person has to know
        self.journal.append("restored", words=f"{restored.label} was restored from its run")

    def _allowed(self, cycle: CycleRow) -> Permission:
        """Return whether work may continue. A person's pause ends it too."""
        if (loop_folder(self.name if self.domain is None else self.domain.of) / PAUSED).exists():
            return Permission(False, reason="paused by a person")
        return allowed_at(self.config, self.clock(), asked=cycle.opened_for == "request")

    def _send(self, notice: Notice) -> None:
        """Send a notice once: a disk that stays full is told once."""
        command = self.config.cycle.notify
        if notice.sentence in self._sent or not command:
            return
        self._sent.add(notice.sentence)
        problem = send_notice(notice, command)
        self.journal.append("notice", kind=notice.kind, problem=problem)
        if problem:
            self.listener.say(f"a notice was not sent: {problem}")

    def _sleep(self, wait_s: float) -> None:
        """Sleep up to `wait_s`, less when a person speaks (cycle pause, resume, now)."""
        folder = loop_folder(self.name)
        before = [(folder / word).exists() for word in (PAUSED, NOW)]
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, LISTEN_EVERY_S))
            if before != [(folder / word).exists() for word in (PAUSED, NOW)]:
                return

    def _collect(self) -> None:
        """Collect from each source. One that is missing is skipped: the cycle continues with the others' rows."""
        for source in self.config.cycle.sources:
            topic = f"collect {source}"
            try:
                problem = self._collect_from(source)
            except (HivetuneError, OSError) as error:
                problem = str(error).partition("\n")[0]
            if problem:
                self._report_once(topic, f"nothing is collected from one source: {problem}")
            else:
                self._problems.pop(topic, None)
        paths = self.config.data.path
        if "store" not in ([paths] if isinstance(paths, str) else paths) and (captured := _captured_answers()):
            self._report_once(
                "store",
                f"{captured} rated answers that the gateway captured are not learned: data.path has no `store`",
            )

    def _collect_from(self, source: str) -> str:
        """Collect from a source; return why nothing comes from a server that is gone, or ""."""
        stop, last = Event(), [0.0, time.monotonic()]

        def give_up_when_silent(collected: Collected) -> None:
            delivered = float(collected.total().delivered)
            if delivered != last[0]:
                last[:] = delivered, time.monotonic()
            elif time.monotonic() - last[1] > SILENT_S:
                stop.set()

        readers = parse_sources([source])
        collect(readers, follow=False, stop=stop, tick=give_up_when_silent)
        if not stop.is_set():
            return ""
        return ["no answer", *(note for reader in readers for note in reader.notes)][-1]  # its reader waits for it

    def _report_once(self, topic: str, text: str) -> None:
        if self._problems.get(topic) != text:
            self._problems[topic] = text
            self.listener.say(text)
            try:
                self.journal.append("problem", words=text)
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
                self.listener.say(f"the journal can't be written: {error}")


def _passes(error: Exception) -> bool:
    """Return whether an error ends by itself, or when a person mends its cause while the loop goes on."""
    return not isinstance(error, OSError) or error.errno in UNWRITABLE


def _captured_answers() -> int:
    with closing(open_database()) as database:
        (count,) = database.execute(
            "SELECT count(*) FROM interactions WHERE source LIKE ? AND feedback IS NOT NULL", (f"{SOURCE}:%",)
        ).fetchone()
    return int(count)


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
