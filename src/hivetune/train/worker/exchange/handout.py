"""Who computes which pack of a round: handed out on request, again when a worker is lost or late. Pure bookkeeping.

Times come in as arguments, results are named by their digests only, so that every order of events can be tested. What
is decided here changes how long a round takes, never what comes out of it.
"""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# A pack that takes this many times as long as its worker's usual one is given to another worker too. gloo peers that
# were stopped raised nothing in 6 s: silence must be judged by the clock.
OVERDUE_TIMES = 5.0
# No pack is overdue sooner: a busy machine delays a short one by this much.
OVERDUE_FLOOR_S = 1.0
# Before anything was computed: the first pack may include a compiler.
FIRST_PACK_S = 60.0
# A clock may not have moved meanwhile.
LEAST_PACK_S = 1e-6
# Whoever waits for a moment to be past wakes up this much after it.
PAST_S = 1e-3
# Of a worker's pace, the weight of its newest pack.
NEWEST = 0.3


@dataclass
class Paces:
    """Seconds a token of each worker, remembered over rounds."""

    seconds: dict[int, float] = field(default_factory=dict)

    def learn(self, worker: int, cost: int, seconds: float) -> None:
        pace = max(seconds, LEAST_PACK_S) / max(1, cost)
        before = self.seconds.get(worker)
        self.seconds[worker] = pace if before is None else (1 - NEWEST) * before + NEWEST * pace

    def expected_s(self, worker: int, cost: int) -> float | None:
        """What a pack of `cost` tokens takes this worker; the median worker where it has computed nothing yet."""
        pace = self.seconds.get(worker)
        if pace is None and self.seconds:
            pace = statistics.median(self.seconds.values())
        return None if pace is None else pace * max(1, cost)

    def overdue_s(self, worker: int, cost: int) -> float:
        expected = self.expected_s(worker, cost)
        return FIRST_PACK_S if expected is None else max(OVERDUE_FLOOR_S, OVERDUE_TIMES * expected)


@dataclass
class _State:
    """Of one pack. `since`: when each worker took it that has not given it back; `votes`: digest of each that has."""

    cost: int
    checked: bool
    since: dict[int, float] = field(default_factory=dict)
    votes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def disputed(self) -> bool:
        return self.checked and len({digest for _, digest in self.votes}) > 1

    @property
    def decided(self) -> bool:
        return _truth(self.votes) is not None

    def voted(self, worker: int) -> bool:
        return any(other == worker for other, _ in self.votes)


@dataclass(frozen=True)
class PackCheck:
    """What the comparison of a pack says. `wrong`: workers; `undecided`: nobody can tell which of them."""

    pack: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]
    undecided: bool = False


class Handout:
    """The packs of one round.

    `costs`: tokens of each pack. `checked`: numbers of those that two workers of a class compute, as long as there are
    two. A result that several workers gave is judged by `comparisons`. `classes`: of each worker; only results of one
    class are equal bit for bit.
    """

    def __init__(
        self, costs: Sequence[int], checked: Collection[int], paces: Paces, classes: Mapping[int, str] | None = None
    ):
        self._packs = [_State(cost, number in checked) for number, cost in enumerate(costs)]
        # Large ones first: what is left for the end is small.
        self._order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
        self._paces = paces
        self._classes = {} if classes is None else classes
        self.again = 0

    def take(self, worker: int, workers: Collection[int], now_s: float) -> int | None:
        """A pack for `worker`, or None for now. `workers`: all that are alive, this one included."""
        fresh = [n for n in self._order if not self._packs[n].votes and not self._packs[n].since]
        if fresh and not self._others_sooner(worker, workers, self._packs[fresh[0]].cost, now_s):
            return self._hold(worker, fresh[0], now_s)
        second = next((n for n in self._order if self._wants_check(n, worker, workers)), None)
        if second is not None and not fresh:
            return self._hold(worker, second, now_s)
        late = next((n for n in self._order if self._is_late(n, worker, now_s)), None)
        if late is not None:
            self.again += 1
            return self._hold(worker, late, now_s)
        return None

    def give(self, worker: int, number: int, digest: str, now_s: float) -> bool:
        """A result has come; whether it is the first of its pack, the one that counts."""
        pack = self._packs[number]
        taken_s = pack.since.pop(worker, None)
        if taken_s is not None:
            self._paces.learn(worker, pack.cost, now_s - taken_s)
        if pack.votes and self._classes.get(worker) != self._classes.get(pack.votes[0][0]):
            return False  # it was late, and says nothing about the bits of the first
        pack.votes.append((worker, digest))
        return len(pack.votes) == 1

    def lose(self, worker: int) -> list[int]:
        """The packs that a worker had which is gone; they are handed out again."""
        lost = [number for number, pack in enumerate(self._packs) if pack.since.pop(worker, None) is not None]
        again = [number for number in lost if not self._packs[number].votes and not self._packs[number].since]
        self.again += len(again)
        return again

    def done(self, workers: Collection[int], now_s: float) -> bool:
        """Every pack has a result, and every comparison is decided, or no worker that could decide it is in time."""
        in_time = [worker for worker in workers if not self._keeps_waiting(worker, now_s)]
        return all(self._is_settled(number, in_time) for number in range(len(self._packs)))

    def next_late_s(self, now_s: float) -> float | None:
        """Seconds until the next pack is late, None where none can be: before that nothing changes by itself."""
        return min(
            (
                since + overdue_s - now_s + PAST_S
                for pack in self._packs
                for worker, since in pack.since.items()
                if now_s - since <= (overdue_s := self._paces.overdue_s(worker, pack.cost))
            ),
            default=None,
        )

    def is_checked(self, number: int) -> bool:
        return self._packs[number].checked

    def comparisons(self) -> list[PackCheck]:
        """One for each checked pack that more than one worker computed."""
        return [
            _judge(number, pack.votes)
            for number, pack in enumerate(self._packs)
            if pack.checked and len({worker for worker, _ in pack.votes}) > 1
        ]

    def _hold(self, worker: int, number: int, now_s: float) -> int:
        self._packs[number].since[worker] = now_s
        return number

    def _others_sooner(self, worker: int, workers: Collection[int], cost: int, now_s: float) -> bool:
        """Whether all that is left would be done by the others before this worker has done one pack.

        The fastest of those that answer in time never waits: with few packs all would wait for each other.
        """
        mine = self._paces.seconds.get(worker)
        in_time = [other for other in workers if other != worker and not self._keeps_waiting(other, now_s)]
        known = [pace for other in in_time if (pace := self._paces.seconds.get(other)) is not None]
        if mine is None or not known or len(known) < len(in_time) or mine <= min(known):
            return False
        left = float(sum(pack.cost for pack in self._packs if not pack.votes and not pack.since))
        for holder, since, held in self._held(worker):
            pace = self._paces.seconds.get(holder)
            done = 0.0 if pace is None else (now_s - since) / pace
            left += max(0.0, held - done)
        return mine * cost > left / sum(1 / pace for pace in known) + min(known) * cost / 2

    def _held(self, apart_from: int) -> list[tuple[int, float, int]]:
        return [
            (holder, since, pack.cost)
            for pack in self._packs
            for holder, since in pack.since.items()
            if holder != apart_from and not pack.votes
        ]

    def _is_settled(self, number: int, in_time: Collection[int]) -> bool:
        pack = self._packs[number]
        if not pack.votes or pack.decided or not (pack.checked or pack.disputed):
            return bool(pack.votes)
        return not any(worker in pack.since or self._wants_check(number, worker, in_time) for worker in in_time)

    def _keeps_waiting(self, worker: int, now_s: float) -> bool:
        return any(
            worker in pack.since and now_s - pack.since[worker] > self._paces.overdue_s(worker, pack.cost)
            for pack in self._packs
        )

    def _wants_check(self, number: int, worker: int, workers: Collection[int]) -> bool:
        """Whether `worker` should compute a pack that has a result: to compare it, or to say which of two is wrong."""
        pack = self._packs[number]
        if not pack.votes or worker in pack.since or pack.decided:
            return False
        alike = self._classes.get(pack.votes[0][0])
        if self._classes.get(worker) != alike:
            return False
        if not pack.disputed:
            return pack.checked and not pack.since and not pack.voted(worker)
        # Everybody says it once, and then once more: a fault that comes and goes shows itself.
        peers = [other for other in workers if self._classes.get(other) == alike]
        everybody = all(pack.voted(other) or other in pack.since for other in peers)
        return not pack.voted(worker) or (everybody and sum(other == worker for other, _ in pack.votes) == 1)

    def _is_late(self, number: int, worker: int, now_s: float) -> bool:
        pack = self._packs[number]
        if pack.votes or not pack.since or worker in pack.since:
            return False
        return all(now_s - since > self._paces.overdue_s(holder, pack.cost) for holder, since in pack.since.items())


def _judge(number: int, votes: Sequence[tuple[int, str]]) -> PackCheck:
    said = {worker: {digest for other, digest in votes if other == worker} for worker, _ in votes}
    if len({digest for _, digest in votes}) == 1:
        return PackCheck(number, tuple(sorted(said)), ())
    truth = _truth(votes)
    if truth is None:
        return PackCheck(number, (), (), undecided=True)
    right = tuple(sorted(worker for worker, digests in said.items() if digests == {truth}))
    return PackCheck(number, right, tuple(sorted(set(said) - set(right))))


def _truth(votes: Sequence[tuple[int, str]]) -> str | None:
    """The digest that is right: of the most workers, each of which said nothing else; None while two are level."""
    said = {worker: {digest for other, digest in votes if other == worker} for worker, _ in votes}
    steady = Counter(next(iter(digests)) for digests in said.values() if len(digests) == 1)
    ranked = steady.most_common(2)
    if not ranked or sum(len(digests) for digests in said.values()) < 2:
        return None
    level = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
    return None if level else ranked[0][0]
