"""The contract of a parent and its child: tasks in, beats on the way, one outcome at the end. No torch, no processes.

A task is one frozen dataclass; its fields are the keys of `task.json`, declared here and nowhere else. `ENTRIES` says
which engine module does it. The child answers with one byte a beat on an inherited pipe and writes `outcome.json` last.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from hivetune import errors
from hivetune.base.disk import FULL_DISK_WORDS, read_json, write_json
from hivetune.base.typed import from_plain, to_plain
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import TASK

# A child that can't even write its outcome, since the disk is full, says so by this exit code (sysexits: EX_CANTCREAT).
EXIT_FULL_DISK = 73
# A child that waits for its task keeps the numbers below free for files, which have the same number in its parent.
RESERVED_HANDLES = 64

Status = Literal["done", "stopped", "failed", "hung", "died"]


class Beat(Enum):
    """What a child was just doing, or is about to do; the value is the byte on the pipe."""

    STARTING = b"s"
    """About to import and load."""
    PREPARING = b"k"
    """About to load, compile or measure: silence may last as long as at the start."""
    MEASURED = b"m"
    """What is timed has been timed: the machine may do other things too. Preparing goes on."""
    ITEM = b"t"
    """One item (an optimizer step, a row, a tensor) is finished."""
    WAITING = b"w"
    """Nothing to do, or work has just come: what follows until the next item is that item's time."""
    VALIDATING = b"v"
    SAVING = b"c"

    @property
    def phase(self) -> str:
        """As journals name it."""
        return self.name.lower()


@dataclass(frozen=True)
class PrepareModel:
    """`model` as typed by a person becomes the prepared folder `target`."""

    model: str
    target: Path
    offline: bool = False


@dataclass(frozen=True)
class Probe:
    """Measure two steps of `run` and write its choices. Without `run`: of `config`, and only the profile is written."""

    model: Path
    snapshot: Path
    run: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    choices: Choices = NO_CHOICES


@dataclass(frozen=True)
class MeasureRates:
    """What `device` does at all: products by precision, memory, launches, the way to and from the host."""

    device: str


@dataclass(frozen=True)
class Prove:
    """Compute the parts of a step with one set of backends, `choices`, and compare each with float64.

    `model`: fields of a config.json; with `rank` and `tokens` (of a micro-batch, in rising order) they are the shapes.
    Each part is repeated `calls` times, since some faults are rare, then all of them for `soak_s` seconds. A line of
    `journal` before and after each, so that a child which dies has told where.
    """

    model: Mapping[str, Any]
    rank: int
    tokens: tuple[int, ...]
    choices: Choices
    journal: Path
    calls: int
    soak_s: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """The file where a run's processes on this machine find each other; `token` tells one attempt from another."""

    address: str
    token: str


@dataclass(frozen=True)
class ComputePacks:
    """Compute packs for a run as its worker `number` (from 1), on `device`, as long as that run goes on. `changes`: for
    this device alone, over the run's choices."""

    model: Path
    number: int
    meeting: Meeting
    device: str | None = None
    changes: Choices = NO_CHOICES


@dataclass(frozen=True)
class Train:
    """Train `run` to its end. `changes`: of a recovery, over the run's choices; `standby`: two inherited handles;
    `meeting`: where other workers come to compute packs."""

    run: Path
    model: Path
    snapshot: Path
    changes: Choices = NO_CHOICES
    standby: tuple[int, int] | None = None
    mean_time_between_faults_s: float | None = None
    meeting: Meeting | None = None


@dataclass(frozen=True)
class Item:
    """Rows that are replayed together. `padded`: with untrained tokens behind each, so that every shape is another."""

    rows: tuple[int, ...]
    padded: bool = False


@dataclass(frozen=True)
class Replay:
    """Compute loss and gradient of each item of `run` alone; a line of `journal` for each that is finished."""

    run: Path
    model: Path
    snapshot: Path
    journal: Path
    items: tuple[Item, ...]
    changes: Choices = NO_CHOICES


@dataclass(frozen=True)
class Salvage:
    """Write the adapter of a run that can't go on."""

    run: Path
    model: Path


@dataclass(frozen=True)
class Generate:
    """Rows that are answered, at most `new_tokens` each, `slots` at a time."""

    rows: tuple[int, ...]
    new_tokens: int
    slots: int


@dataclass(frozen=True)
class Score:
    """Base and tuned model (only the base without `adapter`) on the same rows; a line of `scores` for each."""

    model: Path
    adapter: Path | None
    snapshot: Path
    scores: Path
    rows: tuple[int, ...]
    generate: Generate
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class ScoreAdapters:
    """The loss of `model` with each of `adapters` on the same rows; a line of `scores` for each."""

    model: Path
    adapters: Mapping[str, Path]
    snapshot: Path
    scores: Path
    rows: tuple[int, ...]
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Gradients:
    """The gradients of `adapter` on parts of each domain's rows: the inner products of each two parts of one domain."""

    model: Path
    adapter: Path
    snapshot: Path
    parts: Mapping[str, tuple[tuple[int, ...], ...]]
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Passage:
    """Tokens of a conversation, and the places among them that are asked about."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class ScorePassages:
    """What `model`, alone and with `adapter` beside it, says of each place: its token's log-probability, and those of
    the `top` likeliest."""

    model: Path
    adapter: Path | None
    passages: tuple[Passage, ...]
    top: int


@dataclass(frozen=True)
class Merge:
    """Adapter and base as one folder `target`, in `dtype`: float32, bfloat16, or the base's own ("source")."""

    model: Path
    adapter: Path
    target: Path
    dtype: str = "source"


@dataclass(frozen=True)
class WriteGguf:
    """A whole model, with the adapter merged into it, as `file`. `recipe`: release/quantize.Recipe. `base_name`: what
    the file says that it is. `converter`: the folder of llama.cpp's."""

    model: Path
    adapter: Path | None
    file: Path
    recipe: Mapping[str, Any]
    base_name: str
    converter: Path


@dataclass(frozen=True)
class WriteGgufAdapter:
    """The adapter alone, as `file`."""

    model: Path
    adapter: Path
    file: Path
    converter: Path


@dataclass(frozen=True)
class DryGguf:
    """A model of the same architecture with few layers and random weights as `file`, and a random adapter of it with
    `rank` on `targets` as `adapter_file`; and what both say of `passages`, as `ScorePassages`."""

    model: Path
    targets: tuple[str, ...]
    rank: int
    file: Path
    adapter_file: Path
    base_name: str
    converter: Path
    passages: tuple[Passage, ...]
    top: int


ENTRIES: Mapping[type, str] = {
    PrepareModel: "hivetune.models.worker.prepare_model",
    Probe: "hivetune.train.worker.measure.probe",
    MeasureRates: "hivetune.train.worker.measure.rates",
    Prove: "hivetune.train.worker.measure.prove",
    Train: "hivetune.train.worker.loop",
    ComputePacks: "hivetune.train.worker.exchange.worker",
    Replay: "hivetune.train.worker.replay",
    Salvage: "hivetune.train.worker.salvage",
    Score: "hivetune.judge.worker.score",
    ScoreAdapters: "hivetune.judge.worker.adapters",
    Gradients: "hivetune.judge.worker.gradients",
    ScorePassages: "hivetune.release.worker.score_passages",
    Merge: "hivetune.release.worker.merge",
    WriteGguf: "hivetune.release.worker.to_gguf",
    WriteGgufAdapter: "hivetune.release.worker.to_gguf",
    DryGguf: "hivetune.release.worker.dry",
}
# What SIGTERM asks to save and return. It ends every other task at once: nothing there would read the request, and
# Ctrl-C would wait for the parent's SIGKILL.
SAVES_WHEN_STOPPED: frozenset[type] = frozenset({Train})


@dataclass(frozen=True)
class Envelope:
    """`task.json`: the fields of a task under the name of its class, and what every child is told.

    `folder` is where the child writes its outcome.
    """

    kind: str
    folder: Path
    fields: Mapping[str, Any]
    heartbeat_fd: int | None = None
    memory_limit_bytes: int | None = None
    schema: int = 1

    def task(self, *kinds: type) -> Any:
        """Raises ValueError when the file holds a task of none of these kinds, or not all of its fields."""
        kind = next((kind for kind in kinds if kind.__name__ == self.kind), None)
        if kind is None:
            raise ValueError(f"{self.folder / TASK}: a task {self.kind}, not {' or '.join(k.__name__ for k in kinds)}")
        return from_plain(kind, self.fields)


def write_task(
    task: object, folder: Path, *, heartbeat_fd: int | None = None, memory_limit_bytes: int | None = None
) -> Path:
    """`folder/task.json` of a task; returns its path."""
    path = folder / TASK
    envelope = Envelope(type(task).__name__, folder.resolve(), to_plain(task), heartbeat_fd, memory_limit_bytes)
    write_json(path, to_plain(envelope))
    return path


def read_task(path: Path) -> Envelope:
    return from_plain(Envelope, read_json(path))


@dataclass(frozen=True)
class ChildError:
    """The exception that ended the child, as it wrote it down."""

    type: str
    message: str
    hint: str
    exit_code: int
    traceback: str


_ERRORS: dict[int, type[errors.HivetuneError]] = {
    2: errors.UsageError,
    3: errors.DataRefused,
    4: errors.MachineNotFit,
    5: errors.DoesNotFit,
    6: errors.NotDeployed,
    7: errors.RecoveryExhausted,
    75: errors.Busy,
}


@dataclass(frozen=True)
class Outcome:
    """How a child ended. `signal` is set when one killed it; `result` is its `outcome.json` without status and error.

    `beat` is the last one that came. `state` is the kernel's letter for a child that hung (R running, S sleeping,
    D uninterruptible, T stopped), and `survived` is true when not even SIGKILL removed it (only a restart of the
    machine will).
    """

    status: Status
    returncode: int | None
    signal: int | None
    seconds: float
    result: Mapping[str, Any]
    stderr_tail: str
    error: ChildError | None = None
    beat: Beat | None = None
    state: str = ""
    survived: bool = False

    def check(self, what: str) -> Mapping[str, Any]:
        """The result of a child that is done or stopped; else raises its error with the exit code that it chose."""
        if self.status in ("done", "stopped"):
            return self.result
        if self.error is not None:
            if self.error.exit_code == 1 and FULL_DISK_WORDS.search(self.error.message):
                hint = "free some space, then give the same command again"
                raise errors.DoesNotFit(f"the disk is full: {what}: {self.error.message}", hint=hint)
            kind = _ERRORS.get(self.error.exit_code, errors.HivetuneError)
            prefix = "" if self.error.exit_code != 1 else f"{what} failed: {self.error.type}: "
            raise kind(prefix + self.error.message, hint=self.error.hint)
        tail = "\n".join(self.stderr_tail.splitlines()[-5:])
        raise errors.HivetuneError(f"{what} {self.ending()}" + (f"; its last lines:\n{tail}" if tail else ""))

    def ending(self) -> str:
        """How it ended, in words."""
        if self.status == "hung":
            return f"gave no sign of life for too long and was killed after {self.seconds:.0f} s"
        if self.signal is not None:
            return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.returncode} and without an outcome"
