"""A slice of training: it ends before its window does, at a person's pause and with its energy; and it stands still."""

import time

import pytest

from hivetune.config import parse_config
from hivetune.cycle.acts import slices
from hivetune.cycle.acts.slices import LOOK_EVERY_S, ActContext, Slice, SliceEnded, ends_with_window
from hivetune.cycle.decide import Observation, Permission
from hivetune.machine.telemetry import KWH, Energy
from hivetune.process.lease import Answering


def test_it_ends_at_a_checkpoint_before_the_window_and_now_when_that_is_over() -> None:
    now = [1000.0]
    slice_ = Slice(lambda: Permission(True, 1100.0), yields=False, clock=lambda: now[0])
    terms = slice_.terms()
    terms.on_step(1)
    assert terms.ends() == 0
    now[0] = 1099.0  # a step and its checkpoint take longer than a second
    assert terms.ends() == 1 and slice_.why == "the window ends"
    now[0] = 1100.0
    assert terms.ends() == 2


def test_a_step_that_stood_still_is_no_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a user of five minutes would end the slice ten minutes before its window does."""
    now = [0.0]
    monkeypatch.setattr(slices.time, "monotonic", lambda: now[0])
    slice_ = Slice(lambda: Permission(True, 2000.0), yields=True, clock=lambda: now[0])
    terms = slice_.terms()
    terms.on_step(1)
    with Answering():
        assert terms.stand_still()
    now[0] = 300.0
    assert not terms.stand_still()
    terms.on_step(2)
    now[0] = 301.0
    terms.on_step(3)
    now[0] = 1990.0
    assert terms.ends() == 0
    assert slice_.still_s == 300.0  # which are no hours of training


def test_it_ends_when_it_is_not_allowed_any_more_and_with_its_energy() -> None:
    paused = Slice(lambda: Permission(False, reason="paused by a person"), yields=False)
    assert paused.terms().ends() == 1 and paused.why == "paused by a person"
    hungry = Slice(Permission, yields=False, left_kwh=0.5, energy=Energy(0.5 * KWH))
    assert hungry.terms().ends() == 1 and "energy" in hungry.why
    assert Slice(Permission, yields=False, left_kwh=0.5).terms().ends() == 0


def test_what_answers_take_meanwhile_is_no_energy_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(slices, "energy_between", lambda before, after: Energy(KWH))
    slice_ = Slice(Permission, yields=True)
    terms = slice_.terms()
    with Answering():
        assert terms.stand_still() and terms.ends() == 0
    assert slice_.energy.kwh == 0.0
    monkeypatch.setattr(slices, "LINGER_S", 0.0)
    assert not terms.stand_still() and terms.ends() == 0
    assert slice_.energy.kwh == 1.0


def test_it_stands_still_while_somebody_waits_and_a_little_longer() -> None:
    slice_ = Slice(Permission, yields=True)
    stand_still = slice_.terms().stand_still
    assert not stand_still()
    with Answering():
        assert stand_still()
        assert not Slice(Permission, yields=False).terms().stand_still()
    assert stand_still()


def test_other_long_work_ends_before_its_window_too() -> None:
    config = parse_config({"model": "tiny", "data": {"path": "rows.jsonl"}})
    until = [time.time() + 60]
    act_context = ActContext(config, "demo", Observation(), "why", lambda: Permission(True, until[0]), time.time())
    ends_with_window(act_context, "answering")(1, 2)
    until[0] = time.time() + LOOK_EVERY_S / 2
    with pytest.raises(SliceEnded, match="the window ended first"):
        ends_with_window(act_context, "answering")(1, 2)
