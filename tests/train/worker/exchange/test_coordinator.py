"""Workers on sockets: one sum whoever takes part; the dead, the late, the lying and the foreign are told apart.

The workers are threads of this process that speak the real messages and compute with the real model.
"""

import contextlib
import itertools
import secrets
import socket
import tempfile
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
from hivetune.process.protocol import Meeting
from hivetune.run.choices import Choices
from hivetune.train.worker.exchange import coordinator as module
from hivetune.train.worker.exchange import wire
from hivetune.train.worker.exchange.admission import class_of, hello
from hivetune.train.worker.exchange.coordinator import OWN, Coordinator, WorkerWrong
from hivetune.train.worker.exchange.exchange import Alone, Packs
from hivetune.train.worker.exchange.work import WorkResult, compute, read_work, result_message
from hivetune.train.worker.measure.canary import CanaryFailed
from hivetune.train.worker.model.adapter import begin
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

Change = Callable[[int, WorkResult], WorkResult | None]
SCALE = 1 / 100
OPTIONS = ("USER_TIMEOUT", "KEEPIDLE", "KEEPINTVL")


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
    begin(model.adapter, lora, 3)
    model.master_N.add_(0.01 * torch.randn(model.master_N.numel(), generator=torch.Generator().manual_seed(1)))
    return model


def documents_of(count: int = 24) -> list[Document]:
    rows = enumerate(learnable_rows(count, seed=5))
    return [Document(row, torch.tensor(ids), torch.tensor(mask).bool()) for row, (ids, mask) in rows]


class Stage:
    """A coordinator and its threads. `told`: what it journals."""

    def __init__(self, folder: Path, *, mixed: bool = False):
        self.folder, self.model = folder, model_of(folder)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._folder = tempfile.TemporaryDirectory()
        self.meeting = Meeting(f"{self._folder.name}/meeting", secrets.token_hex(8), mixed)
        self.crew = Coordinator(
            self.model,
            self.meeting,
            mine=hello(0, folder),
            kernels=class_of(self.model),
            welcome={},
            tell=lambda event, fields: self.told.append((event, fields)),
        )
        self.packs = Packs(self.model, 0, self.crew)
        # Dropout draws from torch's one generator, which threads would share.
        self.computing = threading.Lock()

    def worker(self, number: int, change: Change = lambda count, result: result, **said: Any) -> threading.Thread:
        """`change` of the number and the result of each piece of work; None: the worker dies."""
        thread = threading.Thread(target=self._work, args=(number, change, said), daemon=True)
        thread.start()
        return thread

    def _work(self, number: int, change: Change, said: Mapping[str, Any]) -> None:
        model = model_of(self.folder)
        weights = memoryview(model.master_N.numpy()).cast("B")
        with wire.reach(self.meeting.address, self.meeting.token) as peer, contextlib.suppress(OSError):
            wire.send(peer, {**hello(number, self.folder), **said})
            if wire.receive(peer)[0]["kind"] == "refused":
                return
            wire.send(peer, {"kind": "ready", "class": {**class_of(model), **said.get("class", {})}})
            for count in itertools.count():
                header = {"kind": "weights"}
                while header["kind"] == "weights":
                    header, payload = wire.receive(
                        peer, lambda h, size: weights if h["kind"] == "weights" else memoryview(bytearray(size))
                    )
                if header["kind"] != "work":
                    return
                with self.computing:
                    result = compute(model, read_work(header, payload))
                changed = change(count, result)
                if changed is None:
                    return
                wire.send(peer, *result_message(header["number"], changed))

    def close(self) -> None:
        self.packs.close()
        self._folder.cleanup()

    def wait_for(self, event: str, count: int = 1) -> None:
        """Rounds of scoring until it was told; they are the moments at which things are told."""
        deadline = time.monotonic() + 120
        while sum(name == event for name, _ in self.told) < count:
            assert time.monotonic() < deadline, self.told
            self.crew.run([], 0, torch.zeros(0, dtype=torch.int64))

    def step(self, step: int = 0, exponent: int = 0) -> tuple[bytes, float, int]:
        summed = self.packs.backward(documents_of(), step, scale=SCALE, exponent=exponent)
        return self.model.grad_N.numpy().tobytes(), float(summed.losses), summed.exponent


@pytest.fixture
def stage(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stage]:
    here = make_stage(tiny_model_folder, monkeypatch, mixed=getattr(request, "param", False))
    yield here
    here.close()


def make_stage(folder: Path, monkeypatch: pytest.MonkeyPatch, *, mixed: bool = False) -> Stage:
    here = Stage(folder, mixed=mixed)

    def compute_alone(model: LoraModel, work: Any) -> WorkResult:
        with here.computing:
            return compute(model, work)

    monkeypatch.setattr(module, "compute", compute_alone)
    return here


@pytest.fixture(scope="module")
def alone(tiny_model_folder: Path) -> tuple[bytes, float, int]:
    model = model_of(tiny_model_folder)
    packs = Packs(model, 0, Alone(model))
    summed = packs.backward(documents_of(), 0, scale=SCALE, exponent=0)
    return model.grad_N.numpy().tobytes(), float(summed.losses), summed.exponent


def lie(count: int, result: WorkResult) -> WorkResult:
    return result if result.integers_N is None else replace(result, integers_N=result.integers_N + 1)


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
    begin(model.adapter, lora, 3)
    model.backward(documents_of(), SCALE)
    whole = model.grad_N.clone()
    assert len(model.micro_batches(documents_of())) > 4
    Packs(model, 0, Alone(model)).backward(documents_of(), 0, scale=SCALE, exponent=0)
    assert float((model.grad_N - whole).abs().max()) <= 1e-12 * float(whole.abs().max())  # the grid's 45 bits


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_bits(stage: Stage, alone: tuple[bytes, float, int], workers: int) -> None:
    for number in range(1, workers + 1):
        stage.worker(number)
    stage.wait_for("worker_joined", workers)
    assert stage.step() == alone
    stage.packs.close()
    computed = next(fields["workers"] for event, fields in stage.told if event == "packs_computed")
    assert sum(computed.values()) == len(stage.model.micro_batches(documents_of()))
    assert set(computed) <= {str(number) for number in range(workers + 1)}


def test_an_overflow_repeats_the_step_on_a_wider_grid(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    """A grid that is far too fine: the step comes out as on the grid that its own largest value asks for."""
    found, nll, exponent = stage.step(exponent=-60)
    assert (nll, exponent) == alone[1:]
    values, right = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (found, alone[0]))
    assert float((values - right).abs().max()) <= 2.0**-24 * float(right.abs().max())


def test_a_worker_that_dies_is_replaced_by_the_others(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    stage.worker(1, lambda count, result: None if count == 1 else result)
    stage.wait_for("worker_joined")
    assert stage.step() == alone
    stage.wait_for("worker_lost")
    lost = next(fields for event, fields in stage.told if event == "worker_lost")
    assert lost["worker"] == 1 and len(lost["packs"]) <= 1
    stage.worker(1)  # and one that comes back takes part again
    stage.wait_for("worker_joined", 2)
    assert stage.step() == alone


def test_a_result_of_another_size_loses_its_worker_and_no_pack(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    half = lambda _, result: replace(result, integers_N=result.integers_N[1:].clone())  # noqa: E731
    stage.worker(1, half)
    stage.wait_for("worker_joined")
    assert stage.step() == alone
    stage.wait_for("worker_lost")
    assert "bytes came" in next(fields["why"] for event, fields in stage.told if event == "worker_lost")


def test_a_worker_that_comes_again_has_its_place_and_its_packs(stage: Stage, alone: tuple[bytes, float, int]) -> None:
    """Its machine went away without a word and is back before the old connection has failed."""
    with wire.reach(stage.meeting.address, stage.meeting.token) as old:
        wire.send(old, hello(1, stage.folder))
        wire.receive(old)
        wire.send(old, {"kind": "ready", "class": class_of(stage.model)})
        stage.wait_for("worker_joined")
        stage.worker(1)
        stage.wait_for("worker_joined", 2)
        assert not old.recv(1)  # it was hung up on
    assert stage.step() == alone
    stage.wait_for("worker_lost")
    lost = [fields for event, fields in stage.told if event == "worker_lost"]
    assert [fields["why"] for fields in lost] == ["it connected again"] and not lost[0]["packs"]
    assert not [event for event, _ in stage.told if event == "packs_again"]


def test_a_worker_that_dies_while_it_waits_is_noticed_without_any_work(stage: Stage) -> None:
    stage.worker(1)
    with wire.reach(stage.meeting.address, stage.meeting.token) as peer:
        wire.send(peer, hello(2, stage.folder))
        wire.receive(peer)
        wire.send(peer, {"kind": "ready", "class": class_of(stage.model)})
        stage.wait_for("worker_joined", 2)
    stage.wait_for("worker_lost")  # its rounds have no work
    assert [fields["worker"] for event, fields in stage.told if event == "worker_lost"] == [2]


def test_a_connection_that_fails_at_the_door_keeps_nobody_else_out(
    tiny_model_folder: Path, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Door:
        """A real listener whose first peer is gone before it is let in."""

        def __init__(self, address: str):
            self._real, self.failed = open_listener(address), False
            doors.append(self)

        def accept(self) -> tuple[socket.socket, Any]:
            if not self.failed:
                self.failed = True
                raise ConnectionAbortedError
            return self._real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    doors: list[Door] = []
    open_listener = wire.open_listener
    monkeypatch.setattr(wire, "open_listener", Door)
    here = make_stage(tiny_model_folder, monkeypatch)
    here.worker(1)
    here.wait_for("worker_joined")
    assert doors[0].failed and here.step() == alone
    here.close()


def test_a_network_that_is_gone_is_noticed() -> None:
    """By bytes that nobody answers, and by probes while a worker computes and nothing is sent."""
    with wire.open_listener("127.0.0.1:0") as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        there = threading.Thread(target=lambda: wire.greet(listener.accept()[0], "t", b"coordinator", b"worker"))
        there.start()
        with wire.reach(at, "t") as peer:
            there.join()
            told = {name: peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in OPTIONS}
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert told["USER_TIMEOUT"] == 20_000 and told["KEEPIDLE"] + 4 * told["KEEPINTVL"] <= 25


@pytest.mark.parametrize("other", ["pace", "comparison", ""])
def test_a_worker_that_is_stopped_holds_nobody_up(
    stage: Stage, alone: tuple[bytes, float, int], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Nor in the step after, of which it has no pack: it could do them sooner, or compare, if it answered."""
    goes_on, heard = threading.Event(), [True]

    def stop(count: int, result: WorkResult) -> WorkResult:
        if count >= 1:
            heard.append(goes_on.wait(60))
        return result

    stage.worker(1, stop)
    stage.wait_for("worker_joined")
    assert stage.step() == alone
    if other == "pace":
        stage.crew._paces.seconds.update({OWN: 1.0, 1: 1e-3})
    monkeypatch.setattr(module, "is_checked", lambda seed: other == "comparison")
    assert stage.step() == alone and all(heard), "a step waited for it"
    goes_on.set()  # what it computed meanwhile comes too late, and changes nothing
    assert stage.step() == alone


def test_a_liar_among_three_is_named_and_let_in_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_checked", lambda seed: True)
    stage.worker(1, lie)
    stage.worker(2)
    stage.wait_for("worker_joined", 2)
    with pytest.raises(WorkerWrong, match="worker 1 computes wrong numbers") as caught:
        for step in range(20):
            stage.step(step)
    assert caught.value.worker == 1
    stage.worker(1)
    stage.wait_for("worker_refused")
    assert "differs" in next(fields["why"] for event, fields in stage.told if event == "worker_refused")


def test_two_that_disagree_for_good_stop_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_checked", lambda seed: True)
    stage.worker(1, lie)
    stage.wait_for("worker_joined")
    with pytest.raises(CanaryFailed, match="each repeats its own"):
        for step in range(20):
            stage.step(step)


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
    ],
)
def test_a_worker_that_would_compute_otherwise_is_refused(stage: Stage, said: dict[str, Any], why: str) -> None:
    stage.worker(1, **said)
    stage.wait_for("worker_refused")
    assert why in next(fields["why"] for event, fields in stage.told if event == "worker_refused")


OTHER_TORCH = {"class": {"torch": "2.9.1"}}
mixed = pytest.mark.parametrize("stage", [True], indirect=True)


def double(count: int, result: WorkResult) -> WorkResult:
    return result if result.integers_N is None else replace(result, integers_N=2 * result.integers_N)


@mixed
def test_another_class_is_let_into_a_cluster_and_its_rounding_is_no_lie(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lie` changes the last bit of each weight's gradient, as other kernels do."""
    monkeypatch.setattr(module, "is_checked", lambda seed: True)
    stage.worker(1, lie, **OTHER_TORCH)
    stage.worker(2)
    stage.wait_for("worker_joined", 2)
    told = [fields.get("differs", "") for event, fields in stage.told if event == "worker_joined"]
    assert sum("torch 2.9.1 instead of" in differs for differs in told) == 1
    for step in range(5):
        stage.step(step)
    assert not [event for event, _ in stage.told if event in ("worker_wrong", "packs_differ")]


@mixed
def test_a_wrong_gradient_of_another_class_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_checked", lambda seed: True)
    stage.worker(1, double, **OTHER_TORCH)
    stage.wait_for("worker_joined")
    with pytest.raises(WorkerWrong, match=r"worker 1 .* is 100% of its length off"):
        for step in range(20):
            stage.step(step)


def test_who_does_not_know_the_token_gets_nothing(stage: Stage) -> None:
    with pytest.raises(OSError):
        wire.reach(stage.meeting.address, "guessed")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(stage.meeting.address)
        silent.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(64))
        stage.wait_for("nothing", 0)
    assert not [event for event, _ in stage.told if event == "worker_joined"]


def test_a_pack_that_is_not_finite_makes_the_step_so(stage: Stage) -> None:
    stage.model.master_N[0] = torch.nan
    summed = stage.packs.backward(documents_of(), 0, scale=SCALE, exponent=5)
    assert not torch.isfinite(summed.losses) and summed.exponent == 5
