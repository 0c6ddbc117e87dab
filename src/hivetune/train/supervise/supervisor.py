"""A run is brought to its end: start the worker, explain each death, climb the ladder, stop with what there is.

No torch here. Everything that happens is an event in RUN/events.jsonl, written by this process alone, and a supervisor
that is killed itself is replaced by the next one, which goes on from what is on disk.
"""

import collections
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune import __version__, errors
from hivetune.base.disk import FULL_DISK, boot_id, manifest_problems
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.base.typed import from_plain
from hivetune.config import RunConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import DoesNotFit, HivetuneError, RecoveryExhausted, Stopped, UsageError
from hivetune.machine.faults import fault as fault_of
from hivetune.machine.inventory import Machine, disk_free_bytes, read_machine
from hivetune.machine.knowledge.facts import facts, is_met
from hivetune.machine.profile import read_profile, write_profile
from hivetune.process.cluster import ask_cluster, cluster_of
from hivetune.process.limits import LearnedLimits
from hivetune.process.parent import run_task
from hivetune.process.protocol import Beat, Outcome, Salvage
from hivetune.process.stop import StopRequest
from hivetune.run import checkpoints
from hivetune.run.choices import Choices, read_resolved, write_resolved
from hivetune.run.folder import EVENTS, METRICS, SALVAGE
from hivetune.run.standby import Standby
from hivetune.run.status import hold_run, quarantined
from hivetune.train.plan.steps import Amendment, append_amendment, most_quarantined, read_plan
from hivetune.train.supervise.attempt import Ended, Job, Terms, Told, newest_step, run_attempt, state_to_disk
from hivetune.train.supervise.isolate import amend_plan, isolate, replay_in_children, within
from hivetune.train.supervise.ladder import (
    RANK_MULTIPLE,
    RUNGS,
    Bounds,
    Failure,
    Reply,
    after_isolation,
    next_action,
    void_rungs,
)
from hivetune.train.supervise.room import LOOK_S, Events, has_room
from hivetune.train.supervise.variables import worker_effects
from hivetune.train.supervise.workers.local import devices_beside

# Which rungs of the ladder got a run through on this machine, or on others with its card.
#
# What helped here is where the next run begins. It is kept in the machine's profile (one per fingerprint: another
# driver,
# card or torch starts anew), per model.

# Tried again without them after this long: what filled the memory or broke the card may be gone.
FORGET_S = 30 * 86_400.0
# Isolation, rank and sample concern one run's data, not the machine.
OF_THE_RUN = frozenset({"rank", "sample"})
KEY = "rungs"


def published_remedies(machine: Machine) -> dict[str, dict[str, str]]:
    """By fault, the rungs that helped others with a card of `machine`, in their order: name -> the thread."""
    seen = [{"gfx": card.architecture} for card in machine.cards if card.kind == "rocm"]
    known: dict[str, dict[str, str]] = {}
    for fact in facts("remedy"):
        if any(is_met(fact.when, one) for one in seen):
            for fault in fact.more["faults"]:
                known.setdefault(fault, {}).setdefault(fact.more["rung"], f"as in {fact.source[0]}")
    return known


def remembered_rungs(fingerprint: str, model: str, now_s: float | None = None) -> tuple[str, ...]:
    """The rungs that a run of `model` begins with here."""
    entry = read_profile(fingerprint).choices.get(KEY, {}).get(model, {})
    age_s = (time.time() if now_s is None else now_s) - entry.get("time", 0.0)
    return tuple(name for name in entry.get(KEY, ()) if name in RUNGS) if age_s < FORGET_S else ()


def remember_rungs(fingerprint: str, model: str, rungs: Sequence[str]) -> None:
    """These rungs were in effect when a run of `model` got on here."""
    profile = read_profile(fingerprint)
    kept = [name for name in rungs if name not in OF_THE_RUN]
    known = {**profile.choices.get(KEY, {}), model: {KEY: kept, "time": round(time.time())}}
    write_profile(replace(profile, choices={**profile.choices, KEY: known}))


# What recovery may change of the training itself, only where `supervise.allow` names it: a lower rank, fewer rows.


def lower_rank(run: Path) -> str:
    """Halve rank and alpha (the scale stays) and begin anew; the checkpoints of the old rank are set aside."""
    config, choices = read_resolved(run)
    before, rank = config.lora.r, max(1, config.lora.r // 2)
    lora = config.lora.model_copy(update={"r": rank, "alpha": config.lora.alpha * rank / before})
    write_resolved(run, config.model_copy(update={"lora": lora}), choices)
    checkpoints.distrust_after(run, 0)
    return f"rank {before} -> {rank}, from step 0"


def thin_out(run: Path, snapshot: Path) -> str:
    """Leave out every second row of what is still to come, evenly over agents and categories.

    The amendment ends with the plan's last step, so the rows count as not reached, not as quarantined.
    """
    plan, data = read_plan(run), open_snapshot(snapshot)
    steps = plan.steps
    done = checkpoints.newest_good(run).step
    trained = {row for i in range(done) for row in steps[i].rows}
    coming = sorted({row for i in range(done, len(steps)) for row in steps[i].rows} - trained)
    seen: collections.Counter[tuple[str | None, str | None]] = collections.Counter()
    left_out = []
    for row in coming:
        info = data.info(row)
        seen[info.agent, info.category] += 1
        if seen[info.agent, info.category] % 2 == 0:
            left_out.append(row)
    reason = "sample: every second row, as supervise.allow permits"
    append_amendment(run, Amendment(done, tuple(left_out), reason, len(steps)))
    return f"{len(left_out)} of {len(coming)} coming rows left out from step {done}"


# What an earlier supervisor of a run left in its events: rungs, failures that still count, another machine.

_WITH_RUNGS = ("attempt", "action", "supervisor_ended")


def union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def last_rungs(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """The rungs in effect when the last supervisor ended or was killed: a resumed run keeps its arithmetic.

    A rung of an older Hivetune that is gone (rank16) is left out; what it padded changes rounding alone."""
    of = [entry["rungs"] for entry in events if entry["event"] in _WITH_RUNGS and "rungs" in entry]
    return tuple(name for name in of[-1] if name in RUNGS) if of else ()


def open_failures(events: list[dict[str, Any]]) -> list[Failure]:
    """The failures since the last clean end: a killed supervisor's count goes on, a person's new start begins anew."""
    failures: list[Failure] = []
    names = Failure.__dataclass_fields__.keys()
    for entry in events:
        if entry["event"] == "supervisor_ended":
            failures = []
        elif entry["event"] == "failure" and names <= entry.keys():
            failures.append(from_plain(Failure, {name: entry[name] for name in names}))
    return [failure for failure in failures if _is_known(failure.fault)]


def _is_known(identifier: str) -> bool:
    try:
        fault_of(identifier)
    except KeyError:
        return False
    return True


def drift(events: list[dict[str, Any]], machine: Machine) -> list[str]:
    """What differs from the machine and packages that the run began with; it goes on, but a reader must know."""
    started = (entry for entry in events if entry["event"] == "supervisor_started")
    first = next((entry for entry in started if {"versions", "fingerprint"} <= entry.keys()), None)
    if first is None:
        return []
    now, then = dict(machine.versions), first["versions"]
    changed = [
        f"{name} {then.get(name)} -> {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)
    ]
    if first["fingerprint"] != machine.fingerprint and not changed:
        changed = ["the processor, the card or its driver"]
    return [f"changed since this run began: {', '.join(changed)}; rounding may differ"] if changed else []


SMALLER = ("rank", "sample")
# Kept free for the checkpoints of a whole run: newest three, the best, and the one that is being written.
CHECKPOINTS_ON_DISK = 5
LEAST_RESERVE_BYTES = 64 << 20


@dataclass(frozen=True)
class RunOutcome:
    """What a run came to. `result` is the worker's own; `faults` the catalogue's ids in order; `useful_share` the part
    of the wall time that went into steps that count. Failed: `error` says why, and what to do.
    """

    status: str
    steps: int
    restarts: int
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    useful_share: float = 0.0
    error: HivetuneError | None = None

    def check(self) -> "RunOutcome":
        """Itself when done; else raises what ended it: Stopped, RecoveryExhausted, or what the worker refused with."""
        if self.error is not None:
            raise self.error
        return self


def supervise_run(
    run: Path,
    config: RunConfig,
    *,
    model: Path,
    snapshot: Path,
    terms: Terms = Terms(),
    worker: str | None = None,
    replay: str | None = None,
    machine: Machine | None = None,
) -> RunOutcome:
    """Train `run` to its end, whatever happens to its workers; returns how it ended (`RunOutcome.check` raises it).

    SIGTERM, SIGHUP and Ctrl-C end it after a checkpoint,
    a second one at once. Raises Busy when another process has the run, UsageError when model or data are not what they
    were, DoesNotFit when the disk has no room for the run's checkpoints.
    """
    with (
        hold_run(run),
        Events(run / EVENTS) as events,
        StopRequest(terms.ends) as stop,
        closing(Standby.create()) as standby,
    ):
        job = Job(run, model, snapshot, worker, replay, config.supervise, events, stop, standby, terms)
        supervisor = _Supervisor(job, config, machine or read_machine(folder=run))
        supervisor.begin()
        return supervisor.finish()


class _Supervisor:
    """The state of one `supervise_run`: what failed so far, and which rungs are in effect."""

    def __init__(self, job: Job, config: RunConfig, machine: Machine):
        self.job, self.config, self.machine = job, config, machine
        self.history: list[Failure] = []
        self.rungs: tuple[str, ...] = ()
        self.tried = ""
        self.attempts = 0
        self.start_s: dict[tuple[str, ...], float] = {}
        self.started = time.monotonic()

    def begin(self) -> None:
        """Adopt what an earlier supervisor left, and refuse what can't go well."""
        before = list(read_journal(self.job.run / EVENTS))
        self.job.events.append(
            "supervisor_started",
            boot_id=boot_id(),
            host=os.uname().nodename,
            hivetune=__version__,
            fingerprint=self.machine.fingerprint,
            versions=dict(self.machine.versions),
        )
        self.rungs = union(remembered_rungs(self.machine.fingerprint, self.config.model), last_rungs(before))
        self.history = open_failures(before)
        for warning in drift(before, self.machine):
            self.job.events.append("warning", text=warning)
        if self.rungs:
            self.job.events.append("remembered", rungs=list(self.rungs))
        for folder, what, hint in (
            (self.job.model, "the model", f"hivetune fetch {quoted(self.config.model)}"),
            (self.job.snapshot, "the data", "train from the config again: hivetune train CONFIG"),
        ):
            problems = manifest_problems(folder)
            if problems:
                raise UsageError(f"{what} of {self.job.run} changed: {folder}/{problems[0]}", hint=hint)
        if cluster_of(self.config) is not None and not newest_step(self.job.run):
            ask_cluster(cluster_of(self.config) or "")  # a run that has begun goes on without it
        reserve = _reserve_bytes(self.job.run)
        free = disk_free_bytes(self.job.run)
        if free < reserve and not checkpoints.reclaim(self.job.run):
            raise DoesNotFit(
                f"{self.job.run}: {free >> 20} MiB are free on its disk, its checkpoints need {reserve >> 20} MiB",
                hint="free some space, or choose another output folder",
            )

    def finish(self) -> RunOutcome:
        """Attempts until one is done, a stop is asked for, or nothing is left to try. A full disk is a pause, also when
        this process meets it first."""
        while True:
            try:
                outcome = self._attempt()
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                self.job.events.append("warning", text=f"the disk is full: {error}")
                self._wait_for_disk()
                outcome = self._stopped({}) if self.job.stop.count else None
            if outcome is not None:
                return outcome

    def _attempt(self) -> RunOutcome | None:
        """One worker and the answer to how it ended; None when another one is to be started."""
        self.attempts += 1
        limits = self._limits()
        ended = run_attempt(self.job, self.attempts, self.rungs, self._told(), limits)
        if limits.started:
            self.start_s[self.rungs] = limits.start_s
        if ended.outcome.status == "done":
            if self.rungs:
                self._remember()
            return self._outcome("done", ended.durable, ended.outcome.result)
        if ended.diagnosis is None:
            return self._stopped(ended.outcome.result)
        action = self._answer(ended)
        if action.kind == "stop":
            return self._exhausted(ended, action)
        self.rungs, self.tried = action.rungs, action.tried
        if action.kind == "wait":
            self._wait_for_disk()
        if action.tried in SMALLER:
            self._make_smaller(action.tried)
        self.job.stop.sleep(action.wait_s)
        if self.job.stop.count:
            return self._stopped(ended.outcome.result)
        return None

    def _remember(self) -> None:
        try:
            remember_rungs(self.machine.fingerprint, self.config.model, self.rungs)
        except OSError as error:  # the profile is not worth the run
            self.job.events.append("warning", text=f"the machine's profile could not be written: {error}")

    def _limits(self) -> LearnedLimits:
        return LearnedLimits(self.job.settings, self.start_s.get(self.rungs))

    def _answer(self, ended: Ended) -> Reply:
        """Journal the failure and choose what to do; an isolation is done at once, and its answer asked for again."""
        assert ended.diagnosis is not None
        if ended.diagnosis.fault.distrust:
            self._distrust(ended)
        failure = Failure(
            fault=ended.diagnosis.fault.id,
            step=ended.step,
            durable=newest_step(self.job.run),
            quarantined=quarantined(self.job.run),
            rungs=self.rungs,
            tried=self.tried,
            # Not by a training row: validation and saving are not bisected.
            isolated=ended.phase in (Beat.VALIDATING, Beat.SAVING),
        )
        self.history.append(failure)
        self.job.events.append("failure", **asdict(failure), words=ended.diagnosis.words, shape=ended.diagnosis.shape)
        action = next_action(self.history, self._bounds())
        if action.kind == "isolate":
            self._journal_action(action)
            action = self._isolate(failure)
        self._journal_action(action)
        return action

    def _isolate(self, failure: Failure) -> Reply:
        """Is it a row of the step? Quarantine it and go on; else what the ladder says next."""
        job = self.job
        run = job.run
        plan, data = read_plan(run), open_snapshot(job.snapshot)
        steps = plan.steps
        if failure.step >= len(steps):  # after the last one: there are no rows to ask
            self.history[-1] = replace(failure, isolated=True)
            return next_action(self.history, self._bounds())
        before = steps[failure.step - 1].rows if failure.step else ()
        replay = replay_in_children(
            run,
            job.model,
            data.folder,
            rungs=self.rungs,
            module=job.replay,
            limits=self._limits,
        )
        findings = isolate(steps[failure.step].rows, replay, control=before[0] if before else None)
        most = most_quarantined(plan.num_rows, self.config.data.max_rejected)
        findings = within(findings, failure.quarantined, most)
        entries = amend_plan(run, failure.step, findings, lambda row: data.info(row).source)
        job.events.append("isolated", verdict=findings.culprit, words=findings.words, children=findings.children)
        for entry in entries:
            job.events.append("quarantined", **entry)
        action, self.history[-1] = after_isolation(self.history, findings.culprit, findings.words, self._bounds())
        return action

    def _make_smaller(self, how: str) -> None:
        run = self.job.run
        text = lower_rank(run) if how == "rank" else thin_out(run, self.job.snapshot)
        self.job.events.append("smaller", how=how, text=text)

    def _journal_action(self, action: Reply) -> None:
        self.job.events.append(
            "action", action=action.kind, why=action.why, rungs=list(action.rungs), tried=action.tried
        )

    def _distrust(self, ended: Ended) -> None:
        """Checkpoints since the last good test of the numbers may hold wrong ones: set them aside."""
        good = [e["step"] for e in read_journal(self.job.run / METRICS) if e["event"] == "canary" and e["passed"]]
        self.job.standby.clear()
        doubtful = checkpoints.distrust_after(self.job.run, max(good, default=0))
        self.job.events.append("distrusted", steps=doubtful, newest=ended.durable)

    def _wait_for_disk(self) -> None:
        """Give back what of ours can be spared, then wait for room; training stands still, nothing is lost."""
        run = self.job.run
        freed = checkpoints.reclaim(run)
        self.job.events.append("disk_wait", reclaimed_bytes=freed, free_bytes=disk_free_bytes(run))
        while not has_room(run, _reserve_bytes(run)) and not self.job.stop.count:
            self.job.stop.sleep(LOOK_S)
        self.job.events.append("disk_ready", free_bytes=disk_free_bytes(run))
        state_to_disk(self.job)

    def _told(self) -> Told:
        memory_bytes = int(self.machine.memory_bytes * self.config.supervise.memory_share)
        between_s = max(1.0, (time.monotonic() - self.started) / len(self.history)) if self.history else None
        devices = devices_beside(self.job.run, self.job.model, self.config, self.machine, self._device())
        limit = None if self._on_device() else memory_bytes // (1 + len(devices))
        return Told(limit, between_s, devices, cluster_of(self.config), self.config.model, self._device())

    def _bounds(self) -> Bounds:
        settings = self.config.supervise
        # The adapter that a run begins with has its rank.
        allowed = {name for name in settings.allow if name != "rank" or self.config.lora.start is None}
        return Bounds(
            attempts=settings.attempts,
            on_device=self._on_device() and "cpu" not in self.rungs,
            backoff_s=settings.backoff_s,
            allow=frozenset(allowed),
            void=self._void(),
            published=published_remedies(self.machine),
        )

    def _void(self) -> frozenset[str]:
        """Rungs that would change nothing in a worker as it is started now."""
        environment, changes = worker_effects(self.job.run, self.rungs)
        config, settled = read_resolved(self.job.run)  # a lower rank is written there
        started = [e for e in read_journal(self.job.run / METRICS) if e["event"] == "started" and "path" in e]
        as_started = Choices(
            path=started[-1]["path"] if started else None,
            kernels="torch" if self._on_device() else None,  # a card's default
            rank_multiple=math.gcd(config.lora.r, RANK_MULTIPLE),
        )
        variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        return void_rungs(variables, changes.over(settled.over(as_started)))

    def _on_device(self) -> bool:
        return self._device() != "cpu"

    def _device(self) -> str:
        """By the run's settled choices, before there are any by what is in the machine."""
        device = read_resolved(self.job.run)[1].device or self.config.device
        return ("cuda" if self.machine.cards else "cpu") if device == "auto" else device

    def _stopped(self, result: Mapping[str, Any]) -> RunOutcome:
        step = newest_step(self.job.run)
        error = Stopped(
            f"stopped at step {step}; everything up to it is saved",
            signal_number=self.job.stop.number,
            hint=f"go on with: hivetune resume {quoted(self.job.run)}",
        )
        return self._outcome("stopped", step, result, error)

    def _exhausted(self, ended: Ended, action: Reply) -> RunOutcome:
        """The end without success: a loadable adapter if any step was committed, and the reason in words."""
        assert ended.diagnosis is not None
        refused = ended.outcome.error
        if refused is not None and refused.exit_code in (2, 3, 4, 5):
            return self._outcome("failed", ended.durable, {}, _refusal(ended.outcome))
        fault = ended.diagnosis.fault
        left = self._salvage() if ended.durable else "No step was committed, so there is no adapter."
        where = f" in step {ended.step}" if ended.step >= 0 else " while it was loading"
        error = RecoveryExhausted(
            f"the worker died{where}: {ended.diagnosis.words}\n{action.why}. {left}",
            hint=f"{fault.advice} Then: hivetune resume {quoted(self.job.run)}",
        )
        return self._outcome("failed", ended.durable, {}, error)

    def _salvage(self) -> str:
        """The newest state as an adapter at the top of the folder."""
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        outcome = run_task(Salvage(self.job.run, self.job.model), self.job.run / SALVAGE, environment=on_cpu)
        if outcome.status != "done":
            self.job.events.append("warning", text=f"the adapter could not be written: {outcome.ending()}")
            return "Its checkpoints are whole, but the adapter could not be written from them."
        return f"The adapter of step {outcome.result['adapter_step']} is in {self.job.run}."

    def _outcome(
        self, status: str, steps: int, result: Mapping[str, Any], error: HivetuneError | None = None
    ) -> RunOutcome:
        seconds = time.monotonic() - self.started
        useful_s = result.get("train_seconds") or 0.0
        outcome = RunOutcome(
            status=status,
            steps=steps,
            restarts=self.attempts - 1,
            seconds=round(seconds, 3),
            result=dict(result),
            faults=tuple(failure.fault for failure in self.history),
            rungs=self.rungs,
            useful_share=round(min(1.0, useful_s / seconds), 4) if seconds else 0.0,
            error=error,
        )
        why = "" if error is None else error.message
        self.job.events.append(
            "supervisor_ended", status=status, steps=steps, restarts=outcome.restarts, rungs=list(self.rungs), why=why
        )
        return outcome


def _refusal(outcome: Outcome) -> HivetuneError:
    try:
        outcome.check("training")
    except HivetuneError as error:
        return error
    return errors.HivetuneError("training was refused")


def _reserve_bytes(run: Path) -> int:
    """Room for the checkpoints that are still to come, by the size of those that are there."""
    sizes = [
        sum(path.stat().st_size for path in checkpoints.folder_of(run, step).iterdir())
        for step in checkpoints.steps(run)
    ]
    missing = max(1, CHECKPOINTS_ON_DISK - len(sizes))
    return max(LEAST_RESERVE_BYTES, missing * max(sizes, default=0))
