"""The work that a worker can be asked for: a pack's gradient, or the loss of some documents. As values and messages.

A message carries the tokens, so a worker needs neither snapshot nor plan: it can't compute another plan's rows.

Shapes: N adapter weights.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.exchange.pack import PackTerms, StepPack, compute_pack
from hivetune.train.worker.model.protocol import Document, LoraModel


@dataclass(frozen=True)
class Gradient:
    """The loss and the gradient of one pack."""

    pack: StepPack
    terms: PackTerms

    @property
    def documents(self) -> tuple[Document, ...]:
        return self.pack.documents


@dataclass(frozen=True)
class Losses:
    """The loss of each of these documents, without a gradient."""

    documents: tuple[Document, ...]


Work = Gradient | Losses


@dataclass(frozen=True)
class Figures:
    """The numbers of a result. `nlls`: of each document of Losses, one for a pack.

    A gradient also has its largest value `peak`, and `fits` says whether it fits on the grid.
    """

    nlls: tuple[float, ...]
    peak: float = 0.0
    fits: bool = True

    @property
    def finite(self) -> bool:
        return math.isfinite(self.peak) and all(map(math.isfinite, self.nlls))


@dataclass(frozen=True)
class WorkResult:
    """What a work came to. `integers_N`: the gradient, where it is finite and fits on the grid."""

    figures: Figures
    integers_N: Tensor | None = None

    def kept(self) -> "WorkResult":
        """Return a copy with memory of its own: a worker's next result is written over this one."""
        return WorkResult(self.figures, None if self.integers_N is None else self.integers_N.clone())

    def digest(self) -> str:
        """Return a hash of the result, bit for bit."""
        hashed = hashlib.sha256(repr(self.figures).encode())
        if self.integers_N is not None:
            hashed.update(memoryview(self.integers_N.numpy()))
        return hashed.hexdigest()


def cost_of(work: Work) -> int:
    """Return the number of tokens of a work. Its time is about proportional to them."""
    return sum(len(document.tokens_L) for document in work.documents)


def compute(model: LoraModel, work: Work) -> WorkResult:
    """Return what the model makes of a work, on its own device."""
    if isinstance(work, Losses):
        return WorkResult(Figures(tuple(model.nll(work.documents).tolist())))
    result = compute_pack(model, work.pack, work.terms)
    fits = result.integers_N is not None
    return WorkResult(Figures((result.nll,), result.peak, fits), result.integers_N)


def work_message(number: int, work: Work) -> tuple[dict[str, Any], bytes]:
    """Return a work as a header for JSON and the bytes of its tokens."""
    header: dict[str, Any] = {
        "kind": "work",
        "number": number,
        "rows": [document.row for document in work.documents],
        "lengths": [len(document.tokens_L) for document in work.documents],
    }
    if isinstance(work, Gradient):
        header["pack"] = {"number": work.pack.number, "seed": work.pack.seed}
        terms = work.terms
        header["terms"] = {"scale": terms.scale, "exponent": terms.exponent, "packs": terms.packs}
    tokens = torch.cat([document.tokens_L.cpu() for document in work.documents]).to(torch.int32)
    trained = torch.cat([document.trained_L.cpu() for document in work.documents]).to(torch.uint8)
    return header, tokens.numpy().tobytes() + trained.numpy().tobytes()


def read_work(header: Mapping[str, Any], payload: memoryview) -> Work:
    """Return the work of a message. Raises KeyError, TypeError or ValueError for a message that holds none."""
    total = sum(header["lengths"])
    if payload.nbytes != 5 * total:
        raise ValueError(f"{payload.nbytes} bytes for {total} tokens")
    tokens = torch.frombuffer(payload, dtype=torch.int32, count=total).to(torch.int64)
    trained = torch.frombuffer(payload, dtype=torch.uint8, count=total, offset=4 * total).bool()
    parts = zip(header["rows"], tokens.split(header["lengths"]), trained.split(header["lengths"]), strict=True)
    documents = tuple(Document(row, tokens_L, trained_L) for row, tokens_L, trained_L in parts)
    if "pack" not in header:
        return Losses(documents)
    return Gradient(StepPack(documents=documents, **header["pack"]), PackTerms(**header["terms"]))


def losses_of(documents: Sequence[Document], size: int) -> list[Work]:
    """Return the work that scores these documents, `size` of them at a time."""
    return [Losses(tuple(documents[start : start + size])) for start in range(0, len(documents), size)]
