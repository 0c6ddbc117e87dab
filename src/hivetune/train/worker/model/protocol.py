"""The interface of a model for training and scoring, and the documents that it takes.

It has two implementations: fast/ computes the architectures that it knows, general.py runs any causal model of
transformers. load.py chooses between them. Both keep all adapter weights in one flat fp32 buffer. They return sums,
never means: the caller divides.

Shapes: L positions of a document, N adapter weights.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hivetune.data.snapshot import Snapshot


class Document(NamedTuple):
    """One row of a snapshot. Position i predicts token i + 1, so `trained_L[0]` is never set."""

    row: int
    tokens_L: Tensor
    """int64, on any device."""
    trained_L: Tensor
    """bool: this token is a target."""
    weight: float = 1.0
    """What its loss is multiplied by in `backward`; below 0 for a bad answer."""


class LoraModel(Protocol):
    """A frozen base with low-rank adapters. Everything below is on `device`."""

    path: Literal["fast", "general"]
    why: str
    """Why the general path runs; empty on the fast path."""
    kernels: str
    """The kernels that compute: their roundings differ."""
    device: torch.device
    dtype: torch.dtype
    master_N: Tensor
    grad_N: Tensor

    @property
    def adapter(self) -> Mapping[str, Tensor]:
        """Return PEFT parameter name -> fp32 view into `master_N`. All values are zero after `load_model`.

        An example of a name is `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
        """
        ...

    def multiply(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        """Compute out = a b with the library that computes the model's large products."""
        ...

    def backward(self, documents: Sequence[Document], scale: float) -> Tensor:
        """Add d(scale * sum of weight * nll) / d master to `grad_N`. Return the unscaled sum of weight * nll in nats.

        The sum is over trained tokens. The documents are divided into micro-batches here. The returned scalar is on
        `device`; the call does not wait for it.
        """
        ...

    def micro_batches(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the micro-batches of `backward` as indices of documents; they depend on contents and choices."""
        ...

    def backward_one(self, documents: Sequence[Document], scale: float) -> Tensor:
        """Compute the same as `backward`, with all documents as one micro-batch, whatever its size."""
        ...

    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        """Return each document's sum of nll over its trained tokens, in nats. `adapter` False: of the base."""
        ...


_Part = TypeVar("_Part")


def halved(batches: Sequence[list[_Part]], halvings: int) -> list[list[_Part]]:
    """Return the micro-batches, each cut into 2 ** `halvings` parts, or into single documents."""
    # The budget is not halved instead, because half a budget that no step fills would change nothing.
    parts: list[list[_Part]] = []
    for batch in batches:
        size = max(1, -(-len(batch) // 2**halvings))
        parts += [batch[start : start + size] for start in range(0, len(batch), size)]
    return parts


def read_documents(snapshot: Snapshot, rows: Sequence[int]) -> list[Document]:
    """Return rows of a snapshot as documents with tensors on the CPU."""
    # They are copies, so that nothing points into the file while a step runs.
    documents = []
    for row in rows:
        tokens = torch.frombuffer(bytearray(snapshot.tokens(row).cast("B")), dtype=torch.int32)
        trained = torch.frombuffer(bytearray(snapshot.trained(row).cast("B")), dtype=torch.uint8)
        documents.append(Document(row, tokens.to(torch.int64), trained.bool()))
    return documents
