"""A process that computes packs for a run: it asks the run's own process for work until there is none.

It holds the base model and nothing that must survive: weights and tokens come with the work. The supervisor starts it
in a child and watches it.
"""

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hivetune.base.typed import from_plain
from hivetune.config import LoraConfig
from hivetune.errors import MachineNotFit
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, ComputePacks, Meeting
from hivetune.run.choices import Choices
from hivetune.train.worker.device import cap_memory, start_with
from hivetune.train.worker.exchange import wire
from hivetune.train.worker.exchange.admission import class_of, hello
from hivetune.train.worker.exchange.work import compute, read_work, result_message
from hivetune.train.worker.measure import canary
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel

# Between two beats of a worker that waits, and between two looks whether the run's process listens by now.
IDLE_BEAT_S = 1.0
KNOCK_S = 0.2


def main(task: ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    with _reach(task.meeting, heartbeat) as peer:
        wire.send(peer, hello(task.number, task.model))
        welcome = _answer(wire.receive(peer)[0])
        model = load_welcomed(task.model, welcome, task.changes.over(Choices(device=task.device)))
        wire.send(peer, {"kind": "ready", "class": class_of(model)})
        with contextlib.suppress(ConnectionError, TimeoutError):  # the run's process, or the network, is gone
            _serve(peer, model, heartbeat)
    return {}


def _serve(peer: socket.socket, model: LoraModel, heartbeat: Heartbeat) -> None:
    """Work until there is no more. Raises MachineNotFit when this worker is refused, CanaryFailed."""
    products = canary.shapes_of(model.adapter, canary.TOKENS)
    master_N = model.master_N if model.device.type == "cpu" else torch.empty_like(model.master_N, device="cpu")
    weights = memoryview(master_N.numpy()).cast("B")
    tested = -canary.EVERY_S

    def room(header: Mapping[str, Any], size: int) -> memoryview:
        return weights if header["kind"] == "weights" else memoryview(bytearray(size))

    while True:
        while not select.select([peer], [], [], IDLE_BEAT_S)[0]:
            heartbeat.beat(Beat.WAITING)
        header, payload = wire.receive(peer, room)
        heartbeat.beat(Beat.WAITING)
        if header["kind"] == "weights":
            model.master_N.copy_(master_N)
            continue
        if header["kind"] == "end":
            return
        _answer(header)
        if time.monotonic() - tested >= canary.EVERY_S:
            _test(peer, model, products)
            tested = time.monotonic()
        wire.send(peer, *result_message(header["number"], compute(model, read_work(header, payload))))
        heartbeat.beat(Beat.ITEM)


def _test(peer: socket.socket, model: LoraModel, products: list[canary.Product]) -> None:
    try:
        canary.must_pass(products, dtype=model.dtype, device=model.device, multiply=model.product)
    except canary.CanaryFailed as error:
        wire.send(peer, {"kind": "wrong", "why": error.message})
        raise


def _reach(meeting: Meeting, heartbeat: Heartbeat) -> socket.socket:
    """The connection, as soon as somebody listens. The wait ends with this process: the supervisor ends it with the
    run's own. Raises WireError when who listens does not know the token."""
    while True:
        try:
            return wire.reach(meeting.address, meeting.token)
        except wire.WireError:
            raise
        except OSError:  # it still loads
            heartbeat.beat(Beat.PREPARING)
            time.sleep(KNOCK_S)


def _answer(header: Mapping[str, Any]) -> Mapping[str, Any]:
    if header["kind"] == "refused":
        raise MachineNotFit(f"this worker can't compute for the run: {header['why']}")
    return header


def load_welcomed(folder: Path, welcome: Mapping[str, Any], changes: Choices) -> LoraModel:
    """The same model as the run's process has, with this worker's own device and `changes`."""
    choices = changes.over(from_plain(Choices, welcome["choices"]))
    device, dtype = start_with(choices)
    cap_memory(device, welcome["memory_share"])
    lora = LoraConfig(**welcome["lora"])
    return load_model(folder, lora, method=welcome["method"], dtype=dtype, device=device, choices=choices)


if __name__ == "__main__":
    run_child(main, ComputePacks)
