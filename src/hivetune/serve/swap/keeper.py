"""Keeps what is loaded equal to what the registry wants, without losing a request: start, warm, check, switch, drain.

The only state is the registry and the processes that run. After a crash of the gateway or of a backend the same loop
finds the difference and mends it. A change that needs no new adapter (a rollback, a promotion of what is loaded) is a
change of routes alone and takes effect at once.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.serve.swap.live import Live
from hivetune.serve.swap.router import Route, Routes
from hivetune.serve.swap.wanted import Deployment, Wanted

_POLL_S = 0.25
DRAIN_S = 60.0
KEEP_S = 600.0  # a replaced backend is kept this long for an instant return, where memory allows
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
READY_TIMEOUT_S = 120.0

# Starts a backend and returns it warm and checked; raises HivetuneError. Runs in a thread.
Start = Callable[[Deployment], Live]
Read = Callable[[], Wanted]


@dataclass
class _Retry:
    """When a deployment that did not start is tried again, and why it failed."""

    at_s: float
    wait_s: float
    why: str


@dataclass
class Keeper:
    """The backends of a gateway and the routes to them. All methods but `Start` and `Read` run in one event loop."""

    read: Read
    start: Start
    canary: float = 0.0
    keep_old: Callable[[], bool] = lambda: True
    lives: dict[str, Live] = field(default_factory=dict)
    routes: Routes = field(default_factory=Routes)
    wanted: Wanted = field(default_factory=Wanted)
    swaps: int = 0
    restarts: int = 0
    _old: list[tuple[Live, float]] = field(default_factory=list)
    _retries: dict[Deployment, _Retry] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Look, mend, and look again, until cancelled; then every backend is ended."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(_POLL_S)
        finally:
            for live in [*self.lives.values(), *(live for live, _ in self._old)]:
                await live.close()

    async def look(self) -> None:
        """One comparison of what is wanted with what runs, and the work that follows from it."""
        self.wanted = await asyncio.to_thread(self.read)
        self._set_routes()
        for deployment in self.wanted.deployments:
            await self._mend(deployment)
        models = {deployment.model for deployment in self.wanted.deployments}
        for model in [model for model in self.lives if model not in models]:
            self._put_aside(self.lives.pop(model))
        self._set_routes()
        await self._end_old()

    async def live(self, route: Route) -> Live:
        """The backend of a route. Raises MachineNotFit when none is ready after `READY_TIMEOUT_S`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            live = self.lives.get(route.model)
            if live is not None and not live.retired and not live.dead:
                return live
            left = deadline - time.monotonic()
            if left <= 0:
                raise MachineNotFit("the model is not loaded", hint="; ".join(self.problems) or "try again later")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, _POLL_S))
            except TimeoutError:
                continue

    @property
    def problems(self) -> list[str]:
        """What is wanted and can't be served, in words."""
        return [*self.wanted.problems, *(retry.why for retry in self._retries.values())]

    @property
    def ready(self) -> bool:
        return bool(self.lives) and all(not live.dead for live in self.lives.values())

    async def _mend(self, deployment: Deployment) -> None:
        live = self.lives.get(deployment.model)
        if live is not None and live.dead:
            live.retire()
            self.restarts += 1
            self._old.append((live, 0.0))
            del self.lives[deployment.model]
            live = None
        if live is not None and live.deployment == deployment:
            return
        kept = next((old for old, _ in self._old if old.deployment == deployment and not old.dead), None)
        if kept is not None and kept.retired and not kept.turns.num_running:
            self._old = [(old, until) for old, until in self._old if old is not kept]
            self._switch(Live(deployment, kept.backend, kept.slots, kept.end))
            return
        retry = self._retries.get(deployment)
        if retry is not None and time.monotonic() < retry.at_s:
            return
        try:
            green = await asyncio.to_thread(self.start, deployment)
        except HivetuneError as error:
            wait_s = FIRST_RETRY_S if retry is None else min(2 * retry.wait_s, LONGEST_RETRY_S)
            self._retries[deployment] = _Retry(time.monotonic() + wait_s, wait_s, error.message)
            return
        self._retries = {}
        self._switch(green)

    def _switch(self, green: Live) -> None:
        blue = self.lives.get(green.deployment.model)
        self.lives[green.deployment.model] = green
        self._set_routes()
        if blue is not None:
            self.swaps += 1
            self._put_aside(blue)
        self._changed.set()

    def _put_aside(self, live: Live) -> None:
        live.retire()
        self._old.append((live, time.monotonic() + (KEEP_S if self.keep_old() else 0.0)))

    async def _end_old(self) -> None:
        """End what was replaced: when its time is over and its last answer, but no later than `DRAIN_S` after that."""
        now, left = time.monotonic(), []
        for live, until_s in self._old:
            over = live.dead or (now >= until_s and not live.turns.num_running) or now >= until_s + DRAIN_S
            if over:
                await live.close()
            else:
                left.append((live, until_s))
        self._old = left

    def _set_routes(self) -> None:
        """Routes to what is loaded. A champion that is still loading is answered for by the one before it."""
        labels = {label: model for model, live in self.lives.items() for label in live.deployment.labels}
        champions = {}
        for name, label in self.wanted.champions.items():
            known = label if label in labels else self.routes.champions.get(name)
            if known in labels:
                champions[name] = known
        self.routes = replace(
            self.routes,
            bases=tuple(sorted(self.lives)),
            labels=labels,
            champions=champions,
            candidates={name: label for name, label in self.wanted.candidates.items() if label in labels},
            canary=self.canary,
        )
