"""A limit on the processor time of a row, or of a template that no row asked for.

Processor time and not the clock, so that a busy machine refuses no rows. Signals reach the main thread only.
"""

import functools
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

# Python drops an error that is raised during a finaliser or a garbage collection: so it is raised again.
AGAIN_S = 1.0


class TimeLimit(AbstractContextManager[None]):
    """A limit on a block: raise `error()` when it has taken `limit_s` of processor time.

    It interrupts Python and its regular expressions, but no other native code. It has no effect inside another limit,
    or outside the main thread."""

    __slots__ = ("_error", "_is_set", "_limit_s")
    running: Callable[[], BaseException] | None = None  # the error of the limit that runs

    def __init__(self, limit_s: float, error: Callable[[], BaseException]):
        self._limit_s = limit_s
        self._error = error

    def __enter__(self) -> None:
        self._is_set = TimeLimit.running is None and threading.current_thread() is threading.main_thread()
        if self._is_set:
            _install()
            TimeLimit.running = self._error
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s, AGAIN_S)

    def __exit__(self, *_error: object) -> None:
        if self._is_set:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            TimeLimit.running = None


@functools.cache
def _install() -> None:
    """Install the signal handler once: doing it for each row took 5 % of the row's time."""
    signal.signal(signal.SIGVTALRM, _reached)


def _reached(_number: int, frame: FrameType | None) -> None:
    # In its own exit the block is over, and an error would leave the limit behind.
    if TimeLimit.running is not None and not (frame and frame.f_code is TimeLimit.__exit__.__code__):
        raise TimeLimit.running()
