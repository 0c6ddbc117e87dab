"""The device's half of a step after the gradient: check, clipping and update; and its answer, which may be read late.

The check is made where the numbers are. A step whose loss or gradient is not finite changes nothing, and neither does
any step that the device was given after it, until `go_on`: so the host may give out the next step before it has read
what this one came to, and finds the weights as they were before the bad one.

Shapes: N adapter weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hivetune.train.worker.model.memory import to_device, unwritten
from hivetune.train.worker.optimizer import AdamW

Repeat = Callable[[str, Callable[[], None]], None]
# The loss of good rows, that of bad answers (0 outside of stage 2), the gradient's norm.
NUM_TOLD = 3


class StepAnswer:
    """What a step came to, on its way to the host."""

    def __init__(self, told: Tensor):
        on_card = told.device.type == "cuda"
        self._here = torch.empty(told.shape, dtype=told.dtype, pin_memory=on_card)
        self._here.copy_(told, non_blocking=True)
        self._arrived = torch.cuda.current_stream(told.device).record_event() if on_card else None

    def read(self) -> list[float]:
        """Loss, loss of bad answers, norm. Waits for the step, and for nothing that was given out after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._here.tolist())


class Updater:
    """`grad_N`: where a step leaves its gradient. `loss_scale`: what it was multiplied by for float16. `repeat`: of the
    model (protocol.py)."""

    def __init__(
        self,
        grad_N: Tensor,
        optimizer: AdamW,
        *,
        clip: float,
        loss_scale: float = 1.0,
        repeat: Repeat = lambda name, work: work(),
    ):
        self._grad_N, self._optimizer, self._clip = grad_N, optimizer, clip
        self._loss_scale, self._repeat = loss_scale, repeat
        device = grad_N.device
        self._tokens = unwritten(1, dtype=torch.float64, device=device)
        self._told = torch.zeros(NUM_TOLD, dtype=torch.float64, device=device)
        self._sum, self._shrink = (torch.zeros((), dtype=torch.float64, device=device) for _ in "12")
        self._finite = torch.zeros((), dtype=torch.bool, device=device)
        self._ok = torch.ones((), dtype=torch.bool, device=device)

    def begin(self, *, rate: float, number: int, trained_tokens: int) -> None:
        """What `apply` reads: the rate and number of the update, and how many tokens the step trains."""
        self._optimizer.begin(rate=rate, number=number)
        to_device(self._tokens, (trained_tokens,))

    @torch.no_grad()
    def apply(self, losses: Tensor) -> None:
        """`losses` [1] or [2]: sums over the step. Nothing here waits for the device or allocates."""
        self._told[: len(losses)].copy_(losses)
        self._repeat("update", self._update)

    def _update(self) -> None:
        norm = self._told[NUM_TOLD - 1]
        self._told[: NUM_TOLD - 1].div_(self._tokens)
        if self._loss_scale != 1:
            self._grad_N.div_(self._loss_scale)
        self._optimizer.norm(self._grad_N, norm)
        torch.sum(self._told, 0, out=self._sum)
        torch.eq(self._sum.sub_(self._sum), 0, out=self._finite)  # inf - inf is not a number
        self._ok.logical_and_(self._finite)
        if self._clip > 0:  # the gradient as a whole, down to this norm
            torch.reciprocal(norm, out=self._shrink).mul_(self._clip).clamp_(max=1.0)
        self._optimizer.apply(self._grad_N, self._ok, self._shrink if self._clip > 0 else None)

    def answer(self) -> StepAnswer:
        return StepAnswer(self._told)

    def go_on(self) -> None:
        """The host knows of the step that was not finite: updates count again."""
        self._ok.fill_(True)


def loss_scale_of(dtype: torch.dtype) -> float:
    """Gradients below 6e-8 are zero in float16; a power of two changes nothing else (arXiv:1710.03740)."""
    return 1024.0 if dtype == torch.float16 else 1.0
