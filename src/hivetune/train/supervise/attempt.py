"""One worker's life: the terms it runs under, the step that it is in, and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.journal import read_journal
from hivetune.process.protocol import Beat, Outcome
from hivetune.run.folder import METRICS
from hivetune.train.supervise.diagnose import Diagnosis

METRICS_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Terms:
    """The caller's requests to a running run. Each function but the last two is called about four times a second.

    `on_step` gets the number of finished steps. `ends` returns 0, 1 for an end after a checkpoint, or 2 for an end now.
    `on_wait` gets the reason for a wait that a person has to end. `on_change` gets each environment variable that the
    workers are given.
    """

    on_step: Callable[[int], None] = lambda done: None
    ends: Callable[[], int] = lambda: 0
    on_wait: Callable[[str], None] = lambda reason: None
    on_change: Callable[[str], None] = lambda words: None


@dataclass(frozen=True)
class Ended:
    """The end of an attempt. `step`: the one it died in, -1 while loading; `durable`: the newest state that is safe.

    `diagnosis` is None where the worker was done or stopped as asked. `phase`: its last heartbeat.
    """

    outcome: Outcome
    step: int
    durable: int
    phase: Beat | None = None
    seconds: float = 0.0
    diagnosis: Diagnosis | None = None


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
