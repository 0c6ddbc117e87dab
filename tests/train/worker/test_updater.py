"""What the device does with a gradient: a step that is not finite changes nothing, nor do those after it until it is
known."""

import math

import pytest
import torch

from hivetune.train.worker.loop import Updater
from hivetune.train.worker.optimizer import AdamW


def made(
    *, clip: float = 0.0, loss_scale: float = 1.0, kernels: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor, AdamW, Updater]:
    generator = torch.Generator().manual_seed(0)
    master_N, grad_N = torch.randn(8, generator=generator), torch.zeros(8)
    optimizer = AdamW(master_N, weight_decay=0.1, kernels=kernels)
    return master_N, grad_N, optimizer, Updater(grad_N, optimizer, clip=clip, loss_scale=loss_scale)


def step(grad_N: torch.Tensor, updater: Updater, number: int, *, value: float = 1.0, loss: float = 6.0) -> list[float]:
    grad_N.copy_(torch.linspace(-value, value, 8))
    updater.begin(rate=0.1, number=number, trained_tokens=3)
    updater.apply(torch.tensor([loss]))
    return updater.answer().read()


KERNELS = ["torch", "native"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("most", "norm"), [(0.0, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_clipping_scales_the_whole_gradient(most: float, norm: float, kernels: str) -> None:
    _, grad_N, _, updater = made(clip=most, kernels=kernels)
    grad_N[:2] = torch.tensor([3.0, 4.0])
    updater.begin(rate=0.1, number=1, trained_tokens=1)
    updater.apply(torch.tensor([1.0]))
    assert updater.answer().read() == [1.0, 0.0, 5.0]  # the norm before it is clipped
    assert float(grad_N.norm()) == pytest.approx(norm) and float(grad_N[0] / grad_N[1]) == pytest.approx(0.75)


@pytest.mark.parametrize(("value", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_changes_nothing_until_it_is_known(
    value: float, loss: float, clip: float, kernels: str
) -> None:
    master_N, grad_N, optimizer, updater = made(clip=clip, kernels=kernels)
    plain_N, plain_grad_N, _, plain = made(clip=clip, kernels=kernels)
    assert step(grad_N, updater, 1) == step(plain_grad_N, plain, 1)
    held = [tensor.clone() for tensor in (master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N)]
    bad = step(grad_N, updater, 2, value=value, loss=loss)
    assert not math.isfinite(sum(bad))
    assert math.isfinite(sum(step(grad_N, updater, 3)))  # given out before anybody has read the bad one
    for before, now in zip(held, (master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N), strict=True):
        assert torch.equal(before, now)
    updater.go_on()
    assert step(grad_N, updater, 2) == step(plain_grad_N, plain, 2)
    assert torch.equal(master_N, plain_N) and not torch.equal(master_N, held[0])


def test_the_loss_scale_of_float16_is_taken_back() -> None:
    masters = []
    for scale in (1.0, 1024.0):
        master_N, grad_N, _, updater = made(loss_scale=scale)
        for number in (1, 2):
            assert step(grad_N, updater, number, value=scale)[0] == 2.0
        masters.append(master_N)
    assert torch.equal(*masters)
