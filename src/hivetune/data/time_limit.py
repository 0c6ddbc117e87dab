"""Limits on the processor time of what strangers' data and templates set going, one inside the other.

Processor time, not the clock: a busy machine must not refuse rows. One timer ticks while there is any limit, and each
tick counts against all of them: a limit that begins inside another one costs no call of the system. Signals reach the
main thread only.
"""

import functools
import math
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from hivetune.data.reasons import RowRefused

ROW_LIMIT_S = 20.0  # a row of 1 MB takes 0.5 s on a slow core
TIMER_S = 0.02
# What is cleaned up on the way out has so much time before the error is raised again.
_AGAIN_S = 1.0


class TimeLimit(AbstractContextManager[None]):
    """Raises `error()` when its blocks together have taken `limit_s` of processor time.

    What is interrupted is Python and its regular expressions; a call into other native code ends first. It is raised
    again where a block goes on after it: Python swallows what is raised while it finalises an object or collects
    garbage.
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
            pass  # a limit inside this one that was interrupted on its way out
        if not _running:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


_running: list[TimeLimit] = []  # the outermost first; a signal has no other way to find them
Limit = AbstractContextManager[None]


def time_limit(limit_s: float, error: Callable[[], BaseException]) -> Limit:
    """No limit at all in a thread that can't be interrupted."""
    return TimeLimit(limit_s, error) if can_limit_time() else nullcontext()


def row_time_limit() -> Limit:
    """Of one row: raises RowRefused("too-slow"). The last line of defence behind rules and checks that are linear."""
    return time_limit(ROW_LIMIT_S, _too_slow)


def many_time_limits() -> Limit:
    """A block in which limits come one after the other: the timer goes on between them."""
    return time_limit(math.inf, _too_slow)


_too_slow = functools.partial(RowRefused, "too-slow")


def can_limit_time() -> bool:
    """Makes the process ready for limits; False in a thread that can't be interrupted: only the main one can."""
    if threading.current_thread() is not threading.main_thread():
        return False
    _install()
    return True


@functools.cache
def _install() -> None:
    """Once: changing the handler for each row took 5 % of its time."""
    signal.signal(signal.SIGVTALRM, _tick)


def _tick(_number: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code is TimeLimit.__exit__.__code__:
        return  # the block has ended; raised here, the error would leave its limit among those that run
    for limit in _running:
        limit.left -= 1
        if limit.left <= 0:
            limit.left = _AGAIN_S / TIMER_S
            raise limit.error()
