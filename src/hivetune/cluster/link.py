"""The process of a run that speaks Ray: `python -m hivetune.cluster.link ADDRESS DEVICE`.

Lines of JSON come in: {"place": N, "start": ORDER}, {"place": N, "still": BOOL}, {"place": N, "end": true}; and go out:
{"devices": N}, {"place": N, "sign": SIGN}, {"text": TEXT}. It ends when its input closes; Ray then ends its agents.
"""

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hivetune.base.typed import to_plain
from hivetune.cluster.agent import Agent
from hivetune.cluster.machine import claim_device, read_membership
from hivetune.cluster.ray import DEVICE, connect_ray, offered_by
from hivetune.errors import HivetuneError
from hivetune.process.cluster import AgentSign
from hivetune.process.protocol import ChildError, Outcome

ANSWERS_EVERY_S = 0.5
COUNT_EVERY_S = 5.0
# Somebody should know why a worker does not start.
WAITS_S = 60.0
_PIPE_BYTES = 1 << 16


@dataclass
class _Placed:
    """An agent. `call`: what it was asked last and has not answered; `asked`: when it was asked for."""

    actor: Any
    call: Any
    asked: float
    answered: bool = False
    waits_told: bool = False


class _Link:
    def __init__(self, ray: Any, own_device: str):
        self._ray, self._agents = ray, dict[int, _Placed]()
        self._reserved = _reserve(ray, own_device)
        threading.Thread(target=self._count, daemon=True).start()

    def hear(self, said: dict[str, Any]) -> None:
        place = int(said["place"])
        if "start" in said:
            # An agent takes no core and no memory of those that Ray counts: what computes is its child.
            actor = self._ray.remote(num_cpus=0, resources={DEVICE: 1}, max_restarts=0)(Agent).remote()
            self._agents[place] = _Placed(actor, actor.start.remote(json.dumps(said["start"])), time.monotonic())
        elif "still" in said and place in self._agents:
            self._agents[place].actor.stand_still.remote(bool(said["still"]))
        elif "end" in said and place in self._agents:
            self._end(place)

    def look(self) -> None:
        """Signs of all agents that have answered; each is asked anew."""
        for place, placed in list(self._agents.items()):
            ready, _ = self._ray.wait([placed.call], timeout=0)
            if not ready:
                self._tell_waiting(place, placed)
                continue
            try:
                sign = json.loads(self._ray.get(placed.call))
            except self._ray.exceptions.RayError as error:
                sign = to_plain(AgentSign(outcome=_gone(error)))
            placed.answered = True
            _say({"place": place, "sign": sign})
            if sign["outcome"] is not None:
                self._end(place)
            else:
                placed.call = placed.actor.look.remote()

    def _tell_waiting(self, place: int, placed: _Placed) -> None:
        if not placed.answered and not placed.waits_told and time.monotonic() - placed.asked > WAITS_S:
            placed.waits_told = True
            _say({"text": f"worker {place} waits for a device of the cluster: none is free"})

    def _end(self, place: int) -> None:
        self._ray.kill(self._agents.pop(place).actor)

    def _count(self) -> None:
        """A thread of its own: while the head is away, Ray's answer waits for it."""
        while True:
            _say({"devices": offered_by(self._ray.nodes()) - self._reserved})
            time.sleep(COUNT_EVERY_S)


def _reserve(ray: Any, own_device: str) -> int:
    """Keep agents from the device that the run's own worker has, where this machine offers it: held here, and one less
    for Ray to give. How many that are."""
    membership = read_membership()
    claimed = None if membership is None else claim_device(membership.devices, own_device)
    if claimed is None:
        return 0
    node = ray.get_runtime_context().get_node_id()
    group = ray.util.placement_group([{DEVICE: 1}], bundle_label_selector=[{"ray.io/node-id": node}])
    ray.get(group.ready(), timeout=COUNT_EVERY_S)
    return 1


def _gone(error: Exception) -> Outcome:
    """Its process or its machine is gone, by Ray's words."""
    words = " ".join(str(error).split())
    described = ChildError(type(error).__name__, words, "", 1, f"{type(error).__name__}: {words}")
    return Outcome("died", None, None, 0.0, {}, "", described)


_saying = threading.Lock()
# Ray prints on standard output when a machine dies: that goes into the log, and our lines have a handle of their own.
_OUT = os.dup(1)


def _say(line: dict[str, Any]) -> None:
    with _saying:
        os.write(_OUT, json.dumps(line).encode() + b"\n")


class _Requests:
    """Whole lines of the input."""

    def __init__(self) -> None:
        self._text = b""

    def read(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """What came within `timeout_s`. Raises EOFError when nothing more can come."""
        if not select.select([sys.stdin], [], [], timeout_s)[0]:
            return
        data = os.read(sys.stdin.fileno(), _PIPE_BYTES)
        if not data:
            raise EOFError
        *whole, self._text = (self._text + data).split(b"\n")
        for line in whole:
            yield json.loads(line)


def main(address: str, own_device: str) -> int:
    os.dup2(2, 1)
    try:
        ray = connect_ray(address)
    except HivetuneError as error:
        sys.stderr.write(f"{error.message}\n")  # its log, whose last line the supervisor tells
        sys.stderr.flush()
        return error.exit_code
    link, requests = _Link(ray, own_device), _Requests()
    with contextlib.suppress(EOFError):
        while True:
            for said in requests.read(ANSWERS_EVERY_S):
                link.hear(said)
            link.look()
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:3]))
