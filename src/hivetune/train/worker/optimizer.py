"""AdamW on one flat buffer, and the learning rate of each step.

Shapes: N all adapter weights.
"""

import math

import torch
from torch import Tensor

from hivetune.config import RunConfig


class AdamW:
    """torch's fused AdamW (arXiv:1711.05101) of `master_N` and its gradient, with its two averages in reach.

    The state is a function of the weights, the averages and the number of updates, so a checkpoint needs nothing else.
    """

    def __init__(self, master_N: Tensor, grad_N: Tensor, *, weight_decay: float):
        self.exp_avg_N, self.exp_avg_sq_N = torch.zeros_like(master_N), torch.zeros_like(master_N)
        self._step = torch.zeros((), dtype=torch.float32, device=master_N.device)
        master_N.grad = grad_N
        self._adamw = torch.optim.AdamW([master_N], weight_decay=weight_decay, fused=True)
        self._adamw.state[master_N] = {
            "step": self._step,
            "exp_avg": self.exp_avg_N,
            "exp_avg_sq": self.exp_avg_sq_N,
        }

    def update(self, *, rate: float, number: int) -> None:
        """Make one update. `number` counts updates from 1 and corrects the averages' bias."""
        self._adamw.param_groups[0]["lr"] = rate
        self._step.fill_(number - 1)
        self._adamw.step()


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Return the rate of `step` (from 0) of `steps`: linear warm-up to the peak, then the schedule, which ends at 0."""
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
    """Return the steps of the warm-up: below 1 a share of the steps, from 1 their number; never more than there are."""
    return min(steps, math.ceil(warmup * steps) if warmup < 1 else round(warmup))
