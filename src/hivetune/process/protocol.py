"""The contract of parent and child: a task, heartbeats on the way, and one outcome at the end.

A task is a frozen dataclass whose fields are the keys of `task.json`. `ENTRIES` names the worker module of each task.
The child writes one byte per heartbeat to an inherited pipe, and `outcome.json` last.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from hivetune import errors
from hivetune.base.disk import FULL_DISK_ERROR, write_json
from hivetune.base.typed import from_plain, to_plain
from hivetune.run.checkpoints import CHECKPOINT_EVERY_S
from hivetune.run.choices import NO_CHOICES, Choices

TASK = "task.json"  # in the folder of its outcome
EXIT_FULL_DISK = 73  # of a child that has no room for its outcome (sysexits: EX_CANTCREAT)

Status = Literal["done", "stopped", "failed", "hung", "died"]


class Beat(Enum):
    """A heartbeat of a child; the value is the byte on the pipe."""

    STARTING = b"s"  # about to import and load
    PREPARING = b"k"  # about to load, compile or measure: silence may last as long as at the start
    ITEM = b"t"  # one item (an optimizer step, a row, a tensor) is finished
    WAITING = b"w"  # idle, or work has just come: the time until the next item is that item's
    VALIDATING = b"v"
    SAVING = b"c"


@dataclass(frozen=True)
class PrepareModel:
    """Prepare `model`, as a person typed it, in the folder `target`."""

    model: str
    target: Path
    offline: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)  # values for arguments of its chat template
    plain: Path = Path()  # with `template`: the folder where it is prepared without


@dataclass(frozen=True)
class Rank:
    """The number of a process among the `size` ranks of a run, and where they meet (train/worker/ranks.py)."""

    number: int = 0
    size: int = 1
    meeting: str = ""  # where they meet: file:///PATH or tcp://HOST:PORT
    address: str = "127.0.0.1"  # of its machine, towards the others


@dataclass(frozen=True)
class Train:
    """Train `run` to its end."""

    run: Path  # of a process that rank 0 started: a folder of its own
    model: Path
    snapshot: Path
    changes: Choices = NO_CHOICES  # a recovery's, over the run's choices
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    devices: tuple[str, ...] = ()  # of the ranks on this machine, rank 0's first; fewer than two for one process
    environment: Mapping[str, str | None] = field(default_factory=dict)  # what ranks elsewhere have to change
    rank: Rank | None = None  # of a process that rank 0 started


@dataclass(frozen=True)
class Item:
    """Rows whose loss and gradient are computed together in a replay. `padded`: untrained tokens change all shapes."""

    rows: tuple[int, ...]
    padded: bool = False


@dataclass(frozen=True)
class Replay:
    """Compute loss and gradient of each item of `run`, and write a line to `journal` after each."""

    run: Path
    model: Path
    snapshot: Path
    journal: Path
    items: tuple[Item, ...]
    changes: Choices = NO_CHOICES


@dataclass(frozen=True)
class Salvage:
    """Write the adapter of a run that can't continue."""

    run: Path
    model: Path


@dataclass(frozen=True)
class Score:
    """Compute the loss of base and tuned model (without `adapter` only of the base) on the same rows; write a line to
    `scores` for each row and model."""

    model: Path
    adapter: Path | None
    snapshot: Path
    scores: Path
    rows: tuple[int, ...]
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Passage:
    """The tokens of a conversation, and the positions in it at which log-probabilities are compared."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class ScorePassages:
    """At each position, compute the log-probabilities of the actual and the `top` most likely tokens, with and without
    `adapter`."""

    model: Path
    adapter: Path | None
    passages: tuple[Passage, ...]
    top: int


@dataclass(frozen=True)
class Merge:
    """Merge adapter and base into the folder `target`."""

    model: Path
    adapter: Path
    target: Path


@dataclass(frozen=True)
class WriteGguf:
    """Write `file`: the whole model, merged with the adapter; without `quant` only the adapter."""

    model: Path
    adapter: Path | None
    file: Path
    quant: str | None  # a recipe of release/gguf.py
    converter: Path  # llama.cpp's folder


ENTRIES: Mapping[type, str] = {
    PrepareModel: "hivetune.models.worker.prepare_model",
    Train: "hivetune.train.worker.loop",
    Replay: "hivetune.train.worker.recover",
    Salvage: "hivetune.train.worker.checkpoint",
    Score: "hivetune.judge.worker.score",
    ScorePassages: "hivetune.release.worker.score_passages",
    Merge: "hivetune.release.worker.merge",
    WriteGguf: "hivetune.release.worker.to_gguf",
}
# The tasks that SIGTERM asks to save and return. It ends other tasks at once, since they would ignore the request and
# Ctrl-C would have to wait for SIGKILL.
SAVES_WHEN_STOPPED: frozenset[type] = frozenset({Train})


def write_task(task: object, folder: Path, *, memory_limit_bytes: int | None = None) -> Path:
    """Write a task to `folder/task.json`, and return the path."""
    known = {"schema": 1, "kind": type(task).__name__, "memory_limit_bytes": memory_limit_bytes}
    write_json(folder / TASK, {**known, "fields": to_plain(task)})
    return folder / TASK


def task_in(document: Mapping[str, Any], *kinds: type) -> Any:
    """Return the task in a `task.json`. Raise ValueError if its kind is not one of `kinds`, or a field does not fit."""
    kind = next((kind for kind in kinds if kind.__name__ == document["kind"]), None)
    if kind is None:
        raise ValueError(f"a task {document['kind']}, not {' or '.join(kind.__name__ for kind in kinds)}")
    return from_plain(kind, document["fields"])


@dataclass(frozen=True)
class ChildError:
    """The exception that ended the child, as the child recorded it. The child's log has the traceback."""

    type: str
    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its status, exit code, time in seconds, result and error."""

    status: Status
    returncode: int | None
    seconds: float
    result: Mapping[str, Any]  # `outcome.json` without status and error
    stderr_tail: str
    error: ChildError | None = None

    @property
    def signal(self) -> int | None:
        """Return the number of the signal that killed the child, or None."""
        return -self.returncode if self.returncode is not None and self.returncode < 0 else None

    def check(self, title: str) -> Mapping[str, Any]:
        """Return the result of a child that is done or stopped, else raise its error with its exit code."""
        if self.status in ("done", "stopped"):
            return self.result
        if self.error is None:
            tail = "\n".join(self.stderr_tail.splitlines()[-5:])
            raise errors.HivetuneError(f"{title} {self.ending()}" + (f"; its last lines:\n{tail}" if tail else ""))
        if self.error.exit_code != 1:  # an error for users, as the child said it
            kinds = {
                kind.exit_code: kind for kind in errors.HivetuneError.__subclasses__() if kind is not errors.Stopped
            }
            kind = kinds.get(self.error.exit_code, errors.HivetuneError)
            raise kind(self.error.message, hint=self.error.hint)
        if FULL_DISK_ERROR.search(self.error.message):
            hint = "free some space, then run the same command again"
            raise errors.DoesNotFit(f"{title} failed because the disk is full: {self.error.message}", hint=hint)
        message = f"{title} failed: {self.error.type}: {self.error.message}"
        raise errors.HivetuneError(message, hint=self.error.hint)

    def ending(self) -> str:
        """Return the end of the child as a phrase for messages, such as its exit code or signal."""
        if self.status == "hung":
            return f"gave no sign of life for too long and was killed after {self.seconds:.0f} s"
        if self.signal is not None:
            return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.returncode} and without an outcome"
