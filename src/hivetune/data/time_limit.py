"""Limits on the processor time of what strangers' data and templates set going, one inside the other.

Processor time, not the clock: a busy machine must not refuse rows. Signals reach the main thread only.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from hivetune.data.reasons import RowRefused

ROW_LIMIT_S = 20.0  # a row of 1 MB takes 0.5 s on a slow core
LEAST_S = 1e-3  # a timer of 0 would be none


class Limit(NamedTuple):
    """What runs at a time: the seconds left when another limit begins inside it, and what is raised when none are."""

    left_s: float
    error: BaseException | None


_error: BaseException | None = None


def can_limit_time() -> bool:
    """Makes the process ready for limits; False in a thread that can't be interrupted: only the main one can."""
    if threading.current_thread() is not threading.main_thread():
        return False
    _install()
    return True


def begin_limit(limit_s: float, error: BaseException) -> Limit:
    """From now on `error` is raised after so much processor time. Returns the limit around it, for `end_limit`.

    What is interrupted is Python and its regular expressions; a call into other native code ends first.
    """
    global _error  # a signal has no other way to say which limit is meant
    outer = Limit(signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)[0], _error)
    _error = error
    return outer


def end_limit(limit_s: float, outer: Limit) -> None:
    """The limit of `limit_s` that was begun last is over: the one around it goes on."""
    global _error
    left_s = signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0]
    _error = outer.error
    if outer.left_s:
        signal.setitimer(signal.ITIMER_VIRTUAL, max(outer.left_s - limit_s + left_s, LEAST_S))


@contextlib.contextmanager
def row_time_limit(limit_s: float = ROW_LIMIT_S) -> Iterator[None]:
    """Raises RowRefused("too-slow") inside the block after so much processor time: the last line of defence behind
    rules and checks that are linear."""
    outer = begin_limit(limit_s, RowRefused("too-slow"))
    try:
        yield
    finally:
        end_limit(limit_s, outer)


@functools.cache
def _install() -> None:
    """Once: changing the handler for each row took 5 % of its time."""
    signal.signal(signal.SIGVTALRM, _time_is_up)


def _time_is_up(_number: int, _frame: FrameType | None) -> None:
    if _error is not None:
        raise _error
