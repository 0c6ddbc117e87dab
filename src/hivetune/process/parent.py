"""The parent's side of a task: it starts `python -m hivetune.process MODULE TASK.json`, watches it and reads the end.

Nothing here imports torch, so the parent can't die of its child's fault. Time is monotonic and counted only while this
process runs, so that suspend, a frozen container or a stopped supervisor is never taken for a hang.
"""

import contextlib
import errno
import math
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hivetune.base.disk import read_json
from hivetune.base.private import make_folder, open_plain
from hivetune.process.launch import launch_child
from hivetune.process.protocol import ENTRIES, EXIT_FULL_DISK, Beat, ChildError, Outcome, Status, write_task
from hivetune.process.still import Process, moving_s
from hivetune.process.supervision import Supervision
from hivetune.records import Progress
from hivetune.run.folder import OUTCOME, WORKER_LOG

STEPS_REMEMBERED = 64
# The quantile of step times that is used, since long documents make some steps much longer than the median.
QUANTILE = 0.9
# After these beats silence lasts as long as compilers and disks need.
LOADING = (Beat.STARTING, Beat.PREPARING, Beat.MEASURED)


class Limits(Protocol):
    """The limit of silence."""

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        """Record a beat, `elapsed_s` watched seconds after the previous one."""

    def allowed_s(self) -> float:
        """Return the watched seconds of silence after which the child counts as hung."""


@dataclass
class FixedLimits:
    """Fixed limits: `start_s` until the first item, then by the last beat."""

    start_s: float = 900.0
    item_s: float = 600.0
    validate_s: float = 1800.0
    save_s: float = 600.0
    _last: Beat = Beat.STARTING
    _started: bool = False

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        self._last = beat
        self._started = self._started or beat is Beat.ITEM

    def allowed_s(self) -> float:
        if self._last in LOADING or not self._started:
            return self.start_s
        return {Beat.VALIDATING: self.validate_s, Beat.SAVING: self.save_s}.get(self._last, self.item_s)


@dataclass
class LearnedLimits:
    """Learned limits: `hang_factor` times the usual step, at least `hang_floor_s`.

    The first step belongs to the start, because it compiles. `usual_start_s` is the start time of an earlier worker
    with the same settings, if there was one.
    """

    settings: Supervision
    usual_start_s: float | None = None
    start_s: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _last: Beat = Beat.STARTING
    started: bool = False

    def beat(self, beat: Beat, elapsed_s: float) -> None:
        if not self.started:
            self.start_s += elapsed_s
        if beat is Beat.ITEM:
            if self._last in (Beat.ITEM, Beat.WAITING):
                self._steps.append(elapsed_s)
            self.started = True
        self._last = beat

    def allowed_s(self) -> float:
        if self._last in LOADING or not self.started:
            if self.usual_start_s is None:
                return self.settings.start_timeout_s
            learned_s = max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_start_s)
            return min(self.settings.start_timeout_s, learned_s)
        if self._last is Beat.VALIDATING:
            return self.settings.evaluate_timeout_s
        if self._last is Beat.SAVING:
            return self.settings.save_timeout_s
        return max(self.settings.hang_floor_s, self.settings.hang_factor * self.usual_s)

    @property
    def usual_s(self) -> float:
        """The rolling step time, 0 before two steps."""
        if not self._steps:
            return 0.0
        return sorted(self._steps)[math.ceil(QUANTILE * len(self._steps)) - 1]


_BEATS = {beat.value[0]: beat for beat in Beat}
PIPE_BYTES = 65_536
_TAIL_BYTES = 16_384
LOG_LIMIT_BYTES = 16 << 20
_POLL_S = 0.25
# The most that is counted per look; after a larger gap this process did not run (suspend, SIGSTOP).
MAX_TICK_S = 4 * _POLL_S
STACKS_S = 1.0
GRACE_S = 10.0
# A killed process that still exists after this time is in an uninterruptible driver call.
REAP_S = 30.0


@dataclass
class Child:
    """A running task. Call `wait_beats`, which is its clock, until `ended`.

    `worked`: it has finished an item. `still`: it was paused, which is not a hang.
    """

    process: Process
    folder: Path
    limits: Limits
    pipe: int
    log_start_bytes: int
    started: float = field(default_factory=moving_s)
    silent_s: float = 0.0
    last_beat: Beat | None = None
    worked: bool = False
    still: bool = False
    _looked: float = field(default_factory=moving_s)

    def wait_beats(self, timeout_s: float = _POLL_S) -> list[Beat]:
        """Return the beats within `timeout_s`, at once if there are some or the child has ended."""
        watch = select.poll()
        watch.register(self.pipe, select.POLLIN)
        data = b""
        if watch.poll(timeout_s * 1000):
            data = os.read(self.pipe, PIPE_BYTES)
            if not data:  # the other end is closed, so it has ended or is about to
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout_s)
        now = moving_s()
        self.silent_s += 0.0 if self.still else min(now - self._looked, MAX_TICK_S)
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

    def state(self) -> str:
        """Return the kernel's letter for the process, or ""."""
        try:
            line = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        return line.rpartition(")")[2].split()[0]

    def stand_still(self, still: bool) -> None:
        """Pause the child's whole session, which keeps its memory, or continue it."""
        self.still = still
        self._signal(signal.SIGSTOP if still else signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM: some tasks save before they end, others end at once."""
        if not self.ended:
            self.stand_still(False)  # a stopped process would handle it only later
            self._signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_S) -> bool:
        """Send SIGTERM, after `grace_s` SIGKILL to the whole session. Return False if it survives."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        return self.kill()

    def kill(self) -> bool:
        """Send SIGKILL to the whole session. Return False if it survives."""
        self._signal(signal.SIGKILL)
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to its log, also if it holds the GIL, but not while it is stopped."""
        if not self.ended:
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STACKS_S)

    def end_hung(self) -> Outcome:
        """Log the stacks and send SIGKILL: a hung child can't save, and its checkpoint is on the disk."""
        state = self.state()
        self.dump_stacks()
        return self.outcome(hung=True, state=state, survived=not self.kill())

    def outcome(self, *, hung: bool = False, state: str = "", survived: bool = False) -> Outcome:
        """Close the pipe and return how it ended."""
        code = self.process.returncode
        os.close(self.pipe)
        document: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # it died before it wrote one
            document = read_json(self.folder / OUTCOME)
        status: Status = document.pop("status", "died")
        told = document.pop("error", None)
        error = ChildError(**told) if told else None
        document.pop("schema", None)
        if code == EXIT_FULL_DISK and error is None:
            status = "failed"
            problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / OUTCOME))
            error = ChildError("OSError", str(problem), "", 1, "")
        tail, log = "", self.folder / WORKER_LOG
        if log.exists():
            with open(open_plain(log), "rb") as file:
                file.seek(max(self.log_start_bytes, log.stat().st_size - _TAIL_BYTES))
                tail = file.read().decode("utf-8", "replace")
        if code != 0 and status in ("done", "stopped"):
            status = "died"  # it died after it had written its outcome, which proves nothing
        return Outcome(
            status="hung" if hung else status,
            returncode=code,
            signal=-code if code is not None and code < 0 else None,
            seconds=moving_s() - self.started,
            result=document,
            stderr_tail=tail,
            error=error,
            beat=self.last_beat,
            state=state,
            survived=survived,
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def start_child(
    task: object,
    folder: Path,
    *,
    module: str | None = None,
    limits: Limits | None = None,
    environment: Mapping[str, str | None] | None = None,
    pass_fds: Sequence[int] = (),
    memory_limit_bytes: int | None = None,
) -> Child:
    """Start a child for `task` (process/protocol.py) in its own session, with files and log in `folder`.

    `module`, a dotted name or the path of a script, replaces the one in `ENTRIES`. None in `environment` removes a
    variable. `pass_fds` stay open with the same numbers. Allocations above `memory_limit_bytes` fail. Call it from a
    thread that lives as long as the child, which the kernel ends with the thread.
    """
    make_folder(folder)
    (folder / OUTCOME).unlink(missing_ok=True)
    log = folder / WORKER_LOG
    log_start_bytes = log.stat().st_size if log.exists() else 0  # where this child's lines begin
    if log_start_bytes > LOG_LIMIT_BYTES:
        log.replace(log.with_name(WORKER_LOG + ".1"))
        log_start_bytes = 0
    reader, writer = os.pipe()
    try:
        path = write_task(task, folder, heartbeat_fd=writer, memory_limit_bytes=memory_limit_bytes)
        with open(open_plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            handles = (writer, *pass_fds)
            process = launch_child(module or ENTRIES[type(task)], str(path), file, handles, environment or {})
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Child(process, folder, limits or FixedLimits(), reader, log_start_bytes)


def run_task(
    task: object,
    folder: Path,
    *,
    module: str | None = None,
    limits: Limits | None = None,
    environment: Mapping[str, str | None] | None = None,
    on_beat: Callable[[Beat], None] = lambda beat: None,
    memory_limit_bytes: int | None = None,
) -> Outcome:
    """Run one task to its end and return its outcome, as `start_child` and `see_off` do."""
    settings: dict[str, Any] = {"module": module, "limits": limits, "environment": environment}
    return see_off(start_child(task, folder, memory_limit_bytes=memory_limit_bytes, **settings), on_beat)


def count_items(progress: Progress, total: int | None, count: int = 0) -> Callable[[Beat], None]:
    """Return an `on_beat` that reports finished items, at most `total`, after `count` earlier ones."""

    def on_beat(beat: Beat) -> None:
        nonlocal count
        if beat is Beat.ITEM and (total is None or count < total):
            count += 1
            progress(count, total)

    return on_beat


def see_off(
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
