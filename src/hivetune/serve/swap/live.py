"""One running model server inside the gateway: its process, its connections, and the requests that wait for its
slots."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from hivetune.llama.backend import CONTEXT_TOKENS, Backend
from hivetune.serve.swap.turns import Ticket, Turns
from hivetune.serve.swap.wanted import Deployment

_MAX_WAIT_S = 2.0
BACKEND_CONNECT_S = 5.0
# The longest silence of a backend inside an answer: the prompt of a full context on two cores takes about as long.
SILENCE_TIMEOUT_S = 300.0


class BackendRetired(Exception):
    """The model server was replaced, or died, before the request started. Another one will take it."""


@dataclass(eq=False)
class LiveBackend:
    """A model server with `deployment` loaded. `end` ends its process. `takes_tools`: its chat template has a place for
    tools. `template`: the text of it. `private_cache`: only the client that filled a slot's cache may use it.
    `retired`: it takes no new request."""

    deployment: Deployment
    backend: Backend
    slots: int
    end: Callable[[], None]
    context_tokens: int = CONTEXT_TOKENS
    takes_tools: bool = True
    template: str = ""
    private_cache: bool = False
    retired: bool = False
    silent_since: float | None = None
    turns: Turns = field(init=False)
    client: httpx2.AsyncClient = field(init=False)
    _starts: dict[Ticket, asyncio.Future[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns(self.slots, _MAX_WAIT_S)
        self.client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                uds=str(self.backend.socket_path), limits=httpx2.Limits(max_connections=self.slots + 4)
            ),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {self.backend.token}"},
            timeout=httpx2.Timeout(SILENCE_TIMEOUT_S, connect=BACKEND_CONNECT_S),
        )

    @property
    def dead(self) -> bool:
        return self.backend.process.poll() is not None

    @contextlib.asynccontextmanager
    async def turn(
        self, label: str | None, session: Hashable, *, client: str = "", long: bool = False
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Wait for a slot and hold it. Yields the fields that pin a request to the slot and to the adapter of `label`,
        or to the base for None. `long`: it may wait behind short ones. Raises BackendRetired."""
        if self.retired or (label is not None and label not in self.deployment.labels):
            raise BackendRetired
        ticket = Ticket(label, session, time.monotonic(), client, long)
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starts[ticket] = start
        self.turns.arrive(ticket)
        try:
            self._start()
            await start
            if self.client.is_closed:
                raise BackendRetired
            # The scale of every adapter: an empty list would mean the server's own scales, not the base.
            scales = [
                {"id": number, "scale": float(name == label)} for number, name in enumerate(self.deployment.labels)
            ]
            yield {"id_slot": ticket.slot, "lora": scales, "cache_prompt": ticket.warm or not self.private_cache}
        finally:
            self._starts.pop(ticket, None)
            self.turns.leave(ticket)
            self._start()

    def retire(self) -> None:
        """Take no new request. Waiting ones go elsewhere, running ones continue."""
        self.retired = True
        for start in self._starts.values():
            if not start.done():
                start.set_exception(BackendRetired())

    async def look_at_health(self, hung_s: float) -> None:
        """Kill the process if it has not answered for `hung_s`."""
        asked_s = time.monotonic()
        try:
            await self.client.get("/health", timeout=httpx2.Timeout(hung_s / 3))
        except httpx2.TransportError:
            self.silent_since = asked_s if self.silent_since is None else self.silent_since
            if time.monotonic() - self.silent_since >= hung_s and not self.dead:
                self.backend.kill()
        else:
            self.silent_since = None

    async def close(self) -> None:
        """End the process. Running requests break off."""
        self.retire()
        await self.client.aclose()
        await asyncio.to_thread(self.end)

    def _start(self) -> None:
        if self.retired:
            return
        for ticket in self.turns.start(time.monotonic()):
            start = self._starts[ticket]
            if not start.done():
                start.set_result(None)
