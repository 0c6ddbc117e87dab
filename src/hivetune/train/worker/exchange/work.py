"""A piece of work for a worker: the gradient of a pack, or the loss of some documents. And what comes out of it.

A pack is a micro-batch as a pure function of plan and budget. Nothing here knows how many workers there are: dropout is
seeded by step and pack, every pack begins with a gradient of zeros, and sums are made of integers (grid.py). A message
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

from hivetune.train.worker.exchange.grid import to_integers
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
            "weights": [document.weight for document in work.documents],
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
    weights = [weight for header in headers for weight in header["weights"]]
    if not rows:
        return [Work(()) for _ in headers]
    total = sum(lengths)
    tokens = torch.frombuffer(payload, dtype=torch.int32, count=total).to(torch.int64).split(lengths)
    trained = torch.frombuffer(payload, dtype=torch.uint8, count=total, offset=4 * total).bool().split(lengths)
    documents = map(Document, rows, tokens, trained, weights)
    return [
        Work(tuple(next(documents) for _ in header["rows"]), header["pack"] and Pack(**header["pack"]))
        for header in headers
    ]
