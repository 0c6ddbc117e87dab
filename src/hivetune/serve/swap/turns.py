"""Which waiting requests may start: one adapter at a time, in slots that remember what they hold. Pure: no clock.

llama.cpp never computes two adapters in one batch. A request of another adapter waits until those before it have ended,
so steady traffic for one adapter starves the others. Here the adapters take turns. A turn continues while it has
requests and nobody else has waited longer than `longest_wait_s`; then it admits no more. While somebody has waited that
long, the next turn belongs to the adapter whose last turn is longest ago, else to that of the oldest request. So an
overdue adapter starts after at most one batch of each other adapter.

Among the requests for one adapter, the client with the fewest running requests comes first, then a short prompt before
a long one, then the earliest. While other clients ask, the long prompts of one client have at most a quarter of the
slots. A long one that has waited for `LONG_PATIENCE_S` counts as short. So one client's thousand requests, or its
prompts of a whole context, hold up no other client.

A slot keeps the tokens of its last request. A session gets its own slot again where it can, else one of its adapter.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
SessionKey = Hashable
LONG_PATIENCE_S = 10.0
OTHERS_S = 60.0  # since the last request of another client


@dataclass(eq=False)
class Ticket:
    """A request in the queue. `key`: the adapter that it needs. `long`: its prompt takes seconds. `slot` is set when it
    starts. `warm`: the slot's last request was the same client's."""

    key: Key
    session: SessionKey
    arrived_s: float
    client: str = ""
    long: bool = False
    slot: int | None = None
    warm: bool = False


@dataclass
class _Slot:
    number: int
    key: Key = None
    session: SessionKey = None
    client: str | None = None
    used: int = 0
    ticket: Ticket | None = None


@dataclass
class Turns:
    """The state of one model server: its slots, and the requests that wait for them."""

    num_slots: int
    longest_wait_s: float
    key: Key = None
    _waiting: dict[Key, list[Ticket]] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _uses: int = 0
    _turns: dict[Key, int] = field(default_factory=dict)
    _last_turns: dict[str, float] = field(default_factory=dict)  # client -> when it asked last

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self.num_slots)]

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def num_running(self) -> int:
        return sum(slot.ticket is not None for slot in self._slots)

    def arrive(self, ticket: Ticket) -> None:
        """Add a request to the queue of its adapter."""
        self._last_turns[ticket.client] = ticket.arrived_s
        self._waiting.setdefault(ticket.key, []).append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that has ended, or whose client went away while it waited."""
        for slot in self._slots:
            if slot.ticket is ticket:
                slot.ticket = None
        queue = self._waiting.get(ticket.key)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._waiting[ticket.key]

    def start(self, now_s: float) -> list[Ticket]:
        """Return the tickets that start now, each with its slot. Call it after every arrival and every end."""
        started: list[Ticket] = []
        while self._waiting and self.num_running < self.num_slots:
            if self.num_running == 0:
                self._begin_turn(now_s)
            elif self.key not in self._waiting or self._is_overdue(now_s):
                break  # the turn ends when its last request does
            admitted = self._admit(now_s)
            if not admitted:
                break  # only long ones of clients that have their share
            started += admitted
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

    def _admit(self, now_s: float) -> list[Ticket]:
        queue = self._waiting[self.key]
        running = [slot.ticket for slot in self._slots if slot.ticket is not None]
        clients = Counter(ticket.client for ticket in running)
        long = Counter(ticket.client for ticket in running if ticket.long)
        self._last_turns = {client: at_s for client, at_s in self._last_turns.items() if now_s - at_s < OTHERS_S}
        most_long = max(1, self.num_slots // 4) if len(self._last_turns) > 1 else self.num_slots
        admitted: list[Ticket] = []
        while len(running) < self.num_slots:
            ticket = min(
                (waiting for waiting in queue if not waiting.long or long[waiting.client] < most_long),
                key=lambda waiting: (
                    clients[waiting.client],
                    waiting.long and now_s - waiting.arrived_s < LONG_PATIENCE_S,
                    waiting.arrived_s,
                ),
                default=None,
            )
            if ticket is None:
                break
            queue.remove(ticket)
            slot = self._choose(ticket)
            self._uses += 1
            ticket.slot, ticket.warm = slot.number, slot.client == ticket.client
            slot.key, slot.session, slot.client = ticket.key, ticket.session, ticket.client
            slot.used, slot.ticket = self._uses, ticket
            running.append(ticket)
            clients[ticket.client] += 1
            long[ticket.client] += ticket.long
            admitted.append(ticket)
        if not queue:
            del self._waiting[self.key]
        return admitted

    def _choose(self, ticket: Ticket) -> _Slot:
        def rank(slot: _Slot) -> tuple[bool, bool, int]:
            same_key = slot.key == ticket.key
            return not (same_key and slot.session == ticket.session), not same_key and slot.used > 0, slot.used

        return min((slot for slot in self._slots if slot.ticket is None), key=rank)
