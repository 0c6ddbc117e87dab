"""How a step's gradient comes about: the one interface that the loop knows, with packs or without.

`Whole` is one process that adds in fp32. `Packs` adds integers (grid.py), so the sum is the same whoever computes. A
`Crew` decides who that is: this process alone, a group on this machine (group.py), or a cluster's actors (cluster.py).

Shapes: N adapter weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hivetune.train.worker.exchange.grid import exponent_of, to_gradient
from hivetune.train.worker.exchange.pack import PackTerms, make_packs, step_seed
from hivetune.train.worker.exchange.work import Figures, Gradient, Work, compute, losses_of
from hivetune.train.worker.model.protocol import Document, LoraModel

# Documents that a worker scores at once in validation.
SCORED_TOGETHER = 16


@dataclass(frozen=True)
class Summed:
    """`losses` [1]: nll of the step's trained tokens; [2] in stage 2: of good rows, and the loss of the bad ones. The
    gradient is in `grad_N`. `exponent`: of the next step's grid."""

    losses: Tensor
    exponent: int


class Exchange(Protocol):
    def backward(
        self, documents: Sequence[Document], step: int, *, scale: float, exponent: int, beta: float | None = None
    ) -> Summed:
        """Leave the gradient of `scale` times the step's loss in the model's `grad_N`. `beta`: of stage 2.

        Raises WorkerWrong.
        """
        ...

    def nll(self, documents: Sequence[Document], step: int) -> list[float]:
        """Return the sum over the trained tokens of each document."""
        ...

    def close(self) -> None: ...


class Whole:
    """One process that adds in fp32, also for the judged rows of stage 2."""

    def __init__(self, model: LoraModel, seed: int):
        self._model, self._seed = model, seed

    def backward(
        self, documents: Sequence[Document], step: int, *, scale: float, exponent: int, beta: float | None = None
    ) -> Summed:
        torch.manual_seed(step_seed(self._seed, step))
        self._model.grad_N.zero_()
        if beta is not None:
            return Summed(self._model.backward_judged(documents, scale, beta), exponent)
        return Summed(self._model.backward(documents, scale)[None], exponent)

    def nll(self, documents: Sequence[Document], step: int) -> list[float]:
        return list(self._model.nll(documents).tolist())

    def close(self) -> None:
        pass


class Crew(Protocol):
    """The processes that compute a round."""

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[Figures]:
        """Return the figures of each work, and add the gradients' integers to `sum_N`."""
        ...

    def close(self) -> None: ...


class Alone:
    """A crew of this process alone, which computes the works in order."""

    def __init__(self, model: LoraModel):
        self._model = model

    def run(self, works: Sequence[Work], step: int, sum_N: Tensor) -> list[Figures]:
        figures = []
        for work in works:
            result = compute(self._model, work)
            if result.integers_N is not None:
                sum_N.add_(result.integers_N)
            figures.append(result.figures)
        return figures

    def close(self) -> None:
        pass


class Packs:
    """Sums of integers: the same bits whichever process of the crew computed which pack."""

    def __init__(self, model: LoraModel, seed: int, crew: Crew):
        self._model, self._seed, self._crew = model, seed, crew
        self._sum_N = torch.zeros(model.master_N.numel(), dtype=torch.int64)

    def backward(
        self, documents: Sequence[Document], step: int, *, scale: float, exponent: int, beta: float | None = None
    ) -> Summed:
        if beta is not None:
            raise ValueError("stage 2 is computed by one process")
        packs = make_packs(self._model, documents, self._seed, step)
        while True:
            terms = PackTerms(scale, exponent, len(packs))
            self._sum_N.zero_()
            every = self._crew.run([Gradient(pack, terms) for pack in packs], step, self._sum_N)
            if not all(figures.finite for figures in every):
                return self._not_finite(exponent)
            if all(figures.fits for figures in every):
                break
            exponent = exponent_of(max(figures.peak for figures in every), exponent)
        grad_N = self._model.grad_N
        grad_N.copy_(to_gradient(self._sum_N, exponent, grad_N.dtype))
        peak = float(grad_N.abs().max())
        return Summed(self._one(math.fsum(figures.nlls[0] for figures in every)), exponent_of(peak, exponent))

    def nll(self, documents: Sequence[Document], step: int) -> list[float]:
        every = self._crew.run(losses_of(documents, SCORED_TOGETHER), step, self._sum_N)
        return [nll for figures in every for nll in figures.nlls]

    def close(self) -> None:
        self._crew.close()

    def _not_finite(self, exponent: int) -> Summed:
        self._model.grad_N.fill_(torch.nan)
        return Summed(self._one(math.nan), exponent)

    def _one(self, value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64, device=self._model.device)
