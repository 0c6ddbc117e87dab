"""One worker from its start to its end: started with the rungs in effect, watched, asked to stop, examined."""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.base.disk import MANIFEST, sha256_bytes, sha256_file
from hivetune.base.journal import Journal, read_journal
from hivetune.config import SuperviseConfig
from hivetune.machine.telemetry import any_hot, sample
from hivetune.machine.traces import KernelLog, oom_kills, settle_kernel
from hivetune.process.cluster import Order
from hivetune.process.launch import Launch, launch_child
from hivetune.process.limits import LearnedLimits
from hivetune.process.parent import Child, start_child
from hivetune.process.protocol import Beat, Meeting, Outcome, Train
from hivetune.process.stop import StopRequest
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import METRICS, WORKERS
from hivetune.run.standby import Standby, persist
from hivetune.train.supervise.diagnose import Diagnosis, diagnose, evidence_of
from hivetune.train.supervise.variables import worker_effects
from hivetune.train.supervise.workers.cluster import ClusterPlaces
from hivetune.train.supervise.workers.local import LocalPlaces
from hivetune.train.supervise.workers.workers import WorkerPlaces, Workers

SAMPLE_EVERY_S = 30.0
# The first one sooner: many faults come within the first half minute.
FIRST_SAMPLE_S = 5.0
METRICS_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Terms:
    """What whoever started a run asks of it while it goes on; every function is called about four times a second.

    `on_step` is told the number of finished steps. While `stand_still` is true the worker computes nothing. `ends`: 0,
    1 for an end after a checkpoint, 2 for an end now. `on_look` has nothing to tell. `start` makes a worker's process.
    """

    on_step: Callable[[int], None] = lambda done: None
    stand_still: Callable[[], bool] = lambda: False
    ends: Callable[[], int] = lambda: 0
    on_look: Callable[[], None] = lambda: None
    start: Launch = launch_child


@dataclass(frozen=True)
class Job:
    """What stays the same over all attempts of a run. `worker`, `replay`: modules instead of the engine's own."""

    run: Path
    model: Path
    snapshot: Path
    worker: str | None
    replay: str | None
    settings: SuperviseConfig
    events: Journal
    stop: StopRequest
    standby: Standby
    terms: Terms = Terms()


@dataclass(frozen=True)
class Ended:
    """How an attempt ended. `step`: the one it died in, -1 while loading; `durable`: the newest state that is safe."""

    outcome: Outcome
    step: int
    durable: int
    diagnosis: Diagnosis | None = None
    phase: Beat | None = None
    seconds: float = 0.0
    asked_to_stop: bool = field(default=False)


@dataclass(frozen=True)
class Told:
    """What the worker is told of this attempt: the memory that it may take, and how often it is likely to die; and the
    workers that compute packs for it: their devices on this machine, or the cluster that has some. `device`: its own.
    """

    memory_limit_bytes: int | None = None
    mean_time_between_faults_s: float | None = None
    devices: tuple[str, ...] = ()
    cluster: str | None = None
    model: str = ""
    device: str = "cpu"


def run_attempt(job: Job, number: int, rungs: tuple[str, ...], told: Told, limits: LearnedLimits) -> Ended:
    """Start the worker, watch it to its end, bring what it left in memory to disk, and say what happened."""
    environment, choices = worker_effects(job.run, rungs)
    kernel, oom_before, started = KernelLog(), oom_kills(), time.monotonic()
    state_to_disk(job)  # what an earlier attempt left and a full disk refused
    child: Child | None = None
    beside = Workers(_places(job, told, environment), job.events)
    try:
        with beside:
            child = _start(job, environment, choices, told, limits, beside.meeting)
            pid = child.process.pid
            job.events.append("attempt", number=number, pid=pid, rungs=list(rungs), environment=environment)
            outcome = _watch(job, child, beside)
        state_to_disk(job)
        durable = newest_step(job.run)
        step = step_of_death(job.run, pid)
        ended = Ended(outcome, step, durable, None, child.last_beat, time.monotonic() - started, job.stop.count > 0)
        _journal_end(job, ended)
        if outcome.status in ("done", "stopped") or (ended.asked_to_stop and outcome.status != "failed"):
            return ended
        settle_kernel()
        evidence = evidence_of(
            outcome, kernel=kernel.lines(pid), oom=oom_kills() > oom_before, override=_overridden(environment)
        )
        return Ended(outcome, step, durable, diagnose(evidence), child.last_beat, ended.seconds, ended.asked_to_stop)
    except BaseException:
        if child is not None:
            child.kill()  # whoever goes on after this starts another worker: never two on one run
        raise
    finally:
        kernel.close()


def _places(job: Job, told: Told, environment: dict[str, str | None]) -> WorkerPlaces:
    if told.cluster is None:
        return LocalPlaces(
            job.run,
            job.model,
            told.devices,
            environment=environment,
            limits=lambda: LearnedLimits(job.settings),
            module=job.worker,
        )
    order = functools.partial(
        Order,
        run=f"{job.run.name}-{sha256_bytes(str(job.run.resolve()).encode())[:6]}",
        model=told.model,
        model_folder=job.model.resolve(),
        model_hash=sha256_file(job.model / MANIFEST),
        supervise=job.settings.model_dump(mode="json"),
        module=job.worker,
    )
    return ClusterPlaces(told.cluster, order, told.device, job.run / WORKERS / "cluster.log")


def _start(
    job: Job,
    environment: dict[str, str | None],
    choices: Choices,
    told: Told,
    limits: LearnedLimits,
    meeting: Meeting | None,
) -> Child:
    handles, between_s = job.standby.handles, told.mean_time_between_faults_s
    return start_child(
        Train(job.run, job.model, job.snapshot, choices, handles, between_s, meeting),
        job.run,
        module=job.worker,
        limits=limits,
        environment=environment,
        pass_fds=handles,
        memory_limit_bytes=told.memory_limit_bytes,
        start=job.terms.start,
    )


def newest_step(run: Path) -> int:
    """The newest checkpoint whose sizes are right, 0 without one; the worker verifies every byte when it starts."""
    found = checkpoints.newest_good(run)
    return found.step


def step_of_death(run: Path, pid: int) -> int:
    """The step (counted from 0) that worker `pid` was in, by the run's metrics; -1 when it never began one."""
    step = -1
    for entry in read_journal(run / METRICS):
        if entry["event"] == "started":
            step = entry["step"] if entry.get("pid") == pid else -1
        elif entry["event"] == "step" and step >= 0:
            step = entry["step"]
    return step


def last_step(run: Path) -> int:
    """The newest step in the metrics, read from the end of the file; 0 without one."""
    path = run / METRICS
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - METRICS_TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace")
    marks = [line.partition('"step": ')[2] for line in tail.splitlines() if '"event": "step"' in line]
    numbers = [mark.partition(",")[0] for mark in marks]
    return int(numbers[-1]) if numbers and numbers[-1].isdigit() else 0


def _watch(job: Job, child: Child, workers: Workers) -> Outcome:
    """Until it ends, hangs, or was asked to stop and did. A worker that is still loading has nothing to save."""
    asked = hot = False
    next_sample = time.monotonic() + FIRST_SAMPLE_S
    while not child.ended:
        beats = child.wait_beats()
        job.terms.on_look()
        if Beat.ITEM in beats:
            job.terms.on_step(last_step(job.run))
        still = job.terms.stand_still() and not job.stop.count
        _stand_still(job, child, still=still)
        workers.tend(still=still)
        if child.hung:
            return child.end_hung()
        if job.stop.count and not asked:
            asked = True
            job.events.append("stop_requested", signal=job.stop.number)
            child.ask_to_stop()
        if job.stop.count > 1 or (asked and not child.worked):
            child.kill()
        if time.monotonic() >= next_sample:
            hot = _sample(job, child, workers, hot)
            next_sample = time.monotonic() + SAMPLE_EVERY_S
    child.wait_beats(0)
    child.kill()
    return child.outcome()


def _stand_still(job: Job, child: Child, *, still: bool) -> None:
    """Stopped by the kernel, at any instruction: somebody else needs the processor now, and no step need end first."""
    if still != child.still and not child.ended:
        child.stand_still(still)
        job.events.append("stands_still" if still else "goes_on")


def _sample(job: Job, child: Child, workers: Workers, was_hot: bool) -> bool:
    """One line of telemetry; said once when a card begins to hold itself back: then steps take longer, no hang."""
    taken = sample(child.process.pid, job.run)
    hot = any_hot(taken.get("cards", ()))
    beside = workers.sample()
    job.events.append("sample", **taken, **({"workers": beside} if beside else {}))
    if hot and not was_hot:
        job.events.append("warning", text="a card is at its limit of heat or power: steps take longer")
    return hot


def state_to_disk(job: Job) -> None:
    """What the worker left in memory becomes a checkpoint; while the disk refuses, it stays in memory."""
    try:
        step = persist(job.run, job.standby)
    except OSError as error:
        job.events.append("warning", text=f"the state in memory could not be written: {error}")
        return
    job.standby.clear()
    if step is not None:
        job.events.append("from_memory", step=step)


def _journal_end(job: Job, ended: Ended) -> None:
    outcome = ended.outcome
    error = None if outcome.error is None else f"{outcome.error.type}: {outcome.error.message}"[:1000]
    job.events.append(
        "ended",
        status=outcome.status,
        returncode=outcome.returncode,
        signal=outcome.signal,
        state=outcome.state,
        survived=outcome.survived,
        phase=ended.phase.phase if ended.phase else "",
        step=ended.step,
        durable=ended.durable,
        seconds=round(ended.seconds, 3),
        error=error,
    )


def _overridden(environment: dict[str, str | None]) -> bool:
    name = "HSA_OVERRIDE_GFX_VERSION"
    return (environment[name] if name in environment else os.environ.get(name)) is not None
