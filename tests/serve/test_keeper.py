"""The keeper's loop with model servers that are objects: what it starts, switches to, keeps, ends, and survives."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve.stage import FakeBackend, played

from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.serve.route import Deployment, Wanted
from hivetune.serve.servers import Keeper, LiveBackend


def deployment(*versions: int, model: str = "m", before: int | None = None) -> Deployment:
    """Return a deployment of these versions. `before`: the one that is loaded with them and is not required."""
    served = {f"a@{version}": Path("x") for version in versions}
    return Deployment(model, "0" * 64, served, frozenset(served) - {f"a@{before}"})


def wants(champion: int, *versions: int, before: int | None = None) -> Wanted:
    return Wanted(deployment(*versions, before=before), {"a": f"a@{champion}"})


class Stage:
    """A keeper, the registry's content, and what was started and ended."""

    def __init__(self, **settings: Any) -> None:
        self.now: Wanted | Exception = Wanted()
        self.started: list[Deployment] = []
        self.ended: list[Deployment] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing: Exception | None = None
        self.keeper = Keeper(self.read, self.start, **settings)

    def read(self) -> Wanted:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    def start(self, wanted: Deployment) -> LiveBackend:
        self.started.append(wanted)
        self.gate.wait(10)
        if self.failing is not None:
            raise self.failing
        return LiveBackend(wanted, FakeBackend(), 1, lambda: self.ended.append(wanted))  # type: ignore[arg-type]

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(500):
            await self.keeper.look()
            if holds():
                return
            await asyncio.sleep(0.002)
        raise AssertionError("it did not come about")

    async def look(self, times: int = 20) -> None:
        for _ in range(times):
            await self.keeper.look()
            await asyncio.sleep(0.002)


async def serving(wanted: Wanted, **settings: Any) -> tuple[Stage, Keeper]:
    """Return a keeper that serves what is wanted, and its stage."""
    stage = Stage(**settings)
    stage.now = wanted
    await stage.until(lambda: stage.keeper.ready)
    return stage, stage.keeper


@played
async def test_a_return_during_a_slow_start_takes_effect_at_once() -> None:
    stage, keeper = await serving(wants(1, 1, 2))
    stage.gate.clear()
    stage.now = wants(3, 1, 2, 3)
    await stage.until(lambda: len(stage.started) == 2)
    assert keeper.routes.champions == {"a": "a@1"}  # answered for by the one before
    stage.now = wants(2, 1, 2)
    await keeper.look()
    assert keeper.routes.champions == {"a": "a@2"}
    stage.gate.set()  # what was started is not wanted any more: it takes no request
    await stage.look()
    assert keeper.live is not None and keeper.live.deployment == deployment(1, 2) and keeper.swaps == 0


@played
async def test_a_rollback_restarts_nothing() -> None:
    """The one before the champion is loaded; the one before that is wanted then, and is no reason to restart."""
    stage, keeper = await serving(wants(3, 2, 3, before=2))
    stage.now = wants(2, 1, 2, before=1)
    await keeper.look()
    assert keeper.routes.champions == {"a": "a@2"}
    await stage.look()
    assert len(stage.started) == 1 and keeper.swaps == 0
    assert set(keeper.routes.labels) == {"a@2"}, "what is not wanted is not served, loaded or not"


@played
async def test_the_server_before_answers_until_that_of_another_base_is_ready() -> None:
    stage, keeper = await serving(wants(1, 1))
    stage.gate.clear()
    stage.now = Wanted(deployment(2, model="other"), {"a": "a@2"})
    await stage.until(lambda: len(stage.started) == 2)
    assert keeper.ready and keeper.routes.find("a", "s") == "a@1" and keeper.routes.base == "m"
    stage.gate.set()
    await stage.until(lambda: keeper.swaps == 1)
    assert keeper.routes.find("a", "s") == "a@2" and keeper.routes.base == "other"
    await stage.until(lambda: stage.ended == [deployment(1)])


@pytest.mark.slow
@played
async def test_an_answer_of_some_minutes_is_not_cut_by_a_promotion() -> None:
    """With little memory its server was ended after a minute, which counted as a failure of its release."""
    stage, keeper = await serving(wants(1, 1))
    assert keeper.live is not None
    async with keeper.live.turn("a@1", "s"):
        stage.now = wants(2, 1, 2)
        await stage.until(lambda: keeper.swaps == 1)
        await asyncio.sleep(0.3)  # it is looked at, and not cut before ten minutes
        assert stage.ended == []
    await stage.until(lambda: stage.ended == [deployment(1)])


@played
async def test_a_registry_that_cannot_be_read_changes_nothing_and_is_told() -> None:
    stage, keeper = await serving(wants(1, 1))
    stage.now = sqlite3.OperationalError("disk I/O error")
    await keeper.look()
    assert keeper.ready and keeper.problems == ["the registry can't be read: disk I/O error"]
    stage.now = wants(1, 1)
    await keeper.look()
    assert keeper.problems == []


@played
async def test_a_dead_backend_is_replaced_and_a_silent_one_is_killed() -> None:
    stage, keeper = await serving(wants(1, 1), hung_s=0.05)
    first = await keeper.server()
    stage.gate.clear()

    async def silent(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadTimeout("silent")

    first.client = httpx2.AsyncClient(transport=httpx2.MockTransport(silent), base_url="http://localhost")
    await stage.until(lambda: keeper.restarts == 1)
    assert keeper.routes.champions == {"a": "a@1"}  # requests wait for the next one
    waiting = asyncio.create_task(keeper.server())
    stage.gate.set()
    await stage.until(lambda: keeper.ready)
    assert await waiting is keeper.live is not first


@played
async def test_a_start_that_nobody_waits_for_any_more_is_ended() -> None:
    stage = Stage()
    stage.gate.clear()
    stage.now = wants(1, 1)
    running = asyncio.create_task(stage.keeper.run())
    while not stage.started:
        await asyncio.sleep(0.002)
    running.cancel()
    await asyncio.wait({running})
    stage.gate.set()
    while not stage.ended:
        await asyncio.sleep(0.002)
    assert stage.ended == stage.started == [deployment(1)]


@pytest.mark.parametrize("before", [None, 1])
@played
async def test_a_start_that_failed_and_is_not_wanted_any_more_is_no_problem(before: int | None) -> None:
    """Nothing is served then, as when it was retired, or what answered before the promotion."""
    stage = Stage()
    earlier = Wanted() if before is None else wants(before, before)
    stage.now = earlier
    await stage.until(lambda: stage.keeper.ready == (before is not None))
    stage.failing = MachineNotFit("the tensors are missing")
    stage.now = wants(2, 2)
    await stage.until(lambda: stage.keeper.problems == ["the tensors are missing"])
    stage.now = earlier
    await stage.until(lambda: stage.keeper.problems == [])
    assert stage.keeper.ready == (before is not None) and not stage.ended


@played
async def test_a_bug_ends_it_and_every_backend_with_it() -> None:
    stage = Stage()
    stage.now = wants(1, 1)
    running = asyncio.create_task(stage.keeper.run())
    while not stage.keeper.ready:
        await asyncio.sleep(0.002)
    stage.now = RuntimeError("a bug")
    await asyncio.wait({running})
    with pytest.raises(RuntimeError, match="a bug"):
        running.result()
    assert len(stage.ended) == 1


@played
async def test_a_card_that_is_trained_on_is_given_back_after_the_last_answer_and_the_cpu_answers() -> None:
    def on(device: str, taken: str = "") -> Wanted:
        return Wanted(replace(deployment(1), device=device), {"a": "a@1"}, taken=taken)

    stage, keeper = await serving(on("cuda:7"))
    card = await keeper.server()
    async with card.turn("a@1", "s"):
        stage.now = on("cpu", taken="cuda:7")
        await stage.until(lambda: keeper.live not in (card, None))
        assert (await keeper.server()).deployment.device == "cpu" and card.retired and stage.ended == []
    await stage.until(lambda: len(stage.ended) == 1)  # at once, not after ten minutes
    assert stage.ended[0].device == "cuda:7" and keeper.restarts == 0
    stage.now = on("cuda:7")
    await stage.until(lambda: keeper.live is not None and keeper.live.deployment.device == "cuda:7")


def second_is_over(keeper: Keeper) -> None:
    assert keeper.failure is not None
    keeper.failure = keeper.failure._replace(again_s=0.0)


@played
async def test_a_start_that_can_be_tried_again_in_a_second_is_waited_for() -> None:
    """A child that died while starting used to give everybody an instant 503."""
    stage, keeper = await serving(wants(1, 1))
    stage.failing = sqlite3.OperationalError("it died while loading")
    (await keeper.server()).backend.kill()
    await stage.until(lambda: keeper.failure is not None)
    assert keeper.routes.champions == {"a": "a@1"}
    waiting = asyncio.create_task(keeper.server())
    stage.failing = None
    second_is_over(keeper)
    await stage.until(lambda: keeper.ready)
    assert (await waiting) is keeper.live
    stage.failing = HivetuneError("it dies each time")
    (await keeper.server()).backend.kill()
    for _ in range(4):
        known = len(stage.started)
        await stage.until(lambda known=known: len(stage.started) > known and not keeper.starting)  # type: ignore[misc]
        second_is_over(keeper)
    with pytest.raises(MachineNotFit, match="it dies each time"):
        await keeper.server()
