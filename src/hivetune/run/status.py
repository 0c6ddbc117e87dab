"""How a run is doing, from its files alone: anyone may look, also while it goes on and after any crash."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import boot_id, lock, lock_holder
from hivetune.base.journal import DAMAGED, read_journal, read_tail
from hivetune.base.paths import quoted
from hivetune.base.sealed import read_sealed
from hivetune.base.units import duration
from hivetune.errors import Busy, UsageError
from hivetune.run import checkpoints
from hivetune.run.folder import AMENDMENTS, EVENTS, METRICS, OUTCOME, PLAN, PROBE, RECORD
from hivetune.run.record import read_record

State = Literal["running", "done", "stopped", "failed", "interrupted", "new", "damaged"]
RECENT_STEPS = 50


@dataclass(frozen=True)
class RunStatus:
    """`interrupted`: its supervisor is gone without a word (a crash or a power cut); resume goes on. `left_s`: at the
    speed of the last steps; None where nothing is known or nothing is left."""

    run: Path
    name: str
    state: State
    step: int
    steps: int
    pid: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    left_s: float | None = None
    restarts: int = 0
    quarantined: int = 0
    last_fault: str = ""
    created: float = 0.0
    problem: str = ""
    damaged_lines: int = 0
    storage_problem: str = ""
    """What its disk refused, in words: it was or is full, or checkpoints could not be written."""

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "run": str(self.run)}


@dataclass
class RunTally:
    """What a run's two journals have said so far. Whoever follows a run adds the lines that came since."""

    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Seconds and tokens of the newest steps."""
    restarts: int = 0
    last_fault: str = ""
    last_end: Mapping[str, Any] | None = None
    """The newest start or end of a supervisor."""
    damaged_lines: int = 0
    refused_saves: int = 0
    last_refusal: str = ""
    disk_waits: int = 0
    waiting_since: float | None = None
    """The wall clock when the disk was full, while it still is."""
    waited_s: float = 0.0

    def add_metric(self, entry: Mapping[str, Any]) -> None:
        """A line of METRICS."""
        if entry["event"] == "step":
            self.step, self.loss = entry["step"], entry["loss"]
            self.recent.append((entry.get("seconds", 0.0), entry.get("tokens", 0)))
        elif entry["event"] == "validation":
            self.validation_loss = entry["loss"]
        elif entry["event"] == "save_failed":
            self.refused_saves, self.last_refusal = self.refused_saves + 1, str(entry.get("error"))
        self.damaged_lines += entry["event"] == DAMAGED

    def add_event(self, entry: Mapping[str, Any]) -> None:
        """A line of EVENTS."""
        if entry["event"] == "failure":
            self.restarts, self.last_fault = self.restarts + 1, entry["words"]
        elif entry["event"] in ("supervisor_started", "supervisor_ended"):
            self.last_end = entry
        elif entry["event"] == "disk_wait":
            self.disk_waits, self.waiting_since = self.disk_waits + 1, entry["time"]
        if entry["event"] in ("disk_ready", "supervisor_started", "supervisor_ended"):
            since = entry["time"] if self.waiting_since is None else self.waiting_since
            self.waited_s, self.waiting_since = self.waited_s + max(0.0, entry["time"] - since), None
        self.damaged_lines += entry["event"] == DAMAGED

    @property
    def storage_problem(self) -> str:
        """What the disk refused so far, in words; empty where it took everything."""
        parts = []
        if self.waiting_since is not None:
            parts.append("its disk is full: it waits for room")
        elif self.disk_waits:
            times = "once" if self.disk_waits == 1 else f"{self.disk_waits} times"
            parts.append(f"its disk was full {times}, it waited {duration(self.waited_s)}")
        if self.refused_saves:
            count = "1 checkpoint" if self.refused_saves == 1 else f"{self.refused_saves} checkpoints"
            parts.append(f"{count} could not be written: {self.last_refusal}")
        return "; ".join(parts)


def run_status(run: Path) -> RunStatus:
    """Raises UsageError when `run` is not a run folder. A damaged one has that state, and `problem` says where."""
    tally = RunTally()
    try:
        for entry in read_journal(run / METRICS):
            tally.add_metric(entry)
        for entry in read_journal(run / EVENTS):
            tally.add_event(entry)
    except OSError as error:
        if os.path.lexists(run / RECORD):
            return _damaged(run, f"{error.filename}: {error.strerror}")
    return status_of(run, tally)


def status_of(run: Path, tally: RunTally) -> RunStatus:
    """The status of a run whose journals say so much. Raises as `run_status`."""
    if not os.path.lexists(run / RECORD):
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs")
    try:
        return _status(run, tally)
    except UsageError as error:
        return _damaged(run, error.message)
    except OSError as error:
        return _damaged(run, f"{error.filename}: {error.strerror}")


def _damaged(run: Path, problem: str) -> RunStatus:
    return RunStatus(run, run.name, "damaged", 0, 0, problem=problem)


def _status(run: Path, tally: RunTally) -> RunStatus:
    record, plan = read_record(run), read_sealed(run / PLAN)
    total = plan.get("steps")
    if not isinstance(total, int):
        raise UsageError(f"{run / PLAN} is damaged: its 'steps' is {total!r}")
    holder = lock_holder(run)
    seconds = sum(each for each, _ in tally.recent)
    tokens = sum(each for _, each in tally.recent)
    running = holder is not None
    return RunStatus(
        run=run,
        name=record["name"],
        state=_state(record, tally, running=running),
        step=tally.step,
        steps=total,
        pid=holder.pid if holder else None,
        loss=tally.loss,
        validation_loss=tally.validation_loss,
        tokens_per_second=tokens / seconds if seconds else None,
        left_s=seconds / len(tally.recent) * (total - tally.step) if running and tally.recent else None,
        restarts=tally.restarts,
        quarantined=quarantined(run),
        last_fault=tally.last_fault,
        created=record["created"],
        damaged_lines=tally.damaged_lines,
        storage_problem=tally.storage_problem,
    )


def has_begun(run: Path) -> bool:
    """Whether its choices are made: it was measured, or has a checkpoint."""
    return (run / PROBE / OUTCOME).exists() or bool(checkpoints.steps(run))


def hold_run(run: Path) -> AbstractContextManager[None]:
    """The lock of a run folder, for who writes to it. Raises Busy, UsageError as `lock`."""
    return lock(run, hint=f"wait for it, or stop it with: hivetune stop {quoted(run)}")


def stop_run(run: Path, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Ask the run's supervisor for a clean end and wait for it; False when it was not running.

    Raises Busy when it has not ended after `timeout_s`, UsageError when it runs in another container or machine.
    """
    if not ask_to_stop(run):
        return False
    deadline = time.monotonic() + timeout_s
    while lock_holder(run) is not None:
        if time.monotonic() > deadline:
            raise Busy(f"{run} is still saving after {timeout_s:.0f} s", hint="give it more time, or stop it again")
        sleep(0.1)
    return True


def ask_to_stop(run: Path) -> bool:
    """Ask the run's supervisor for a clean end, and do not wait; False when it is not running.

    Raises UsageError when it runs in another container or machine.
    """
    holder = lock_holder(run)
    if holder is None:
        return False
    if holder.boot_id != boot_id():
        raise UsageError(f"{run} is held by process {holder.pid} of another machine", hint="stop it there")
    os.kill(holder.pid, signal.SIGTERM)
    return True


def quarantined(run: Path) -> int:
    """How many rows the plan's amendments have taken out for good."""
    amendments = (entry for entry in read_journal(run / AMENDMENTS) if entry["event"] == "amendment")
    return len({row for a in amendments if a.get("until_step") is None for row in a["rows"]})


def loss_curve(run: Path) -> list[tuple[int, float, str]]:
    """(step, nats per token, "step" or "validation"), the newest line of a step that was repeated after a crash.

    A loss that was not finite is written as null, and is no point.
    """
    points: dict[tuple[str, int], float] = {}
    for entry in read_journal(run / METRICS):
        if entry["event"] in ("step", "validation") and entry["loss"] is not None:
            points[entry["event"], entry["step"]] = entry["loss"]
    return sorted((step, loss, kind) for (kind, step), loss in points.items())


def newest_losses(run: Path) -> tuple[float | None, float | None, float | None]:
    """The newest training loss and validation loss, and tokens a second of the newest step. None: not told yet."""
    tail = read_tail(run / METRICS)
    step = next((entry for entry in reversed(tail) if entry["event"] == "step"), None)
    validation = next((entry for entry in reversed(tail) if entry["event"] == "validation"), None)
    speed = step.get("tokens", 0) / step["seconds"] if step and step.get("seconds") else None
    return step["loss"] if step else None, validation["loss"] if validation else None, speed


def _state(record: Mapping[str, Any], tally: RunTally, *, running: bool) -> State:
    if running:
        return "running"
    if tally.last_end is None:
        return "new"
    if tally.last_end["event"] == "supervisor_started":
        return "interrupted"
    status: State = tally.last_end["status"]
    return "done" if record["status"] == "done" else status
