"""AdamW equals torch's, and the schedule is the one that users know."""

import itertools

import pytest
import torch

from hivetune.config import parse_config
from hivetune.train.worker.optimizer import AdamW, learning_rate, warmup_steps


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_updates_equal_torch(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(1000, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = AdamW(ours, weight_decay=weight_decay)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=weight_decay)
    for number in range(1, 51):
        gradient = torch.randn(1000, generator=generator, dtype=torch.float64)
        optimizer.update(gradient, rate=1e-2, number=number)
        theirs.grad = gradient.clone()
        reference.step()
    assert torch.allclose(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_one_pass_equals_torch_in_fp32() -> None:
    """An odd number of weights, larger than a task of the kernel; some gradients of 1e-9, as large as epsilon."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(40_001, generator=generator)
    theirs = torch.nn.Parameter(ours.double())
    optimizer = AdamW(ours, weight_decay=0.1, kernels="native")
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    norm = torch.zeros((), dtype=torch.float64)
    for number in range(1, 21):
        gradient = torch.randn(40_001, generator=generator)
        gradient[::7] *= 1e-9
        theirs.grad = gradient.double()
        optimizer.norm(gradient, norm)
        assert norm.item() == pytest.approx(float(theirs.grad.norm()), rel=1e-14)
        optimizer.update(gradient, rate=1e-2, number=number)
        reference.step()
    assert torch.allclose(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-6)  # 20 roundings of fp32


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
