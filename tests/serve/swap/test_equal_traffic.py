"""The watch judges the release and not its traffic: equal releases under five kinds of unequal traffic. Seeded."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hivetune.serve.swap.watch import Watch

LIVES, BEFORE, AFTER = 100, 200, 250


@dataclass
class Traffic:
    """The cost of a client's request: `prompt` and `tokens` of the answer, `running` answers at once, others' prompts
    beside it; and the shares that fail and that are complained about, by client."""

    prompt: int = 200
    tokens: int = 60
    running: int = 1
    others: float = 0.0
    fails: tuple[float, ...] = (0.01,)
    complains: tuple[float, ...] = (0.01,)


USUAL = Traffic()
# The second is what the traffic becomes when the equal release is promoted.
KINDS = {
    "longer prompts": (USUAL, Traffic(prompt=3500)),
    "shorter answers": (Traffic(tokens=200), Traffic(tokens=9)),
    "more at once": (USUAL, Traffic(running=4, others=20.0)),
    "one client complains of everything": (Traffic(complains=(0.01, 0.01)), Traffic(complains=(0.01, 0.01, 0.9))),
    "one client's requests fail": (Traffic(fails=(0.01, 0.01)), Traffic(fails=(0.01, 0.01, 0.6))),
}


class Machine:
    """Two cores. A token costs more in a batch and in a long context, another's prompt delays it, and one answer in
    fifty meets a burst of other work."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)

    def answer(self, traffic: Traffic, factor: float) -> tuple[float, int, tuple[int, ...]]:
        draw = self.draw
        prompt = max(1, int(traffic.prompt * draw.lognormvariate(0, 0.5)))
        tokens = max(1, int(traffic.tokens * draw.lognormvariate(0, 0.4)))
        running = draw.randint(1, traffic.running)
        others = int(traffic.others * tokens * draw.random())
        pace = factor * 0.01 * (1 + 0.4 * (running - 1)) * (1 + (prompt + tokens) / 4000)
        seconds = (pace * tokens + 0.002 * others) * draw.lognormvariate(0, 0.15)
        seconds *= 3 if draw.random() < 0.02 else 1
        return seconds, tokens, tuple(number.bit_length() for number in (running, prompt, others // tokens))


def withdrawn(seed: int, before: Traffic, after: Traffic, factor: float = 1.0) -> bool:
    raised: list[str] = []
    watch = Watch(lambda label, reason: raised.append(label), None, busy=lambda: False)  # type: ignore[arg-type]
    watch._raise = lambda label, kind, alarm: raised.append(kind)  # type: ignore[method-assign] # without a thread
    machine = Machine(seed)
    for label, traffic, count in (("a@1", before, BEFORE), ("a@2", after, AFTER)):
        watch.champions({"a": label}, {"a@2": "a@1"})
        for number in range(count):
            who = machine.draw.randrange(max(len(traffic.fails), len(traffic.complains)))
            failed = machine.draw.random() < traffic.fails[who % len(traffic.fails)]
            if failed:
                watch.answered(label, str(who), error=True)
                continue
            seconds, tokens, shared = machine.answer(traffic, factor if label == "a@2" else 1.0)
            watch.answered(label, str(who), error=False, seconds=seconds, tokens=tokens, traffic=shared)
            if machine.draw.random() < traffic.complains[who % len(traffic.complains)]:
                watch.complained(label, f"{label}-{number}", str(who))
            if raised:
                return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_an_equal_release_is_withdrawn_in_at_most_one_life_of_a_hundred(kind: str) -> None:
    lost = sum(withdrawn(seed, *KINDS[kind]) for seed in range(LIVES))
    assert lost <= 0.01 * LIVES, (kind, lost)


def test_a_worse_release_is_still_noticed() -> None:
    """It is three times slower, fails, or everybody complains about it."""
    before = Traffic(fails=(0.01, 0.01))
    for change in (Traffic(fails=(0.2, 0.2)), Traffic(complains=(0.2, 0.2))):
        assert sum(withdrawn(seed, before, change) for seed in range(20)) >= 19, change
    assert sum(withdrawn(seed, USUAL, USUAL, factor=3.0) for seed in range(20)) >= 19


def test_the_old_measure_would_have_withdrawn_it() -> None:
    """The old measure divided the seconds of the whole answer by its tokens."""
    raised: list[str] = []
    watch = Watch(lambda label, reason: None, None, busy=lambda: False)  # type: ignore[arg-type]
    watch._raise = lambda label, kind, alarm: raised.append(kind)  # type: ignore[method-assign]
    add: Callable[..., None] = watch.answered
    for label, prompt_s in (("a@1", 0.1), ("a@2", 3.0)):
        watch.champions({"a": label}, {"a@2": "a@1"})
        for _ in range(60):
            add(label, error=False, seconds=0.6 + prompt_s, tokens=60)
    assert raised
