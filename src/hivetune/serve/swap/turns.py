"""Which waiting requests may start: one adapter at a time, the oldest request first. Pure: no clock.

llama.cpp never computes two adapters in one batch. A request of another adapter waits until those before it have ended,
so steady traffic for one adapter would starve the others. Here a turn of an adapter admits no more once somebody waits
longer than `longest_wait_s` for another one; the next turn is that of the oldest request. While nobody is overdue, a
turn continues as long as it has requests.

Among the requests for one adapter, the client with the fewest running requests comes first, then a short prompt before
a long one that has not waited for `LONG_PATIENCE_S`, then the earliest. While another client asked in the last
`OTHERS_S`, the long prompts of one client have at most a quarter of the slots: an answer in the middle of others'
prompts of a whole context would come seconds later. So one client holds up no other, neither by many requests nor by
long ones.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
LONG_PATIENCE_S = 10.0
OTHERS_S = 10.0


@dataclass(eq=False)
class Ticket:
    """A request in the queue. `key`: the adapter that it needs. `session`: whose tokens its slot should hold. `long`:
    its prompt takes seconds. `slot` is set when it starts. `warm`: the slot's last request was the same client's."""

    key: Key
    session: Hashable
    arrived_s: float
    client: str = ""
    long: bool = False
    slot: int | None = None
    warm: bool = False


@dataclass
class _Slot:
    number: int
    key: Key = None
    client: str | None = None
    session: Hashable = None
    used: int = 0
    ticket: Ticket | None = None


@dataclass
class Turns:
    """The state of one model server: its slots, and the requests that wait for them."""

    num_slots: int
    longest_wait_s: float
    key: Key = None
    _waiting: list[Ticket] = field(default_factory=list)  # oldest first
    _slots: list[_Slot] = field(default_factory=list)
    _uses: int = 0
    _asked_s: dict[str, float] = field(default_factory=dict)  # client -> when it asked last

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self.num_slots)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(slot.ticket is not None for slot in self._slots)

    def arrive(self, ticket: Ticket) -> None:
        """Add a request to the queue."""
        self._waiting.append(ticket)
        self._asked_s[ticket.client] = ticket.arrived_s

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that has ended, or whose client went away while it waited."""
        for slot in self._slots:
            if slot.ticket is ticket:
                slot.ticket = None
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    def start(self, now_s: float) -> list[Ticket]:
        """Return the tickets that start now, each with its slot. Call it after every arrival and every end."""
        started: list[Ticket] = []
        running = [slot.ticket for slot in self._slots if slot.ticket is not None]
        while self._waiting and len(running) < self.num_slots:
            if not running:
                others = [ticket for ticket in self._waiting if ticket.key != self.key]
                overdue = others and now_s - others[0].arrived_s > self.longest_wait_s
                self.key = (others if overdue else self._waiting)[0].key
            elif any(
                ticket.key != self.key and now_s - ticket.arrived_s > self.longest_wait_s for ticket in self._waiting
            ):
                break  # the turn ends with its last request
            ticket = self._next(running, now_s)
            if ticket is None:
                break
            self._waiting.remove(ticket)
            self._give_slot(ticket)
            running.append(ticket)
            started.append(ticket)
        return started

    def _next(self, running: list[Ticket], now_s: float) -> Ticket | None:
        """Return the next ticket of the present adapter; None where all are long ones of clients with their share."""
        clients = Counter(ticket.client for ticket in running)
        long = Counter(ticket.client for ticket in running if ticket.long)
        self._asked_s = {client: at_s for client, at_s in self._asked_s.items() if now_s - at_s < OTHERS_S}

        def may_start(ticket: Ticket) -> bool:
            alone = not self._asked_s.keys() - {ticket.client}
            return not ticket.long or alone or long[ticket.client] < max(1, self.num_slots // 4)

        mine = [ticket for ticket in self._waiting if ticket.key == self.key and may_start(ticket)]
        return min(
            mine,
            key=lambda ticket: (
                clients[ticket.client],
                ticket.long and now_s - ticket.arrived_s < LONG_PATIENCE_S,
                ticket.arrived_s,
            ),
            default=None,
        )

    def _give_slot(self, ticket: Ticket) -> None:
        """Give the free slot that holds most of the ticket's tokens: its session's, else one of its adapter, else the
        one that was not used for longest."""

        def rank(slot: _Slot) -> tuple[bool, bool, int]:
            same_key = slot.key == ticket.key
            return not (same_key and slot.session == ticket.session), not same_key and slot.used > 0, slot.used

        slot = min((slot for slot in self._slots if slot.ticket is None), key=rank)
        self._uses += 1
        ticket.slot, ticket.warm = slot.number, slot.client == ticket.client
        slot.client = ticket.client
        slot.key, slot.session, slot.used, slot.ticket = ticket.key, ticket.session, self._uses, ticket
