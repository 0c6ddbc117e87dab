"""The loop of the cycle, one for each name: check the rows, then open a cycle, continue the open one, or wait."""

import errno
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from datetime import time as clock
from functools import partial
from threading import Event
from typing import Any, Literal

from hivetune.base.database import open_database
from hivetune.base.disk import FULL_DISK, lock
from hivetune.base.journal import Journal
from hivetune.base.private import make_folder
from hivetune.base.units import count
from hivetune.config import RunConfig
from hivetune.cycle import record, stations
from hivetune.cycle.record import CycleEnd, CycleRow, Domain, OpenedFor, cycles_of, loop_folder
from hivetune.cycle.rows import RowsNow, cycle_id, domain_config, domains_of, read_rows_now
from hivetune.cycle.stations import FAILURES, WindowEnded, first_line
from hivetune.data.files.find import refuse_read_once
from hivetune.data.intake.collect import Collected, collect, parse_sources
from hivetune.data.raw import GATEWAY
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, MachineNotFit, Stopped, UsageError
from hivetune.judge.rows import freeze_wins
from hivetune.release.registry import champion_of, champion_versions, check_release_name

UNWRITABLE = (*FULL_DISK, errno.EROFS)  # errors of a disk that a person or time mends
# A server that is gone is asked again and again: after so long it is left for the next look.
SILENT_S = 10.0
LOOK_AGAIN_S = 60.0  # a look counts the rows of the store; all that a loop waits for waits for the next one
MAX_FAILURES = 3  # of one station in a row; then the cycle is closed
RETRY_S = 120.0  # after a failed station
# What failed three times costs at most one training a day.
COOL_S = 86_400.0
MIN_WINDOW_S = 60.0  # a worker needs a third of it to start
SEND_TIMEOUT_S = 20.0  # the loop waits meanwhile
MAX_SENTENCE_CHARS = 500  # a message on a telephone
# What happened -> kind and beginning of its notice.
NOTICES = {
    "promoted": ("promote", "{} is the new champion"),
    "rolled_back": ("rollback", "{} was rolled back"),
    "ready": ("ask", "{} waits for a person to promote it"),
    "left_out": ("ask", "the cycle of {} leaves out rows whose columns need a mapping"),
    "worse": ("worse", "the new rows of {} made a worse model"),
    "failed": ("stuck", "the cycle of {} can't continue"),
    "disk": ("disk", "the cycle of {} waits for room on the disk"),
}
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)")
_DAY = 24 * 60


@dataclass(frozen=True)
class Look:
    """The loop's decision (`do`), its reason, and the state that it was based on. `champion`: the served release, None
    if no release was served yet."""

    do: Literal["wait", "open", "continue"]
    reason: str
    champion: str | None = None
    open: CycleRow | None = None
    opens_for: OpenedFor = "rows"
    rows: RowsNow = field(default_factory=RowsNow)

    def waits(self, reason: str) -> "Look":
        return replace(self, do="wait", reason=reason)


def look(config: RunConfig, name: str, before: RowsNow, now: float, domain: Domain | None = None) -> Look:
    """Return the loop's next action. At most the snapshot of the rows is written. `before`: the rows at the last call.
    `domain`: the domain whose cycle is considered, with those rows. Raises Busy and DoesNotFit if hive.db can't be
    used now, HivetuneError for a damaged champion."""
    leader = name if domain is None else domain.of
    folder = loop_folder(leader)
    with closing(open_database()) as database:
        champion, cycles = champion_of(database, leader), cycles_of(database, name)
        opened = next((cycle for cycle in cycles if cycle.closed is None), None)
        asked = (folder / record.NOW).exists() if opened is None else opened.opened_for == "request"
        until = open_until(config, now, asked=asked)
        outside = f"outside the window {config.cycle.window}" if until <= now else ""
        label = None if champion is None else champion.label
        seen = Look("wait", "", label, opened, "request" if asked else "rows")
        if (folder / record.PAUSED).exists():
            return seen.waits("paused by a person")
        if opened is not None:
            if opened.failed_at is not None and opened.failed_at <= now < opened.failed_at + RETRY_S:
                return seen.waits(f"{opened.station} failed and is tried again: {opened.words}")
            if outside or until - now < MIN_WINDOW_S:
                return seen.waits(f"cycle {opened.id}: {outside or 'what is left of the window is too short'}")
            return replace(seen, do="continue", reason=f"cycle {opened.id} is open")
        rows = before if domain is not None else read_rows_now(config, database, name, champion, before)
    seen, ended = replace(seen, rows=rows), [cycle for cycle in cycles if cycle.end != "failed"]
    # A clock that was set back ends the wait, too.
    if cycles and cycles[-1].end == "failed" and not asked:
        failed_at = cycles[-1].closed or 0.0
        if failed_at <= now < failed_at + COOL_S:
            return seen.waits(f"cycle {cycles[-1].id} failed: {cycles[-1].reason}")
    if domain is None:
        reason = "asked for by a person" if asked else f"{rows.groups} new groups"
        enough = 1 if asked else config.cycle.after_rows
        if rows.problem or rows.groups < enough:
            lacks = f"{rows.groups} of {enough} new groups"
            return seen.waits(f"the rows can't be used: {rows.problem}" if rows.problem else lacks)
        if rows.snapshot and cycle_id(rows.snapshot, config, champion) in {cycle.id for cycle in ended}:
            return seen.waits("a cycle of these rows, settings and champion is closed already")
    else:
        reason = f"{name}: {domain.value!r} has enough rows, and {label} is new"
        if any(cycle.champion == label for cycle in ended):
            return seen.waits(f"{name} follows the next promotion of {leader}")
    if outside:
        return seen.waits(outside)
    if champion is not None:
        champion.check()  # now, not after hours of training: the candidate is compared with it
    return replace(seen, do="open", reason=reason)


def parse_window(text: str) -> tuple[int, int]:
    """Return begin and end of a window in minutes after midnight; an end on the next day is above 1440. Raises
    UsageError unless the text is HH:MM-HH:MM.
    """
    if hours := _HOURS.fullmatch(text.strip()):
        first, first_minute, last, last_minute = map(int, hours.groups())
        start, end = 60 * first + first_minute, 60 * last + last_minute
        if end <= _DAY and start != end:
            return start, end if end > start else end + _DAY
    raise UsageError(f"cycle.window: {text!r} is not a time of day", hint='write hours: "22:00-06:00"')


def open_until(config: RunConfig, now_s: float, *, asked: bool = False) -> float:
    """Return the time until which long work may go on, in seconds since 1970: the end of the window that is open at
    `now_s`, 0 outside it, infinity without a window. `asked`: a person requested the work, so the window does not
    count. Raises UsageError.
    """
    if config.cycle.window is None or asked:
        return math.inf
    minutes, today = parse_window(config.cycle.window), datetime.fromtimestamp(now_s).date()
    # Yesterday's window may reach into today.
    for day in (-1, 0):
        start_s, end_s = (_moment(today, day * _DAY + minute) for minute in minutes)
        if start_s <= now_s < end_s:
            return end_s
    return 0.0


def _moment(today: date, minutes: int) -> float:
    """Return the time `minutes` after today's local midnight, in seconds since 1970."""
    # The system knows its zone and the changes of its clocks: a time that daylight saving skips counts as usual, of a
    # repeated one the first does.
    days, minute = divmod(minutes, _DAY)
    return datetime.combine(today + timedelta(days), clock(minute // 60, minute % 60)).timestamp()


@dataclass
class Loop:
    """The loop of one config, created by `opened`, which locks it. `say` is called with a line of text for each action.
    `failure`: the error of the station (step of a cycle) that was tried last, None after a success."""

    config: RunConfig
    name: str
    journal: Journal
    say: Callable[[str], None] = lambda words: None
    rows: RowsNow = field(default_factory=RowsNow)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    failure: HivetuneError | None = None
    _told: dict[str, str] = field(default_factory=dict)  # by topic what was said last

    def run(self, *, once: bool = False) -> Look:
        """Run until a stop is requested, or with `once` until there is nothing to do now. Return the last decision."""
        while True:
            wait_s = LOOK_AGAIN_S
            try:
                seen = self.step()
                self._told.pop("look", None)
                if seen.do == "wait" and once:
                    return seen
                wait_s = LOOK_AGAIN_S if seen.do == "wait" else 0.0
            except FAILURES as error:
                is_bug = isinstance(error, OSError) and error.errno not in UNWRITABLE
                if isinstance(error, Stopped) or once or is_bug:
                    raise
                self._report("look", f"cannot read its state and tries again: {error}")
                # What is damaged needs a person; a full disk, a lock and a machine that is busy end by themselves.
                if isinstance(error, HivetuneError) and not isinstance(error, Busy | DoesNotFit | MachineNotFit):
                    self._send("failed", self.name, first_line(error))
            self.sleep(wait_s)

    def step(self) -> Look:
        """Decide and act once, for the release name, or else for the first of its domains that has something to do.
        Return the decision."""
        self._collect()
        # First: the rollback of a champion is news, whatever this look decides.
        with closing(open_database()) as database:
            for release in record.newly_rolled_back(database, self.name):
                self._send("rolled_back", release.label, release.withdrawn)
            champion, served = champion_of(database, self.name), champion_versions(database)
        seen = self._do(self.config, None)
        self._report("left out", self.rows.left_out)
        if self.rows.left_out:
            self._send("left_out", self.name, self.rows.left_out)
        if seen.do != "wait" or seen.rows.snapshot is None or champion is None or self.config.cycle.by is None:
            return seen
        domains = domains_of(self.config, seen.rows.snapshot.pool())
        gone = {name for name in served if name.startswith(f"{self.name}-")} - {domain.name for domain in domains}
        few = f"{', '.join(sorted(gone))}: too few rows are left to train again; what is served stays"
        self._report("domains", few if gone else "")
        found = (self._do(domain_config(self.config, domain, champion), domain) for domain in domains)
        return next((each for each in found if each.do != "wait"), seen)

    def _do(self, config: RunConfig, domain: Domain | None) -> Look:
        """Decide the next action of one name or domain, write the decision to the journal, and carry it out."""
        name = self.name if domain is None else domain.name
        seen = look(config, name, self.rows, self.clock(), domain)
        self.rows = self.rows if seen.rows.key is None else seen.rows
        if self._is_news(name, seen.reason) or seen.do != "wait":
            decided = {"do": seen.do, "reason": seen.reason}
            self.journal.append("decision", now=self.clock(), **decided)
            self.say(f"{'waits' if seen.do == 'wait' else seen.do}: {seen.reason}")
        # Opened in one step and continued in the next, by which a kill between them is like any other.
        if seen.do == "open":
            self._open(config, name, seen, domain)
        elif seen.do == "continue" and seen.open is not None:
            self._continue(seen.open)
        return seen

    def _open(self, config: RunConfig, name: str, seen: Look, domain: Domain | None) -> None:
        """Open a cycle and record its settings. The same rows, settings and champion give the same cycle."""
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
                # It goes into releases, and the command of `notify` may hold an address that is a secret.
                config=config.model_dump(mode="json", exclude={"cycle": {"notify"}}),
                champion=None if champion is None else champion.label,
                domain=domain,
            )
            make_folder(cycle.folder)
            record.begin_cycle(database, cycle)
        (loop_folder(self.name) / record.NOW).unlink(missing_ok=True)
        self.journal.append("opened", cycle=cycle.id, opened_for=seen.opens_for)

    def _continue(self, cycle: CycleRow) -> None:
        """Continue the cycle to its end, the end of the window, or a failure."""
        ends = partial(self.must_end, cycle)
        work = stations.Work(cycle, stations.settings_then(cycle), ends, self.journal, self.say)
        try:
            ended = stations.run_cycle(work)
        except WindowEnded:
            return
        except Stopped:
            raise
        except FAILURES as error:
            return self._fail(cycle, work.at, error)
        self.failure = None
        self._close(cycle, *ended)

    def _fail(self, cycle: CycleRow, station: str, error: Exception) -> None:
        """Count a failure. After a full disk or a busy home the loop waits without counting; refused rows end the cycle
        as failed at once.
        """
        text = first_line(error)
        is_full = isinstance(error, DoesNotFit) or (isinstance(error, OSError) and error.errno in UNWRITABLE)
        self.failure = error if isinstance(error, HivetuneError) else HivetuneError(text)
        with closing(open_database()) as database:
            counts = not (is_full or isinstance(error, Busy))
            failures = record.fail_station(database, cycle, station, text, self.clock(), counts=counts)
        if is_full:
            self._send("disk", self.name, text)
        if isinstance(error, DataRefused) or failures >= MAX_FAILURES:
            self._close(cycle, "failed", text)

    def _close(self, cycle: CycleRow, end: CycleEnd, reason: str) -> None:
        reason = stations.close_cycle(cycle, end, reason, self.clock())
        self._told.clear()  # what is told in the next cycle is news again
        self.journal.append("closed", cycle=cycle.id, end=end, reason=reason)
        self.say(f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}")
        with closing(open_database()) as database:
            release = record.release_of(database, cycle)
        event = "worse" if end == "refused" and record.gate_of(cycle).get("verdict") == "abort" else end
        self._send(event, cycle.name if release is None else release.label, reason)

    def must_end(self, cycle: CycleRow, within_s: float) -> str:
        """Return the reason why a cycle's work has to end within `within_s` seconds, such as the window or a person's
        pause; "" if it may go on.
        """
        if (loop_folder(self.name) / record.PAUSED).exists():
            return "paused by a person"
        now_s = self.clock()
        until = open_until(self.config, now_s, asked=cycle.opened_for == "request")
        return "the window ends" if now_s + within_s >= until else ""

    def _is_news(self, topic: str, text: str) -> bool:
        """Return whether `text` differs from the last one of its topic, and remember it."""
        before, self._told[topic] = self._told.get(topic, ""), text
        return before != text

    def _send(self, event: str, release: str, reason: str) -> None:
        """Send the notice of an event once: a disk that stays full is reported once."""
        command = self.config.cycle.notify
        if not command or event not in NOTICES:
            return
        document = notice(event, release, reason)
        if self._is_news(f"notice: {event} of {release}", document["text"]):
            problem = send_notice(document, command)
            self.journal.append("notice", kind=document["kind"], problem=problem)
            if problem:
                self.say(f"a notice was not sent: {problem}")

    def _report(self, topic: str, text: str) -> None:
        """Write a problem to the journal once, until its text changes. An empty text means that it has ended."""
        if self._is_news(topic, text) and text:
            self.say(text)
            with suppress(OSError):  # a full disk is told by the station that needs it
                self.journal.append("problem", words=text)

    def _collect(self) -> None:
        """Collect from each source. A missing source is skipped, and the cycle continues with the others' rows."""
        for source in self.config.cycle.sources:
            try:
                problem = _collect_from(source)
            except (HivetuneError, OSError) as error:
                problem = first_line(error)
            self._report(f"collect {source}", problem and f"nothing is collected from one source: {problem}")
        paths = self.config.data.path
        if "store" not in ([paths] if isinstance(paths, str) else paths):
            query = "SELECT count(*) FROM interactions WHERE source LIKE ? AND feedback IS NOT NULL"
            with closing(open_database()) as database:
                (captured,) = database.execute(query, (f"{GATEWAY}:%",)).fetchone()
            answers, are = count(captured, "rated answer"), "is" if captured == 1 else "are"
            told = f"{answers} that the gateway captured {are} not learned: data.path has no `store`"
            self._report("store", told if captured else "")


def _collect_from(source: str) -> str:
    """Collect from a source. Returns the problem if its server can't be reached, else ""."""
    readers, stop, began = parse_sources([source]), Event(), time.monotonic()

    def give_up(collected: Collected) -> None:
        if time.monotonic() - began > SILENT_S and any(reader.retrying for reader in readers):
            stop.set()

    collect(readers, follow=False, stop=stop, tick=give_up)
    notes = [note for reader in readers for note in reader.notes]
    return ["no answer", *notes][-1] if stop.is_set() else ""


def notice(event: str, release: str, reason: str) -> dict[str, Any]:
    """Return the JSON document of an event of `NOTICES`. `release`: NAME@VERSION, or NAME for an event of the loop."""
    kind, beginning = NOTICES[event]
    # `text` is one printable line: a reason may quote what a stranger sent.
    text = f"{beginning.format(release)}: {reason}"
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    line = line if len(line) <= MAX_SENTENCE_CHARS else line[: MAX_SENTENCE_CHARS - 3] + "..."
    about = {"kind": kind, "release": release, "reason": reason, "time": time.time()}
    return {"schema": 1, **about, "text": f"Hivetune: {line}"}


def send_notice(document: dict[str, Any], command: Sequence[str]) -> str:
    """Run the command, without a shell, with the notice as JSON on its standard input. Returns the reason of a failure,
    or "". It never raises, so that a failed notice does not stop the loop.
    """
    # Without a shell: a reason may quote what a stranger sent.
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen([*command], stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started: {error}"
    try:
        process.communicate(json.dumps(document).encode(), timeout=SEND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with whatever it started
        process.wait()
        return f"{command[0]} was ended after {SEND_TIMEOUT_S:.0f} s"
    return "" if process.returncode == 0 else f"{command[0]} ended with {process.returncode}"


@contextmanager
def opened(config: RunConfig, say: Callable[[str], None] = lambda words: None) -> Iterator[Loop]:
    """Yield the loop of this config, locked against other processes. Raises Busy, UsageError."""
    name = release_name(config)
    folder = loop_folder(name)
    hint = "see what it does: hivetune cycle status"
    with lock(folder, hint=hint), Journal(folder / record.JOURNAL) as journal:
        yield Loop(config, name, journal, say)


def release_name(config: RunConfig) -> str:
    """Return the release name of a config. Raises UsageError for a config whose cycle can't run."""
    if config.cycle.window is not None:
        parse_window(config.cycle.window)
    parse_sources(config.cycle.sources)
    refuse_read_once(config.data.path)
    if config.cycle.name is None:
        raise UsageError("'cycle.name', the name of the releases, is missing", hint="cycle: {name: helpdesk}")
    return check_release_name(config.cycle.name)
