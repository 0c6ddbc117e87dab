"""Which waiting requests may start on a model server: one adapter at a time, the oldest first. Pure: no clock."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
# A long prompt steps back for short ones this long, and then no longer: a stream of short ones must not starve it.
LONG_PATIENCE_S = 10.0
# How long a client counts as one that asks, after its last request.
OTHERS_S = 10.0


@dataclass(eq=False)
class Ticket:
    """A request in the queue."""

    key: Key  # the adapter that it needs
    # Whose tokens its slot should hold.
    session: Hashable
    arrived_s: float
    client: str = ""
    long: bool = False  # its prompt takes seconds
    # Set when it starts; `warm` if the slot's last request was the same client's.
    slot: int | None = None
    warm: bool = False
    # Set by whoever sees its answer begin.
    answering: bool = False

    @property
    def holds_turn(self) -> bool:
        # A long prompt holds no turn before its answer begins. It is computed in pieces (PROMPT_BATCH in run.py), and
        # llama.cpp computes a request of another adapter in a lower slot before the next piece.
        return self.answering or not self.long


@dataclass
class _Slot:
    """A slot of the server, and what its prompt cache holds: the last request's adapter, client and session."""

    number: int
    key: Key = None
    client: str | None = None
    session: Hashable = None
    used: int = 0
    ticket: Ticket | None = None


@dataclass
class Turns:
    """The slots of one model server, and the requests that wait for them. `key`: the adapter whose turn it is. No turn
    admits more once somebody has waited longer than `longest_wait_s` for another adapter."""

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
        # llama.cpp never computes two adapters in one batch, so one has the turn and the others wait or are overtaken.
        running = self._running()
        mine = [ticket for ticket in running if ticket.key == self.key]
        holds = any(ticket.holds_turn for ticket in mine)
        overtaken = [(self._turn_s, ticket.key) for ticket in running if ticket.key != self.key]
        # Beside a long prompt no other one can begin.
        claims = [(ticket.arrived_s, ticket.key) for ticket in self._waiting if holds or not mine or not ticket.long]
        others = [(since_s, key) for since_s, key in (*claims, *overtaken) if key != self.key]
        overdue = [(since_s, key) for since_s, key in others if now_s - since_s > self.longest_wait_s]
        # Its own requests join while nobody else has waited too long; a stream of them must not starve another adapter.
        if holds:
            return not overdue
        is_needed = any(ticket.key == self.key for ticket in self._waiting)
        if (mine and now_s < self._protected_s) or not (overdue or (others and not is_needed)):
            return True
        self.key, self._turn_s = min(overdue or others, key=lambda claim: claim[0])[1], now_s
        # Who was overtaken for the longest wait is not overtaken again for as long: a long prompt must end, too.
        if overdue and any(ticket.key == self.key for ticket in running):
            self._protected_s = now_s + self.longest_wait_s
        return True

    def _is_before_overtaken(self, slot: _Slot) -> bool:
        """Return whether llama.cpp, which takes the lowest busy slot first, computes this slot before the prompts that
        it overtakes."""
        return all(slot.number < other.number for other in self._slots if other.ticket and other.ticket.key != self.key)

    def _next(self, now_s: float, num_free: int) -> Ticket | None:
        """Return the next ticket of the present adapter, if there is one that fits."""
        running = self._running()
        clients = Counter(ticket.client for ticket in running)
        long = Counter(ticket.client for ticket in running if ticket.long)
        self._asked_s = {client: at_s for client, at_s in self._asked_s.items() if now_s - at_s < OTHERS_S}

        def may_start(ticket: Ticket) -> bool:
            if not ticket.long:
                return True
            # A quarter of the slots while another client asks: with more, the 99th percentile of fifteen others went
            # from 1.35 to 4.3 s (tests/serve/test_turns.py). And one slot stays free for a short request.
            is_alone = not self._asked_s.keys() - {ticket.client}
            share = self.num_slots if is_alone else max(1, self.num_slots // 4)
            return (num_free > 1 or self.num_slots == 1) and long[ticket.client] < share

        def rank(ticket: Ticket) -> tuple[int, bool, float]:
            steps_back = ticket.long and now_s - ticket.arrived_s < LONG_PATIENCE_S
            # The client with the fewest running requests first: a hundred of one client hold up nobody else's.
            return clients[ticket.client], steps_back, ticket.arrived_s

        return min((each for each in self._waiting if each.key == self.key and may_start(each)), key=rank, default=None)

    def _take(self, ticket: Ticket, free: list[_Slot]) -> None:
        """Give a ticket the slot that holds most of its tokens: its session's, else one of its client and adapter, else
        the one that was not used for longest."""

        def rank(slot: _Slot) -> tuple[bool, bool, bool, int, int]:
            is_warm = (slot.key, slot.client) == (ticket.key, ticket.client)
            # High slots for long prompts, and never the lowest while another is free: short ones must find it.
            is_needed, place = (slot.number == 0, -slot.number) if ticket.long else (False, slot.number)
            is_other = not (is_warm and slot.session == ticket.session)
            return is_needed, is_other, not is_warm and slot.used > 0, slot.used, place

        slot = min(free, key=rank)
        self._uses += 1
        ticket.slot, ticket.warm = slot.number, slot.client == ticket.client
        slot.client = ticket.client
        slot.key, slot.session, slot.used, slot.ticket = ticket.key, ticket.session, self._uses, ticket
