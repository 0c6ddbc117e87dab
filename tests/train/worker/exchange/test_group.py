"""Workers in a group: one sum whoever takes part; the dead, the silent, the lying and the foreign are told apart.

The workers are threads of this process, with the real store, the real collectives and the real model.
"""

import random
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.runs import learnable_rows

from hivetune.config import LoraConfig
from hivetune.errors import MachineNotFit
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Meeting
from hivetune.run.choices import Choices
from hivetune.train.worker.exchange import group as module
from hivetune.train.worker.exchange import work
from hivetune.train.worker.exchange.exchange import LocalCrew, Packs
from hivetune.train.worker.exchange.group import GroupCrew, open_store, serve_group, shares_of
from hivetune.train.worker.exchange.trust import WorkerWrong, hello
from hivetune.train.worker.exchange.work import WorkResult, compute
from hivetune.train.worker.measure.canary import CanaryFailed
from hivetune.train.worker.model.adapter import initialise
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

Change = Callable[[int, WorkResult], WorkResult]
SCALE = 1 / 100


class Died(Exception):
    """A worker's thread ends here, and its connections with it."""


def model_of(folder: Path) -> LoraModel:
    lora = LoraConfig(r=4, alpha=8, dropout=0.1)
    model = load_model(
        folder,
        lora,
        method="lora",
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(pack_tokens=32, kernels="torch"),
    )
    initialise(model.adapter, 3)
    model.master_N.add_(0.01 * torch.randn(model.master_N.numel(), generator=torch.Generator().manual_seed(1)))
    return model


def documents_of(count: int = 24) -> list[Document]:
    rows = enumerate(learnable_rows(count, seed=5))
    return [Document(row, torch.tensor(ids), torch.tensor(mask).bool()) for row, (ids, mask) in rows]


class Beats(Heartbeat):
    """A worker that waits for its place in a group beats; the supervisor would end it after the run."""

    def __init__(self, stage: "Stage"):
        super().__init__(None)
        self._stage = stage

    def beat(self, beat: Beat) -> None:
        if self._stage.closed and threading.get_ident() in self._stage.workers:
            raise Died


class Stage:
    """A crew of rank 0 and its threads. `told`: what it journals."""

    def __init__(self, folder: Path, meeting: Path):
        self.folder, self.model = folder, model_of(folder)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.meeting = Meeting(str(meeting), secrets.token_hex(8))
        self.crew = GroupCrew(
            self.model,
            open_store(self.meeting),
            local=True,
            mine=hello(0, folder, self.model),
            welcome={},
            tell=lambda event, fields: self.told.append((event, fields)),
        )
        self.packs = Packs(self.model, 0, self.crew)
        # Dropout draws from torch's one generator, which threads would share.
        self._computing = threading.Lock()
        self.closed = False
        self.workers: dict[int, Change] = {}
        self._counts: dict[int, int] = {}
        self._threads: list[threading.Thread] = []

    def compute(self, model: LoraModel, work: Any) -> WorkResult:
        me = threading.get_ident()
        with self._computing:
            result = compute(model, work)
            result = result if result.integers_N is None else replace(result, integers_N=result.integers_N.clone())
        if me not in self.workers:
            return result
        self._counts[me] = self._counts.get(me, -1) + 1
        return self.workers[me](self._counts[me], result)

    def worker(self, number: int, change: Change = lambda count, result: result, **said: Any) -> threading.Thread:
        """`change` of the number and the result of each piece of work."""
        thread = threading.Thread(target=self._work, args=(number, change, said), daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _work(self, number: int, change: Change, said: Mapping[str, Any]) -> None:
        model = model_of(self.folder)
        self.workers[threading.get_ident()] = change
        own = hello(number, self.folder, model)
        described = {**own, **said, "class": {**own["class"], **said.get("class", {})}}
        store = open_store(replace(self.meeting, token=said.get("token", self.meeting.token)))
        try:
            serve_group(model, store, described, Beats(self), local=True)
        except (Died, MachineNotFit, CanaryFailed):
            return

    def close(self) -> None:
        self.packs.close()
        self.closed = True
        for thread in self._threads:  # one that is left in a collective at the interpreter's end aborts it
            thread.join(2)

    def wait_for(self, event: str, count: int = 1) -> None:
        """Rounds of scoring until it was told; they are the moments at which things are told."""
        deadline = time.monotonic() + 120
        while sum(name == event for name, _ in self.told) < count:
            assert time.monotonic() < deadline, self.told
            self.crew.run([], 0, torch.zeros(0, dtype=torch.int64))

    def fields(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.told if name == event]

    def step(self, step: int = 0, exponent: int = 0) -> tuple[bytes, float, int]:
        summed = self.packs.backward(documents_of(), step, scale=SCALE, exponent=exponent)
        return self.model.grad_N.numpy().tobytes(), float(summed.loss), summed.exponent


@pytest.fixture
def stage(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    here = Stage(tiny_model_folder, tmp_path / "meeting")
    monkeypatch.setattr(module, "compute", here.compute)
    yield here
    here.close()


@pytest.fixture(scope="module")
def alone(tiny_model_folder: Path) -> tuple[bytes, float, int]:
    model = model_of(tiny_model_folder)
    packs = Packs(model, 0, LocalCrew(model))
    summed = packs.backward(documents_of(), 0, scale=SCALE, exponent=0)
    return model.grad_N.numpy().tobytes(), float(summed.loss), summed.exponent


def test_integer_sums_are_the_sums_of_one_process_up_to_rounding(tiny_model_folder: Path) -> None:
    lora = LoraConfig(r=4, alpha=8)
    model = load_model(
        tiny_model_folder,
        lora,
        method="lora",
        dtype=torch.float64,
        device=torch.device("cpu"),
        choices=Choices(pack_tokens=32),
    )
    initialise(model.adapter, 3)
    model.backward(documents_of(), SCALE)
    whole = model.grad_N.clone()
    assert len(model.micro_batches(documents_of())) > 4
    Packs(model, 0, LocalCrew(model)).backward(documents_of(), 0, scale=SCALE, exponent=0)
    assert float((model.grad_N - whole).abs().max()) <= 1e-12 * float(whole.abs().max())  # the grid's 45 bits


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_bits(stage: Stage, alone: tuple[bytes, float, int], workers: int) -> None:
    for number in range(1, workers + 1):
        stage.worker(number)
    stage.wait_for("worker_joined", workers)
    assert stage.step() == alone
    stage.packs.close()
    (computed,) = stage.fields("packs_computed")
    assert sum(computed["workers"].values()) == len(stage.model.micro_batches(documents_of()))
    assert set(computed["workers"]) == {str(number) for number in range(workers + 1)}
    assert all(computed["workers"].values()), "a worker computed nothing, so its sum proves nothing"


def test_an_overflow_repeats_the_step_on_a_wider_grid(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    """A grid that is far too fine: the step comes out as on the grid that its own largest value asks for."""
    found, nll, exponent = stage.step(exponent=-60)
    assert (nll, exponent) == alone[1:]
    values, right = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (found, alone[0]))
    assert float((values - right).abs().max()) <= 2.0**-24 * float(right.abs().max())


@pytest.mark.parametrize("dying", [1, 2, 3])
def test_the_packs_of_a_worker_that_dies_go_to_the_others(
    stage: Stage, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch, dying: int
) -> None:
    """Whichever rank it had, the others notice, though each rank waits for one other at a time."""
    process = subprocess.Popen(["sleep", "600"])  # whose end is that of the worker, a thread here

    def die(count: int, result: WorkResult) -> WorkResult:
        time.sleep(0.5)  # the others have computed their shares, and wait for it
        process.kill()
        process.wait()
        raise Died

    # It is not waited for, since it has ended; the others are, however long that takes on a busy machine.
    monkeypatch.setattr(module, "CALL_AGAIN_S", 60.0)
    stage.worker(dying, die, pid=process.pid)
    for other in {1, 2, 3} - {dying}:
        stage.worker(other)
    stage.wait_for("worker_joined", 3)
    assert stage.step() == alone
    assert [lost["worker"] for lost in stage.fields("worker_lost")] == [dying]
    assert stage.fields("packs_again")
    stage.worker(dying)  # and one that comes back takes part again
    stage.wait_for("worker_joined", 4)
    assert stage.step() == alone


def test_a_worker_that_still_computes_when_another_dies_is_waited_for(
    stage: Stage, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(count: int, result: WorkResult) -> WorkResult:
        raise Died

    def slow(seconds: float) -> Change:
        def once(count: int, result: WorkResult) -> WorkResult:
            time.sleep(seconds if count == 0 else 0)
            return result

        return once

    monkeypatch.setattr(module, "CALL_AGAIN_S", 1.0)
    stage.workers[threading.get_ident()] = slow(4)  # rank 0 is this thread
    stage.worker(1, die)
    stage.worker(2, slow(6))
    stage.wait_for("worker_joined", 2)
    assert stage.step() == alone
    assert [lost["worker"] for lost in stage.fields("worker_lost")] == [1]


def test_a_worker_that_dies_while_it_waits_holds_nobody_up(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    def die(count: int, result: WorkResult) -> WorkResult:
        raise Died

    stage.worker(1, die)
    stage.worker(2)
    stage.wait_for("worker_joined", 2)
    assert stage.step() == alone and stage.step() == alone
    assert [lost["worker"] for lost in stage.fields("worker_lost")] == [1]


def test_a_worker_that_is_stopped_is_lost_and_comes_again(
    stage: Stage, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_FLOOR_S", 0.5)
    monkeypatch.setattr(module, "FIRST_ROUND_S", 2.0)
    goes_on, heard = threading.Event(), [True]

    def stop(count: int, result: WorkResult) -> WorkResult:
        if count == 1:
            heard.append(goes_on.wait(60))
        return result

    stage.worker(1, stop)
    stage.wait_for("worker_joined")
    assert stage.step() == alone and all(heard), "the step waited for it"
    assert [lost["worker"] for lost in stage.fields("worker_lost")] == [1]
    goes_on.set()  # what it computed meanwhile comes too late, and changes nothing
    stage.wait_for("worker_joined", 2)
    assert stage.step() == alone


def lie(count: int, result: WorkResult) -> WorkResult:
    return result if result.integers_N is None else replace(result, integers_N=result.integers_N + 1)


def test_a_liar_among_three_is_named_in_its_first_step_and_let_in_no_more(
    stage: Stage, alone: tuple[bytes, float, int]
) -> None:
    stage.worker(1, lie)
    stage.worker(2)
    stage.wait_for("worker_joined", 2)
    with pytest.raises(WorkerWrong, match="worker 1 computes wrong numbers") as caught:
        stage.step(7)
    assert (caught.value.worker, caught.value.good) == (1, 7)
    assert stage.step() == alone
    stage.worker(1)
    stage.wait_for("worker_refused")
    assert "differs" in stage.fields("worker_refused")[0]["why"]


def test_one_that_lies_later_is_found_by_a_pack_that_two_compute(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "CHECKED_SHARE", 1.0)
    stage.worker(1, lambda count, result: lie(count, result) if count > 20 else result)
    stage.worker(2)
    stage.wait_for("worker_joined", 2)
    with pytest.raises(WorkerWrong, match="worker 1 computes wrong numbers"):
        for step in range(20):
            stage.step(step)


def test_two_that_disagree_for_good_stop_the_run(stage: Stage) -> None:
    stage.worker(1, lie)
    stage.wait_for("worker_joined")
    with pytest.raises(CanaryFailed, match="each repeats its own"):
        stage.step()


def test_a_worker_whose_test_products_are_wrong_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_pass(*_: Any, **__: Any) -> None:
        raise CanaryFailed("a product is wrong")

    monkeypatch.setattr(module.canary, "must_pass", must_pass)
    thread = stage.worker(1)
    with pytest.raises(WorkerWrong, match="a product that it computed to test itself is wrong"):
        stage.wait_for("worker_joined", 2)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"model": "0" * 64}, "other bytes"),
        ({"hivetune": "0.0.1"}, "hivetune 0.0.1"),
        ({"worker": 0}, "its number is 0; the run's own worker is 0"),
        ({"worker": -1}, "its number is -1"),
        ({"worker": True}, "its number is True"),
        ({"worker": "1"}, "its number is '1'"),
        ({"class": {"kernels": "other"}}, "kernels other instead of torch"),
        ({"class": {"torch": "2.9.1"}}, "torch 2.9.1 instead of"),
        ({"class": {"processor": "NEON"}}, "processor NEON instead of"),
    ],
)
def test_a_worker_that_would_compute_otherwise_is_refused(stage: Stage, said: dict[str, Any], why: str) -> None:
    stage.worker(1, **said)
    stage.wait_for("worker_refused")
    assert why in stage.fields("worker_refused")[0]["why"]
    assert not stage.fields("worker_joined")


def test_a_worker_of_another_attempt_is_not_heard(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    stage.worker(1, token="of a run that was killed")
    stage.worker(2)
    stage.wait_for("worker_joined")
    assert stage.step() == alone
    assert [joined["worker"] for joined in stage.fields("worker_joined")] == [2]


def test_a_pack_that_is_not_finite_makes_the_step_so(stage: Stage) -> None:
    stage.model.master_N[0] = torch.nan
    summed = stage.packs.backward(documents_of(), 0, scale=SCALE, exponent=5)
    assert not torch.isfinite(summed.loss) and summed.exponent == 5


def finish_s(shares: list[list[int]], costs: list[int], paces: list[float]) -> float:
    return max(sum(costs[n] for n in share) * pace for share, pace in zip(shares, paces, strict=True))


@pytest.mark.parametrize("packs", [4, 8, 16])
def test_a_worker_at_a_third_of_the_speed_costs_at_most_15_percent(packs: int) -> None:
    """Of the best division into whole packs."""
    paces, costs = [1.0, 3.0], [1] * packs
    best = min(max(packs - slow, 3 * slow) for slow in range(packs + 1))
    assert finish_s(shares_of(costs, list(paces)), costs, paces) <= 1.15 * best


def test_random_costs_are_shared_out_nearly_as_well_as_they_can_be() -> None:
    numbers = random.Random(1)
    for _ in range(200):
        ranks = numbers.randint(1, 5)
        costs = [numbers.randint(50, 400) for _ in range(numbers.randint(4 * ranks, 64))]
        shares = shares_of(costs, [None] * ranks)
        assert sorted(number for share in shares for number in share) == list(range(len(costs)))
        assert finish_s(shares, costs, [1.0] * ranks) <= 1.15 * max(sum(costs) / ranks, max(costs))
