"""AdamW with decoupled weight decay on one flat buffer, the learning rate of each step, and the gradient's norm.

Shapes: N all adapter weights.
"""

import math

import torch
from torch import Tensor

from hivetune.config import RunConfig


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101), in place. Equals torch.optim.AdamW up to rounding."""

    beta1, beta2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, master_N: Tensor, *, weight_decay: float):
        self.master_N = master_N
        self.weight_decay = weight_decay
        self.exp_avg_N = torch.zeros_like(master_N)
        self.exp_avg_sq_N = torch.zeros_like(master_N)
        self._scratch_N = torch.empty_like(master_N)

    @torch.no_grad()
    def update(self, grad_N: Tensor, *, rate: float, number: int) -> None:
        """One update; `number` counts updates from 1 and corrects the averages' bias."""
        self.exp_avg_N.lerp_(grad_N, 1 - self.beta1)
        self.exp_avg_sq_N.mul_(self.beta2).addcmul_(grad_N, grad_N, value=1 - self.beta2)
        torch.sqrt(self.exp_avg_sq_N, out=self._scratch_N)
        self._scratch_N.div_(math.sqrt(1 - self.beta2**number)).add_(self.epsilon)
        self.master_N.mul_(1 - rate * self.weight_decay)
        self.master_N.addcdiv_(self.exp_avg_N, self._scratch_N, value=-rate / (1 - self.beta1**number))


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Rate of `step` (from 0) of `steps`: linear warm-up to the peak, then the schedule, which ends at 0."""
    warmup = warmup_steps(config.warmup, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate


def warmup_steps(warmup: float, steps: int) -> int:
    """A share of the steps below 1, a number of steps from 1; never more than there are."""
    return min(steps, math.ceil(warmup * steps) if warmup < 1 else round(warmup))


def clip_(grad_N: Tensor, norm: float, most: float) -> None:
    """Scale the gradient of `norm` down to `most`; 0 leaves it alone."""
    if 0 < most < norm:
        grad_N.mul_(most / norm)
