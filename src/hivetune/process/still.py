"""The pause of this process's children while others need the machine: SIGSTOP, and SIGCONT later.

`moving_s` is the clock for their times, which stands still with them. Each child leads its session, so that a signal to
the group reaches its own children.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

STILL_LOOK_S = 0.25


class Process(Protocol):
    """A process as `subprocess.Popen` knows one: `returncode` is None until `poll` or `wait` has seen its end."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


_guard = threading.Lock()
_leaders: list[Process] = []
_since: float | None = None  # when the pause began, None while they run
_stood_s = 0.0  # the sum of earlier pauses


def moving_s() -> float:
    """Return a monotonic time that stands still with the children, for their times and limits."""
    with _guard:
        return (time.monotonic() if _since is None else _since) - _stood_s


def stands_still() -> bool:
    return _since is not None


def join_standstill(leader: Process) -> None:
    """Pause this child, the leader of its session, with the others."""
    with _guard:
        _leaders[:] = [process for process in _leaders if process.poll() is None]
        _leaders.append(leader)
        if _since is not None:
            _signal(leader, signal.SIGSTOP)


@contextlib.contextmanager
def yielding(needed: Callable[[], bool]) -> Iterator[None]:
    """Pause the children within the block while `needed` returns True. A thread calls it every STILL_LOOK_S."""
    over = threading.Event()

    def look() -> None:
        try:
            while not over.wait(STILL_LOOK_S):
                _turn(needed())
        finally:  # if `needed` fails, nothing else would continue them
            _turn(False)

    thread = threading.Thread(target=look, daemon=True)
    _turn(needed())
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _turn(False)


def _turn(still: bool) -> None:
    global _since, _stood_s
    with _guard:
        if still == (_since is not None):
            return
        for leader in _leaders:
            _signal(leader, signal.SIGSTOP if still else signal.SIGCONT)
        now = time.monotonic()
        if _since is not None:
            _stood_s += now - _since
        _since = now if still else None


def _signal(leader: Process, number: signal.Signals) -> None:
    """Signal a child's group. Its number can't belong to another process before it was waited for."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)
