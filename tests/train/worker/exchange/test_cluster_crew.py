"""Actors of a cluster beside the run's own worker: one sum whoever computes, and a dead actor's packs go to others.

The actors are threads of this process with the real model, behind the few calls of Ray that are used.
tests/cluster has the real Ray.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train.worker.exchange.test_group import SCALE, documents_of, model_of

from hivetune.errors import MachineNotFit
from hivetune.train.worker.exchange import cluster as module
from hivetune.train.worker.exchange import work
from hivetune.train.worker.exchange.actor import ActorOrder, PackActor
from hivetune.train.worker.exchange.cluster import RayCrew
from hivetune.train.worker.exchange.exchange import LocalCrew, Packs
from hivetune.train.worker.exchange.trust import WorkerWrong, hello
from hivetune.train.worker.exchange.work import WorkResult, compute
from hivetune.train.worker.measure.canary import CanaryFailed

Change = Callable[[int, WorkResult], WorkResult]


class RayError(Exception):
    pass


class ActorDied(RayError):
    pass


class GetTimeoutError(RayError):
    pass


class Ray:
    """As much of Ray as a crew uses; an actor is a thread. `offered`: devices of the cluster."""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        self.offered = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {module.DEVICE: self.offered}}]

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda: Actor(kind()))

    def put(self, value: Any) -> Any:
        return value

    def wait(self, calls: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        wait(calls, timeout, "FIRST_COMPLETED" if num_returns == 1 else "ALL_COMPLETED")
        ready = [call for call in calls if call.done()]
        return ready[:num_returns], ready[num_returns:]

    def get(self, call: "Future[Any]", timeout: float | None = None) -> Any:
        try:
            return call.result(timeout)
        except TimeoutError:
            raise GetTimeoutError from None

    def kill(self, actor: "Actor") -> None:
        actor.dead = True


class Actor:
    def __init__(self, held: Any):
        self.dead = False
        self._held, self._thread = held, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *values, **named: self._thread.submit(self._call, name, values, named))

    def _call(self, name: str, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.dead:
            raise ActorDied("the actor died unexpectedly before finishing this task")
        try:
            return getattr(self._held, name)(*values, **named)
        except ActorDied:
            self.dead = True
            raise


class Stage:
    """A crew with a cluster. `changes`: of the results of a worker's number; `said`: what its description says else."""

    def __init__(self, folder: Path, ray: Ray):
        self.ray, self.model = ray, model_of(folder)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.changes: dict[int, Change] = {}
        self.said: dict[int, Mapping[str, Any]] = {}
        self.computing = threading.Lock()  # dropout draws from torch's one generator
        self.crew = RayCrew(
            self.model,
            "127.0.0.1:1",
            own_device="cpu",
            order=ActorOrder(0, "tiny", folder, "", {"lora": {"dropout": 0.1}}),
            mine=hello(0, folder, self.model),
            tell=lambda event, fields: self.told.append((event, fields)),
        )
        self.packs = Packs(self.model, 0, self.crew)

    def fields(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.told if name == event]

    def workers(self, count: int) -> None:
        """Offer so many devices, and wait until a worker is admitted on each."""
        self.ray.offered = count
        self.wait_for("worker_joined", count)

    def wait_for(self, event: str, count: int = 1) -> None:
        deadline = time.monotonic() + 120
        while len(self.fields(event)) < count:
            assert time.monotonic() < deadline, self.told
            self.crew.run([], 0, torch.zeros(0, dtype=torch.int64))
            time.sleep(0.02)

    def step(self, step: int = 0, exponent: int = 0) -> tuple[bytes, float, int]:
        summed = self.packs.backward(documents_of(), step, scale=SCALE, exponent=exponent)
        return self.model.grad_N.numpy().tobytes(), float(summed.loss), summed.exponent

    def computed(self) -> dict[str, int]:
        self.packs.close()
        return dict(self.fields("packs_computed")[-1]["workers"])


@pytest.fixture(scope="module")
def alone(tiny_model_folder: Path) -> tuple[bytes, float, int]:
    model = model_of(tiny_model_folder)
    summed = Packs(model, 0, LocalCrew(model)).backward(documents_of(), 0, scale=SCALE, exponent=0)
    return model.grad_N.numpy().tobytes(), float(summed.loss), summed.exponent


@pytest.fixture
def stage(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    ray = Ray()
    monkeypatch.setattr(module, "connect_ray", lambda address: ray)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.05)
    here = Stage(tiny_model_folder, ray)
    there = threading.local()

    class ThreadActor(PackActor):
        def load(self, order: ActorOrder) -> dict[str, Any]:
            self._model, self._number, self._count = model_of(tiny_model_folder), order.number, -1
            said = here.said.get(order.number, {})
            own = hello(order.number, tiny_model_folder, self._model)
            return {**own, **said, "class": {**own["class"], **said.get("class", {})}}

        def compute(self, *values: Any, **named: Any) -> Any:
            with here.computing:
                self._count += 1
                there.change, there.count = here.changes.get(self._number), self._count
                return super().compute(*values, **named)

    def compute_there(model: Any, work: Any) -> WorkResult:
        result = compute(model, work)
        if result.integers_N is not None:  # its memory is written over by the next one
            result = replace(result, integers_N=result.integers_N.clone())
        return result if there.change is None else there.change(there.count, result)

    def compute_here(model: Any, work: Any) -> WorkResult:
        time.sleep(0.02)  # so that the actors get some of the packs
        with here.computing:
            return compute(model, work)

    monkeypatch.setattr(work, "compute", compute_there)
    monkeypatch.setattr(module, "compute", compute_here)
    monkeypatch.setattr(module, "PackActor", ThreadActor)
    yield here
    here.packs.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_actors_gives_the_same_bits(stage: Stage, alone: tuple[bytes, float, int], workers: int) -> None:
    stage.workers(workers)
    assert stage.step() == alone
    computed = stage.computed()
    assert sum(computed.values()) == len(stage.model.micro_batches(documents_of()))
    assert set(computed) == {str(number) for number in range(workers + 1)}


def die_at(when: int) -> Change:
    def change(count: int, result: WorkResult) -> WorkResult:
        if count == when:
            raise ActorDied("killed")
        return result

    return change


def test_the_packs_of_a_dead_actor_are_computed_by_others_and_not_only_by_this_process(
    stage: Stage, alone: tuple[bytes, float, int]
) -> None:
    """It had finished packs whose integers died with it, and one that it was at."""
    by: dict[int, list[int]] = {0: [], 1: [], 2: []}
    take, own = module.Round._take, module.Round._compute_own

    def see_take(self: Any, handed: Any, *answer: Any) -> None:
        by[handed.seat.number].append(handed.number)
        take(self, handed, *answer)

    def see_own(self: Any, number: int) -> None:
        by[0].append(number)
        time.sleep(0.2)  # the other actor is faster
        own(self, number)

    stage.workers(2)
    stage.changes[1] = die_at(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Round, "_take", see_take)
        patch.setattr(module.Round, "_compute_own", see_own)
        assert stage.step() == alone
    (lost,) = stage.fields("worker_lost")
    again = set(lost["packs"])
    assert lost["worker"] == 1 and len(again) >= 2
    assert set(by[1]) & again, "what it had finished is part of what was lost"
    assert again <= set(by[0]) | set(by[2]) and again & set(by[2]), "the other actor computed none of them again"
    stage.changes.clear()
    stage.wait_for("worker_joined", 3)  # another one takes its place
    assert stage.step() == alone


def test_all_actors_die_and_this_process_goes_on(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    stage.changes = {1: die_at(1), 2: die_at(0)}
    stage.workers(2)
    assert stage.step() == alone
    assert {lost["worker"] for lost in stage.fields("worker_lost")} == {1, 2}


def test_an_actor_that_is_late_is_lost(
    stage: Stage, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_FLOOR_S", 0.5)
    monkeypatch.setattr(module, "FIRST_PACK_S", 2.0)
    goes_on = threading.Event()

    def stop(count: int, result: WorkResult) -> WorkResult:
        stage.computing.release()
        goes_on.wait(60 if count == 1 else 0)
        stage.computing.acquire()
        return result

    stage.changes[1] = stop
    stage.workers(1)
    assert stage.step() == alone
    assert [lost["why"] for lost in stage.fields("worker_lost")] == ["it is late"]
    goes_on.set()


def lie(count: int, result: WorkResult) -> WorkResult:
    return result if result.integers_N is None else replace(result, integers_N=result.integers_N + 1)


def test_a_liar_among_three_is_named_and_let_in_no_more(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    stage.changes[1] = lie
    stage.workers(2)
    with pytest.raises(WorkerWrong, match="worker 1 computes wrong numbers"):
        stage.step()
    assert stage.step() == alone
    assert len(stage.fields("worker_joined")) == 2


def test_two_that_disagree_for_good_stop_the_run(stage: Stage) -> None:
    stage.changes[1] = lie
    stage.workers(1)
    with pytest.raises(CanaryFailed, match="each repeats its own"):
        stage.step()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"model": "0" * 64}, "other bytes"),
        ({"hivetune": "0.0.1"}, "hivetune 0.0.1"),
        ({"refused": "its machine does not have the model"}, "does not have the model"),
    ],
)
def test_a_worker_that_would_compute_otherwise_is_refused(
    stage: Stage, alone: tuple[bytes, float, int], said: dict[str, Any], why: str
) -> None:
    stage.said[1] = said
    stage.ray.offered = 1
    stage.wait_for("worker_refused")
    assert why in stage.fields("worker_refused")[0]["why"] and stage.step() == alone
    assert stage.computed() == {"0": len(stage.model.micro_batches(documents_of()))}


OTHER_TORCH = {"class": {"torch": "2.9.1"}}


def double(count: int, result: WorkResult) -> WorkResult:
    return result if result.integers_N is None else replace(result, integers_N=2 * result.integers_N)


def test_another_torch_is_let_in_and_its_rounding_is_no_lie(stage: Stage) -> None:
    """`lie` changes the last bit of each weight's gradient, as other kernels do."""
    stage.said[1], stage.changes[1] = OTHER_TORCH, lie
    stage.workers(2)
    told = [joined.get("differs", "") for joined in stage.fields("worker_joined")]
    assert sum("torch 2.9.1 instead of" in differs for differs in told) == 1
    for step in range(3):
        stage.step(step)
    assert not stage.fields("worker_wrong") and not stage.fields("packs_differ")


def test_a_wrong_gradient_of_another_torch_is_named_in_its_first_step(stage: Stage) -> None:
    stage.said[1], stage.changes[1] = OTHER_TORCH, double
    stage.workers(1)
    with pytest.raises(WorkerWrong, match=r"worker 1 .* is 100% of its length off"):
        stage.step()


def test_a_cluster_that_does_not_answer_is_told_once_and_the_run_goes_on(
    stage: Stage, alone: tuple[bytes, float, int], tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(address: str) -> Any:
        raise MachineNotFit(f"the cluster at {address} does not answer")

    monkeypatch.setattr(module, "connect_ray", nobody)
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    here = Stage(tiny_model_folder, Ray())
    here.wait_for("warning")
    assert here.step() == alone
    assert len(here.fields("warning")) == 1 and "does not answer" in here.fields("warning")[0]["text"]
    here.packs.close()
