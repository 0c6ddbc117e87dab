"""One worker while it lives: the terms it runs under, how it is watched, and where it ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.journal import Journal, read_journal
from hivetune.config import SuperviseConfig
from hivetune.machine.telemetry import any_hot, sample
from hivetune.process.launch import Launch, launch_child
from hivetune.process.parent import Child
from hivetune.process.protocol import Beat, Outcome
from hivetune.process.stop import StopRequest
from hivetune.run import checkpoints
from hivetune.run.folder import METRICS
from hivetune.run.standby import Standby, persist
from hivetune.train.supervise.diagnose import Diagnosis
from hivetune.train.supervise.workers import Workers

SAMPLE_EVERY_S = 30.0
# The first sample comes sooner: many faults come within the first half minute.
FIRST_SAMPLE_S = 5.0
METRICS_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Terms:
    """What the caller asks of a run while it goes on. Each function is called about four times a second.

    `on_step` gets the number of finished steps. While `stand_still` is true the worker computes nothing. `ends` returns
    0, 1 for an end after a checkpoint, or 2 for an end now. `on_look` is called at every look. `start` makes a worker's
    process.
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
    """How an attempt ended. `step`: the one it died in, -1 while loading; `durable`: the newest state that is safe.

    `diagnosis` is None where the worker was done or stopped as asked. `phase`: its last heartbeat.
    """

    outcome: Outcome
    step: int
    durable: int
    phase: Beat | None = None
    seconds: float = 0.0
    diagnosis: Diagnosis | None = None


def watch(job: Job, child: Child, workers: Workers) -> Outcome:
    """Wait until the worker ends, hangs, or was asked to stop and did so."""
    asked = hot = False
    next_sample = time.monotonic() + FIRST_SAMPLE_S
    while not child.ended:
        beats = child.wait_beats()
        job.terms.on_look()
        if Beat.ITEM in beats:
            job.terms.on_step(last_step(job.run))
        still = job.terms.stand_still() and not job.stop.count
        if still != child.still and not child.ended:
            # SIGSTOP at any instruction: somebody else needs the processor now, and no step has to end first.
            child.stand_still(still)
            job.events.append("stands_still" if still else "goes_on")
        workers.tend(still=still)
        if child.hung:
            return child.end_hung()
        if job.stop.count and not asked:
            asked = True
            job.events.append("stop_requested", signal=job.stop.number)
            child.ask_to_stop()
        if job.stop.count > 1 or (asked and not child.worked):  # a worker that still loads has nothing to save
            child.kill()
        if time.monotonic() >= next_sample:
            hot = _sample(job, child, workers, hot)
            next_sample = time.monotonic() + SAMPLE_EVERY_S
    child.wait_beats(0)
    child.kill()
    return child.outcome()


def _sample(job: Job, child: Child, workers: Workers, was_hot: bool) -> bool:
    """Journal one line of telemetry.

    Warn once when a card begins to throttle: steps then take longer, which is no hang.
    """
    taken = sample(child.process.pid, job.run)
    hot = any_hot(taken.get("cards", ()))
    beside = workers.sample()
    job.events.append("sample", **taken, **({"workers": beside} if beside else {}))
    if hot and not was_hot:
        job.events.append("warning", text="a card throttles at its limit of heat or power: steps take longer")
    return hot


def journal_end(job: Job, ended: Ended) -> None:
    """Journal how an attempt ended, before anything is concluded from it."""
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


def state_to_disk(job: Job) -> None:
    """Write what a worker left in memory as a checkpoint. While the disk refuses it, it stays in memory."""
    try:
        step = persist(job.run, job.standby)
    except OSError as error:
        job.events.append("warning", text=f"the state in memory could not be written to disk yet: {error}")
        return
    job.standby.clear()
    if step is not None:
        job.events.append("from_memory", step=step)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint whose sizes are right, 0 without one.

    The worker verifies every byte when it starts.
    """
    return checkpoints.newest_good(run).step


def step_of_death(run: Path, pid: int) -> int:
    """Return the step (counted from 0) that worker `pid` was in, by the run's metrics; -1 when it never began one."""
    step = -1
    for entry in read_journal(run / METRICS):
        if entry["event"] == "started":
            step = entry["step"] if entry.get("pid") == pid else -1
        elif entry["event"] == "step" and step >= 0:
            step = entry["step"]
    return step


def last_step(run: Path) -> int:
    """Return the newest step in the metrics, read from the end of the file; 0 without one."""
    path = run / METRICS
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - METRICS_TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace")
    marks = [line.partition('"step": ')[2] for line in tail.splitlines() if '"event": "step"' in line]
    numbers = [mark.partition(",")[0] for mark in marks]
    return int(numbers[-1]) if numbers and numbers[-1].isdigit() else 0
