"""What this process started stands still while somebody else needs the machine: stopped by the kernel wherever it is,
with its memory, and later continued. `moving_s` is the clock by which it is measured meanwhile.

The state is of the whole process, as its children are. Each of them is the leader of its session, so that a signal to
the group reaches what it started itself.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

STILL_LOOK_S = 0.25

_guard = threading.Lock()
_leaders: "list[subprocess.Popen[bytes]]" = []
_since: float | None = None  # when all began to stand still; None: they run
_stood_s = 0.0  # earlier times together


def moving_s() -> float:
    """As time.monotonic, but it stands still with the children: times and limits of theirs are counted by it."""
    with _guard:
        return (time.monotonic() if _since is None else _since) - _stood_s


def stands_still() -> bool:
    return _since is not None


def join_standstill(leader: "subprocess.Popen[bytes]") -> None:
    """Let this child, the leader of its session, stand still with the others."""
    with _guard:
        _leaders[:] = [known for known in _leaders if known.poll() is None]
        _leaders.append(leader)
        if _since is not None:
            _signal(leader, signal.SIGSTOP)


@contextlib.contextmanager
def yielding(needed: Callable[[], bool]) -> Iterator[None]:
    """For the length of a `with` block all children that joined stand still while `needed` says that somebody else
    needs the machine. It is asked by a thread, every STILL_LOOK_S."""
    over = threading.Event()

    def look() -> None:
        try:
            while not over.wait(STILL_LOOK_S):
                _turn(needed())
        finally:  # `needed` failed: nobody would let them go on
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


def _signal(leader: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Its number belongs to no other process while it was not waited for."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)
