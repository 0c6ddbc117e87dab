"""A limit on the processor time of one row: the last line of defence behind rules and checks that are linear."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from hivetune.data.reasons import RowRefused

ROW_LIMIT_S = 20.0  # a row of 1 MB takes 0.5 s on a slow core


def can_limit_rows() -> bool:
    """Makes this thread ready for `row_time_limit`; False where it can't be interrupted: only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGVTALRM, _too_slow)
    return True


@contextlib.contextmanager
def row_time_limit(limit_s: float = ROW_LIMIT_S) -> Iterator[None]:
    """Raises RowRefused("too-slow") inside the block after so much processor time of this process.

    A template of a model, for one, may take any time. What is interrupted is Python and its regular expressions; a call
    into other native code ends first.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _too_slow(_signal: int, _frame: object) -> None:
    raise RowRefused("too-slow")
