"""One hostile client among sixteen: simulated arrivals and slots, no clock of this machine."""

import heapq
import itertools
import random
import statistics

from hivetune.serve.swap.turns import Ticket, Turns

SHORT_S, LONG_S, THINK_S, SLOTS, LIFE_S = 1.0, 6.0, 8.0, 4, 600.0


def waits(seed: int, hostile: str = "", adapters: int = 1) -> list[float]:
    """Return the seconds from arrival to end for fifteen clients that think between two requests. The hostile one keeps
    a hundred requests waiting, with `long` or `short` prompts."""
    draw = random.Random(seed)
    turns = Turns(SLOTS, 2.0)
    events: list[tuple[float, int, str, Ticket]] = []
    number, found = 0, []

    def arrive(client: str, at_s: float, long: bool) -> None:
        nonlocal number
        number += 1
        key = f"adapter-{draw.randrange(adapters)}"
        heapq.heappush(events, (at_s, number, "arrive", Ticket(key, (client, number), at_s, client, long)))

    for client in range(15):
        arrive(f"client-{client}", draw.uniform(0, THINK_S), False)
    for _ in range(100 if hostile else 0):
        arrive("hostile", 60.0, hostile == "long")
    while events and events[0][0] < LIFE_S:
        now_s, _, kind, ticket = heapq.heappop(events)
        if kind == "arrive":
            turns.arrive(ticket)
        else:
            turns.leave(ticket)
            if ticket.client == "hostile":
                arrive("hostile", now_s, hostile == "long")
            else:
                found.append(now_s - ticket.arrived_s)
                arrive(ticket.client, now_s + draw.expovariate(1 / THINK_S), False)
        for started in turns.start(now_s):
            number += 1
            service_s = (LONG_S if started.long else SHORT_S) * draw.uniform(0.8, 1.2)
            heapq.heappush(events, (now_s + service_s, number, "end", started))
    return found


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def test_the_others_wait_at_most_twice_as_long() -> None:
    for seed in range(3):
        alone = p99(waits(seed))
        for hostile in ("long", "short"):
            assert p99(waits(seed, hostile)) <= 2 * alone, (seed, hostile)


def test_a_long_prompt_waits_behind_short_ones_but_not_for_ever() -> None:
    turns = Turns(2, longest_wait_s=100)
    long, more = Ticket("a", 0, 0.0, "x", long=True), Ticket("a", 1, 0.5, "x", long=True)
    shorts = [Ticket("a", number, 1.0, "y") for number in range(2, 5)]
    for ticket in (long, more, *shorts):
        turns.arrive(ticket)
    assert turns.start(1.0) == [shorts[0], long]  # of two clients with none
    for ended, began in itertools.pairwise(shorts):
        turns.leave(ended)
        assert turns.start(2.0) == [began]  # x has its share of long ones
    turns.leave(shorts[2])
    assert turns.start(3.0) == []
    assert turns.start(3.0 + 60.0) == [more]  # nobody else asks any more


def test_a_client_with_many_waiting_does_not_keep_out_another() -> None:
    turns = Turns(2, longest_wait_s=100)
    many = [Ticket("a", number, float(number), "greedy") for number in range(50)]
    for ticket in many:
        turns.arrive(ticket)
    assert turns.start(50.0) == many[:2]
    other = Ticket("a", "s", 51.0, "other")
    turns.arrive(other)
    turns.leave(many[0])
    assert turns.start(52.0) == [other]
    turns.leave(other)
    assert turns.start(53.0) == [many[2]]
