"""Connections that say nothing: each costs a file descriptor, and a thousand of them made the gateway deaf.

uvicorn ends a connection that is idle after a request, but not one that never brings a whole head.
"""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for the line and the headers of a request
MAX_SILENT = 512
MAX_FILES = 1 << 16


def limited_protocol(head_s: float = HEAD_S, max_silent: int = MAX_SILENT) -> type[H11Protocol]:
    """uvicorn's protocol, whose connections end when no whole head came within `head_s`. Of more than `max_silent` that
    wait for one the oldest makes room."""
    silent: dict[H11Protocol, asyncio.TimerHandle] = {}  # oldest first

    class Limited(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self not in silent:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            silent[self] = self.loop.call_later(head_s, self._end)
            if len(silent) > max_silent:
                next(iter(silent))._end()  # type: ignore[attr-defined]

        def _stop_waiting(self) -> None:
            timer = silent.pop(self, None)
            if timer is not None:
                timer.cancel()

        def _end(self) -> None:
            self._stop_waiting()
            self.transport.abort()

    return Limited


def raise_file_limit() -> None:
    """As many open files as this process may have: many systems begin with 1,024, which is that many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
