"""The runs of a home: the lookup by folder, name, prefix of a name or `last`, and the status of each.

A status is read from the run's files alone, so it is available during the run and after a crash.
"""

import contextlib
import difflib
import os
import signal
import sqlite3
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hivetune.base import journal
from hivetune.base.database import open_existing_database
from hivetune.base.disk import LockHolder, boot_id, home, lock, lock_holder, stored_path
from hivetune.base.documents import read_document
from hivetune.base.journal import read_journal, read_tail
from hivetune.base.paths import expanded, quoted
from hivetune.errors import Busy, UsageError
from hivetune.run.folder import (
    AMENDMENTS,
    CHECKING,
    EVALUATING,
    EVENTS,
    EXPORTS,
    METRICS,
    PLAN,
    RECORD,
    read_record,
)

State = Literal["running", "done", "stopped", "failed", "interrupted", "new", "damaged"]
RECENT_STEPS = 50  # enough to even out rows of different lengths, few enough to follow a change of the machine
LAST = "last"


@dataclass(frozen=True)
class RunStatus:
    """The status of one run; `left_s` is the estimated remaining time in seconds."""

    run: Path
    name: str
    # "interrupted": the supervisor ended without recording it (a crash or a power cut); the run can be resumed.
    state: State
    step: int
    steps: int
    pid: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    left_s: float | None = None  # at the speed of the last steps; None if it is unknown or the run has ended
    restarts: int = 0
    quarantined: int = 0
    last_fault: str = ""
    created: float = 0.0
    problem: str = ""
    damaged_lines: int = 0
    storage_problem: str = ""  # what the disk refused, in words


@dataclass
class RunTally:
    """The sums over a run's two journals so far. A program that follows the run adds the new lines."""

    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    restarts: int = 0
    last_fault: str = ""
    damaged_lines: int = 0
    disk_waits: int = 0
    is_waiting: bool = False
    refused_saves: int = 0
    last_refusal: str = ""
    state: State = "new"  # by the newest event that starts or ends a supervisor, as if none ran now
    # Seconds and tokens of the newest steps.
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line of METRICS or EVENTS."""
        match entry["event"]:
            case "step":
                self.step, self.loss = entry["step"], entry["loss"]
                self.recent.append((entry.get("seconds", 0.0), entry.get("tokens", 0)))
            case "validation":
                self.validation_loss = entry["loss"]
            case "save_failed":
                self.refused_saves, self.last_refusal = self.refused_saves + 1, str(entry.get("error"))
            case "failure":
                self.restarts, self.last_fault = self.restarts + 1, entry["words"]
            case "disk_wait":
                self.disk_waits, self.is_waiting = self.disk_waits + 1, True
            case "disk_ready":
                self.is_waiting = False
            case "supervisor_started":
                self.state, self.is_waiting = "interrupted", False  # until its end is written
            case "supervisor_ended":
                self.state, self.is_waiting = entry["status"], False
            case journal.DAMAGED:
                self.damaged_lines += 1

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of the newest steps, in tokens per second; None before the first step."""
        seconds = sum(seconds for seconds, _ in self.recent)
        return sum(tokens for _, tokens in self.recent) / seconds if seconds else None

    @property
    def storage_problem(self) -> str:
        """Return a sentence on failed writes to the disk; "" if there are none."""
        problems = []
        if self.disk_waits:
            times = "once" if self.disk_waits == 1 else f"{self.disk_waits} times"
            problems.append("its disk is full: it waits for room" if self.is_waiting else f"its disk was full {times}")
        if self.refused_saves:
            count = "1 checkpoint" if self.refused_saves == 1 else f"{self.refused_saves} checkpoints"
            problems.append(f"{count} could not be written: {self.last_refusal}")
        return "; ".join(problems)


def run_status(run: Path, read: Callable[[], RunTally] | None = None) -> RunStatus:
    """Return the status of the run in a folder; its `problem` names the damaged file, if any. `read` returns the sums
    over its journals, for a caller that has read them. Raises UsageError if `run` is not a run folder.
    """
    if not os.path.lexists(run / RECORD):
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs")
    try:
        holder = lock_holder(run)  # before the journals: a supervisor that is gone has written its last event
        return _status(run, holder, read() if read else _tally_of(run))
    except UsageError as error:
        return damaged_status(run, error.message)
    except OSError as error:
        return damaged_status(run, f"{error.filename}: {error.strerror}")


def damaged_status(run: Path, problem: str) -> RunStatus:
    """Return the status of a run that can't be read."""
    return RunStatus(run, run.name, "damaged", 0, 0, problem=problem)


def _tally_of(run: Path) -> RunTally:
    tally = RunTally()
    for name in (METRICS, EVENTS):
        for entry in read_journal(run / name):
            tally.add(entry)
    return tally


def _status(run: Path, holder: LockHolder | None, tally: RunTally) -> RunStatus:
    record, total = read_record(run), read_document(run / PLAN).get("steps")
    if not isinstance(total, int):
        raise UsageError(f"{run / PLAN} is damaged: 'steps' is {total!r}, not a number of steps")
    # The record is written last: without the event of an end, its "done" is that of an earlier training.
    state: State = "done" if record["status"] == "done" and tally.state not in ("new", "interrupted") else tally.state
    return RunStatus(
        run=run,
        name=record["name"],
        state=state if holder is None else "running",
        steps=total,
        pid=holder.pid if holder else None,
        left_s=statistics.mean(s for s, _ in tally.recent) * (total - tally.step) if holder and tally.recent else None,
        quarantined=quarantined(run),
        created=record["created"],
        step=tally.step,
        loss=tally.loss,
        validation_loss=tally.validation_loss,
        tokens_per_second=tally.tokens_per_second,
        restarts=tally.restarts,
        last_fault=tally.last_fault,
        damaged_lines=tally.damaged_lines,
        storage_problem=tally.storage_problem,
    )


def refuse_older_adapter(run: Path) -> None:
    """Raise UsageError if a run has done more steps than its adapter, which an earlier stop wrote."""
    status = run_status(run)
    stopped_at = (read_record(run).get("result") or {}).get("steps")
    if stopped_at is not None and stopped_at < status.step and (status.pid or status.state == "interrupted"):
        continues = f"wait for it, or stop it: hivetune stop {quoted(run)}"
        raise UsageError(
            f"{run} {'runs' if status.pid else 'was interrupted'} at step {status.step}, but its adapter was written"
            f" at step {stopped_at}",
            hint=continues if status.pid else f"continue it, or stop it again: hivetune train {quoted(run)}",
        )


def lock_run(run: Path) -> AbstractContextManager[None]:
    """Return the lock of a run folder as a context manager; every writer of the folder must hold it. Raises Busy and
    UsageError as `lock`."""
    return lock(run, hint=f"wait for it, or stop it with: hivetune stop {quoted(run)}")


def works_on(run: Path) -> list[tuple[str, LockHolder]]:
    """Return the works on a run beside its training, "eval", "export" or "export-check", each with its process."""
    holders = ((doing, lock_holder(run / doing)) for doing in (EVALUATING, EXPORTS, CHECKING))
    return [(doing, holder) for doing, holder in holders if holder is not None]


@contextlib.contextmanager
def lock_idle_run(run: Path) -> Iterator[None]:
    """Lock a run that is to be deleted. Raises Busy also while it is evaluated or exported, UsageError as `lock`."""
    with lock_run(run):
        for doing, holder in works_on(run):
            raise Busy(f"{run} is in use by process {holder.pid} ({doing})", hint="wait until it has ended")
        yield


def stop_run(run: Path, timeout_s: float) -> bool:
    """Ask the run's supervisor for a clean end and wait for it; False when it was not running.

    Raises Busy when it has not ended after `timeout_s`, UsageError when it runs in another container or machine.
    """
    if not ask_to_stop(run):
        return False
    deadline = time.monotonic() + timeout_s
    while lock_holder(run) is not None:
        if time.monotonic() > deadline:
            raise Busy(f"{run} is still saving after {timeout_s:.0f} s", hint="give it more time, or stop it again")
        time.sleep(0.1)  # the lock of another process can only be looked at
    return True


def ask_to_stop(run: Path) -> bool:
    """Ask the run's supervisor for a clean end, and do not wait; False when it was not running.

    Raises UsageError when it runs in another container or machine.
    """
    holder = lock_holder(run)
    if holder is None:
        return False
    if holder.boot_id != boot_id():  # its number is that of another process here
        raise UsageError(f"{run} is held by process {holder.pid} of another container or machine", hint="stop it there")
    os.kill(holder.pid, signal.SIGTERM)
    return True


def quarantined(run: Path) -> int:
    """Return the number of rows that amendments removed from the plan permanently."""
    amendments = (entry for entry in read_journal(run / AMENDMENTS) if entry["event"] == "amendment")
    return len({row for a in amendments if a.get("until_step") is None for row in a["rows"]})


def newest_losses(run: Path) -> tuple[float | None, float | None, float | None]:
    """Return the newest training loss, validation loss (nats per token) and tokens per second; None if not yet
    measured."""
    tally = RunTally()
    for entry in read_tail(run / METRICS):
        tally.add(entry)
    return tally.loss, tally.validation_loss, tally.tokens_per_second


EVENT_TEXTS = {
    "attempt": "worker {number} started",
    "failure": "fault in step {step}: {words}",
    "action": "-> {action}: {why}",
    "isolated": "isolated: {words}",
    "quarantined": "quarantined {source}: {reason}",
    "warning": "warning: {text}",
    "disk_wait": "the disk is full: waiting for room",
    "disk_ready": "there is room on the disk again",
    "stop_requested": "asked to stop",
    "supervisor_ended": "{status} at step {steps}, {restarts} restarts; {why}",
}


def event_text(entry: Mapping[str, Any]) -> str:
    """Return a line of events.jsonl as text; empty for events that are not shown."""
    return EVENT_TEXTS.get(str(entry["event"]), "").format(**entry).strip(" ;")


def find_run(name: str, or_else: str = "") -> Path:
    """Return the folder of a run, by path, name, unique prefix of a name, or `last`: the newest run, one of a cycle
    only if there is no other.

    `or_else`: another meaning of the name, for the message. Raise UsageError that names similar runs.
    """
    path, runs = expanded(name), run_folders()
    if (path / RECORD).exists():
        return path.resolve()  # a link to a run is that run
    beginning = [run for run in runs if run.name.startswith(name)]
    if "/" in name or (path.exists() and not beginning):
        raise UsageError(f"{path} is not a run folder", hint="see the runs: hivetune runs")
    if name == LAST and runs:
        # A cycle may have begun a run since: `eval last` behind `train` once spoke of that.
        return ([run for run in runs if not run.is_relative_to(home() / "cycles")] or runs)[-1]
    exact = [run for run in beginning if run.name == name]
    meant = exact or beginning
    if len(meant) == 1:
        return meant[0]
    if meant:
        which = ", ".join(str(run) if exact else run.name for run in meant)
        raise UsageError(f"{name!r} could mean {len(meant)} runs", hint=f"choose one of: {which}")
    near = difflib.get_close_matches(name, [LAST, *(run.name for run in runs)], 1)
    hint = f"{f'did you mean {near[0]}? ' if near else ''}see the runs: hivetune runs"
    hint = hint if runs else "train the first one: hivetune train CONFIG"
    hint = f"a release is shown by: hivetune releases {name}" if "@" in name and not or_else else hint
    raise UsageError(f"there is no run{or_else} {name!r}", hint=hint)


def shortest_name(folder: Path) -> str:
    """Return the name to type for this run, quoted: its name if it is unique, else its folder."""
    return quoted(shortest_names(run_folders()).get(folder, folder))


def shortest_names(runs: Collection[Path]) -> dict[Path, str]:
    """Return for each of these runs its name if it is unique, else its folder."""
    times = Counter(run.name for run in runs)
    return {run: run.name if times[run.name] == 1 else str(run) for run in runs}


def known_runs(database: sqlite3.Connection | None = None) -> Iterator[RunStatus]:
    """Yield the runs of this home that still exist. `database` is `hive.db` if the caller has it open."""
    for path in run_folders(database):
        with contextlib.suppress(UsageError):  # deleted by a person
            yield run_status(path)


def run_folders(database: sqlite3.Connection | None = None) -> list[Path]:
    """Return the folders of the runs of this home that still exist, oldest first. Reads nothing in them."""
    with open_existing_database() if database is None else contextlib.nullcontext(database) as opened:
        paths = [stored_path(path) for (path,) in opened.execute("SELECT path FROM runs ORDER BY created, rowid")]
    return [path for path in paths if os.path.lexists(path / RECORD)]  # the record is the last file to be deleted
