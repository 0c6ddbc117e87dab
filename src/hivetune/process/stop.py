"""The stop of a run by Ctrl-C, SIGTERM or SIGHUP: the first asks for a clean end, the second ends it at once.

The caller may ask for the same without a signal, such as a cycle whose window ends.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Handler = Callable[[int, FrameType | None], None]


def handle_stop_signals(handler: Handler, numbers: Sequence[int] = NUMBERS) -> dict[int, Any]:
    """Install `handler` for these signals; return signal -> previous handler. If SIGHUP is ignored, it stays ignored,
    so that a command started with nohup continues after its terminal is closed."""
    taken = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in taken}


class StopRequest:
    """A context that counts stop signals; `number` is the first one.

    `ends` returns the request of the caller: 0 for none, 1 for a clean end, 2 for an end at once.
    """

    def __init__(self, ends: Callable[[], int] = lambda: 0) -> None:
        self.number: int | None = None
        self._ends = ends
        self._signals = 0
        self._before: dict[int, Any] = {}

    @property
    def count(self) -> int:
        """Return the number of stop requests so far: signals and the results of `ends`."""
        return max(self._signals, self._ends())

    def request(self, number: int, frame: FrameType | None = None) -> None:
        self.number = self.number or number
        self._signals += 1

    def sleep(self, seconds: float) -> None:
        """Sleep `seconds`, or less if a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self.count and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.2))

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = handle_stop_signals(self.request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
