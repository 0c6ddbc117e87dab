"""Pages that stay up to date: each asks every three seconds, and gets the parts that have changed, whole.

A browser always shows the state of one moment, made from the journals up to an offset. A lost answer or a reload can
leave no gap and no double point, because nothing is put together from pieces. A page says by hashes which parts it
has, so the server remembers nothing of who looks.

All pages are made in one thread. The more a page costs, the less often it is made: together they may take SHARE of a
core, as long as no page gets older than MAX_AGE_S.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from hivetune.base.disk import sha256_bytes

_T = TypeVar("_T")
SHARE = 0.002
MIN_AGE_S, MAX_AGE_S = 1.0, 5.0
FORGET_S = 3 * MAX_AGE_S  # nobody looks at a page that was not made for so long


@dataclass(frozen=True)
class RenderedPage:
    """A rendered page: its parts by the id of their element, when it was made, and the processor time that it took."""

    parts: Mapping[str, str]
    made: float = 0.0
    cost_s: float = 0.0

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """A word for each part that is equal for equal content."""
        return {name: f"{name}:{sha256_bytes(json.dumps(html).encode())[:12]}" for name, html in self.parts.items()}

    @property
    def have(self) -> str:
        """What a page with these parts says that it has."""
        return " ".join(self.hashes.values())

    def lacking(self, have: str) -> dict[str, str]:
        """Return the parts that a page lacks which says `have`."""
        known = have.split()
        return {name: html for name, html in self.parts.items() if self.hashes[name] not in known}


class LivePages:
    """The rendered pages, each made at most as often as SHARE allows, once for all who look at it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "dashboard")
        self._rendered: dict[str, RenderedPage] = {}

    async def now(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returns, in the thread of the pages."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def current(self, address: str, make: Callable[[], Mapping[str, str]]) -> RenderedPage:
        """Return the page at an address. All pages that are looked at share one budget of processor time."""
        page = self._rendered.get(address)
        if page is not None:
            pause_s = page.cost_s * len(self._rendered) / SHARE
            if time.monotonic() - page.made < min(MAX_AGE_S, max(MIN_AGE_S, pause_s)):
                return page
        return await self.now(partial(self._make, address, make))

    def _make(self, address: str, make: Callable[[], Mapping[str, str]]) -> RenderedPage:
        """Render a page in the thread. Simultaneous requests get the same page."""
        now = time.monotonic()
        page = self._rendered.get(address)
        if page is not None and now - page.made < MIN_AGE_S:
            return page
        began = time.thread_time()
        parts = make()
        page = RenderedPage(parts, time.monotonic(), time.thread_time() - began)
        looked_at = {name: other for name, other in self._rendered.items() if now - other.made < FORGET_S}
        self._rendered = {**looked_at, address: page}
        return page
