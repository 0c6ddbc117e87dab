"""Pages that stay up to date by Server-Sent Events: an event holds each changed part of a page, whole.

A browser always shows the state of one moment, made from the journals up to an offset. A lost connection or a reload
can leave no gap and no double point, because nothing is put together from pieces. An event's id is the hash of the
page; a browser that comes back with the same id is sent nothing.

All pages are made in one thread. The more a page costs, the less often it is made: together they may take SHARE of a
core, as long as no page gets older than MAX_AGE_S.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hivetune.base.disk import sha256_bytes

_T = TypeVar("_T")
SHARE = 0.002
MIN_AGE_S, MAX_AGE_S = 1.0, 5.0
_LOOK_S = 1.0
BEAT_S = 3.0  # after three of these without an event, a page says that it is old (static/dashboard.js)
# A browser opens 6 connections to a host. Streams leave two of them: the oldest gives way and comes back later. A new
# connection costs more than a quiet one, so not at once (seven tabs: 0.7 % of two cores when they came back after 2 s).
MAX_STREAMS = 4
RETRY_S, MADE_WAY_S = 2.0, 4.0


@dataclass(frozen=True)
class RenderedPage:
    """A rendered page: its parts by the id of their element, and the processor time that it took."""

    parts: Mapping[str, str]
    digest: str
    made: float
    cost_s: float


class Stream:
    """An open connection. `over`: a newer connection replaces it."""

    def __init__(self, address: str):
        self.address, self.over = address, False


class LivePages:
    """The rendered pages, each made at most as often as SHARE allows, once for all who look at it. `ending`: the server
    stops."""

    def __init__(self, ending: Callable[[], bool]):
        self.ending = ending
        self._thread = ThreadPoolExecutor(1, "dashboard")
        self._rendered: dict[str, RenderedPage] = {}
        self._streams: list[Stream] = []

    async def now(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returns, in the thread of the pages."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def follow(self, address: str, make: Callable[[], Mapping[str, str]], have: str) -> AsyncGenerator[bytes]:
        """Yield what changed on a page since the hash `have`, until the server ends or the stream must give way."""
        for oldest in self._streams[: max(0, len(self._streams) + 1 - MAX_STREAMS)]:
            oldest.over = True
        stream = Stream(address)
        self._streams.append(stream)
        sent: Mapping[str, str] = {}
        beat_at = 0.0
        try:
            yield f"retry: {RETRY_S * 1000:.0f}\n\n".encode()
            while not (stream.over or self.ending()):
                page = await self._current(address, make)
                if page.digest != have:
                    changed = {name: html for name, html in page.parts.items() if sent.get(name) != html}
                    have, sent, beat_at = page.digest, page.parts, time.monotonic() + BEAT_S
                    yield f"id: {have}\nevent: parts\ndata: {json.dumps(changed)}\n\n".encode()
                elif time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    yield b"event: beat\ndata:\n\n"
                await asyncio.sleep(_LOOK_S)
            if stream.over:
                yield f"retry: {MADE_WAY_S * 1000:.0f}\n\n".encode()
        finally:
            self._streams.remove(stream)
            if all(followed.address != address for followed in self._streams):
                self._rendered.pop(address, None)

    async def _current(self, address: str, make: Callable[[], Mapping[str, str]]) -> RenderedPage:
        page = self._rendered.get(address)
        if page is None or time.monotonic() - page.made >= self._pause_s(page):
            page = await asyncio.get_running_loop().run_in_executor(self._thread, partial(self._make, address, make))
        return page

    def _pause_s(self, page: RenderedPage) -> float:
        """Return how long a page is cached. All open pages share one budget of processor time."""
        addresses = {stream.address for stream in self._streams}
        return min(MAX_AGE_S, max(MIN_AGE_S, page.cost_s * len(addresses) / SHARE))

    def _make(self, address: str, make: Callable[[], Mapping[str, str]]) -> RenderedPage:
        """Render a page in the thread. Simultaneous requests get the same page."""
        page = self._rendered.get(address)
        if page is not None and time.monotonic() - page.made < MIN_AGE_S:
            return page
        began = time.thread_time()
        parts = make()
        cost_s = time.thread_time() - began
        self._rendered[address] = RenderedPage(parts, digest_of(parts), time.monotonic(), cost_s)
        return self._rendered[address]


def digest_of(parts: Mapping[str, str]) -> str:
    """Return a hash that is equal for pages with equal content."""
    return sha256_bytes(json.dumps(sorted(parts.items())).encode())[:16]
