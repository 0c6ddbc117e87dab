"""The processes that compute a run's steps together on one machine: a group of `torch.distributed` over gloo.

Rank 0 is the run's own worker. It alone reads checkpoints, decides and updates; it sends each round's packs and weights
to the others and receives the sum of their integers. So the other ranks hold nothing that a run could lose. A rank that
dies or is silent breaks the group. Rank 0 still has the weights of the last step: it forms another group of those that
are left, and repeats the round. A worker that comes later takes part from the next round on.

Workers and rank 0 meet in a store. The supervisor's workers use a file that only this user can open, and the loopback;
processes of torchrun use its store and the network that GLOO_SOCKET_IFNAME names.

Shapes: N adapter weights, W numbers of works, R ranks, C compared works, H words of a hash.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from hivetune.errors import MachineNotFit
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Meeting
from hivetune.train.worker.exchange.trust import OWN, Comparisons, Tell, Vote, differences, objection
from hivetune.train.worker.exchange.work import Work, WorkResult, compute, read_message, to_message
from hivetune.train.worker.measure import canary
from hivetune.train.worker.measure.canary import CanaryFailed
from hivetune.train.worker.model.protocol import LoraModel

# A rank is lost when it is silent for this many times as long as rank 0 computed, and for at least this long.
SILENT_TIMES, SILENT_FLOOR_S = 5.0, 10.0
# The first round of a group may include a compiler.
FIRST_ROUND_S = 60.0
# Ranks that were told to form a group connect at once, or have died since.
CONNECT_S = 15.0
# Ranks whose group broke call again as soon as their share is done.
CALL_AGAIN_S = 2.0
# torchrun starts all ranks at the same time; each loads the model.
LOAD_S = 600.0
# The others wait for rank 0 while it validates and saves. They are ended by its connection, or by the supervisor.
IDLE_S = 7 * 24 * 3600.0
POLL_S, BEAT_S = 0.02, 1.0
WORK, LEAVE, END = 1, 2, 0
HASH_WORDS = 8  # SHA-256 in words of 32 bits
# Of the weight of the newest round in a rank's pace.
NEWEST = 0.3


class GroupBroken(Exception):
    """A rank is gone or silent, or the network between the ranks failed."""


class Group:
    """One group from its forming to its end. Every call raises GroupBroken, and has then closed the connections.

    A traceback keeps the group for a while. If that kept its connections, ranks that wait for this one would wait on.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, local: bool):
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [
            dist.ProcessGroupGloo.create_device(interface="lo")
            if local
            else dist.ProcessGroupGloo.create_default_device()
        ]
        self._gloo: Any = None  # closed
        with self._closed_if_broken():
            self._gloo = dist.ProcessGroupGloo(store, rank, size, options)
            self._gloo.barrier(dist.BarrierOptions()).wait(timedelta(seconds=CONNECT_S))

    def broadcast(self, tensor: Tensor, timeout_s: float) -> Tensor:
        """Return what rank 0 has, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
        with self._closed_if_broken():
            self._gloo.broadcast([tensor], options).wait()
        return tensor

    def reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """Leave the sum over all ranks in rank 0's tensor; the other ranks' values are lost."""
        options = dist.ReduceOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
        with self._closed_if_broken():
            self._gloo.reduce([tensor], options).wait()

    @contextlib.contextmanager
    def _closed_if_broken(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._gloo = None
            raise GroupBroken(str(error).partition("\n")[0]) from None


class Share(NamedTuple):
    """The share of one rank in a round: first works that count, then works that are only compared."""

    counted: Sequence[int]
    compared: Sequence[int] = ()


class Report:
    """The report of the ranks on a round, besides integers: a vector in which one rank writes each number.

    The others leave it 0, so the sum over all ranks is exact. `works`: of each work the largest value, 1 if it fits,
    and the losses. `ranks_R2`: of each rank the seconds that it computed, and 1 after a wrong test product.
    `digests_RCH`: of each rank and compared work the hash, in words of 32 bits, which fp64 holds exactly.
    """

    def __init__(self, works: Sequence[Work], ranks: int, compared: Sequence[int]):
        self.compared = list(compared)
        self._sizes = [2 + len(work.documents) for work in works]
        sizes = [sum(self._sizes), 2 * ranks, ranks * len(compared) * HASH_WORDS]
        self.vector = torch.zeros(sum(sizes), dtype=torch.float64)
        works_W, ranks_R2, digests_RCH = self.vector.split(sizes)
        self.works = works_W.split(self._sizes)
        self.ranks_R2 = ranks_R2.view(ranks, 2)
        self.digests_RCH = digests_RCH.view(ranks, len(compared), HASH_WORDS)

    def write(self, number: int, result: WorkResult) -> None:
        """Write the numbers of the result of work `number`."""
        values = (result.peak, float(result.fits), *result.nlls)
        self.works[number][: len(values)] = torch.tensor(values, dtype=torch.float64)

    def write_digest(self, rank: int, number: int, digest: str) -> None:
        """Write the hash of the result of work `number`, one of the compared."""
        words = [int(digest[at : at + 8], 16) for at in range(0, len(digest), 8)]
        self.digests_RCH[rank, self.compared.index(number)] = torch.tensor(words, dtype=torch.float64)

    def digest(self, rank: int, index: int) -> str:
        """Return the hash that a rank wrote for the compared work at `index`."""
        return "".join(f"{int(word):08x}" for word in self.digests_RCH[rank, index].tolist())

    def results(self) -> list[WorkResult]:
        return [
            WorkResult(tuple(nlls), peak, bool(fits)) for peak, fits, *nlls in (part.tolist() for part in self.works)
        ]


@dataclass
class Member:
    """A worker that takes part: the number that the supervisor knows it by, and its `hello`."""

    number: int
    call: int
    hello: Mapping[str, Any]
    seconds_per_token: float | None = None
    proven: bool = False

    @property
    def process(self) -> tuple[int, int]:
        return self.number, self.hello["pid"]


def open_store(meeting: Meeting | None) -> dist.Store:
    """Return the store where the run's processes meet: a file of the supervisor, or torchrun's own without one."""
    if meeting is not None:
        return dist.PrefixStore(meeting.token, dist.FileStore(meeting.address, -1))
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("hivetune", store)


class GroupCrew:
    """A `Crew` of this process, rank 0, and of all workers that call at `store`.

    `mine`: `hello` of this process; `welcome`: everything that a worker needs to load the same model. `expected`:
    workers that the first round waits for. `tell(event, fields)` writes the run's journal.
    """

    def __init__(
        self,
        model: LoraModel,
        store: dist.Store,
        *,
        local: bool,
        mine: Mapping[str, Any],
        welcome: Mapping[str, Any],
        tell: Tell,
        expected: int = 0,
    ):
        self._model, self._store, self._local, self._tell = model, store, local, tell
        self._mine, self._expected = mine, expected
        self._comparisons = Comparisons(tell)
        self._members: list[Member] = []
        self._own = Member(OWN, 0, mine, proven=True)
        self._group: Group | None = None
        self._groups = self._calls = self._step = 0
        self._rounds_of_group = 0
        self._own_s = 0.0  # seconds that the own share of this step took
        self._computed: Counter[int] = Counter()
        store.set("welcome", json.dumps(welcome))

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[WorkResult]:
        """Compute a round. Raise WorkerWrong if a comparison finds a wrong worker, CanaryFailed if it is this process
        or unknown.
        """
        self._step = step
        while True:
            self._gather()
            try:
                return self._round(works, sum_N)
            except GroupBroken as error:
                sum_N.zero_()
                self._regroup(str(error))
                if works:
                    self._tell("packs_again", {"step": step, "packs": len(works)})

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(GroupBroken):
                self._command(self._group, END)
        computed = {str(worker): packs for worker, packs in sorted(self._computed.items())}
        self._tell("packs_computed", {"step": self._step, "workers": computed})

    def _gather(self) -> None:
        """Take in every worker that has called since the last round."""
        deadline = time.monotonic() + LOAD_S
        came = self._callers()
        while len(self._members) + len(came) < self._expected and time.monotonic() < deadline:
            time.sleep(POLL_S)
            came += self._callers()
        self._expected = 0
        trusted = [member for member in self._members if member.number not in self._comparisons.dismissed]
        if not came and len(trusted) == len(self._members):
            return
        if self._group is not None:
            with contextlib.suppress(GroupBroken):
                self._command(self._group, LEAVE)
        self._members = trusted
        self._regroup("it ended", came)

    def _regroup(self, reason: str, came: Sequence[Member] = ()) -> None:
        """Form a group of the members that call again and of new ones; other members are lost."""
        self._group, newcomers = None, list(came)
        staying: list[Member] = []
        # A member that has a pack to finish first needs about as long for its share as this process did.
        deadline = time.monotonic() + self._own_s + CALL_AGAIN_S
        while time.monotonic() < deadline and any(
            member not in staying and not self._has_ended(member) for member in self._members
        ):
            for caller in self._callers():
                before = next((member for member in self._members if member.process == caller.process), None)
                if before is None:
                    newcomers.append(caller)
                else:
                    before.call = caller.call
                    staying.append(before)
            time.sleep(POLL_S)
        for member in self._members:
            if member not in staying:
                self._tell("worker_lost", {"step": self._step, "worker": member.number, "why": reason, "packs": []})
        newest = {member.number: member for member in (*staying, *newcomers)}  # a worker may have been started again
        alive = [member for member in newest.values() if not self._has_ended(member)]
        self._members = sorted(alive, key=lambda member: member.number)
        self._groups, self._rounds_of_group = self._groups + 1, 0
        if not self._members:
            return
        size = 1 + len(self._members)
        for rank, member in enumerate(self._members, 1):
            self._store.set(f"seat/{member.call}", json.dumps({"group": self._groups, "rank": rank, "size": size}))
        try:
            self._group = Group(dist.PrefixStore(f"group/{self._groups}", self._store), 0, size, local=self._local)
        except GroupBroken as error:
            return self._regroup(str(error))
        for member in self._members:
            if member not in staying:
                hello = {name: member.hello.get(name) for name in ("worker", "host", "pid")}
                self._tell("worker_joined", {"step": self._step, **hello})

    def _has_ended(self, member: Member) -> bool:
        """Return whether the member's process has ended, as far as that shows: on this machine only."""
        try:
            return self._local and psutil.Process(member.hello["pid"]).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _callers(self) -> list[Member]:
        """Return the workers that have called and may compute; the others are told why not."""
        callers = []
        while self._store.check([f"call/{self._calls + 1}"]):
            self._calls += 1
            hello = json.loads(self._store.get(f"call/{self._calls}"))
            refusal = objection(self._mine, hello) or self._comparisons.dismissed.get(hello["worker"], "")
            if not refusal and (difference := differences(self._mine, hello)):
                refusal = f"its kernels are of another class: {difference}"
            if refusal:
                described = {name: hello.get(name) for name in ("worker", "host", "pid")}
                self._tell("worker_refused", {"step": self._step, **described, "why": refusal})
                self._store.set(f"seat/{self._calls}", json.dumps({"refused": refusal}))
            else:
                callers.append(Member(hello["worker"], self._calls, hello))
        return callers

    def _round(self, works: Sequence[Work], sum_N: Tensor) -> list[WorkResult]:
        ranks = [self._own, *self._members]
        counted = shares_of([work.cost for work in works], [member.seconds_per_token for member in ranks])
        compared = self._compared(works, counted)
        shares = [
            Share(numbers, [number for number, several in compared.items() if rank in several[1:]])
            for rank, numbers in enumerate(counted)
        ]
        report = self._compute(works, shares, list(compared), sum_N)
        self._learn(works, shares, report)
        for index, (number, several) in enumerate(compared.items()):
            votes = [Vote(ranks[rank].number, report.digest(rank, index)) for rank in several]
            self._comparisons.judge(self._step, number, votes, partial(self._ask, works[number]))
        for member in self._members:
            member.proven = member.proven or any(work.pack is not None for work in works)
        return report.results()

    def _compared(self, works: Sequence[Work], counted: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Return the packs that several ranks compute, each with these ranks, the one that counts first.

        The next rank computes one pack in a hundred too; rank 0 and each newcomer compute the smallest pack of a round.
        """
        owner = {number: rank for rank, numbers in enumerate(counted) for number in numbers}
        packs = [number for number, work in enumerate(works) if work.pack is not None]
        newcomers = [rank for rank, member in enumerate(self._members, 1) if not member.proven]
        compared = {}
        if len(counted) > 1:
            checked = [number for number in packs if works[number].is_checked]
            compared = {number: [owner[number], (owner[number] + 1) % len(counted)] for number in checked}
        if newcomers and packs:
            smallest = min(packs, key=lambda number: works[number].cost)
            compared[smallest] = [owner[smallest], *sorted({OWN, *newcomers} - {owner[smallest]})]
        return dict(sorted(compared.items()))

    def _ask(self, work: Work) -> list[Vote]:
        """Return what every rank computes for one pack, twice."""
        ranks = [self._own, *self._members]
        shares = [Share([0]), *[Share([], [0])] * len(self._members)]
        votes = []
        for _ in range(2):
            report = self._compute([work], shares, [0], torch.zeros_like(self._model.master_N, dtype=torch.int64))
            votes += [Vote(member.number, report.digest(rank, 0)) for rank, member in enumerate(ranks)]
        return votes

    def _compute(
        self, works: Sequence[Work], shares: Sequence[Share], compared: Sequence[int], sum_N: Tensor
    ) -> Report:
        """Have every rank compute its share; the integers that count are added to `sum_N`. Raises GroupBroken."""
        report = Report(works, len(shares), compared)
        if self._group is None:
            _compute_share(self._model, works, shares[0], 0, report, sum_N)
            return report
        headers, tokens = to_message(works)
        message = json.dumps({"works": headers, "shares": shares, "compared": compared})
        self._command(self._group, WORK, message.encode(), tokens)
        started = time.monotonic()
        _compute_share(self._model, works, shares[0], 0, report, sum_N)
        self._own_s = time.monotonic() - started
        floor_s = SILENT_FLOOR_S if self._rounds_of_group else FIRST_ROUND_S
        _reduce_all(self._group, works, report, sum_N, max(floor_s, SILENT_TIMES * self._own_s))
        self._rounds_of_group += 1
        return report

    def _command(self, group: Group, kind: int, header: bytes = b"", payload: bytes = b"") -> None:
        group.broadcast(torch.tensor([kind, len(header), len(payload)], dtype=torch.int64), SILENT_FLOOR_S)
        for data in (header, payload):
            if data:
                group.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), SILENT_FLOOR_S)
        if kind == WORK:
            group.broadcast(self._model.master_N.cpu(), SILENT_FLOOR_S)

    def _learn(self, works: Sequence[Work], shares: Sequence[Share], report: Report) -> None:
        """Read each rank's pace and whether its test products are right. Raises WorkerWrong."""
        wrong = []
        for member, share, (seconds, failed) in zip(
            [self._own, *self._members], shares, report.ranks_R2.tolist(), strict=True
        ):
            if share.counted:
                self._comparisons.begin(member.number, self._step)
                pace = seconds / max(1, sum(works[number].cost for number in (*share.counted, *share.compared)))
                before = member.seconds_per_token
                member.seconds_per_token = pace if before is None else (1 - NEWEST) * before + NEWEST * pace
            self._computed[member.number] += sum(works[number].pack is not None for number in share.counted)
            if failed:
                wrong.append(member.number)
        if wrong:
            self._comparisons.accuse(wrong, self._step, "a product that it computed to test itself is wrong")


def serve_group(
    model: LoraModel, store: dist.Store, hello: Mapping[str, Any], heartbeat: Heartbeat, *, local: bool
) -> int:
    """Compute for the run until it ends; return the number of works. `hello`: this process's.

    Raises MachineNotFit when this worker is refused, CanaryFailed when its test products are wrong.
    """
    rank = Rank(model, heartbeat)
    while True:
        seat = _take_seat(store, hello, heartbeat)
        try:
            with _beating(heartbeat):
                members = dist.PrefixStore(f"group/{seat['group']}", store)
                group = Group(members, seat["rank"], seat["size"], local=local)
            while (command := rank.wait_for_work(group)) is not None:
                rank.compute(group, *command)
            if rank.ended:
                return rank.computed
        except GroupBroken:  # rank 0 forms another group, or is gone: then the supervisor ends this process
            continue


def _take_seat(store: dist.Store, hello: Mapping[str, Any], heartbeat: Heartbeat) -> dict[str, Any]:
    """Call at the store and wait until rank 0 answers. Raises MachineNotFit when this worker is refused."""
    call = store.add("calls", 1)
    store.set(f"call/{call}", json.dumps(hello))
    beaten = 0.0
    while not store.check([f"seat/{call}"]):
        if time.monotonic() - beaten > BEAT_S:
            heartbeat.beat(Beat.WAITING)
            beaten = time.monotonic()
        time.sleep(POLL_S)
    seat: dict[str, Any] = json.loads(store.get(f"seat/{call}"))
    if "refused" in seat:
        raise MachineNotFit(f"this worker can't compute for the run: {seat['refused']}")
    return seat


@dataclass
class Rank:
    """A worker's own part in its groups, in order."""

    model: LoraModel
    heartbeat: Heartbeat
    computed: int = 0
    ended: bool = False
    tested: float = field(default=-canary.EVERY_S)

    def wait_for_work(self, group: Group) -> tuple[dict[str, Any], bytearray] | None:
        """Return the header and the tokens of a round; None when rank 0 ends the group, or the run."""
        with _beating(self.heartbeat):
            kind, *sizes = group.broadcast(torch.zeros(3, dtype=torch.int64), IDLE_S).tolist()
            if kind != WORK:
                self.ended = kind == END
                return None
            parts = [bytearray(size) for size in sizes]
            for part in parts:
                if part:
                    group.broadcast(torch.frombuffer(part, dtype=torch.uint8), FIRST_ROUND_S)
            self.model.master_N.copy_(
                group.broadcast(torch.empty_like(self.model.master_N, device="cpu"), FIRST_ROUND_S)
            )
        return json.loads(parts[0]), parts[1]

    def compute(self, group: Group, header: Mapping[str, Any], payload: bytearray) -> None:
        works, share = read_message(header["works"], payload), Share(*header["shares"][group.rank])
        report = Report(works, group.size, header["compared"])
        failed = self._test_products()
        report.ranks_R2[group.rank, 1] = failed is not None
        sum_N = torch.zeros(self.model.master_N.numel(), dtype=torch.int64)
        _compute_share(self.model, works, share, group.rank, report, sum_N, partial(self.heartbeat.beat, Beat.ITEM))
        with _beating(self.heartbeat):
            _reduce_all(group, works, report, sum_N, IDLE_S)
        if failed is not None:
            raise failed
        self.computed += len(share.counted)

    def _test_products(self) -> CanaryFailed | None:
        if time.monotonic() - self.tested < canary.EVERY_S:
            return None
        try:
            canary.check_model(self.model)
        except CanaryFailed as error:
            return error
        self.tested = time.monotonic()
        return None


@contextlib.contextmanager
def _beating(heartbeat: Heartbeat) -> Iterator[None]:
    """Beat from a thread while this one waits for other ranks: a collective can't be looked at in between."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            heartbeat.beat(Beat.WAITING)

    heartbeat.beat(Beat.WAITING)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        heartbeat.beat(Beat.WAITING)


def shares_of(costs: Sequence[int], paces: Sequence[float | None]) -> list[list[int]]:
    """Return the numbers of the works for each rank: the largest first, each to the rank that would finish it first.

    `paces`: seconds a token of each rank; a rank without one is taken to be as fast as the fastest.
    """
    fastest = min((pace for pace in paces if pace is not None), default=1.0)
    shares: list[list[int]] = [[] for _ in paces]
    busy_s = [0.0] * len(paces)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        ends_s = [busy + costs[number] * (pace or fastest) for busy, pace in zip(busy_s, paces, strict=True)]
        rank = ends_s.index(min(ends_s))
        shares[rank].append(number)
        busy_s[rank] = ends_s[rank]
    return shares


def _compute_share(
    model: LoraModel,
    works: Sequence[Work],
    share: Share,
    rank: int,
    report: Report,
    sum_N: Tensor,
    on_item: Callable[[], None] = lambda: None,
) -> None:
    started = time.perf_counter()
    for number in (*share.counted, *share.compared):
        result = compute(model, works[number])
        if number in report.compared:
            report.write_digest(rank, number, result.digest())
        if number in share.counted:
            report.write(number, result)
            if result.integers_N is not None:
                sum_N.add_(result.integers_N)
        on_item()
    report.ranks_R2[rank, 0] = time.perf_counter() - started


def _reduce_all(group: Group, works: Sequence[Work], report: Report, sum_N: Tensor, timeout_s: float) -> None:
    group.reduce(report.vector, timeout_s)
    if any(work.pack is not None for work in works):
        group.reduce(sum_N, timeout_s)
