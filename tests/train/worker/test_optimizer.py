"""AdamW resumes exactly, and the schedule is the one that users know."""

import itertools

import pytest
import torch

from hivetune.config import parse_config
from hivetune.train.worker.optimizer import AdamW, learning_rate, warmup_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_that_is_made_anew_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    """From weights, averages and the number of updates alone, as a resumed run does."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(*size, generator=generator, dtype=dtype) for size in ((1001,), (20, 1001)))
    masters, kept = [], None
    for resumed in (False, True):
        master, grad = weights.clone(), torch.zeros_like(weights)
        optimizer = AdamW(master, grad, weight_decay=0.1)
        for number in range(1, 21):
            if resumed and number <= 10:
                continue
            if resumed and number == 11:
                assert kept is not None
                for target, value in zip((master, optimizer.exp_avg_N, optimizer.exp_avg_sq_N), kept, strict=True):
                    target.copy_(value)
            grad.copy_(gradients[number - 1])
            optimizer.update(rate=1e-2, number=number)
            if number == 10:
                kept = [t.clone() for t in (master, optimizer.exp_avg_N, optimizer.exp_avg_sq_N)]
        masters.append(master)
    assert torch.equal(*masters) and not torch.equal(masters[0], weights)


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
