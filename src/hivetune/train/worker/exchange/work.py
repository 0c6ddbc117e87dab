"""A piece of work for a worker: the gradient of a pack, or the loss of some documents. And what comes out of it.

A pack is a micro-batch as a pure function of plan and budget. Nothing here knows how many workers there are: dropout is
seeded by step and pack, every pack begins with a gradient of zeros, and sums are made of integers (below). A message
carries the tokens, so a worker needs neither snapshot nor plan: it can't compute another plan's rows.

Shapes: L positions of a document, N adapter weights.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.model.protocol import Document, LoraModel

# This share of all packs is computed by two workers and compared.
CHECKED_SHARE = 0.01


@dataclass(frozen=True)
class Pack:
    """The input of a gradient besides documents: dropout's `seed`, the loss's `scale`, the grid's `exponent`, and the
    number of `packs` in the step."""

    seed: int
    scale: float
    exponent: int
    packs: int


@dataclass(frozen=True)
class Work:
    """Documents that are computed at once: their gradient, or without `pack` the loss of each."""

    documents: tuple[Document, ...]
    pack: Pack | None = None

    @property
    def cost(self) -> int:
        """Return the number of tokens, to which the time is about proportional."""
        return sum(len(document.tokens_L) for document in self.documents)

    @property
    def is_checked(self) -> bool:
        """Return whether two workers compute it: one pack in a hundred, the same ones in each repetition."""
        return self.pack is not None and _number(f"checked/{self.pack.seed}") < CHECKED_SHARE * 2**56


@dataclass(frozen=True)
class WorkResult:
    """The result of a work. `nlls`: of each document, or the sum of a pack.

    A pack also has the largest value `peak` of its gradient, and the gradient on the grid, `integers_N`, where it is
    finite and `fits`.
    """

    nlls: tuple[float, ...]
    peak: float = 0.0
    fits: bool = True
    integers_N: Tensor | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.peak) and all(map(math.isfinite, self.nlls))

    def digest(self) -> str:
        """Return the SHA-256 of the result, bit for bit."""
        hashed = hashlib.sha256(repr((self.nlls, self.peak, self.fits)).encode())
        if self.integers_N is not None:
            hashed.update(memoryview(self.integers_N.numpy()))
        return hashed.hexdigest()


def step_seed(seed: int, step: int) -> int:
    """Return the seed of dropout in a step, so that resuming is "go to step i"."""
    return _number(f"{seed}/{step}")


def pack_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of dropout in one pack, so that it does not matter who computes it."""
    return _number(f"{seed}/{step}/{number}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def compute(model: LoraModel, work: Work) -> WorkResult:
    """Compute a work with the model, on its own device. `grad_N` holds a pack's gradient afterwards."""
    pack = work.pack
    if pack is None:
        return WorkResult(tuple(model.nll(work.documents).tolist()))
    torch.manual_seed(pack.seed)
    model.grad_N.zero_()
    sum_nll = model.backward_one(work.documents, pack.scale)
    nll, peak = torch.stack([sum_nll.to(torch.float64), model.grad_N.abs().max().to(torch.float64)]).tolist()
    integers_N = None
    if math.isfinite(nll) and math.isfinite(peak):
        integers_N = to_integers(model.grad_N, peak, pack.exponent, pack.packs)
    return WorkResult((nll,), peak, integers_N is not None, integers_N)


def to_message(works: Sequence[Work]) -> tuple[list[dict[str, Any]], bytes]:
    """Return works as headers for JSON and the bytes of their tokens."""
    headers = [
        {
            "rows": [document.row for document in work.documents],
            "lengths": [len(document.tokens_L) for document in work.documents],
            "pack": work.pack and asdict(work.pack),
        }
        for work in works
    ]
    documents = [document for work in works for document in work.documents]
    if not documents:
        return headers, b""
    tokens = torch.cat([document.tokens_L.cpu() for document in documents]).to(torch.int32)
    trained = torch.cat([document.trained_L.cpu() for document in documents]).to(torch.uint8)
    return headers, tokens.numpy().tobytes() + trained.numpy().tobytes()


def read_message(headers: Sequence[Mapping[str, Any]], payload: bytearray) -> list[Work]:
    """Return the works of a message of `to_message`."""
    rows = [row for header in headers for row in header["rows"]]
    lengths = [length for header in headers for length in header["lengths"]]
    if not rows:
        return [Work(()) for _ in headers]
    total = sum(lengths)
    tokens = torch.frombuffer(payload, dtype=torch.int32, count=total).to(torch.int64).split(lengths)
    trained = torch.frombuffer(payload, dtype=torch.uint8, count=total, offset=4 * total).bool().split(lengths)
    documents = map(Document, rows, tokens, trained)
    return [
        Work(tuple(next(documents) for _ in header["rows"]), header["pack"] and Pack(**header["pack"]))
        for header in headers
    ]


# Gradients as whole numbers on one grid: their sum does not depend on its order, nor on who added what.
#
# A pack's gradient is rounded to multiples of 2^(exponent - 45), where 2^exponent bounds the largest value of the step
# before. A value 2^-22 times as large as that bound still keeps all 24 bits of its significand, and smaller ones are
# off by less than a sum in fp32 would be. int64 leaves 16 bits above the bound: where a gradient exceeds them, the step
# is repeated on a wider grid. Prior art: reproducible summation (Demmel and Nguyen, ARITH 2013); the same training
# result on any number of workers: EasyScale (SC '23).

# A gradient may be this many times (as a power of two) as large as the largest of the step before.
HEADROOM_BITS = 16
# |sum| < 2^61, and rounding may add a half to each term.
SUM_BITS = 61
# The factor 2^(45 - exponent) must be a finite fp32 number.
MIN_EXPONENT, MAX_EXPONENT = -80, 128
# Of the first step: gradients of a mean loss are far below 2^16, and 1e-4 of them still keep 24 bits.
FIRST_EXPONENT = 0


def exponent_of(peak: float, before: int) -> int:
    """Return the grid after a step whose largest value was `peak`; `before` where there was no gradient."""
    if peak == 0:
        return before
    return min(max(math.frexp(peak)[1], MIN_EXPONENT), MAX_EXPONENT)


def to_integers(grad_N: Tensor, peak: float, exponent: int, packs: int) -> Tensor | None:
    """Return `grad_N` on the grid as int64 on the CPU, small enough to add `packs` of them; None if it is too large.

    `peak`: its largest value.
    """
    if peak > 2.0 ** (exponent + HEADROOM_BITS) / packs:
        return None
    return torch.round(grad_N * 2.0 ** _shift(exponent)).to(torch.int64).cpu()


def to_gradient(sum_N: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return a sum of such integers as floating-point numbers, rounded once."""
    return sum_N.to(dtype) * 2.0 ** -_shift(exponent)


def _shift(exponent: int) -> int:
    return SUM_BITS - HEADROOM_BITS - exponent
