"""The parent's side of a task: it starts `python -m hivetune.process MODULE TASK.json`, watches it and reads the end.

Nothing here imports torch, so the parent can't die of its child's fault. Time is counted only while this process runs,
so that suspend, a frozen container or a stopped supervisor is never taken for a hang.
"""

import contextlib
import errno
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import read_json
from hivetune.base.private import make_folder, open_plain
from hivetune.process.launch import Supervision, child_environment, set_idle_priority
from hivetune.process.protocol import ENTRIES, EXIT_FULL_DISK, Beat, ChildError, Outcome, Status, write_task
from hivetune.records import Progress
from hivetune.run.folder import OUTCOME, WORKER_LOG

STEPS_REMEMBERED = 64
QUANTILE = 0.9  # of step times: long documents make some steps much longer than the median
# The limits of a task other than training: its items are rows or tensors, and a large tensor takes minutes.
TASK_LIMITS = Supervision(hang_floor_s=600.0)


@dataclass
class Limits:
    """The longest silence of a child before it counts as hung: `hang_factor` times its usual time of a step, but at
    least `hang_floor_s`.

    The first step counts as a part of the start, because it compiles kernels.
    """

    settings: Supervision = TASK_LIMITS
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _last: Beat = Beat.STARTING
    _started: bool = False

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        """Record a heartbeat that came `elapsed_s` watched seconds after the previous one."""
        if beat is Beat.ITEM:
            if self._last in (Beat.ITEM, Beat.WAITING):
                self._steps.append(elapsed_s)
            self._started = True
        self._last = beat

    def allowed_s(self) -> float:
        """Return the watched seconds of silence after which the child counts as hung."""
        if not self._started or self._last in (Beat.STARTING, Beat.PREPARING):
            return self.settings.start_timeout_s
        if self._last is Beat.VALIDATING:
            return self.settings.evaluate_timeout_s
        if self._last is Beat.SAVING:
            return self.settings.save_timeout_s
        usual_s = sorted(self._steps)[math.ceil(QUANTILE * len(self._steps)) - 1] if self._steps else 0.0
        return max(self.settings.hang_floor_s, self.settings.hang_factor * usual_s)


_BEATS = {beat.value[0]: beat for beat in Beat}
_PIPE_BYTES, _TAIL_BYTES = 65_536, 16_384
_POLL_S = 0.25
_MAX_TICK_S = 4 * _POLL_S  # counted per look: after a larger gap this process did not run (suspend, SIGSTOP)
_STACKS_S = 1.0  # for the stacks of a hung child, which it writes on SIGUSR1
GRACE_S = 10.0
_REAP_S = 30.0  # a killed process that exists for longer is in an uninterruptible driver call


@dataclass
class Child:
    """A running child process. Call `wait_beats` until `ended`: it also measures how long the child is silent."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    limits: Limits
    pipe: int
    log_start_bytes: int  # where its lines begin in the log
    started: float = field(default_factory=time.monotonic)
    silent_s: float = 0.0
    last_beat: Beat | None = None
    worked: bool = False  # it has finished an item
    _looked: float = field(default_factory=time.monotonic)

    def wait_beats(self, timeout_s: float = _POLL_S) -> list[Beat]:
        """Return the heartbeats of the child within `timeout_s` seconds, or at once if there are some or it has
        ended."""
        watch = select.poll()
        watch.register(self.pipe, select.POLLIN)
        data = b""
        if watch.poll(timeout_s * 1000):
            data = os.read(self.pipe, _PIPE_BYTES)
            if not data:  # the other end is closed, so it has ended or is about to
                self._wait(timeout_s)
        now = time.monotonic()
        self.silent_s += min(now - self._looked, _MAX_TICK_S)
        self._looked = now
        beats = [_BEATS[byte] for byte in data if byte in _BEATS]
        for beat in beats:
            self.limits.beat(beat, self.silent_s)
            self.silent_s = 0.0
            self.last_beat = beat
            self.worked = self.worked or beat is Beat.ITEM
        return beats

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def hung(self) -> bool:
        return self.silent_s > self.limits.allowed_s()

    def ask_to_stop(self) -> None:
        """Send SIGTERM. Tasks that can save do so before they end; others end at once."""
        if not self.ended:
            self._signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """Send SIGTERM, after `grace_s` SIGKILL to the whole session. Return False if it survives."""
        self.ask_to_stop()
        self._wait(grace_s)
        return self.kill()

    def kill(self) -> bool:
        """Send SIGKILL to the whole session. Return False if it survives."""
        self._signal(signal.SIGKILL)
        return self._wait(_REAP_S)

    def end_hung(self) -> Outcome:
        """Log the stacks of all threads and send SIGKILL; a hung child can't save, but its checkpoint is on the
        disk."""
        if not self.ended:
            self.process.send_signal(signal.SIGUSR1)  # also written by one that holds the GIL, but not while stopped
            self._wait(_STACKS_S)
        self.kill()
        return self.outcome("hung")

    def outcome(self, status: Status | None = None) -> Outcome:
        """Close the pipe and return how the child ended; `status` replaces the status that the child wrote."""
        os.close(self.pipe)
        code = self.process.returncode
        document: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # it died before it wrote one
            document = read_json(self.folder / OUTCOME)
        document.pop("schema", None)
        written: Status = document.pop("status", "died")
        recorded = document.pop("error", None)
        error = ChildError(**recorded) if recorded else None
        if code == EXIT_FULL_DISK and error is None:
            problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / OUTCOME))
            written, error = "failed", ChildError("OSError", str(problem), "", 1)
        if code != 0 and written in ("done", "stopped"):
            written = "died"  # after it had written its outcome, which proves nothing
        seconds = time.monotonic() - self.started
        return Outcome(status or written, code, seconds, document, self._log_tail(), error)

    def _log_tail(self) -> str:
        log = self.folder / WORKER_LOG
        if not log.exists():
            return ""
        with open(open_plain(log), "rb") as file:
            file.seek(max(self.log_start_bytes, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")

    def _wait(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.ended

    def _signal(self, number: int) -> None:
        """Signal the child's session, which it leads."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def start_child(
    task: object,
    folder: Path,
    *,
    module: str | None = None,
    limits: Limits | None = None,
    environment: Mapping[str, str | None] | None = None,
    memory_limit_bytes: int | None = None,
) -> Child:
    """Start a child for `task` (process/protocol.py) in its own session, with files and log in `folder`.

    `module`, a dotted name or the path of a script, replaces the one in `ENTRIES`. None in `environment` removes a
    variable. Allocations above `memory_limit_bytes` fail. Call it from a thread that lives as long as the child, which
    the kernel ends with the thread.
    """
    make_folder(folder)
    (folder / OUTCOME).unlink(missing_ok=True)
    log = folder / WORKER_LOG
    log_start_bytes = log.stat().st_size if log.exists() else 0
    path = write_task(task, folder, memory_limit_bytes=memory_limit_bytes)
    reader, writer = os.pipe()
    try:
        with open(open_plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            process = start_process(module or ENTRIES[type(task)], path, file, writer, environment or {})
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Child(process, folder, limits or Limits(), reader, log_start_bytes)


def start_process(
    module: str, task_file: Path, log: IO[bytes], heartbeat: int, environment: Mapping[str, str | None]
) -> "subprocess.Popen[bytes]":
    """Start `python -m hivetune.process MODULE TASK.json HEARTBEAT`, the leader of a session of its own."""
    # It imports torch and the engine anew: 1.8 s (torch 1.3 s) of one core, which a fork server would save. Forks share
    # what their server has loaded, and its faults: a new process shares nothing.
    process = subprocess.Popen(
        [sys.executable, "-m", "hivetune.process", module, str(task_file), str(heartbeat)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=child_environment(environment),
        pass_fds=(heartbeat,),
        start_new_session=True,
    )
    set_idle_priority(process.pid)
    return process


def run_task(
    task: object, folder: Path, *, on_beat: Callable[[Beat], None] = lambda beat: None, **start: Any
) -> Outcome:
    """Run one task to its end and return its outcome; `start` are arguments of `start_child`."""
    return wait_for_outcome(start_child(task, folder, **start), on_beat)


def count_items(progress: Progress, total: int | None, count: int = 0) -> Callable[[Beat], None]:
    """Return an `on_beat` that reports the number of finished items to `progress`, starting after `count` earlier ones
    and at most `total`.
    """

    def on_beat(beat: Beat) -> None:
        nonlocal count
        if beat is Beat.ITEM and (total is None or count < total):
            count += 1
            progress(count, total)

    return on_beat


def wait_for_outcome(
    child: Child, on_beat: Callable[[Beat], None] = lambda beat: None, meanwhile: Callable[[], None] = lambda: None
) -> Outcome:
    """Wait for the child's end and return its outcome, also of a failed child; `Outcome.check` raises its error.

    `meanwhile` runs first, while the child computes; `on_beat` gets each beat. Any exception here, also Ctrl-C, ends
    the child first (SIGTERM, then SIGKILL).
    """
    try:
        meanwhile()
        while not child.ended:
            for beat in child.wait_beats():
                on_beat(beat)
            if child.hung:
                return child.end_hung()
        for beat in child.wait_beats(0):
            on_beat(beat)
    except BaseException:
        child.stop()
        raise
    child.kill()  # also processes that it left in its session
    return child.outcome()
