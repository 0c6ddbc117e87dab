"""The model servers: when the registry changes, the loaded models are changed without losing a request.

One server answers requests. A second one exists only while it starts, or while it finishes its last answers.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx2

from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.llama.backend import CONTEXT_TOKENS, Backend
from hivetune.serve.route import BASE, Deployment, Routes, Wanted
from hivetune.serve.turns import Ticket, Turns

# For another adapter's turn: the promised longest wait (turns.py).
MAX_WAIT_S = 2.0
BACKEND_CONNECT_S = 5.0
# The longest silence of a backend inside an answer: the prompt of a full context on two cores takes about as long.
SILENCE_TIMEOUT_S = 300.0
LOOK_AT_HEALTH_S = 5.0
HUNG_S = 30.0
_POLL_S = 0.25
# For the answers of a server that is replaced: one that fills a context takes as long on two cores. Less where a run
# waits for the card.
DRAIN_S, YIELD_S = 600.0, 60.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 300.0
# Of requests: what is tried again within this time is waited for.
PATIENCE_S = 4.0
READY_TIMEOUT_S = 120.0


class BackendRetired(Exception):
    """The model server was replaced or died before the request started; another server has to take the request."""


@dataclass(eq=False)
class LiveBackend:
    """A model server with `deployment` loaded, and the requests that wait for its slots."""

    deployment: Deployment
    backend: Backend
    slots: int
    end: Callable[[], None]  # ends its process
    context_tokens: int = CONTEXT_TOKENS
    # Whether its chat template has a place for tools, and the text of that.
    takes_tools: bool = True
    template: str = ""
    retired: bool = False  # it takes no new request
    watching: asyncio.Task[None] | None = None
    turns: Turns = field(init=False)
    client: httpx2.AsyncClient = field(init=False)
    _starts: dict[Ticket, asyncio.Future[None]] = field(default_factory=dict)
    _look_again: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.turns = Turns(self.slots, MAX_WAIT_S)
        limits = httpx2.Limits(max_connections=self.slots + 4)
        self.client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(self.backend.socket_path), limits=limits),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {self.backend.token}"},
            timeout=httpx2.Timeout(SILENCE_TIMEOUT_S, connect=BACKEND_CONNECT_S),
        )

    @property
    def dead(self) -> bool:
        return self.backend.process.poll() is not None

    @property
    def answers(self) -> bool:
        """Return whether the server accepts requests."""
        return not self.retired and not self.dead

    @contextlib.asynccontextmanager
    async def turn(
        self, label: str, session: Hashable, *, client: str = "", long: bool = False
    ) -> AsyncIterator[Ticket]:
        """Wait for a slot and hold it during the block, for the adapter of `label`, or for the base alone. `long`: the
        prompt takes seconds to compute. Raises BackendRetired."""
        if self.retired or label not in (BASE, *self.deployment.served):
            raise BackendRetired
        ticket = Ticket(label, session, time.monotonic(), client, long)
        start = self._starts[ticket] = asyncio.get_running_loop().create_future()
        self.turns.arrive(ticket)
        try:
            self._start()
            await start
            if self.client.is_closed:
                raise BackendRetired
            yield ticket
        finally:
            self._starts.pop(ticket, None)
            self.turns.leave(ticket)
            self._start()

    def _start(self) -> None:
        """Start the tickets that may start now, and check again after half of `MAX_WAIT_S` while others wait."""
        if self.retired:
            return
        for ticket in self.turns.start(time.monotonic()):
            if not self._starts[ticket].done():
                self._starts[ticket].set_result(None)
        if self._look_again is not None:
            self._look_again.cancel()
        waits = self.turns.num_waiting > 0
        self._look_again = asyncio.get_running_loop().call_later(MAX_WAIT_S / 2, self._start) if waits else None

    def pinned(self, ticket: Ticket) -> Mapping[str, Any]:
        """Return the fields of a request that select its slot and its adapter."""
        # The scale of every adapter is named: an empty list would mean the server's own scales, not the base.
        labels = enumerate(self.deployment.served)
        scales = [{"id": number, "scale": float(name == ticket.key)} for number, name in labels]
        # A slot's prompt cache serves the client alone that filled it: its timing would tell others what that client
        # asked (CVE-2025-46570 of vLLM).
        return {"id_slot": ticket.slot, "lora": scales, "cache_prompt": ticket.warm}

    def retire(self) -> None:
        """Accept no new request. Waiting requests go to another server; running ones continue."""
        self.retired = True
        for start in self._starts.values():
            if not start.done():
                start.set_exception(BackendRetired())

    async def watch_health(self, hung_s: float) -> None:
        """Kill the process if it has not answered /health for `hung_s` seconds."""
        # One that computes answers it, from another thread; one that is stopped or stuck does not.
        while not self.dead:
            await asyncio.sleep(min(LOOK_AT_HEALTH_S, hung_s / 4))
            try:
                await self.client.get("/health", timeout=hung_s)
            except (httpx2.ReadTimeout, httpx2.ConnectTimeout):
                self.backend.kill()
            except httpx2.TransportError:  # it died: the next look sees that
                pass

    async def close(self) -> None:
        """End the process, which breaks off running requests."""
        self.retire()
        if self.watching is not None:
            self.watching.cancel()
        await self.client.aclose()
        await asyncio.to_thread(self.end)


# Starts a backend and returns it warm and checked; raises HivetuneError. Runs in a thread.
Start = Callable[[Deployment], LiveBackend]


class Failure(NamedTuple):
    """A failed start of a model server: its deployment, the reason, the time of the next try (monotonic clock, in
    seconds), and the pause before it in seconds."""

    deployment: Deployment
    why: str
    wait_s: float
    again_s: float


@dataclass
class Keeper:
    """The model servers of a gateway and the routes to their models. A loop starts and ends servers until they match
    the registry. All methods but `start` and `read` run in one event loop.
    """

    read: Callable[[], Wanted]
    start: Start
    canary: float = 0.0
    hung_s: float = HUNG_S
    # The server that answers. A lost one stays until another takes its place, which requests wait for.
    live: LiveBackend | None = None
    # Of the last start, until one succeeds or is not wanted any more.
    failure: Failure | None = None
    routes: Routes = field(default_factory=Routes)
    # Servers that were replaced by others, and those that died.
    swaps: int = 0
    restarts: int = 0
    # Why the registry can't be read, else empty.
    unread: str = ""
    starting: asyncio.Task[None] | None = None
    _draining: dict[LiveBackend, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def wanted(self) -> Wanted:
        return self.routes.wanted

    @property
    def problems(self) -> list[str]:
        """Return, in words, why wanted releases can't be served."""
        why = "" if self.failure is None else self.failure.why
        return [problem for problem in (self.unread, *self.wanted.problems, why) if problem]

    @property
    def ready(self) -> bool:
        """Return whether a model server accepts requests."""
        return self.wanted.deployment is not None and self.live is not None and self.live.answers

    async def server(self) -> LiveBackend:
        """Return the model server. Raises MachineNotFit if there is none, or if it is not ready after
        `READY_TIMEOUT_S`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            live = self.live
            if live is not None and live.answers:
                return live
            if time.monotonic() >= deadline or live is None:
                hint = "; ".join(self.problems) or "it is being started: try again in a few seconds"
                raise MachineNotFit("the model is not loaded", hint=hint)
            await asyncio.sleep(_POLL_S / 5)

    async def run(self) -> None:
        """Call `look` until cancelled; then end every model server."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(_POLL_S)
        finally:
            for task in (self.starting, *self._draining.values()):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(live.close() for live in {self.live, *self._draining} if live is not None))

    async def look(self) -> None:
        """Compare the wanted deployment with the running servers, and start what is missing. While the registry can't
        be read, the last wanted deployment is kept."""
        try:
            now, self.unread = await asyncio.to_thread(self.read), ""
            self.routes = replace(self.routes, wanted=now)
        except (HivetuneError, sqlite3.Error, OSError) as error:
            self.unread = f"the registry can't be read: {error}"
        # There is no other state than the registry and the running processes, so after a crash of the gateway or of a
        # server the same lines find the difference and fix it.
        wanted, live = self.wanted, self.live
        if live is not None and not live.retired and (live.dead or wanted.deployment is None or self._must_yield(live)):
            self.restarts += live.dead
            self._drain(live)
        if wanted.deployment is None:
            self.live = self.failure = None
        elif live is not None and live.answers and live.deployment.holds(wanted.deployment):
            # Of a start that is not wanted any more: a rollback took it back.
            self.failure = None
        elif self.starting is None and self._may_try(wanted.deployment):
            # Not waited for: a rollback during a slow start takes effect at once.
            self.starting = asyncio.create_task(self._start(wanted.deployment))
        self._route()

    def _may_try(self, deployment: Deployment) -> bool:
        failure = self.failure
        return failure is None or failure.deployment != deployment or time.monotonic() >= failure.again_s

    def _must_yield(self, live: LiveBackend) -> bool:
        """Return whether a run wants the server's card. The server may finish its answers, then the run gets
        the card.
        """
        return bool(self.wanted.taken) and live.deployment.device == self.wanted.taken

    async def _start(self, deployment: Deployment) -> None:
        """Start a server, and switch to it if its deployment is still wanted then."""
        try:
            green = await _in_thread(self.start, deployment)
        except (HivetuneError, sqlite3.Error, OSError) as error:
            before, wait_s = self.failure, FIRST_RETRY_S
            if before is not None and before.deployment == deployment:
                wait_s = min(2 * before.wait_s, MAX_RETRY_S)
            self.failure = Failure(deployment, str(error), wait_s, time.monotonic() + wait_s)
            if wait_s > PATIENCE_S and not self.ready:
                self.live = None
            self._route()
            return
        finally:
            self.starting = None
        wanted, blue = self.wanted.deployment, self.live
        blue = None if blue is None or blue.retired else blue
        if wanted is None or not deployment.holds(wanted) or (blue is not None and blue.deployment.holds(wanted)):
            # What is wanted changed meanwhile.
            self._drain(green)
            return
        self.live, self.failure = green, None
        green.watching = asyncio.create_task(green.watch_health(self.hung_s))
        self._route()
        if blue is not None:
            self.swaps += 1
            self._drain(blue)

    def _drain(self, live: LiveBackend) -> None:
        """Send a server no new requests, and end it after its last answer, at most `DRAIN_S` later (`YIELD_S` on a card
        that a run wants).
        """
        live.retire()

        async def drain() -> None:
            since_s = time.monotonic()
            while live.turns.num_running and not live.dead:
                if time.monotonic() >= since_s + (YIELD_S if self._must_yield(live) else DRAIN_S):
                    break
                await asyncio.sleep(_POLL_S)
            await live.close()  # up to ten seconds for one that hangs
            del self._draining[live]

        self._draining[live] = asyncio.create_task(drain())

    def _route(self) -> None:
        """Route to the loaded releases. While a champion is loading, the previous one answers."""
        wanted, before = self.wanted, self.routes.champions
        held = None if self.live is None else self.live.deployment
        answering = wanted.labels | set(before.values())  # until the new ones are loaded
        labels = answering & set(held.served) if held is not None else frozenset[str]()
        champions = {name: label if label in labels else before.get(name) for name, label in wanted.champions.items()}
        answers_now = {name: label for name, label in champions.items() if label is not None and label in labels}
        base = "" if held is None else held.model
        self.routes = Routes(wanted, base, labels, answers_now, self.canary, self.problems)


async def _in_thread(start: Start, deployment: Deployment) -> LiveBackend:
    """Run `start` in a thread and return its server. If the caller is cancelled meanwhile, the server is ended."""
    started: Future[LiveBackend] = Future()

    def run() -> None:
        try:
            live = start(deployment)
        except Exception as error:  # noqa: BLE001 (it is raised again where the result is awaited)
            with contextlib.suppress(InvalidStateError):
                started.set_exception(error)
            return
        try:
            started.set_result(live)
        except InvalidStateError:  # it was cancelled
            live.end()

    # A daemon, which does not outlive the process: asyncio's own threads are waited for, and a model may load for
    # minutes.
    threading.Thread(target=run, name="start", daemon=True).start()
    try:
        return await asyncio.wrap_future(started)
    except asyncio.CancelledError:
        if not started.cancel() and started.exception() is None:  # it came at the same moment
            started.result().end()
        raise
