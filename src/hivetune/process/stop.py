"""Ctrl-C, SIGTERM and SIGHUP while a run goes on: the first asks for a clean end, the second ends it now.

Whoever started it may ask for the same without a signal, such as a cycle whose window ends.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """A context in which those signals are counted instead of ending this process. `number` is the first that came.

    `ends` asks as often as it says: 0, 1 (a clean end), 2 (now).
    """

    def __init__(self, ends: Callable[[], int] = lambda: 0) -> None:
        self.number: int | None = None
        self._ends = ends
        self._signals = 0
        self._before: dict[int, Any] = {}

    @property
    def count(self) -> int:
        """How often an end was asked for."""
        return max(self._signals, self._ends())

    def request(self, number: int, frame: FrameType | None = None) -> None:
        self.number = self.number or number
        self._signals += 1

    def sleep(self, seconds: float) -> None:
        """At most `seconds`; less when a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self.count and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self.request) for number in NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
