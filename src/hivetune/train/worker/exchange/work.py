"""What a worker can be asked for: a pack's gradient, or the loss of some documents. As values, and as messages.

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
    """Loss and gradient of one pack."""

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
    """`nlls`: of each document of Losses, one for a pack. Of a gradient also `peak`, its largest value, and whether
    it `fits` on the grid."""

    nlls: tuple[float, ...]
    peak: float = 0.0
    fits: bool = True

    @property
    def finite(self) -> bool:
        return math.isfinite(self.peak) and all(map(math.isfinite, self.nlls))


@dataclass(frozen=True)
class WorkResult:
    """`integers_N`: of a gradient that is finite and fits."""

    figures: Figures
    integers_N: Tensor | None = None

    def kept(self) -> "WorkResult":
        """With memory of its own: a worker's next result is written over this one."""
        return WorkResult(self.figures, None if self.integers_N is None else self.integers_N.clone())

    def digest(self) -> str:
        """Equal for equal results, bit for bit."""
        hashed = hashlib.sha256(repr(self.figures).encode())
        if self.integers_N is not None:
            hashed.update(memoryview(self.integers_N.numpy()))
        return hashed.hexdigest()


def cost_of(work: Work) -> int:
    """Its tokens: what its time is about proportional to."""
    return sum(len(document.tokens_L) for document in work.documents)


def compute(model: LoraModel, work: Work) -> WorkResult:
    if isinstance(work, Losses):
        return WorkResult(Figures(tuple(model.nll(work.documents).tolist())))
    result = compute_pack(model, work.pack, work.terms)
    fits = result.integers_N is not None
    return WorkResult(Figures((result.nll,), result.peak, fits), result.integers_N)


def work_message(number: int, work: Work) -> tuple[dict[str, Any], bytes]:
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
    """Raises KeyError, TypeError or ValueError for what is none."""
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


def result_message(number: int, result: WorkResult) -> tuple[dict[str, Any], bytes | memoryview]:
    figures = result.figures
    header = {"kind": "result", "number": number, "nlls": figures.nlls, "peak": figures.peak, "fits": figures.fits}
    return header, b"" if result.integers_N is None else memoryview(result.integers_N.numpy()).cast("B")


def read_result(header: Mapping[str, Any], payload: memoryview) -> WorkResult:
    """Raises KeyError, TypeError or ValueError for what is none."""
    figures = Figures(tuple(float(nll) for nll in header["nlls"]), float(header["peak"]), bool(header["fits"]))
    return WorkResult(figures, torch.frombuffer(payload, dtype=torch.int64) if payload.nbytes else None)


def losses_of(documents: Sequence[Document], size: int) -> list[Work]:
    return [Losses(tuple(documents[start : start + size])) for start in range(0, len(documents), size)]
