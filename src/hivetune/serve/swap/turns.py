"""Which waiting requests may start: one adapter at a time, in slots that remember what they hold. Pure: no clock.

llama.cpp never computes two adapters in one batch, and a request of another adapter waits until those before it have
ended, so steady traffic for one adapter starves the others. Here the adapters take turns. A turn goes on while it has
requests and nobody else has waited longer than `longest_wait_s`; then it admits no more. While somebody has waited that
long, the adapter whose last turn is longest ago is next, else that of the oldest request. So the first request of an
adapter starts, once it is overdue, after at most one batch of each other adapter.

A slot keeps the tokens of its last request. A session gets its own slot again where it can, else one of its adapter.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
SessionKey = Hashable


@dataclass(eq=False)
class Ticket:
    """One request. `key`: the adapter that it needs; `slot` is set when it starts."""

    key: Key
    session: SessionKey
    arrived_s: float
    slot: int | None = None


@dataclass
class _Slot:
    number: int
    key: Key = None
    session: SessionKey = None
    used: int = 0
    ticket: Ticket | None = None


@dataclass
class Turns:
    """The state of one backend: its slots, and who waits for them."""

    num_slots: int
    longest_wait_s: float
    key: Key = None
    _waiting: dict[Key, deque[Ticket]] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _uses: int = 0
    _turns: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self.num_slots)]

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def num_running(self) -> int:
        return sum(slot.ticket is not None for slot in self._slots)

    def arrive(self, ticket: Ticket) -> None:
        self._waiting.setdefault(ticket.key, deque()).append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It ended, or its client went away while it waited."""
        for slot in self._slots:
            if slot.ticket is ticket:
                slot.ticket = None
        queue = self._waiting.get(ticket.key)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._waiting[ticket.key]

    def start(self, now_s: float) -> list[Ticket]:
        """The tickets that start now, each with its slot. Call it after every arrival and every end."""
        started: list[Ticket] = []
        while self._waiting and self.num_running < self.num_slots:
            if self.num_running == 0:
                self._begin_turn(now_s)
            elif self.key not in self._waiting or self._is_overdue(now_s):
                break  # the turn ends when its last request does
            started += self._admit(self.num_slots - self.num_running)
        return started

    def _begin_turn(self, now_s: float) -> None:
        arrived = {key: queue[0].arrived_s for key, queue in self._waiting.items()}
        if now_s - min(arrived.values()) > self.longest_wait_s:
            self.key = min(arrived, key=lambda key: (self._turns.get(key, 0), arrived[key]))
        else:
            self.key = min(arrived, key=lambda key: arrived[key])
        self._turns[self.key] = max(self._turns.values(), default=0) + 1

    def _is_overdue(self, now_s: float) -> bool:
        return any(
            now_s - queue[0].arrived_s > self.longest_wait_s for key, queue in self._waiting.items() if key != self.key
        )

    def _admit(self, most: int) -> list[Ticket]:
        queue = self._waiting[self.key]
        admitted: list[Ticket] = []
        while queue and len(admitted) < most:
            ticket = queue.popleft()
            slot = self._choose(ticket)
            self._uses += 1
            slot.key, slot.session, slot.used, slot.ticket = ticket.key, ticket.session, self._uses, ticket
            ticket.slot = slot.number
            admitted.append(ticket)
        if not queue:
            del self._waiting[self.key]
        return admitted

    def _choose(self, ticket: Ticket) -> _Slot:
        def rank(slot: _Slot) -> tuple[bool, bool, int]:
            same_key = slot.key == ticket.key
            return not (same_key and slot.session == ticket.session), not same_key and slot.used > 0, slot.used

        return min((slot for slot in self._slots if slot.ticket is None), key=rank)
