"""The keeper: it makes what is loaded equal to what the registry wants, without losing a request.

It starts, warms, checks, switches and drains model servers. Its only state is the registry and the running processes,
so after a crash of the gateway or of a model server the same loop finds the difference and mends it. A server is right
if it holds at least what is wanted. So a change that needs no new adapter, such as a rollback, changes only the routes
and takes effect at once.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hivetune.errors import HivetuneError, MachineNotFit, NotThere
from hivetune.serve.swap.live import LiveBackend
from hivetune.serve.swap.wanted import Deployment, DesiredState, Route, Routes

_POLL_S = 0.25
DRAIN_S = 600.0  # for an answer that fills a context, on two cores
YIELD_S = 60.0  # the same, where a run waits for the card
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 300.0
PATIENCE_S = 4.0  # of requests: what is tried again within this time is waited for
READY_TIMEOUT_S = 120.0
# A server that computes still answers /health, from another thread; one that is stopped or stuck does not.
LOOK_AT_HEALTH_S = 5.0
HUNG_S = 30.0

# Starts a backend and returns it warm and checked; raises HivetuneError. Runs in a thread.
Start = Callable[[Deployment], LiveBackend]
Read = Callable[[], DesiredState]


@dataclass
class _Retry:
    """A deployment that did not start: when it is retried, and why it failed."""

    at_s: float
    wait_s: float
    why: str


@dataclass
class Keeper:
    """The model servers of a gateway and the routes to them. All but `Start` and `Read` run in one event loop."""

    read: Read
    start: Start
    canary: float = 0.0
    hung_s: float = HUNG_S
    tell: Callable[[frozenset[str]], None] = lambda labels: None  # which releases are loaded, when that changed
    lives: dict[str, LiveBackend] = field(default_factory=dict)
    routes: Routes = field(default_factory=Routes)
    wanted: DesiredState = field(default_factory=DesiredState)
    swaps: int = 0
    restarts: int = 0
    unread: str = ""
    _old: list[tuple[LiveBackend, float]] = field(default_factory=list)
    _lost: dict[str, Deployment] = field(default_factory=dict)  # died, and is started again: requests wait for it
    # What a thread starts now, by model.
    _starting: "dict[str, tuple[Deployment, asyncio.Future[LiveBackend]]]" = field(default_factory=dict)
    _retries: dict[Deployment, _Retry] = field(default_factory=dict)
    _closing: "set[asyncio.Task[None]]" = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Look and repair until cancelled; then end every model server."""
        try:
            async with asyncio.TaskGroup() as tasks:  # neither goes on without the other
                tasks.create_task(self._watch_health())
                while True:
                    await self.look()
                    await asyncio.sleep(_POLL_S)
        finally:
            for _, starting in self._starting.values():
                starting.cancel()
            lives = [*self.lives.values(), *(live for live, _ in self._old)]
            await asyncio.gather(*(live.close() for live in lives), *self._closing)

    async def look(self) -> None:
        """Compare the wanted with the running servers once, and begin the resulting work. It waits for no start, so a
        rollback during a slow one takes effect at once. While the registry can't be read, everything stays as it is."""
        try:
            self.wanted, self.unread = await asyncio.to_thread(self.read), ""
        except (HivetuneError, sqlite3.Error, OSError) as error:
            self.unread = f"the registry can't be read: {error}"
        self._set_routes()
        for deployment in self.wanted.deployments:
            self._mend(deployment)
        models = {deployment.model for deployment in self.wanted.deployments}
        for model in [model for model in self.lives if model not in models]:
            self._put_aside(self.lives.pop(model))
        self._lost = {model: lost for model, lost in self._lost.items() if model in models}
        self._retries = {d: retry for d, retry in self._retries.items() if d in self.wanted.deployments}
        for model in [m for m, (_, starting) in self._starting.items() if m not in models and starting.done()]:
            _, unwanted = self._starting.pop(model)
            if unwanted.exception() is None:
                self._put_aside(unwanted.result())
        self._set_routes()
        self._end_old()

    async def live(self, route: Route) -> LiveBackend:
        """Return the model server of a route. Raises MachineNotFit when none is ready after `READY_TIMEOUT_S`, and
        NotThere at once for a model that is not to be served."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            live = self.lives.get(route.model)
            if live is not None and not live.retired and not live.dead:
                return live
            remaining = deadline - time.monotonic()
            if remaining <= 0 or (live is None and route.model not in self._lost):
                if route.model not in {deployment.model for deployment in self.wanted.deployments}:
                    raise NotThere(f"{route.label} is not served", hint="GET /v1/models names what is")
                hint = "; ".join(self.problems) or "it is being started: try again in a few seconds"
                raise MachineNotFit("the model is not loaded", hint=hint)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(remaining, _POLL_S))
            except TimeoutError:
                continue

    @property
    def problems(self) -> list[str]:
        """Return why wanted models can't be served, in words."""
        unread = [self.unread] if self.unread else []
        return [*unread, *self.wanted.problems, *(retry.why for retry in self._retries.values())]

    @property
    def ready(self) -> bool:
        """Return whether every wanted model answers."""
        models = [deployment.model for deployment in self.wanted.deployments]
        return bool(models) and all(model in self.lives and not self.lives[model].dead for model in models)

    def _mend(self, deployment: Deployment) -> None:
        live = self.lives.get(deployment.model)
        if live is not None and (live.dead or self._must_yield(live)):
            live.retire()
            self.restarts += live.dead
            self._old.append((live, time.monotonic()))
            self._lost[deployment.model] = live.deployment
            del self.lives[deployment.model]
        self._take_started(deployment)
        live = self.lives.get(deployment.model)
        if deployment.model in self._starting or (live is not None and live.deployment.holds(deployment)):
            return
        retry = self._retries.get(deployment)
        if retry is None or time.monotonic() >= retry.at_s:
            self._starting[deployment.model] = deployment, _in_thread(self.start, deployment)

    def _must_yield(self, live: LiveBackend) -> bool:
        """Return whether a run trains on its card. It may finish its answers, then the card is the trainer's."""
        return bool(self.wanted.taken) and live.deployment.device == self.wanted.taken

    def _take_started(self, deployment: Deployment) -> None:
        """Switch to the server that was started for this model, if it is ready and still wanted."""
        if deployment.model not in self._starting or not self._starting[deployment.model][1].done():
            return
        started, live = self._starting.pop(deployment.model)
        try:
            green = live.result()
        except (HivetuneError, sqlite3.Error, OSError) as error:
            retry = self._retries.get(started)
            wait_s = FIRST_RETRY_S if retry is None else min(2 * retry.wait_s, MAX_RETRY_S)
            if wait_s > PATIENCE_S:
                self._lost.pop(deployment.model, None)
            self._retries[started] = _Retry(time.monotonic() + wait_s, wait_s, str(error))
            return
        self._retries = {d: retry for d, retry in self._retries.items() if d.model != deployment.model}
        present = self.lives.get(deployment.model)
        if started.holds(deployment) and (present is None or not present.deployment.holds(deployment)):
            self._switch(green)
        else:
            self._put_aside(green)  # what is wanted changed meanwhile

    def _switch(self, green: LiveBackend) -> None:
        blue = self.lives.get(green.deployment.model)
        self.lives[green.deployment.model] = green
        self._lost.pop(green.deployment.model, None)
        self._set_routes()
        if blue is not None:
            self.swaps += 1
            self._put_aside(blue)
        self._changed.set()

    def _put_aside(self, live: LiveBackend) -> None:
        """Give a replaced server no new requests; it ends with its last answer."""
        live.retire()
        self._old.append((live, time.monotonic()))

    def _end_old(self) -> None:
        """End replaced servers with their last answer, at most `DRAIN_S` later (`YIELD_S` on a card that a run trains
        on)."""
        now, remaining = time.monotonic(), []
        for live, since_s in self._old:
            drain_s = YIELD_S if self._must_yield(live) else DRAIN_S
            if live.dead or not live.turns.num_running or now >= since_s + drain_s:
                closing = asyncio.create_task(live.close())  # up to ten seconds for one that hangs
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            else:
                remaining.append((live, since_s))
        self._old = remaining

    async def _watch_health(self) -> None:
        """Kill a server that has not answered /health for `hung_s`. The next look starts another one."""
        while True:
            await asyncio.sleep(min(LOOK_AT_HEALTH_S, self.hung_s / 4))
            await asyncio.gather(*(live.look_at_health(self.hung_s) for live in list(self.lives.values())))

    def _set_routes(self) -> None:
        """Route to the loaded releases. While a champion is loading, the previous one answers."""
        loaded = self._lost | {model: live.deployment for model, live in self.lives.items()}
        wanted = {label for deployment in self.wanted.deployments for label in deployment.labels}
        wanted |= set(self.routes.champions.values())  # until the new one is loaded
        labels = {
            label: model for model, deployment in loaded.items() for label in deployment.labels if label in wanted
        }
        if labels.keys() != self.routes.labels.keys():
            self.tell(frozenset(labels))
        champions = {}
        for name, label in self.wanted.champions.items():
            champion = label if label in labels else self.routes.champions.get(name)
            if champion in labels:
                champions[name] = champion
        self.routes = replace(
            self.routes,
            bases=tuple(sorted(loaded)),
            labels=labels,
            champions=champions,
            candidates={name: label for name, label in self.wanted.candidates.items() if label in labels},
            canary=self.canary,
            withdrawn=self.wanted.withdrawn,
            canaries=self.wanted.canaries,
        )


def _in_thread(start: Start, deployment: Deployment) -> "asyncio.Future[LiveBackend]":
    """Run `start` in a thread that does not outlive the process: a model may load for minutes. A server that nobody
    waits for any more is ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LiveBackend] = loop.create_future()

    def deliver(live: LiveBackend | None, error: Exception | None) -> None:
        if future.cancelled():
            if live is not None:
                live.end()
        elif live is not None:
            future.set_result(live)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        live, problem = None, None
        try:
            live = start(deployment)
        except Exception as error:  # noqa: BLE001 (it is raised again where the result is asked for)
            problem = error
        try:
            loop.call_soon_threadsafe(deliver, live, problem)
        except RuntimeError:  # the loop is closed: the gateway has ended
            if live is not None:
                live.end()

    threading.Thread(target=run, name="start", daemon=True).start()
    return future
