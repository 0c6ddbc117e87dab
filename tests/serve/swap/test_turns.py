"""Turns: one adapter at a time, nobody starves, sessions come back to their slot."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.serve.swap.turns import Ticket, Turns


def test_an_adapter_fills_the_slots_and_another_waits() -> None:
    turns = Turns(2, longest_wait_s=5)
    tickets = [Ticket(key, number, number) for number, key in enumerate("aaba")]
    for ticket in tickets:
        turns.arrive(ticket)
    assert turns.start(3) == tickets[:2] and {ticket.slot for ticket in tickets[:2]} == {0, 1}
    turns.leave(tickets[0])
    assert turns.start(4) == [tickets[3]]  # nobody is overdue yet
    turns.leave(tickets[1])
    turns.leave(tickets[3])
    assert turns.start(5) == [tickets[2]]


def test_an_overdue_request_ends_the_turn() -> None:
    turns = Turns(2, longest_wait_s=5)
    first, other, late = Ticket("a", 1, 0), Ticket("b", 2, 1), Ticket("a", 3, 2)
    for ticket in (first, other, late):
        turns.arrive(ticket)
        turns.start(ticket.arrived_s)
    assert late.slot is not None  # 1 s of waiting is not too long
    later = Ticket("a", 4, 7)
    turns.arrive(later)
    turns.leave(first)
    assert turns.start(7) == []  # b has waited 6 s: a admits no more
    turns.leave(late)
    assert turns.start(8) == [other]


def test_a_session_gets_its_slot_again() -> None:
    turns = Turns(3, longest_wait_s=5)
    for _ in range(2):
        running = [Ticket("a", session, 0) for session in ("x", "y", "z")]
        for ticket in running:
            turns.arrive(ticket)
        turns.start(0)
        assert [ticket.slot for ticket in running] == [0, 1, 2]
        for ticket in reversed(running):
            turns.leave(ticket)
    stranger = Ticket("b", "y", 1)
    turns.arrive(stranger)
    assert turns.start(1) == [stranger] and stranger.slot == 0  # the least recently used; y's tokens are of another key


def test_who_leaves_while_waiting_is_forgotten() -> None:
    turns = Turns(1, longest_wait_s=5)
    first, gone, last = Ticket("a", 1, 0), Ticket("b", 2, 1), Ticket("a", 3, 2)
    for ticket in (first, gone, last):
        turns.arrive(ticket)
    turns.start(2)
    turns.leave(gone)
    turns.leave(first)
    assert turns.start(9) == [last] and turns.num_waiting == 0


@dataclass
class Event:
    key: str
    at_s: int
    takes_s: int


events = st.lists(
    st.builds(Event, st.sampled_from("abcd"), st.integers(0, 60), st.integers(1, 10)), min_size=1, max_size=60
)


@given(events=events, num_slots=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_one_adapter_at_a_time_and_a_bounded_wait(events: list[Event], num_slots: int) -> None:
    """Simulated second by second. The first request of an adapter waits for the longest wait and then at most one batch
    of each other adapter, each as long as its longest request. A request behind others of its adapter waits so for each
    batch."""
    longest_wait_s, turns = 8, Turns(num_slots, longest_wait_s=8)
    takes: dict[int, int] = {}
    running: dict[Ticket, int] = {}
    waited: list[tuple[Ticket, float, int]] = []
    pending = sorted(events, key=lambda event: event.at_s)
    now = 0
    ahead: dict[int, int] = {}
    while pending or running or turns.num_waiting:
        for ticket in [ticket for ticket, end in running.items() if end <= now]:
            del running[ticket]
            turns.leave(ticket)
        while pending and pending[0].at_s <= now:
            event = pending.pop(0)
            ticket = Ticket(event.key, id(event), now)
            takes[id(ticket)] = event.takes_s
            ahead[id(ticket)] = sum(waiting.key == event.key for waiting in turns._waiting)
            turns.arrive(ticket)
        for ticket in turns.start(now):
            running[ticket] = now + takes[id(ticket)]
            waited.append((ticket, now - ticket.arrived_s, ahead[id(ticket)]))
        assert len({ticket.key for ticket in running}) <= 1
        assert len(running) <= num_slots == len({slot.number for slot in turns._slots})
        assert len({ticket.slot for ticket in running}) == len(running)
        now += 1
        assert now < 2000
    assert len(waited) == len(events)
    for _, seconds, own_ahead in waited:
        batches = 1 + own_ahead // num_slots
        assert seconds <= batches * (longest_wait_s + 4 * 10 + 10)
