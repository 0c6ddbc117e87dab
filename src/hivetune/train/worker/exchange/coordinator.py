"""The run's own process with workers beside it: it hands out packs, computes some itself, and adds what comes back.

One thread a worker speaks with it; a worker that dies is noticed by its socket at once (peer.py), one that hangs by its
packs being late (handout.py). Nothing of a round depends on who took part in it. A worker joins whenever it comes.

Shapes: N adapter weights.
"""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hivetune.errors import HivetuneError
from hivetune.process.protocol import Meeting
from hivetune.train.worker.exchange import wire
from hivetune.train.worker.exchange.admission import differences, more_than_rounding, objection
from hivetune.train.worker.exchange.handout import Handout, Paces
from hivetune.train.worker.exchange.pack import is_checked
from hivetune.train.worker.exchange.peer import Peer
from hivetune.train.worker.exchange.work import (
    Figures,
    Gradient,
    Work,
    WorkResult,
    compute,
    cost_of,
    read_result,
    work_message,
)
from hivetune.train.worker.measure import canary
from hivetune.train.worker.measure.canary import CanaryFailed
from hivetune.train.worker.model.protocol import LoraModel

OWN = 0
"""The number of this process among the workers."""
CLOSE_S = 2.0
# Between two tries to accept, where one failed.
DOOR_S = 0.05


class WorkerWrong(HivetuneError):
    """A worker computed wrong numbers. What it did since step `good` is doubtful."""

    def __init__(self, worker: int, good: int, why: str):
        super().__init__(f"worker {worker} computes wrong numbers: {why}", hint="test its card: hivetune doctor")
        self.worker, self.good = worker, good


@dataclass
class _Round:
    """The work of one call of `run`. `number` tells it from every other one. `foreign`: who gave the first result of a
    checked pack whose kernels are of another class than this process's, and what it was."""

    number: int
    step: int
    works: Sequence[Work]
    handout: Handout
    weights: memoryview
    sum_N: Tensor
    figures: dict[int, Figures]
    foreign: dict[int, tuple[int, WorkResult]]


class Coordinator:
    """A `Crew` of this process and of all workers that come to `meeting`.

    `welcome`: what a worker needs to load the same model; `mine`: `hello` of this process; `kernels`: its class.
    `tell(event, fields)` is called by the thread that calls `run`. Call `close` in the end.
    """

    def __init__(
        self,
        model: LoraModel,
        meeting: Meeting,
        *,
        mine: Mapping[str, Any],
        kernels: Mapping[str, Any],
        welcome: Mapping[str, Any],
        tell: Callable[[str, dict[str, Any]], None],
    ):
        self._model, self._meeting, self._tell = model, meeting, tell
        self._mine, self._kernels, self._welcome = mine, kernels, welcome
        self._classes = {OWN: _label(kernels)}
        self._changed = threading.Condition()
        self._peers: dict[int, Peer] = {}
        self._works_for: dict[int, int] = {}  # the number of the round whose pack a worker has
        self._dismissed: dict[int, str] = {}
        self._accused: list[int] = []
        self._good: dict[int, int] = {}
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._paces = Paces()
        self._computed: Counter[int] = Counter()
        self._round: _Round | None = None
        self._rounds = 0
        self._step = 0
        self._closed = False
        self._listener = wire.open_listener(meeting.address)
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[Figures]:
        """Raises WorkerWrong when a comparison shows one, CanaryFailed when it is this process or nobody can tell."""
        current = self._begin(works, step, sum_N)
        while (taken := self._next(OWN, current)) is not None:
            _, number = taken
            self._give(OWN, current, number, compute(self._model, works[number]))
            self._tell_news()
        with self._changed:
            self._round = None
        self._tell_news()
        if current.handout.again:
            self._tell("packs_again", {"step": step, "packs": current.handout.again})
        self._judge_foreign(current)
        self._judge(current)
        return [current.figures[number] for number in range(len(works))]

    def _tell_news(self) -> None:
        with self._changed:
            untold, self._untold = self._untold, []
        for event, fields in untold:
            self._tell(event, fields)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._wake()
        computed = {str(worker): packs for worker, packs in sorted(self._computed.items())}
        self._tell("packs_computed", {"step": self._step, "workers": computed})
        with contextlib.suppress(OSError):  # wakes the thread that accepts, which a close alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in threading.enumerate():
            if thread.name.startswith("worker-") and thread.is_alive():
                thread.join(CLOSE_S)

    def _begin(self, works: Sequence[Work], step: int, sum_N: Tensor) -> _Round:
        costs = [cost_of(work) for work in works]
        checked = [n for n, work in enumerate(works) if isinstance(work, Gradient) and is_checked(work.pack.seed)]
        weights = memoryview(self._model.master_N.cpu().numpy()).cast("B")
        with self._changed:
            self._rounds += 1
            self._step = step
            handout = Handout(costs, checked, self._paces, self._classes)
            self._round = _Round(self._rounds, step, works, handout, weights, sum_N, {}, {})
            self._wake()
            return self._round

    def _next(self, worker: int, current: _Round | None, peer: Peer | None = None) -> tuple[_Round, int] | None:
        """Waits for work for `worker`, at `peer` or in this process. None: the round `current` is over, where one is
        named, or this worker's part is. Raises OSError when the peer is gone."""
        while True:
            with self._changed:
                if self._closed or worker in self._dismissed or self._peers.get(worker) is not peer:
                    return None
                self._works_for.pop(worker, None)
                now_s, wait_s = time.monotonic(), None
                if self._round is not None:
                    handout, alive = self._round.handout, self._alive(self._round)
                    if current is not None and handout.done(alive, now_s):
                        return None
                    number = handout.take(worker, alive, now_s)
                    if number is not None:
                        self._works_for[worker] = self._round.number
                        return self._round, number
                    wait_s = handout.next_late_s(now_s)
                if peer is None:
                    self._changed.wait(wait_s)
            if peer is not None:
                peer.wait(wait_s)

    def _alive(self, current: _Round) -> set[int]:
        """Who takes part in it. Not who still has a pack of a round before: it has none of this one that could become
        late, and who waits for it to take one, or to compare, waits for ever if it was stopped."""
        here = (worker for worker in self._peers if self._works_for.get(worker, current.number) == current.number)
        return {OWN, *here}

    def _wake(self) -> None:
        """All that wait for work; whoever holds `_changed` and has changed something calls it."""
        self._changed.notify_all()
        for peer in self._peers.values():
            peer.ring()

    def _give(self, worker: int, current: _Round, number: int, result: WorkResult, peer: Peer | None = None) -> None:
        checked = current.handout.is_checked(number)
        digest = result.digest() if checked else ""
        with self._changed:
            # It came late, and the round did without it; or another process has its number by now.
            if self._round is not current or self._peers.get(worker) is not peer:
                return
            if current.handout.give(worker, number, digest, time.monotonic()):
                if result.integers_N is not None:
                    current.sum_N.add_(result.integers_N)
                current.figures[number] = result.figures
                self._computed[worker] += isinstance(current.works[number], Gradient)
                if checked and self._classes[worker] != self._classes[OWN]:
                    current.foreign[number] = (worker, result.kept())
            self._good.setdefault(worker, current.step)
            self._wake()

    def _judge_foreign(self, current: _Round) -> None:
        """Workers of other classes of kernels against this process, as far as rounding goes. Raises CanaryFailed."""
        if self._model.path == "general" and self._welcome.get("lora", {}).get("dropout"):
            return  # its masks are drawn by the device
        for number, (worker, result) in current.foreign.items():
            off = more_than_rounding(result, compute(self._model, current.works[number]), self._model.dtype)
            with self._changed:
                if off:
                    self._accuse(worker, f"its gradient of step {current.step}, pack {number}: {off}")
                else:
                    self._good[worker] = current.step
            if off:  # this process may be the wrong one
                model = self._model
                products = canary.shapes_of(model.adapter, canary.TOKENS)
                canary.must_pass(products, dtype=model.dtype, device=model.device, multiply=model.product)

    def _judge(self, current: _Round) -> None:
        step = current.step
        for check in current.handout.comparisons():
            if check.undecided or OWN in check.wrong:
                self._tell("packs_differ", {"step": step, "pack": check.pack, "wrong": list(check.wrong)})
                raise CanaryFailed(
                    f"step {step}, pack {check.pack}: two workers computed different numbers, "
                    + ("and each repeats its own" if check.undecided else "this process is in the minority"),
                    hint="one of the cards, its driver or its memory is broken: hivetune doctor",
                )
            with self._changed:
                for worker in check.wrong:
                    others = ", ".join("this process" if each == OWN else f"worker {each}" for each in check.right)
                    self._accuse(
                        worker, f"its gradient of step {step}, pack {check.pack} differs from that of {others}"
                    )
                self._good |= dict.fromkeys(check.right, step)
        with self._changed:
            accused, self._accused = self._accused, []
        for worker in accused:
            why = self._dismissed[worker]
            self._tell("worker_wrong", {"step": step, "worker": worker, "why": why})
            raise WorkerWrong(worker, min(self._good.get(each, 0) for each in accused), why)

    def _accuse(self, worker: int, why: str) -> None:
        """It is given nothing more; what it did is judged by the thread that calls `run`."""
        self._dismissed[worker] = why
        self._accused.append(worker)
        self._wake()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or the peer left at once, or this process has too many open files for now
                time.sleep(DOOR_S)
                continue
            threading.Thread(target=self._admit, args=(connection,), name="worker-new", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        worker: int | None = None
        why = "it ended"
        with connection, Peer(connection) as peer:
            try:
                wire.greet(connection, self._meeting.token, b"coordinator", b"worker")
                worker = self._admitted(peer)
                if worker is not None:
                    self._serve(worker, peer)
            except (OSError, KeyError, TypeError, ValueError) as error:  # gone, or what it says is no message
                why = str(error) or type(error).__name__
            finally:
                if worker is not None:
                    self._lose(worker, peer, why)

    def _admitted(self, peer: Peer) -> int | None:
        """The number of a worker that was let in, None for one that was refused and told why."""
        said, _ = wire.receive(peer.connection)
        why = objection(self._mine, said) or self._dismissed.get(said["worker"], "")
        described = {"step": self._step, "worker": said.get("worker"), "host": said.get("host"), "pid": said.get("pid")}
        if not why:
            wire.send(peer.connection, {**self._welcome, "kind": "welcome"})
            ready, _ = wire.receive(peer.connection)
            other = differences(self._kernels, ready["class"])
            if other and not self._meeting.mixed:
                why = f"its kernels are of another class: {other}"
            elif other:
                described["differs"] = other
        with self._changed:
            if not why and (before := self._peers.get(said["worker"])) is not None:
                # Its machine went away without a word, and its connection has not failed yet.
                self._lose(said["worker"], before, "it connected again")
                before.hang_up()
            self._untold.append(("worker_refused", {**described, "why": why}) if why else ("worker_joined", described))
            if not why:
                self._peers[said["worker"]] = peer
                self._classes[said["worker"]] = _label(ready["class"])
        if why:
            wire.send(peer.connection, {"kind": "refused", "why": why})
            return None
        return int(said["worker"])

    def _serve(self, worker: int, peer: Peer) -> None:
        room = bytearray(8 * self._model.master_N.numel())
        weights_of, connection = 0, peer.connection
        while (taken := self._next(worker, None, peer)) is not None:
            current, number = taken
            if weights_of != current.number:
                wire.send(connection, {"kind": "weights"}, current.weights)
                weights_of = current.number
            wire.send(connection, *work_message(number, current.works[number]))
            header, payload = wire.receive(connection, lambda _, size: memoryview(room)[: len(room) if size else 0])
            if header["kind"] == "wrong":
                with self._changed:
                    self._accuse(worker, str(header["why"]))
                return
            self._give(worker, current, number, read_result(header, payload), peer)
        why = self._dismissed.get(worker, "")
        with contextlib.suppress(OSError):
            wire.send(connection, {"kind": "refused", "why": why} if why else {"kind": "end"})

    def _lose(self, worker: int, peer: Peer, why: str) -> None:
        with self._changed:
            if self._peers.get(worker) is not peer:  # another process has its number, and it was told of
                return
            del self._peers[worker]
            self._works_for.pop(worker, None)
            again = [] if self._round is None else self._round.handout.lose(worker)
            if not self._closed:
                self._untold.append(("worker_lost", {"step": self._step, "worker": worker, "why": why, "packs": again}))
            self._wake()


def _label(kernels: Mapping[str, Any]) -> str:
    return json.dumps(kernels, sort_keys=True)
