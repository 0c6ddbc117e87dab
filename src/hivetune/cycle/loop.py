"""The loop of the cycle: look, decide, write down the intent, act, write down the outcome, look again. One for each
name."""

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import FULL_DISK, lock
from hivetune.base.journal import Journal
from hivetune.base.typed import to_plain
from hivetune.config import RunConfig
from hivetune.cycle.acts import release as release_acts
from hivetune.cycle.acts import run as run_acts
from hivetune.cycle.acts.slices import ActContext, Requests, SliceEnded
from hivetune.cycle.decide import HEAVY, LOOK_AGAIN_S, STATIONS, Action, ActionKind, Observation, Permission, decide
from hivetune.cycle.ledger import (
    JOURNAL,
    NOW,
    PAUSED,
    begin_act,
    cycles_of,
    end_act,
    gate_of,
    loop_folder,
    settle_interrupted,
)
from hivetune.cycle.notify import Notice, NoticeKind, send_notice
from hivetune.cycle.observe import allowed_at, observe, release_of
from hivetune.cycle.pool import LookCache
from hivetune.cycle.window import Clocks, InUse, clock_changes, parse_window, read_clocks
from hivetune.data.intake.collect import Collected, collect
from hivetune.data.intake.files import refuse_read_once
from hivetune.data.intake.sources.parse import parse_sources
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, Stopped, UsageError
from hivetune.machine.desktop import CoreUse, OtherPrograms, person_idle_s
from hivetune.machine.telemetry import busy_core_seconds, own_seconds
from hivetune.models.fetch import fetch_model
from hivetune.process.still import moving_s, yielding
from hivetune.records import Progress, silent
from hivetune.release.registry import check_release_name

# A retry does not change these.
FINAL = (DataRefused,)
UNWRITABLE = (*FULL_DISK, errno.EROFS)  # errors of a disk that a person or time mends
LISTEN_EVERY_S = 0.5
SILENT_S = 10.0  # after which a source that brings nothing and does not end is left for the next look


@dataclass
class Listener:
    """The output of the loop: a line of words, and a progress bar by its label."""

    say: Callable[[str], None] = lambda words: None
    progress: Callable[[str], Progress] = lambda label: silent


@dataclass
class Loop:
    """The loop of one config. Make it with `opened`, which holds its lock."""

    config: RunConfig
    name: str
    journal: Journal
    listener: Listener
    known: LookCache = field(default_factory=LookCache)
    clock: Callable[[], float] = time.time
    _clocks: Clocks | None = None
    _others: OtherPrograms = field(default_factory=OtherPrograms)
    _last_wait: str = ""
    _done: tuple[str | None, str] = (None, "")  # the last act that was done: its cycle and kind
    _problems: dict[str, str] = field(default_factory=dict)  # what can't be done now, and why: said once
    _sent: set[str] = field(default_factory=set)  # sentences of notices, since an act was done

    def step(self) -> Action:
        """Look once, decide once, and do the act that was decided. Raises what stopped the process, nothing else."""
        self._collect()
        clocks = read_clocks()
        for text in clock_changes(self._clocks, clocks) if self._clocks is not None else ():
            self.journal.append("clock", words=text)
            self.listener.say(text)
        self._clocks = clocks
        in_use = self._in_use()
        now = self.clock()
        observed = observe(self.config, self.name, self.known, now, in_use)
        action = decide(observed, self.config.cycle, now)
        self._write_decision(observed, action, now)
        if action.kind != "wait":
            self._act(observed, action, now)
        return action

    def run(self, *, once: bool = False) -> Action:
        """Run until told to stop, or with `once` until there is nothing to do now. Returns the last action."""
        while True:
            try:
                action = self.step()
                self._problems.pop("look", None)
                wait_s = max(0.0, min(action.not_before - self.clock(), LOOK_AGAIN_S)) if action.kind == "wait" else 0.0
            except Stopped:
                raise
            except (HivetuneError, OSError, sqlite3.OperationalError) as error:
                if once or (isinstance(error, OSError) and error.errno not in UNWRITABLE):
                    raise
                text = f"it can't look now and tries again: {error}"
                self._report_once("look", text)
                if isinstance(error, UsageError):  # what is damaged needs a person; other causes end by themselves
                    self._send(Notice("stuck", self.name, text.partition("\n")[0]))
                action, wait_s = None, LOOK_AGAIN_S
            if once and action is not None and action.kind == "wait":
                return action
            self._sleep(wait_s)

    def _act(self, observed: Observation, action: Action, now: float) -> None:
        """Write the intent, act, write the outcome. A failure is an outcome; a death leaves the intent alone."""
        cycle = observed.open.id if observed.open else None
        with closing(open_database()) as database:
            number = begin_act(database, self.name, cycle, action.kind, now)
        self.journal.append("intent", number=number, cycle=cycle, action=action.kind)
        self.journal.sync()
        self.listener.say(f"{action.kind.replace('_', ' ')}: {action.reason}")
        context = ActContext(
            self.config,
            self.name,
            observed,
            action.reason,
            partial(self._allowed, observed),
            now,
            self.listener.progress,
        )
        try:
            text, outcome = act(action, context), "done"
            if action.kind in (*STATIONS, "replay") and self._done == (cycle, action.kind):
                raise HivetuneError(f"{text}, twice: its result was missing after the first time")
            self._done = (cycle, action.kind)
            self._sent.clear()
        except Stopped:
            raise
        except SliceEnded as error:
            text, outcome = error.message, "paused"
        except (HivetuneError, OSError, sqlite3.OperationalError) as error:
            text, outcome = str(error).partition("\n")[0], "failed"
            full = isinstance(error, OSError) and error.errno in UNWRITABLE
            full = full or isinstance(error, DoesNotFit)
            context.details |= {"final": isinstance(error, FINAL), "patient": full or isinstance(error, Busy)}
            context.details["full_disk"] = full
            context.details["exit_code"] = error.exit_code if isinstance(error, HivetuneError) else 1
        with closing(open_database()) as database:
            end_act(database, number, outcome, self.clock(), text, context.details)
        self.journal.append(
            "outcome", number=number, action=action.kind, outcome=outcome, words=text, **context.details
        )
        self.listener.say(f"{action.kind.replace('_', ' ')} {outcome}: {text}")
        notice = self._notice(action, outcome, text, context.details)
        if notice is not None:
            self._send(Notice(*notice))

    def _notice(
        self, action: Action, outcome: str, text: str, details: Mapping[str, Any]
    ) -> tuple[NoticeKind, str, str] | None:
        """Return the notice about an act, or None for most acts."""
        if outcome == "done" and (action.kind == "promote" or details.get("end") == "ready"):
            with closing(open_database()) as database:
                cycle = cycles_of(database, self.name)[-1]
                release = release_of(database, cycle)
            gate = gate_of(cycle)
            reasons = "; ".join(gate.get("reasons", [])[: gate.get("decisive")])
            kind: NoticeKind = "promote" if action.kind == "promote" else "ask"
            return kind, self.name if release is None else release.label, reasons
        if outcome == "done" and (action.kind == "roll_back" or details.get("rolled_back")):
            return "rollback", self.name, text
        if details.get("end") == "failed":
            return "stuck", self.name, action.reason
        if outcome == "failed" and action.kind in ("roll_back", "restore") and not details.get("patient"):
            return "stuck", self.name, f"{action.reason}, and {text}"
        if details.get("suspect"):
            return "suspect", self.name, text
        if outcome == "failed" and details.get("full_disk"):
            return "disk", self.name, text
        return None

    def _send(self, notice: Notice) -> None:
        """Send a notice once: a disk that stays full is reported once."""
        if notice.sentence in self._sent:
            return
        self._sent.add(notice.sentence)
        if not self.config.cycle.notify:
            return
        problem = send_notice(notice, self.config.cycle.notify)
        self.journal.append("notice", kind=notice.kind, problem=problem)
        if problem:
            self.listener.say(f"a notice was not sent: {problem}")

    def _allowed(self, observed: Observation) -> Permission:
        """Return whether an act may continue. A person's pause ends it too."""
        if (loop_folder(self.name) / PAUSED).exists():
            return Permission(False, reason="paused by a person")
        asked = observed.open is not None and observed.open.opened_for == "request"
        permission = allowed_at(self.config, self.clock(), self._in_use(), asked=asked)
        ends = [end for end in (permission.until, observed.allowed.until) if end is not None]
        return replace(permission, until=min(ends, default=None))

    def _sleep(self, wait_s: float) -> None:
        """Sleep up to `wait_s`, less when a person speaks (cycle pause, resume, now)."""
        folder = loop_folder(self.name)
        before = [(folder / word).exists() for word in (PAUSED, NOW)]
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, LISTEN_EVERY_S))
            if before != [(folder / word).exists() for word in (PAUSED, NOW)]:
                return

    def _write_decision(self, observed: Observation, action: Action, now: float) -> None:
        """Write the decision with its observation, so that it can be replayed. A wait is written only if it differs
        from the last."""
        if action.kind == "wait" and action.reason == self._last_wait:
            return
        self._last_wait = action.reason if action.kind == "wait" else ""
        settings = self.config.cycle.model_dump(mode="json", exclude={"notify"})  # addresses are secrets
        self.journal.append("decision", now=now, observed=to_plain(observed), settings=settings, **to_plain(action))
        if action.kind == "wait":
            self.listener.say(f"waits: {action.reason}")

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

    def _in_use(self) -> InUse | None:
        """Return who else uses the machine."""
        now = CoreUse(time.monotonic(), busy_core_seconds(), own_seconds())
        return InUse(person_idle_s(self.clock()), self._others.cores(now), len(os.sched_getaffinity(0)))

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


@contextmanager
def opened(config: RunConfig, listener: Listener) -> Iterator[Loop]:
    """Yield the loop of this config, which no other process may run meanwhile. Raises Busy, UsageError."""
    name = release_name(config)
    folder = loop_folder(name)
    with ExitStack() as stack:
        stack.enter_context(lock(folder, hint="see what it does: hivetune cycle status"))
        journal = stack.enter_context(Journal(folder / JOURNAL))
        for number, text in settle_interrupted(name):
            journal.append("outcome", number=number, outcome="interrupted", words=text)
        fetch_model(config.model, listener.progress("preparing the model"))
        yield Loop(config, name, journal, listener)


def release_name(config: RunConfig) -> str:
    """Return the name of the releases of a config. Raises UsageError for a config whose cycle can't run."""
    parse_window(config.cycle.window)
    parse_sources(config.cycle.sources)
    refuse_read_once(config.data.path)
    if config.cycle.name is None:
        raise UsageError("'cycle.name' is missing: the name of the releases", hint="cycle: {name: helpdesk}")
    return check_release_name(config.cycle.name)


ACTS: Mapping[ActionKind, Callable[[ActContext], str]] = {
    "restore": release_acts.restore_champion,
    "roll_back": release_acts.return_to_previous,
    "open": run_acts.open_cycle_of,
    "rebuild": partial(run_acts.open_cycle_of, opened_for="rebuild"),
    "snapshot": run_acts.make_run,
    "train": run_acts.train_slice,
    "evaluate": run_acts.evaluate_beside,
    "gate": run_acts.judge_candidate,
    "export": release_acts.export_adapter,
    "register": release_acts.register_candidate,
    "warm": release_acts.wait_until_loaded,
    "promote": release_acts.promote_candidate,
    "watch": release_acts.end_watch,
    "replay": run_acts.replay_training,
    "close": release_acts.close_cycle,
}


def act(action: Action, context: ActContext) -> str:
    """Do an action and return its outcome in words. Raises SliceEnded, and HivetuneError and OSError for failures.

    Long work stands still for requests. For training the supervisor does that, since it knows that the silence is no
    hang, and a replay does it for what follows; for everything else it happens here.
    """
    if action.kind not in HEAVY - {"train", "replay"}:
        return ACTS[action.kind](context)
    began_s, moved_s = time.monotonic(), moving_s()
    try:
        with yielding(Requests()):
            return ACTS[action.kind](context)
    finally:
        stood_still_s = (time.monotonic() - began_s) - (moving_s() - moved_s)
        if stood_still_s >= 1:
            context.details["stood_still_s"] = round(stood_still_s)
