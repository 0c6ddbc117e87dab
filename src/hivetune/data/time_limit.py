"""Nested limits on the processor time that rows and templates take.

Processor time and not the clock, so that a busy machine refuses no rows. One timer runs while there is any limit, and
each tick counts against all of them, so that a nested limit needs no system call. Signals reach the main thread only.
"""

import functools
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

TIMER_S = 0.02
# The time for clean-up before the error is raised again.
_AGAIN_S = 1.0


class TimeLimit(AbstractContextManager[None]):
    """A limit on processor time: raise `error()` when its blocks together have taken `limit_s`.

    It interrupts Python and its regular expressions, but no other native code. It is raised again if the block goes
    on, since Python drops exceptions that are raised during finalisers and garbage collection.
    """

    __slots__ = ("error", "left")

    def __init__(self, limit_s: float, error: Callable[[], BaseException]):
        self.left = limit_s / TIMER_S
        self.error = error

    def __enter__(self) -> None:
        _running.append(self)
        if len(_running) == 1:
            signal.setitimer(signal.ITIMER_VIRTUAL, TIMER_S, TIMER_S)

    def __exit__(self, *_error: object) -> None:
        while _running and _running.pop() is not self:
            pass  # a nested limit that was interrupted in its own exit
        if not _running:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


_running: list[TimeLimit] = []  # the outermost first; a signal handler needs a global
Limit = AbstractContextManager[None]


def time_limit(limit_s: float, error: Callable[[], BaseException]) -> Limit:
    """Return a limit, or none in a thread that can't be interrupted."""
    return TimeLimit(limit_s, error) if can_limit_time() else nullcontext()


def can_limit_time() -> bool:
    """Install the signal handler and return True; in any thread but the main one, return False."""
    if threading.current_thread() is not threading.main_thread():
        return False
    _install()
    return True


@functools.cache
def _install() -> None:
    """Install the handler once: doing it for each row took 5 % of the row's time."""
    signal.signal(signal.SIGVTALRM, _tick)


def _tick(_number: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code is TimeLimit.__exit__.__code__:
        return  # the block has ended; an error here would leave its limit in the list
    for limit in _running:
        limit.left -= 1
        if limit.left <= 0:
            limit.left = _AGAIN_S / TIMER_S
            raise limit.error()
