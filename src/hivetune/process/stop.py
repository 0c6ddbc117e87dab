"""Ctrl-C, SIGTERM and SIGHUP while a run goes on: the first asks for a clean end, the second ends it now."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """A context in which those signals are counted instead of ending this process. `number` is the first that came."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def request(self, number: int, frame: FrameType | None = None) -> None:
        self.number = self.number or number
        self.count += 1

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
