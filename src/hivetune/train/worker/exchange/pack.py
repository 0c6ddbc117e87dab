"""A pack: a micro-batch as a pure function of plan and budget, and what comes out of computing it.

Nothing here knows how many workers there are. Dropout is seeded by step and pack, every pack begins with a gradient of
zeros, and sums are made of integers (grid.py) and of losses in the packs' order.

Shapes: L positions of a document, N adapter weights.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune.train.worker.exchange.grid import Overflow, to_integers
from hivetune.train.worker.model.protocol import Document, LoraModel

# This share of all packs is computed by two workers and compared.
CHECKED_SHARE = 0.01


@dataclass(frozen=True)
class StepPack:
    """One pack of a step. `number` counts within the step; `seed` is that of dropout."""

    number: int
    documents: tuple[Document, ...]
    seed: int


@dataclass(frozen=True)
class PackTerms:
    """What all packs of a step share: `scale` of the loss, `exponent` of the grid, and the number of `packs`."""

    scale: float
    exponent: int
    packs: int


@dataclass(frozen=True)
class PackResult:
    """Loss and gradient of one pack. `nll`: sum over the trained tokens; `peak`: largest value, nan or inf.

    `integers_N`: the gradient on the grid; None where it is not finite or does not fit.
    """

    nll: float
    peak: float
    integers_N: Tensor | None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.nll) and math.isfinite(self.peak)


def make_packs(model: LoraModel, documents: Sequence[Document], seed: int, step: int) -> list[StepPack]:
    """Return the packs of a step, by the model's own rule for micro-batches."""
    return [
        StepPack(number, tuple(documents[index] for index in indices), pack_seed(seed, step, number))
        for number, indices in enumerate(model.micro_batches(documents))
    ]


def step_seed(seed: int, step: int) -> int:
    """Return the seed of dropout in a step, so that resuming is "go to step i"."""
    return _number(f"{seed}/{step}")


def pack_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of dropout in one pack, so that it does not matter who computes it."""
    return _number(f"{seed}/{step}/{number}")


def is_checked(seed: int) -> bool:
    """Return whether a pack of this seed is computed twice: one in a hundred, the same ones in each repetition."""
    return _number(f"checked/{seed}") < CHECKED_SHARE * 2**56


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def compute_pack(model: LoraModel, pack: StepPack, terms: PackTerms) -> PackResult:
    """Return loss and gradient of one pack on the model's device. `grad_N` holds the gradient afterwards."""
    torch.manual_seed(pack.seed)
    model.grad_N.zero_()
    nll = model.backward_one(pack.documents, terms.scale)
    numbers = torch.stack([nll.to(torch.float64), model.grad_N.abs().max().to(torch.float64)])
    nll_value, peak = numbers.tolist()
    result = PackResult(nll_value, peak, None)
    if not result.finite:
        return result
    try:
        return PackResult(nll_value, peak, to_integers(model.grad_N, peak, terms.exponent, terms.packs))
    except Overflow:
        return result
