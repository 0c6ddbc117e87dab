"""Which waiting requests may start: one adapter at a time, the oldest request first. Pure: no clock.

llama.cpp never computes two adapters in one batch, and of several it takes the slot with the lowest number first. So an
adapter has a turn. It admits no more requests once somebody has waited longer than `longest_wait_s` for another one;
the next turn is that of the oldest request.

A long prompt does not hold its turn until its answer begins: it is computed in pieces (PROMPT_BATCH in run.py), it has
a high slot, and a request of another adapter in a lower slot is computed before its next piece. Whoever was overtaken
for `longest_wait_s` is not overtaken again for as long. So neither many requests nor long prompts hold up others.

Among the requests for one adapter, the client with the fewest running requests comes first, then a short prompt before
a long one that has not waited for `LONG_PATIENCE_S`, then the earliest. The lowest of several slots takes no long
prompt, so that a short one finds it. While another client asked in the last `OTHERS_S`, the long prompts of one client
have a quarter of the slots: with more, the 99th percentile of fifteen others tripled (tests/serve/test_turns.py).
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
    its prompt takes seconds. `slot` is set when it starts, `warm` if the slot's last request was the same client's,
    and `answering` by whoever sees its answer begin."""

    key: Key
    session: Hashable
    arrived_s: float
    client: str = ""
    long: bool = False
    slot: int | None = None
    warm: bool = False
    answering: bool = False

    @property
    def holds_turn(self) -> bool:
        return self.answering or not self.long


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
    _turn_s: float = 0.0  # when the present turn began
    _protected_s: float = 0.0  # until when nobody overtakes

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self.num_slots)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running())

    def _running(self) -> list[Ticket]:
        return [slot.ticket for slot in self._slots if slot.ticket is not None]

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
        while self._admits(now_s):
            free = [slot for slot in self._slots if slot.ticket is None and self._is_before_overtaken(slot)]
            ticket = self._next(now_s, len(free)) if free else None
            if ticket is None:
                break
            self._waiting.remove(ticket)
            self._take(ticket, free)
            started.append(ticket)
        return started

    def _admits(self, now_s: float) -> bool:
        """Return whether the present turn admits a request. Where none holds the turn, the next one may begin."""
        running = self._running()
        mine = [ticket for ticket in running if ticket.key == self.key]
        holds = any(ticket.holds_turn for ticket in mine)
        overtaken = [(self._turn_s, ticket.key) for ticket in running if ticket.key != self.key]
        # Beside a long prompt no other one can begin.
        claims = [(ticket.arrived_s, ticket.key) for ticket in self._waiting if holds or not mine or not ticket.long]
        others = [(since_s, key) for since_s, key in (*claims, *overtaken) if key != self.key]
        overdue = [(since_s, key) for since_s, key in others if now_s - since_s > self.longest_wait_s]
        if holds:
            return not overdue
        is_needed = any(ticket.key == self.key for ticket in self._waiting)
        if (mine and now_s < self._protected_s) or not (overdue or (others and not is_needed)):
            return True
        self.key, self._turn_s = min(overdue or others, key=lambda claim: claim[0])[1], now_s
        if overdue and any(ticket.key == self.key for ticket in running):
            self._protected_s = now_s + self.longest_wait_s
        return True

    def _is_before_overtaken(self, slot: _Slot) -> bool:
        """Return whether llama.cpp computes this slot before the prompts that it overtakes."""
        return all(slot.number < other.number for other in self._slots if other.ticket and other.ticket.key != self.key)

    def _next(self, now_s: float, num_free: int) -> Ticket | None:
        """Return the next ticket of the present adapter, if there is one that fits."""
        running = self._running()
        clients = Counter(ticket.client for ticket in running)
        long = Counter(ticket.client for ticket in running if ticket.long)
        self._asked_s = {client: at_s for client, at_s in self._asked_s.items() if now_s - at_s < OTHERS_S}

        def may_start(ticket: Ticket) -> bool:
            is_alone = not self._asked_s.keys() - {ticket.client}
            share = self.num_slots if is_alone else max(1, self.num_slots // 4)
            return not ticket.long or ((num_free > 1 or self.num_slots == 1) and long[ticket.client] < share)

        fits = [ticket for ticket in self._waiting if ticket.key == self.key and may_start(ticket)]
        return min(
            fits,
            key=lambda ticket: (
                clients[ticket.client],
                ticket.long and now_s - ticket.arrived_s < LONG_PATIENCE_S,
                ticket.arrived_s,
            ),
            default=None,
        )

    def _take(self, ticket: Ticket, free: list[_Slot]) -> None:
        """Give a ticket the slot that holds most of its tokens: its session's, else one of its client and adapter, else
        the one that was not used for longest. A long prompt takes no slot that short ones need: the lowest."""
        slots = [slot for slot in free if slot.number > 0] or free if ticket.long else free

        def rank(slot: _Slot) -> tuple[bool, bool, int, int]:
            is_warm = (slot.key, slot.client) == (ticket.key, ticket.client)
            place = -slot.number if ticket.long else slot.number
            return not (is_warm and slot.session == ticket.session), not is_warm and slot.used > 0, slot.used, place

        slot = min(slots, key=rank)
        self._uses += 1
        ticket.slot, ticket.warm = slot.number, slot.client == ticket.client
        slot.client = ticket.client
        slot.key, slot.session, slot.used, slot.ticket = ticket.key, ticket.session, self._uses, ticket
