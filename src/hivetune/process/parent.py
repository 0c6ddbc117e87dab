"""The parent's side of a task: starts `python -m hivetune.engine MODULE TASK.json`, watches it, reads how it ended.

Nothing here imports torch: who watches can't die of what it watches. Time is monotonic and counted only while this
process runs itself, so that suspend, a frozen container or a stopped supervisor are never taken for a hang.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hivetune import errors
from hivetune.base.disk import read_json, write_json
from hivetune.base.private import make_folder, open_plain

LOG = "child.log"
TASK = "task.json"
OUTCOME = "outcome.json"
TAIL_BYTES = 16_384
LOG_LIMIT_BYTES = 16 << 20
POLL_S = 0.25
# Counted per look at most: a larger gap between two looks means that this process did not run (suspend, SIGSTOP).
LARGEST_TICK_S = 4 * POLL_S
STACKS_S = 1.0
GRACE_S = 10.0
# A killed process that is still there after this long sits in an uninterruptible driver call.
REAP_S = 30.0
ENVIRONMENT = {
    # Idle OpenMP threads that spin long make a step five times as slow on busy cores; those that sleep at once cost 15
    # to 27 % of it on idle ones, where they are woken for each product. GNU's runtime knows a middle way (docs/log.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}

# What a task's name starts: one engine module with a `main` each.
ENTRIES = {
    "merge": "hivetune.engine.convert.merge",
    "prepare_model": "hivetune.engine.convert.prepare_model",
    "probe": "hivetune.engine.measure.probe",
    "replay": "hivetune.engine.recover.replay",
    "salvage": "hivetune.engine.recover.salvage",
    "score": "hivetune.engine.score.score",
    "to_gguf": "hivetune.engine.convert.to_gguf",
    "train": "hivetune.engine.train.loop",
}

Status = Literal["done", "stopped", "failed", "hung", "died"]


@dataclass(frozen=True)
class ChildError:
    """The exception that ended the child, as it wrote it down."""

    type: str
    message: str
    hint: str
    exit_code: int
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """How a child ended. `signal` is set when one killed it; `result` is its `outcome.json` without status and error.

    `state` is the kernel's word for a child that hung (R running, S sleeping, D uninterruptible, T stopped), and
    `survived` is true when not even SIGKILL removed it (only a restart of the machine will).
    """

    status: Status
    returncode: int | None
    signal: int | None
    seconds: float
    result: Mapping[str, Any]
    stderr_tail: str
    error: ChildError | None = None
    beat: str = ""
    state: str = ""
    survived: bool = False

    def check(self, what: str) -> Mapping[str, Any]:
        """The result of a child that is done or stopped; else raises its error with the exit code that it chose."""
        if self.status in ("done", "stopped"):
            return self.result
        if self.error is not None:
            kind = _ERRORS.get(self.error.exit_code, errors.HivetuneError)
            prefix = "" if self.error.exit_code != 1 else f"{what} failed: {self.error.type}: "
            raise kind(prefix + self.error.message, hint=self.error.hint)
        tail = "\n".join(self.stderr_tail.splitlines()[-5:])
        raise errors.HivetuneError(f"{what} {self.ending()}" + (f"; its last lines:\n{tail}" if tail else ""))

    def ending(self) -> str:
        """How it ended, in words."""
        if self.status == "hung":
            return f"gave no sign of life and was ended after {self.seconds:.0f} s"
        if self.signal is not None:
            return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.returncode} and no outcome"


class Limits(Protocol):
    """Decides how long silence may last."""

    def beat(self, kind: str, elapsed_s: float) -> None:
        """A beat came, `elapsed_s` seconds of watched time after the one before."""

    def allowed_s(self) -> float:
        """Watched seconds of silence after which the child counts as hung."""


@dataclass
class FixedLimits:
    """The same limits all along: `start_s` until the first item, then by the last beat."""

    start_s: float = 900.0
    item_s: float = 600.0
    validate_s: float = 1800.0
    save_s: float = 600.0
    _kind: str = "s"
    _started: bool = False

    def beat(self, kind: str, elapsed_s: float) -> None:
        self._kind = kind
        self._started = self._started or kind == "t"

    def allowed_s(self) -> float:
        if self._kind in "sk" or not self._started:
            return self.start_s
        return {"v": self.validate_s, "c": self.save_s}.get(self._kind, self.item_s)


@dataclass
class Child:
    """A running task. `wait_beats` is its clock: call it until `ended`. `worked`: it has finished a first item."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    limits: Limits
    pipe: int
    log_start_bytes: int
    started: float = field(default_factory=time.monotonic)
    silent_s: float = 0.0
    last_beat: str = ""
    worked: bool = False
    _looked: float = field(default_factory=time.monotonic)

    def wait_beats(self, timeout_s: float = POLL_S) -> str:
        """Beats that came within `timeout_s` (at once when there are some, or when the child ended)."""
        watch = select.poll()
        watch.register(self.pipe, select.POLLIN)
        beats = ""
        if watch.poll(timeout_s * 1000):
            beats = os.read(self.pipe, 65536).decode("ascii", "replace")
            if not beats:  # the other end is closed: it ended, or is about to
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout_s)
        now = time.monotonic()
        self.silent_s += min(now - self._looked, LARGEST_TICK_S)
        self._looked = now
        for kind in beats:
            self.limits.beat(kind, self.silent_s)
            self.silent_s = 0.0
            self.last_beat = kind
            self.worked = self.worked or kind == "t"
        return beats

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def hung(self) -> bool:
        return self.silent_s > self.limits.allowed_s()

    def state(self) -> str:
        """The kernel's letter for the process, "" where there is none to read."""
        try:
            line = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        return line.rpartition(")")[2].split()[0]

    def ask_to_stop(self) -> None:
        """SIGTERM: save at the next opportunity, then end."""
        if not self.ended:
            self._signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """SIGTERM, then after `grace_s` SIGKILL to its whole session. False when it survived even that."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        return self.kill()

    def kill(self) -> bool:
        """SIGKILL to its whole session. False when it survived."""
        self._signal(signal.SIGKILL)
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def dump_stacks(self) -> None:
        """Ask for the stacks of all threads in its log; works while it holds the GIL, not while it is stopped."""
        if not self.ended:
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STACKS_S)

    def end_hung(self) -> Outcome:
        """Stacks into the log, then SIGKILL: a hung child can't save, and its checkpoint is on disk already."""
        state = self.state()
        self.dump_stacks()
        survived = not self.kill()
        return self.outcome(hung=True, state=state, survived=survived)

    def outcome(self, *, hung: bool = False, state: str = "", survived: bool = False) -> Outcome:
        """How it ended; closes the pipe."""
        code = self.process.returncode
        os.close(self.pipe)
        document = _read_outcome(self.folder)
        status: Status = document.pop("status", "died")
        error = document.pop("error", None)
        document.pop("schema", None)
        if code != 0 and status in ("done", "stopped"):
            status = "died"  # it died after writing: on its way out, with the work done but not proven
        return Outcome(
            status="hung" if hung else status,
            returncode=code,
            signal=-code if code is not None and code < 0 else None,
            seconds=time.monotonic() - self.started,
            result=document,
            stderr_tail=_tail(self.folder / LOG, self.log_start_bytes),
            error=ChildError(**error) if error else None,
            beat=self.last_beat,
            state=state,
            survived=survived,
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def start_child(
    module: str,
    task: Mapping[str, Any],
    folder: Path,
    *,
    limits: Limits | None = None,
    environment: Mapping[str, str | None] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `module` (a name in `ENTRIES`, a dotted name, or the path of a script) in its own session.

    Output goes to `folder/child.log`. A variable that is None in `environment` is removed. `pass_fds` stay open under
    the same numbers. Call it from a thread that lives as long as the child: the kernel ties the child to it.
    """
    module = ENTRIES.get(module, module)
    make_folder(folder)
    (folder / OUTCOME).unlink(missing_ok=True)
    log_start_bytes = _prepare_log(folder / LOG)
    reader, writer = os.pipe()
    try:
        write_json(folder / TASK, {"schema": 1, **task, "folder": str(folder.resolve()), "heartbeat_fd": writer})
        with open(open_plain(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hivetune.engine", module, str(folder / TASK)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(environment or {}),
                pass_fds=(writer, *pass_fds),
                start_new_session=True,
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Child(process, folder, limits or FixedLimits(), reader, log_start_bytes)


def run_task(
    module: str,
    task: Mapping[str, Any],
    folder: Path,
    *,
    limits: Limits | None = None,
    environment: Mapping[str, str | None] | None = None,
    on_beat: Callable[[str], None] = lambda kind: None,
    pass_fds: Sequence[int] = (),
) -> Outcome:
    """Run one task to its end and say how it ended; it never raises for what the child did (`Outcome.check` does).

    `on_beat` gets each beat ("t": one item finished). Ctrl-C here ends the child first (SIGTERM, then SIGKILL).
    """
    child = start_child(module, task, folder, limits=limits, environment=environment, pass_fds=pass_fds)
    try:
        while not child.ended:
            for kind in child.wait_beats():
                on_beat(kind)
            if child.hung:
                return child.end_hung()
        for kind in child.wait_beats(0):
            on_beat(kind)
    except BaseException:
        child.stop()
        raise
    child.kill()  # what it may have left running in its session
    return child.outcome()


_ERRORS: dict[int, type[errors.HivetuneError]] = {
    2: errors.UsageError,
    3: errors.DataRefused,
    4: errors.MachineNotFit,
    5: errors.DoesNotFit,
    6: errors.NotDeployed,
    7: errors.RecoveryExhausted,
    75: errors.Busy,
}


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _prepare_log(path: Path) -> int:
    """Where this child's lines begin; a log that grew large is put aside once."""
    size = path.stat().st_size if path.exists() else 0
    if size <= LOG_LIMIT_BYTES:
        return size
    path.replace(path.with_name(LOG + ".1"))
    return 0


def _tail(path: Path, start_bytes: int) -> str:
    if not path.exists():
        return ""
    with open(open_plain(path), "rb") as file:
        file.seek(max(start_bytes, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def _read_outcome(folder: Path) -> dict[str, Any]:
    try:
        document = read_json(folder / OUTCOME)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
