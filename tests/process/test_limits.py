"""When silence is a hang: never in a noisy run, soon after a real one."""

import random
from collections.abc import Callable

import pytest
import torch

from hivetune.process.parent import Limits
from hivetune.process.protocol import Beat
from hivetune.process.supervision import Supervision
from hivetune.train.worker.device import cap_memory

DEFAULTS = Supervision()


def noisy(base_s: float, random_: random.Random) -> float:
    """One step in fifty up to twenty times as long."""
    return base_s * (random_.uniform(1, 20) if random_.random() < 0.02 else random_.uniform(0.7, 1.4))


def lognormal(base_s: float, random_: random.Random) -> float:
    return base_s * random_.lognormvariate(0, 0.4)


def slow_rise(base_s: float, random_: random.Random, state: list[float] = [1.0]) -> float:  # noqa: B006
    """A card that throttles: every step 0.1 % slower than the one before."""
    state[0] *= 1.001
    return base_s * min(state[0], 8.0)


@pytest.mark.parametrize(("base_s", "step"), [(0.01, noisy), (2.9, noisy), (30.0, lognormal), (20.0, slow_rise)])
def test_no_false_alarm_in_ten_thousand_steps(base_s: float, step: Callable[[float, random.Random], float]) -> None:
    limits, random_ = Limits(DEFAULTS), random.Random(1)

    def wait(beat: Beat, seconds: float) -> None:
        assert seconds <= limits.allowed_s(), f"{seconds} s until {beat} were taken for a hang"
        limits.beat(beat, seconds)

    wait(Beat.STARTING, 40.0)
    wait(Beat.PREPARING, 3.0)
    wait(Beat.ITEM, 300.0)  # the first step compiles for five minutes
    for number in range(10_000):
        wait(Beat.ITEM, step(base_s, random_))
        if number % 500 == 0:
            wait(Beat.VALIDATING, 0.1)
            wait(Beat.VALIDATING, 1500.0)  # validation
            wait(Beat.SAVING, 20.0)
            wait(Beat.ITEM, 400.0)  # saving on a slow disk, then a step


@pytest.mark.parametrize(("step_s", "allowed_s"), [(0.2, 60.0), (30.0, 150.0)])
def test_a_hang_is_noticed_after_five_steps_or_a_minute(step_s: float, allowed_s: float) -> None:
    limits = Limits(DEFAULTS)
    for beat in (Beat.STARTING, Beat.PREPARING, *[Beat.ITEM] * 101):
        limits.beat(beat, step_s)
    assert limits.allowed_s() == allowed_s


@pytest.mark.parametrize(("device", "asked"), [("cuda", [(0.5, None)]), ("cuda:1", [(0.5, 1)]), ("cpu", [])])
def test_a_worker_takes_no_more_of_a_card_than_its_share(
    device: str, asked: list[tuple[float, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
    cap_memory(torch.device(device), 0.5)
    assert calls == asked
