"""The learning rate of each step is the one that users know."""

import itertools

import pytest

from hivetune.config import parse_config
from hivetune.train.worker.session import learning_rate, warmup_steps


def test_schedules_begin_with_warm_up_and_end_at_zero() -> None:
    rates = {}
    for kind in ("cosine", "linear", "constant"):
        config = parse_config({"model": "m", "data": {"path": "x"}, "lr_schedule": kind, "warmup": 0.1})
        rates[kind] = [learning_rate(config, step, 100) / config.learning_rate for step in range(101)]
    for kind, found in rates.items():
        assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
        assert found[10] == pytest.approx(1) and (found[100] == pytest.approx(0, abs=1e-12)) == (kind != "constant")
        assert all(a >= b for a, b in itertools.pairwise(found[10:]))
    assert rates["cosine"][55] == pytest.approx(0.5) == rates["linear"][55]
    assert rates["cosine"][32] > rates["linear"][32]


@pytest.mark.parametrize(("warmup", "expected"), [(0, 0), (0.05, 5), (0.001, 1), (1, 1), (7, 7), (1000, 100)])
def test_warm_up_is_a_share_or_a_number(warmup: float, expected: int) -> None:
    assert warmup_steps(warmup, 100) == expected
