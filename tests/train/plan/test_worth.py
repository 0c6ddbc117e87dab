"""What more workers are worth: whole packs against bytes."""

import pytest

from hivetune.train.plan.speed import worth_of

GIGABIT = 125e6


def test_packs_are_whole() -> None:
    assert worth_of(2, 8, 8.0, 0).together_s == 4.0
    assert worth_of(3, 8, 8.0, 0).together_s == 3.0
    assert worth_of(16, 8, 8.0, 0).together_s == worth_of(8, 8, 8.0, 0).together_s == 1.0
    assert worth_of(4, 1, 8.0, 10**9).gain == 1.0  # nothing is shared out, so nothing travels


def test_a_large_adapter_over_a_slow_link_is_not_worth_it() -> None:
    """80.7 million weights on 1 GbE: the bytes take longer than the step that they would shorten."""
    worth = worth_of(2, 2, 2.65, 80_700_000, bytes_per_s=GIGABIT)
    assert worth.exchange_s == pytest.approx(7.7, abs=0.1) and worth.gain < 1
    assert "not worth it" in worth.words


def test_a_small_adapter_on_one_machine_is() -> None:
    worth = worth_of(2, 8, 2.65, 4_400_000)
    assert worth.exchange_s == pytest.approx(12 * 4_400_000 / 1e9)  # one sum, however many packs it has
    assert worth.gain > 1.8 and "not worth it" not in worth.words


def test_the_link_is_named() -> None:
    worth = worth_of(2, 2, 2.65, 80_700_000, bytes_per_s=GIGABIT, link="1 Gbit/s of eth0")
    assert "7.7 s of it for gradients and weights over 1 Gbit/s of eth0: not worth it" in worth.words
