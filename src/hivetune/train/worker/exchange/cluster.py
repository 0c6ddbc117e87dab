"""The run's own worker with actors of Ray beside it, on the devices of a cluster's machines.

Each round's weights go into Ray's object store once. Packs go to whoever is free. An actor adds the integers of its
packs up itself, so one sum a round comes back from it. If it dies or is late, its packs of the round are computed by
others. Ray's control plane is only needed to place actors, and a thread of its own speaks with it: while the cluster's
head is away, the actors that are there continue.

Shapes: N adapter weights.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hivetune.errors import HivetuneError
from hivetune.machine.cluster import DEVICE, claim_device, connect_ray, offered_by, read_membership
from hivetune.train.worker.exchange.actor import ActorOrder, PackActor
from hivetune.train.worker.exchange.trust import (
    OWN,
    Comparisons,
    Tell,
    Vote,
    differences,
    more_than_rounding,
    objection,
)
from hivetune.train.worker.exchange.work import Work, WorkResult, compute
from hivetune.train.worker.measure import canary
from hivetune.train.worker.model.protocol import LoraModel

# Packs that an actor has at a time while there are many: the next one is there when one is finished.
AHEAD = 2
# An actor is late when a pack takes this many times as long as usual there, and at least this long.
LATE_TIMES, LATE_FLOOR_S, FIRST_PACK_S = 5.0, 5.0, 60.0
NEWEST = 0.3
# Ends without a finished pack between them, after which an actor is not started again.
MAX_ENDS = 3
LOOK_EVERY_S, WAITS_S, RETRY_S = 1.0, 60.0, 30.0
# Layers recomputed where an actor's memory is too small; the arithmetic stays the same.
ALL_LAYERS = 10_000


@dataclass
class Seat:
    """One device of the cluster: its running or starting actor, and the ends of earlier ones."""

    number: int
    actor: Any = None
    loading: Any = None
    asked_s: float = 0.0
    hello: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""
    joined: bool = False
    proven: bool = False
    ends: int = 0
    again_at: float = 0.0
    given_up: bool = False
    wait_reported: bool = False
    recompute: int | None = None
    seconds_per_token: float | None = None


@dataclass
class Handed:
    """A piece of work that an actor has. `since`: when it could begin with it."""

    seat: Seat
    number: int
    since: float


class Placer:
    """Connects to the cluster and keeps an actor on each device, in a thread: while the head is away its calls wait.

    `notes`: warnings for the journal; `ready`: seats whose actor has loaded and was not admitted yet.
    """

    def __init__(self, address: str, own_device: str, order: ActorOrder):
        self._address, self._own_device, self._order = address, own_device, order
        self.lock = threading.Lock()
        self.ray: Any = None
        self.notes: list[str] = []
        self._noted = ""
        self.ready: list[Seat] = []
        self._seats: list[Seat] = []
        self._closed = threading.Event()
        threading.Thread(target=self._keep, name="placer", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def lose(self, seat: Seat, *, for_good: bool = False, out_of_memory: bool = False) -> None:
        """End an actor; the thread starts another one there, at once the first time."""
        with self.lock:
            actor, seat.actor, seat.loading, seat.joined, seat.proven = seat.actor, None, None, False, False
            seat.ends += 1
            seat.given_up = for_good or seat.ends >= MAX_ENDS
            seat.again_at = time.monotonic() + (0.0 if seat.ends == 1 else 2.0**seat.ends)
            seat.recompute = ALL_LAYERS if out_of_memory else seat.recompute
        if actor is not None:
            threading.Thread(target=self.ray.kill, args=(actor,), daemon=True).start()  # it waits for the head

    def _keep(self) -> None:
        while not self._closed.is_set() and self.ray is None:
            try:
                self.ray = connect_ray(self._address)
            except HivetuneError as error:
                self._note(f"{error.message}; the run continues without the cluster's workers")
                self._closed.wait(RETRY_S)
        membership = read_membership()
        # The device of the run's own worker, where this machine offers it: its lock is held until this process ends.
        own_device = membership is not None and claim_device(membership.devices, self._own_device) is not None
        reserved = not own_device
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                if not reserved:
                    _reserve(self.ray)
                    reserved = True
                while len(self._seats) < offered_by(self.ray.nodes()) - own_device:
                    self._seats.append(Seat(len(self._seats) + 1))
                for seat in self._seats:
                    self._look(seat)
            except self.ray.exceptions.RayError as error:  # the head is away
                self._note(f"no worker can be placed on the cluster at {self._address}: {_error_text(error)}")

    def _look(self, seat: Seat) -> None:
        if seat.loading is None:
            if seat.actor is None and not seat.given_up and time.monotonic() >= seat.again_at:
                self._start(seat)
        elif self.ray.wait([seat.loading], timeout=0)[0]:
            try:
                seat.hello = self.ray.get(seat.loading)
            except self.ray.exceptions.RayError as error:
                self._note(f"worker {seat.number} could not load: {_error_text(error)}")
                return self.lose(seat)
            with self.lock:
                seat.loading = None
                self.ready.append(seat)
        elif not seat.wait_reported and time.monotonic() - seat.asked_s > WAITS_S:
            seat.wait_reported = True
            self._note(f"worker {seat.number} waits for a device of the cluster: none is free")

    def _start(self, seat: Seat) -> None:
        # It takes no core and no memory of those that Ray counts: a device is a resource of our own.
        actor_class = self.ray.remote(num_cpus=0, resources={DEVICE: 1}, max_restarts=0)(PackActor)
        order = replace(self._order, number=seat.number, recompute=seat.recompute)
        seat.asked_s, seat.wait_reported = time.monotonic(), False
        actor = actor_class.remote()
        loading = actor.load.remote(order)
        with self.lock:
            seat.actor, seat.loading = actor, loading

    def _note(self, text: str) -> None:
        with self.lock:
            if text != self._noted:  # the same again says nothing new
                self.notes.append(text)
            self._noted = text


def _reserve(ray: Any) -> None:
    """Leave Ray one device less to give on this machine."""
    node = ray.get_runtime_context().get_node_id()
    group = ray.util.placement_group([{DEVICE: 1}], bundle_label_selector=[{"ray.io/node-id": node}])
    ray.get(group.ready(), timeout=WAITS_S)


class RayCrew:
    """A `Crew` of this process and of actors on the cluster at `address`.

    `mine`: `hello` of this process; `tell(event, fields)` writes the run's journal.
    """

    def __init__(
        self,
        model: LoraModel,
        address: str,
        *,
        own_device: str,
        order: ActorOrder,
        mine: Mapping[str, Any],
        tell: Tell,
    ):
        self._model, self._mine, self._tell = model, mine, tell
        # Masks of the general path are drawn by the device, so other classes have other ones.
        self._comparable = not (model.path == "general" and order.welcome["lora"].get("dropout"))
        self._comparisons = Comparisons(tell)
        self._placer = Placer(address, own_device, order)
        self._seats: list[Seat] = []
        self._rounds = self._step = 0
        self._computed: Counter[int] = Counter()

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[WorkResult]:
        """Compute a round. Raise WorkerWrong if a comparison finds a wrong worker, CanaryFailed if it is this process
        or unknown.
        """
        self._step = step
        self._rounds += 1
        for seat in [seat for seat in self._seats if seat.number in self._comparisons.dismissed]:
            self._seats.remove(seat)
            self._placer.lose(seat, for_good=True)
        self._admit()
        if not works:
            return []
        return Round(self, works, sum_N).finish()

    def close(self) -> None:
        self._placer.close()
        computed = {str(worker): packs for worker, packs in sorted(self._computed.items())}
        self._tell("packs_computed", {"step": self._step, "workers": computed})

    def _admit(self) -> None:
        placer = self._placer
        with placer.lock:
            ready, placer.ready = placer.ready, []
            notes, placer.notes = placer.notes, []
        for text in notes:
            self._tell("warning", {"step": self._step, "text": text})
        for seat in ready:
            hello = seat.hello
            refusal = (
                hello.get("refused") or objection(self._mine, hello) or self._comparisons.dismissed.get(seat.number, "")
            )
            described = {"step": self._step, "worker": seat.number, "host": hello.get("host"), "pid": hello.get("pid")}
            if refusal:
                self._tell("worker_refused", {**described, "why": refusal})
                placer.lose(seat, for_good=True)
                continue
            seat.differs = differences(self._mine, hello)
            seat.joined, seat.proven = True, False
            self._seats.append(seat)
            self._comparisons.begin(seat.number, self._step)
            self._tell("worker_joined", {**described, **({"differs": seat.differs} if seat.differs else {})})


class Round:
    """The works of one call of `RayCrew.run`, until each of them has a result and is in the sum."""

    def __init__(self, crew: RayCrew, works: Sequence[Work], sum_N: Tensor):
        self._crew, self._works, self._sum_N = crew, works, sum_N
        self._ray = crew._placer.ray
        self._left: deque[int] = deque(sorted(range(len(works)), key=lambda number: (-works[number].cost, number)))
        self._handed: dict[Any, Handed] = {}
        self._results: dict[int, WorkResult] = {}
        self._of: dict[int, list[int]] = {}
        """Works whose integers are in the sum of an actor."""
        self._compared: dict[int, tuple[Seat, str]] = {}
        """Works that this process computes too, each with the actor and the digest of its result."""
        self._weights = self._ray.put(crew._model.master_N.cpu().numpy()) if crew._seats else None

    def finish(self) -> list[WorkResult]:
        while True:
            self._hand_out()
            self._collect(0.0)
            if self._left:
                self._compute_own(self._left.pop() if self._handed else self._left.popleft())
            elif self._handed:
                self._collect(LOOK_EVERY_S / 10)
                self._lose_late()
            elif not self._fetch_sums():
                break
        self._compare()
        return [self._results[number] for number in range(len(self._works))]

    def _hand_out(self) -> None:
        for seat in list(self._crew._seats):
            while self._left and len(self._sent(seat)) < (AHEAD if len(self._left) > 2 * len(self._crew._seats) else 1):
                number = self._left.popleft()
                work = self._works[number]
                give = work.pack is not None and (not seat.proven or work.is_checked)
                seat.proven = seat.proven or give
                call = self._call(seat, work, counts=True, give=give)
                self._handed[call] = Handed(seat, number, time.monotonic())

    def _call(self, seat: Seat, work: Work, *, counts: bool, give: bool) -> Any:
        return seat.actor.compute.remote(self._crew._rounds, self._weights, work, counts=counts, give=give)

    def _sent(self, seat: Seat) -> list[Handed]:
        return [handed for handed in self._handed.values() if handed.seat is seat]

    def _collect(self, timeout_s: float) -> None:
        """Read every answer that has come; wait for the first one at most `timeout_s`."""
        if not self._handed:
            return
        ready, _ = self._ray.wait(list(self._handed), num_returns=1, timeout=timeout_s)
        more, _ = self._ray.wait(list(self._handed), num_returns=len(self._handed), timeout=0)
        for call in dict.fromkeys([*ready, *more]):
            handed = self._handed.get(call)
            if handed is None:  # it was lost with another one of its actor
                continue
            try:
                result, digest = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self._lose(handed.seat, error)
                continue
            del self._handed[call]
            self._take(handed, result, digest)

    def _take(self, handed: Handed, result: WorkResult, digest: str | None) -> None:
        seat, number = handed.seat, handed.number
        now = time.monotonic()
        pace = (now - handed.since) / max(1, self._works[number].cost)
        before = seat.seconds_per_token
        seat.seconds_per_token = pace if before is None else (1 - NEWEST) * before + NEWEST * pace
        seat.ends = 0
        for queued in self._sent(seat):
            queued.since = now
        self._results[number] = result
        if self._works[number].pack is not None:
            self._of.setdefault(seat.number, []).append(number)
        if digest is not None:
            self._compared[number] = (seat, digest)

    def _compute_own(self, number: int) -> None:
        work = self._works[number]
        result = self._results[number] = compute(self._crew._model, work)
        if result.integers_N is not None:
            self._sum_N.add_(result.integers_N)
        self._crew._computed[OWN] += work.pack is not None

    def _lose_late(self) -> None:
        now = time.monotonic()
        for handed in list(self._handed.values()):
            pace = handed.seat.seconds_per_token
            usual_s = None if pace is None else LATE_TIMES * pace * self._works[handed.number].cost
            if now - handed.since > (FIRST_PACK_S if usual_s is None else max(LATE_FLOOR_S, usual_s)):
                self._lose(handed.seat, None)
                return

    def _lose(self, seat: Seat, error: Exception | None) -> None:
        """The actor is gone or late: everything that it has of this round is computed again."""
        if seat not in self._crew._seats:
            return
        packs = sorted({*[handed.number for handed in self._sent(seat)], *self._of.pop(seat.number, [])})
        self._handed = {call: handed for call, handed in self._handed.items() if handed.seat is not seat}
        self._compared = {number: pair for number, pair in self._compared.items() if pair[0] is not seat}
        self._left.extend(packs)
        self._crew._seats.remove(seat)
        reason = "it is late" if error is None else _error_text(error)
        cause = getattr(error, "cause", None)
        self._crew._placer.lose(seat, out_of_memory=isinstance(cause, torch.OutOfMemoryError))
        step = self._crew._step
        self._crew._tell("worker_lost", {"step": step, "worker": seat.number, "why": reason, "packs": packs})
        if packs:
            self._crew._tell("packs_again", {"step": step, "packs": len(packs)})

    def _fetch_sums(self) -> bool:
        """Add the sums that the actors have; return whether work remains because an actor was lost."""
        crew = self._crew
        calls = {seat.actor.take.remote(crew._rounds): seat for seat in crew._seats if self._of.get(seat.number)}
        usual_tokens = sum(work.cost for work in self._works)
        for call, seat in calls.items():
            pace = seat.seconds_per_token or 0.0
            try:
                part_N = self._ray.get(call, timeout=max(FIRST_PACK_S, LATE_TIMES * pace * usual_tokens))
            except self._ray.exceptions.RayError as error:
                self._lose(seat, error)
                continue
            if part_N is not None:
                self._sum_N.add_(torch.from_numpy(part_N.copy()))
            crew._computed[seat.number] += len(self._of.pop(seat.number))
        return bool(self._left)

    def _compare(self) -> None:
        """Compare results of actors with those of this process: bit for bit, or as far as rounding goes for a class of
        its own. Raises WorkerWrong, CanaryFailed."""
        crew, model = self._crew, self._crew._model
        for number, (seat, digest) in sorted(self._compared.items()):
            if seat.differs and not crew._comparable:
                continue
            own_result = compute(model, self._works[number])
            if not seat.differs:
                votes = [Vote(seat.number, digest), Vote(OWN, own_result.digest())]
                crew._comparisons.judge(crew._step, number, votes, partial(self._ask, self._works[number]))
            elif off := more_than_rounding(self._results[number], own_result, model.dtype):
                canary.check_model(model)
                reason = f"its gradient of step {crew._step}, pack {number}: {off}"
                crew._comparisons.accuse([seat.number], crew._step, reason)
            else:
                crew._comparisons.passed(seat.number, crew._step)

    def _ask(self, work: Work) -> list[Vote]:
        """Return what this process and every actor of its class compute for one pack, twice."""
        votes = [Vote(OWN, compute(self._crew._model, work).digest()) for _ in range(2)]
        for seat in [seat for seat in self._crew._seats if not seat.differs]:
            for _ in range(2):
                try:
                    _, digest = self._ray.get(self._call(seat, work, counts=False, give=False), timeout=FIRST_PACK_S)
                except self._ray.exceptions.RayError as error:
                    self._lose(seat, error)
                    break
                votes.append(Vote(seat.number, digest))
        return votes


def _error_text(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
