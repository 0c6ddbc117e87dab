"""The order of waiting requests on a model server: one adapter at a time, clients in turn. Pure: times are
arguments.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
# A long prompt counts as if it came so much later: it steps back for short ones, and no stream of them starves it.
LONG_STEPS_BACK_S = 10.0
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
    """A slot of the server. Adapter, client and session are those of its last request, whose tokens its prompt cache
    holds.
    """

    number: int
    last: tuple[Key, str, Hashable] | None = None
    used: int = 0
    ticket: Ticket | None = None


@dataclass
class Turns:
    """The slots of one model server, and the requests that wait for them. Once a request for another adapter has waited
    longer than `longest_wait_s`, the current adapter admits no more.
    """

    num_slots: int
    longest_wait_s: float
    _waiting: list[Ticket] = field(default_factory=list)
    _slots: list[_Slot] = field(default_factory=list)
    _uses: int = 0
    # When each client asked last, and when a request of it started last.
    _asked_s: dict[str, float] = field(default_factory=dict)
    _started_s: dict[str, float] = field(default_factory=dict)
    # Since when a long prompt is overtaken, and until when it is not overtaken again.
    _overtaken_s: float = math.inf
    _protected_s: float = 0.0

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
        """Return the tickets that start now, each with its slot. Call it after every arrival and every end of a
        request."""
        started: list[Ticket] = []
        while (ticket := self._next(now_s)) is not None:
            self._waiting.remove(ticket)
            self._take(ticket, now_s)
            started.append(ticket)
        return started

    def _next(self, now_s: float) -> Ticket | None:
        running = self._running()
        # llama.cpp never computes two adapters in one batch: who holds the turn lets others wait, or overtakes.
        holding = {ticket.key for ticket in running if ticket.holds_turn}
        self._note_overtaking(now_s, is_overtaking=bool(holding and {ticket.key for ticket in running} - holding))
        late_s = now_s - self.longest_wait_s
        # Requests of its own adapter join while nobody else has waited too long: they must not starve another one.
        claims = [self._overtaken_s, *(each.arrived_s for each in self._waiting if each.key not in holding)]
        if len(running) == self.num_slots or (holding and min(claims) < late_s):
            return None
        clients = Counter(ticket.client for ticket in running)

        def rank(ticket: Ticket) -> tuple[int, float]:
            # The client with the fewest running requests first, then the one that has waited for longest. One that was
            # served waits since then: a hundred requests of one client hold up nobody else's, on whatever adapter.
            since_s = max(ticket.arrived_s, self._started_s.get(ticket.client, 0.0))
            return clients[ticket.client], since_s + LONG_STEPS_BACK_S * ticket.long

        queue = sorted(self._waiting, key=rank)
        return next((ticket for ticket in queue if self._may_start(ticket, running, holding, now_s)), None)

    def _note_overtaking(self, now_s: float, *, is_overtaking: bool) -> None:
        if is_overtaking:
            self._overtaken_s = min(self._overtaken_s, now_s)
            return
        # Who was overtaken for the longest wait is not overtaken again for as long: a long prompt must end, too.
        if now_s - self._overtaken_s > self.longest_wait_s:
            self._protected_s = now_s + self.longest_wait_s
        self._overtaken_s = math.inf

    def _may_start(self, ticket: Ticket, running: list[Ticket], holding: set[Key], now_s: float) -> bool:
        others = {other.key for other in running} - {ticket.key}
        # Beside a long prompt of another adapter no long one can begin, and no short one while that is protected.
        if not holding <= {ticket.key} or (others and (ticket.long or now_s < self._protected_s)):
            return False
        if not ticket.long or not self._free(ticket):
            return bool(self._free(ticket))
        # A quarter of the slots while another client asks: with more, the 99th percentile of fifteen others went from
        # 1.35 to 4.3 s (tests/serve/test_turns.py).
        asked = (at_s for client, at_s in self._asked_s.items() if client != ticket.client)
        share = max(1, self.num_slots // 4) if now_s - max(asked, default=-math.inf) < OTHERS_S else self.num_slots
        own = sum(other.long and other.client == ticket.client for other in running)
        return own < share

    def _free(self, ticket: Ticket) -> list[_Slot]:
        # llama.cpp takes the lowest busy slot first: one that overtakes needs a lower one than whom it overtakes, and
        # the lowest of all is never a long prompt's.
        overtaken = [slot.number for slot in self._slots if slot.ticket and slot.ticket.key != ticket.key]
        first, end = int(ticket.long and self.num_slots > 1), min(overtaken, default=self.num_slots)
        return [slot for slot in self._slots[first:end] if slot.ticket is None]

    def _take(self, ticket: Ticket, now_s: float) -> None:
        """Give a ticket the slot whose cache holds most of its tokens: its session's, else one of its client and
        adapter, else the one that was unused for longest.
        """

        own = (ticket.key, ticket.client, ticket.session)

        def rank(slot: _Slot) -> tuple[bool, bool, int, int]:
            is_other = slot.last is not None and slot.last[:2] != own[:2]
            # High slots for long prompts: short ones must find a lower one.
            return slot.last != own, is_other, slot.used, -slot.number if ticket.long else slot.number

        slot = min(self._free(ticket), key=rank)
        self._uses += 1
        self._started_s[ticket.client] = now_s
        ticket.slot, ticket.warm = slot.number, slot.last is not None and slot.last[1] == ticket.client
        slot.last, slot.used, slot.ticket = own, self._uses, ticket
