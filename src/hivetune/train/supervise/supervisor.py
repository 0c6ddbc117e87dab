"""The supervisor of a run: it starts the worker, diagnoses each death, tries the next change, and ends with a result.

It never imports torch. Everything that happens is an event in RUN/events.jsonl, which only this process writes. If the
supervisor itself is killed, the next one continues from the files on the disk.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hivetune import __version__
from hivetune.base.disk import FULL_DISK, boot_id, manifest_problems
from hivetune.base.journal import Journal, read_journal
from hivetune.base.paths import quoted
from hivetune.base.units import size
from hivetune.config import RunConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import DoesNotFit, HivetuneError, RecoveryExhausted, Stopped, UsageError
from hivetune.machine.inventory import Machine, as_torch_sees, disk_free_bytes, read_machine
from hivetune.machine.telemetry import KernelLog, oom_kills, sample
from hivetune.process.launch import supervision
from hivetune.process.parent import Child, Limits, run_task, start_child
from hivetune.process.protocol import Beat, Outcome, Salvage, Train
from hivetune.process.stop import StopRequest
from hivetune.run import checkpoints
from hivetune.run.checkpoints import CHECKPOINT_EVERY_S
from hivetune.run.choices import Choices
from hivetune.run.folder import EVENTS, METRICS, SALVAGE, read_resolved
from hivetune.run.status import lock_run, quarantined
from hivetune.train.plan.steps import Amendment, append_amendment, max_quarantined, read_plan
from hivetune.train.supervise.attempt import (
    Ended,
    Terms,
    halve_rank,
    last_step,
    rank_devices,
    skip_half_of_remaining_rows,
    step_of_death,
    worker_effects,
)
from hivetune.train.supervise.diagnose import diagnose, evidence_of
from hivetune.train.supervise.isolate import isolate, make_replayer
from hivetune.train.supervise.ladder import (
    SMALLER_TRAINING,
    Bounds,
    Failure,
    Reply,
    last_rungs,
    next_action,
    open_failures,
    published_remedies,
    remaining_rungs,
    remember_rungs,
    remembered_rungs,
    void_rungs,
)

# What a run that goes on needs for journals and logs, besides a checkpoint and an adapter of a third of its size.
MIN_RESERVE_BYTES = 1 << 20
MIN_CHECKPOINT_EVERY_S = 10.0
SAMPLE_EVERY_S = 30.0
# The first sample comes sooner: many faults come within the first half minute.
FIRST_SAMPLE_S = 5.0
# The kernel writes its lines about a death a moment after it.
KERNEL_S = 0.05
# How often a run that waits for the disk looks whether it has room.
LOOK_S = 5.0


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run. `result`: the worker's own document; `faults`: the ids of the diagnosed faults, in order.

    `error`: the reason why a run is not done, with a hint on what to do.
    """

    status: str
    steps: int
    restarts: int
    result: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    error: HivetuneError | None = None

    def check(self) -> "RunOutcome":
        """Return this outcome if the run is done. Else raise Stopped, RecoveryExhausted, or the worker's error."""
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
    """Train `run` to its end, whatever happens to its workers. Return its outcome; `RunOutcome.check` raises.

    Attempts follow each other until one is done, a stop is requested, or no change is left to try. If the disk is full,
    the run waits. SIGTERM, SIGHUP and Ctrl-C end the run after a checkpoint; a second one ends it at once.

    Raises Busy if another process trains the run, UsageError if the model or the data were changed, DoesNotFit if the
    disk has no space for the run's checkpoints.
    """
    with lock_run(run), _Events(run / EVENTS) as events, StopRequest(terms.ends) as stop:
        machine = machine or read_machine(folder=run)
        supervisor = _Supervisor(run, config, model, snapshot, machine, terms, worker, replay, events=events, stop=stop)
        supervisor.begin()
        outcome: RunOutcome | None = None
        while outcome is None:
            try:
                outcome = supervisor.answer(supervisor.attempt())
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                outcome = supervisor.pause_for_disk(error)
        return outcome


class _Events(Journal):
    """The supervisor's journal, RUN/events.jsonl, which must never be the reason that a run ends.

    On a full disk its lines wait in memory, in their order, until there is room. Other errors of the disk are raised.
    """

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        _was_written(partial(super().append, event, **fields))
        return {"event": event, **fields}

    def close(self) -> None:
        _was_written(super().close)


def _was_written(write: Callable[[], object]) -> bool:
    """Return False where the disk is full. Raises its other errors."""
    try:
        write()
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return False
    return True


def _has_room(run: Path) -> bool:
    # It is allocated and freed again, because no call reports a quota.
    needed = _reserve_bytes(run)

    def allocate() -> None:
        with tempfile.TemporaryFile(dir=run) as file:
            os.posix_fallocate(file.fileno(), 0, needed)

    return disk_free_bytes(run) >= needed and _was_written(allocate)


def _reserve_bytes(run: Path) -> int:
    sizes = [
        sum(path.stat().st_size for path in checkpoints.folder_of(run, step).iterdir())
        for step in checkpoints.steps(run)
    ]
    return MIN_RESERVE_BYTES + 4 * max(sizes, default=0) // 3


def _wait_for_disk(
    run: Path,
    events: Journal,
    is_over: Callable[[], bool],
    on_wait: Callable[[str], None],
    sleep: Callable[[float], object],
) -> None:
    """Free what the run can spare, then wait until `is_over`. Nothing is lost meanwhile."""
    events.append("disk_wait", reclaimed_bytes=checkpoints.reclaim(run), free_bytes=disk_free_bytes(run))
    if not is_over():
        on_wait(f"the disk of {run} is full: the run waits until {size(_reserve_bytes(run))} are free")
        while not is_over():
            sleep(LOOK_S)
    events.append("disk_ready", free_bytes=disk_free_bytes(run))


def write_with_retries(run: Path, write: Callable[[], None], on_wait: Callable[[str], None]) -> None:
    """Call `write`, again and again while the disk is full; Ctrl-C ends the wait. Raises other errors.

    `on_wait` is called with the reason for the wait.
    """
    if not _was_written(write):
        with _Events(run / EVENTS) as events:
            _wait_for_disk(run, events, partial(_was_written, write), on_wait, time.sleep)


@dataclass
class _Supervisor:
    """The state of one `supervise_run`: what failed so far, and which rungs are in effect."""

    run: Path
    config: RunConfig
    model: Path
    snapshot: Path
    machine: Machine
    terms: Terms
    worker: str | None
    replay: str | None
    events: Journal
    stop: StopRequest
    history: list[Failure] = field(default_factory=list)
    rungs: tuple[str, ...] = ()
    tried: str = ""
    attempts: int = 0
    started: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Take over from an earlier supervisor, and refuse a run that must fail."""
        before = list(read_journal(self.run / EVENTS))
        self.events.append(
            "supervisor_started",
            boot_id=boot_id(),
            host=os.uname().nodename,
            hivetune=__version__,
            fingerprint=self.machine.fingerprint,
            versions=dict(self.machine.versions),
        )
        remembered = remembered_rungs(self.machine.fingerprint, self.config.model, time.time())
        self.rungs = tuple(dict.fromkeys((*remembered, *last_rungs(before))))
        self.history = open_failures(before)
        first = next((entry for entry in before if entry["event"] == "supervisor_started"), None)
        if first and (first["fingerprint"], first["versions"]) != (self.machine.fingerprint, self.machine.versions):
            then = first["versions"]
            changed = [
                f"{name} {then.get(name)} -> {v}" for name, v in self.machine.versions.items() if then.get(name) != v
            ]
            named = ", ".join(changed) or "the processor, the card or its driver"
            self.events.append("warning", text=f"changed since this run began: {named}; rounding may differ")
        if self.rungs:
            self.events.append("remembered", rungs=list(self.rungs))
        for folder, kind, hint in (
            (self.model, "the model", f"hivetune fetch {quoted(self.config.model)}"),
            (self.snapshot, "the data", "train from the config again: hivetune train CONFIG"),
        ):
            problems = manifest_problems(folder)
            if problems:
                raise UsageError(f"{kind} of {self.run} changed since the run began: {folder}/{problems[0]}", hint=hint)
        reserve, free = _reserve_bytes(self.run), disk_free_bytes(self.run)
        if free < reserve and not checkpoints.reclaim(self.run):
            raise DoesNotFit(
                f"to continue, {self.run} needs {size(reserve)} of disk space, and {size(free)} are free",
                hint="free some space, or choose another output folder",
            )

    def attempt(self) -> Ended:
        """Start a worker with the recovery changes in effect, watch it to its end, and explain how it ended."""
        self.attempts += 1
        environment, choices = worker_effects(self.run, self.rungs)
        threads = read_resolved(self.run)[1].threads
        seen = as_torch_sees(self.machine, {**os.environ, **environment})
        devices = rank_devices(self.config, seen, self.model, self._device(), threads)
        memory_bytes = int(self.machine.memory_bytes * self.config.memory_share) // len(devices)
        every_s = CHECKPOINT_EVERY_S
        if self.history:
            # Faults that come often must not cost much each time.
            between_s = (time.monotonic() - self.started) / len(self.history)
            every_s = min(every_s, max(MIN_CHECKPOINT_EVERY_S, between_s / 10))
        kernel, oom_before = KernelLog(), oom_kills()
        child: Child | None = None
        try:
            child = start_child(
                Train(self.run, self.model, self.snapshot, choices, every_s, devices, environment),
                self.run,
                module=self.worker,
                limits=Limits(supervision()),
                environment=environment,
                memory_limit_bytes=memory_bytes if self._device() == "cpu" else None,
            )
            pid = child.process.pid
            self.events.append(
                "attempt",
                number=self.attempts,
                pid=pid,
                rungs=list(self.rungs),
                environment=environment,
                devices=list(devices),
            )
            outcome = self.watch(child)
            durable = checkpoints.newest_good(self.run).step
            ended = Ended(outcome, step_of_death(self.run, pid), durable, child.last_beat)
            # Before anything is concluded from it.
            error = outcome.error
            self.events.append(
                "ended",
                **{name: getattr(outcome, name) for name in ("status", "returncode", "signal")},
                phase=ended.phase.name.lower() if ended.phase else "",
                step=ended.step,
                durable=durable,
                error=None if error is None else f"{error.type}: {error.message}"[:1000],
            )
            if outcome.status in ("done", "stopped") or (self.stop.count and outcome.status != "failed"):
                return ended
            time.sleep(KERNEL_S)
            evidence = evidence_of(outcome, kernel=kernel.lines(pid), oom=oom_kills() > oom_before)
            return replace(ended, diagnosis=diagnose(evidence))
        except BaseException:
            if child is not None:
                child.kill()  # whoever goes on after this starts another worker: never two on one run
            raise
        finally:
            kernel.close()

    def watch(self, child: Child) -> Outcome:
        """Wait until the worker ends, hangs, or was asked to stop and did so."""
        stopping = hot = False
        next_sample = time.monotonic() + FIRST_SAMPLE_S
        while not child.ended:
            beats = child.wait_beats()
            if Beat.ITEM in beats:
                self.terms.on_step(last_step(self.run))
            if child.hung:
                return child.end_hung()
            if self.stop.count and not stopping:
                stopping = True
                self.events.append("stop_requested", signal=self.stop.number)
                child.ask_to_stop()
            if self.stop.count > 1 or (stopping and not child.worked):  # a worker that still loads has nothing to save
                child.kill()
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_EVERY_S
                measured, was_hot = sample(child.process.pid, self.run), hot
                self.events.append("sample", **measured)
                hot = any(card.get("hot") for card in measured.get("cards", ()))
                if hot and not was_hot:
                    text = "a card throttles at its limit of heat or power: steps take longer"
                    self.events.append("warning", text=text)
        child.wait_beats(0)
        child.kill()
        return child.outcome()

    def answer(self, ended: Ended) -> RunOutcome | None:
        """Return the run's outcome, or None when another worker is to be started."""
        result = ended.outcome.result
        if ended.outcome.status == "done":
            try:
                if self.rungs:
                    remember_rungs(self.machine.fingerprint, self.config.model, self.rungs, time.time())
            except OSError as error:  # a profile that can't be written must not end the run
                self.events.append("warning", text=f"the machine's profile could not be written: {error}")
            return self._end("done", ended.durable, result)
        if ended.diagnosis is None:
            return self._stopped(result)
        action = self._choose_action(ended)
        if action.kind == "stop":
            return self._end("failed", ended.durable, {}, self._exhausted(ended, action.why))
        self.rungs, self.tried = action.rungs, action.tried
        if action.kind == "wait":
            self._wait_for_room()
        if action.tried in SMALLER_TRAINING:
            text = (
                halve_rank(self.run) if action.tried == "rank" else skip_half_of_remaining_rows(self.run, self.snapshot)
            )
            self.events.append("smaller", how=action.tried, text=text)
        self.stop.sleep(action.wait_s)
        return self._stopped(result) if self.stop.count else None

    def pause_for_disk(self, error: OSError) -> RunOutcome | None:
        """Wait until the disk has room again. Return the run's outcome when it was stopped meanwhile."""
        self.events.append("warning", text=f"the disk is full: {error}")
        self._wait_for_room()
        return self._stopped({}) if self.stop.count else None

    def _wait_for_room(self) -> None:
        _wait_for_disk(
            self.run,
            self.events,
            lambda: self.stop.count > 0 or _has_room(self.run),
            self.terms.on_wait,
            self.stop.sleep,
        )

    def _choose_action(self, ended: Ended) -> Reply:
        """Journal the failure and choose what to do. An isolation is made here, and the ladder is asked again."""
        assert ended.diagnosis is not None
        diagnosis = ended.diagnosis
        if diagnosis.fault.distrust:  # the checkpoints since the last good test of the numbers may hold wrong ones
            good = [entry["step"] for entry in read_journal(self.run / METRICS) if entry.get("passed")]
            doubtful = checkpoints.distrust_after(self.run, max(good, default=0))
            self.events.append("distrusted", steps=doubtful, newest=ended.durable)
        failure = Failure(
            fault=diagnosis.fault.id,
            step=ended.step,
            durable=checkpoints.newest_good(self.run).step,
            quarantined=quarantined(self.run),
            rungs=self.rungs,
            tried=self.tried,
            # Validation and saving compute no training rows, so there is none to look for.
            isolated=ended.phase in (Beat.VALIDATING, Beat.SAVING),
        )
        self.history.append(failure)
        self.events.append("failure", **asdict(failure), words=diagnosis.words, shape=diagnosis.shape)
        action = next_action(self.history, self._bounds())
        while True:
            self.events.append(
                "action", action=action.kind, why=action.why, rungs=list(action.rungs), tried=action.tried
            )
            if action.kind != "isolate":
                return action
            found = self._isolate(failure)
            self.history[-1] = replace(failure, isolated=True)
            # The step is made without the rows at fault; where there is none, the ladder goes on.
            if found:
                action = Reply("again", found, remaining_rungs(self.history))
            else:
                action = next_action(self.history, self._bounds())

    def _isolate(self, failure: Failure) -> str:
        """Replay the rows of the step, and quarantine those at fault. Return the reason, or "" where none is."""
        plan, data = read_plan(self.run), open_snapshot(self.snapshot)
        steps, step = plan.steps, failure.step
        if step >= len(steps):  # after the last one: there are no rows to replay
            return ""
        replay = make_replayer(
            self.run,
            self.model,
            data.folder,
            rungs=self.rungs,
            module=self.replay,
            limits=lambda: Limits(supervision()),
        )
        # A row that was trained before; none in the first step.
        control = next(iter(steps[step - 1].rows), None) if step else None
        most = max_quarantined(plan.num_rows, self.config.data.max_rejected) - failure.quarantined
        findings = isolate(steps[step].rows, replay, most=most, control=control)
        for row, reason in findings.rows.items():  # on disk before anything says so
            append_amendment(self.run, Amendment(step, (row,), f"{data.info(row).source}: {reason}"))
        self.events.append("isolated", words=findings.words, children=findings.children)
        for row, reason in findings.rows.items():
            source = data.info(row).source
            self.events.append("quarantined", row=row, source=source, from_step=step, reason=reason)
        return findings.words if findings.rows else ""

    def _bounds(self) -> Bounds:
        settings, run = supervision(), self.run
        # A worker as it is started now: rungs that would change nothing in it are void.
        environment, changes = worker_effects(run, self.rungs)
        _, settled = read_resolved(run)
        started = [e for e in read_journal(run / METRICS) if e["event"] == "started" and "path" in e]
        as_started = Choices(path=started[-1]["path"] if started else None)
        variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        # A run that begins with another run's adapter has that adapter's rank.
        return Bounds(
            attempts=settings.attempts,
            on_device=self._device() != "cpu",
            backoff_s=settings.backoff_s,
            allow=frozenset({name for name in self.config.allow if name != "rank" or self.config.lora.start is None}),
            void=void_rungs(variables, as_started.updated(settled).updated(changes)),
            published=published_remedies(self.machine),
        )

    def _device(self) -> str:
        """Return the next worker's device: by the run's choices, before there are any by what is in the machine."""
        if "cpu" in self.rungs:
            return "cpu"
        device = read_resolved(self.run)[1].device or self.config.device
        if device != "auto":
            return device
        environment, _ = worker_effects(self.run, self.rungs)
        cards = as_torch_sees(self.machine, {**os.environ, **environment}).cards
        return f"cuda:{cards[0].index}" if cards else "cpu"

    def _stopped(self, result: Mapping[str, Any]) -> RunOutcome:
        step = checkpoints.newest_good(self.run).step
        error = Stopped(
            f"stopped at step {step}; everything up to it is saved",
            signal_number=self.stop.number,
            hint=f"to continue: hivetune train {quoted(self.run)}",
        )
        return self._end("stopped", step, result, error)

    def _exhausted(self, ended: Ended, why: str) -> HivetuneError:
        """Return what ends the run without success: the worker's refusal, or the reason, after an adapter is salvaged.

        The adapter is that of the newest saved step, at the top of the run folder.
        """
        outcome, run = ended.outcome, self.run
        if outcome.error is not None and outcome.error.exit_code in (2, 3, 4, 5):
            try:
                outcome.check("training")
            except HivetuneError as refusal:
                return refusal
        assert ended.diagnosis is not None
        adapter = "No step was saved, so there is no adapter."
        if ended.durable:
            on_cpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
            salvaged = run_task(Salvage(run, self.model), run / SALVAGE, environment=on_cpu)
            if salvaged.status == "done":
                adapter = f"The adapter of step {salvaged.result['adapter_step']} is in {run}."
            else:
                self.events.append("warning", text=f"the adapter could not be written: {salvaged.ending()}")
                adapter = "Its checkpoints are whole, but no adapter could be written from them."
        where = f"in step {ended.step}" if ended.step >= 0 else "while it loaded the model"
        return RecoveryExhausted(
            f"the worker of {run} ended {where}: {ended.diagnosis.words}\nNo more attempts: {why}. {adapter}",
            hint=f"{ended.diagnosis.fault.advice} Then: hivetune train {quoted(run)}; "
            "with other settings: hivetune train CONFIG",
        )

    def _end(
        self, status: str, steps: int, result: Mapping[str, Any], error: HivetuneError | None = None
    ) -> RunOutcome:
        """Journal how the run ended, and return it as a RunOutcome."""
        outcome = RunOutcome(
            status=status,
            steps=steps,
            restarts=self.attempts - 1,
            result=dict(result),
            faults=tuple(failure.fault for failure in self.history),
            rungs=self.rungs,
            error=error,
        )
        self.events.append(
            "supervisor_ended",
            status=status,
            steps=steps,
            restarts=outcome.restarts,
            rungs=list(self.rungs),
            why="" if error is None else error.message,
        )
        return outcome
