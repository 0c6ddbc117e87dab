"""AdamW with decoupled weight decay on one flat buffer, and the learning rate of each step.

Shapes: N all adapter weights.
"""

import math

import torch
from torch import Tensor

from hivetune.config import RunConfig
from hivetune.train.worker.model.fast.kernels.calls import native_adamw, native_norm
from hivetune.train.worker.model.memory import to_device, unwritten


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101), in place. Equals torch.optim.AdamW up to rounding.

    An update has two halves, so that a graph can hold the second one: `begin` brings what differs from update to update
    to the device, `apply` reads it there. No operation of `apply` waits for the device or allocates anything.
    `kernels`: as the model names its own; with "native" ones an update is a single pass over the weights.
    """

    beta1, beta2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, master_N: Tensor, *, weight_decay: float, kernels: str = "torch"):
        self.master_N = master_N
        self.weight_decay = weight_decay
        self._native = kernels == "native"
        self.exp_avg_N = torch.zeros_like(master_N)
        self.exp_avg_sq_N = torch.zeros_like(master_N)
        scratch = 0 if self._native else len(master_N)
        self._scratch_N = unwritten(scratch, dtype=master_N.dtype, device=master_N.device)
        # Five terms: shares of the new gradient and of the old square, the square root's correction, decay, rate.
        # `_update` are this update's, `_idle` those of an update that changes nothing, `_used` the ones that are used.
        self._update, self._used = unwritten(2, 5, dtype=master_N.dtype, device=master_N.device)
        self._idle = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=master_N.dtype, device=master_N.device)
        self._whole = torch.ones((), dtype=torch.float64, device=master_N.device)
        self._ok, self._bad = (torch.ones((), dtype=torch.bool, device=master_N.device) for _ in "12")

    def update(self, grad_N: Tensor, *, rate: float, number: int) -> None:
        """Make one update. `number` counts updates from 1 and corrects the averages' bias."""
        self.begin(rate=rate, number=number)
        self.apply(grad_N)

    def begin(self, *, rate: float, number: int) -> None:
        """Copy what `apply` reads, without waiting for it: the update before this one may still be under way."""
        root, decay = math.sqrt(1 - self.beta2**number), 1 - rate * self.weight_decay
        to_device(self._update, (1 - self.beta1, self.beta2, root, decay, -rate / (1 - self.beta1**number)))

    @torch.no_grad()
    def norm(self, grad_N: Tensor, out: Tensor) -> None:
        """Write the gradient's norm into `out`, summed in fp64."""
        if self._native:
            native_norm(grad_N, out)
        else:
            torch.linalg.vector_norm(grad_N, dtype=torch.float64, out=out)

    @torch.no_grad()
    def apply(self, grad_N: Tensor, ok: Tensor | None = None, shrink: Tensor | None = None) -> None:
        """Make the update of `begin` with `shrink` (fp64) times the gradient, which stays scaled.

        Where `ok` (a bool on the device) is false, nothing changes but the gradient, which becomes zero.
        """
        if self._native:
            flat = (self.master_N, grad_N, self.exp_avg_N, self.exp_avg_sq_N)
            constants = (1 - self.beta2, self.epsilon)
            native_adamw(
                flat, self._update, constants, self._whole if shrink is None else shrink, self._ok if ok is None else ok
            )
            return
        if shrink is not None:
            grad_N.mul_(shrink)
        if ok is not None:
            grad_N.masked_fill_(torch.logical_not(ok, out=self._bad), 0.0)
        used = self._update if ok is None else torch.where(ok, self._update, self._idle, out=self._used)
        share, old_share, root, decay, rate = (used[at] for at in range(5))
        self.exp_avg_N.lerp_(grad_N, share)
        self.exp_avg_sq_N.mul_(old_share).addcmul_(grad_N, grad_N, value=1 - self.beta2)
        torch.sqrt(self.exp_avg_sq_N, out=self._scratch_N)
        self._scratch_N.div_(root).add_(self.epsilon)
        torch.div(self.exp_avg_N, self._scratch_N, out=self._scratch_N)
        self.master_N.mul_(decay).addcmul_(self._scratch_N, rate)


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
