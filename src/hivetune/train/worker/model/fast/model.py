"""The fast path's `LoraModel`: documents in, one flat row of tokens through the layers and back, gradients out.

Shapes: T tokens, D hidden, E entries of the loss, N adapter weights.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.plan.layout import (
    Layout,
    TrimmedDocument,
    make_layout,
    multiples_of,
    split_documents,
    token_multiple,
    trim_document,
)
from hivetune.train.worker.model.adapter import scaling
from hivetune.train.worker.model.fast.computing import backend_of
from hivetune.train.worker.model.fast.ops import Drop
from hivetune.train.worker.model.fast.passes import Passes, entry_nll, final_norm
from hivetune.train.worker.model.fast.spec import ModelSpec, read_spec
from hivetune.train.worker.model.fast.state import Walk
from hivetune.train.worker.model.fast.tables import BatchTables, drop_keys, lay_tables
from hivetune.train.worker.model.fast.weights.matrices import bind_adapter
from hivetune.train.worker.model.fast.weights.read import read_weights
from hivetune.train.worker.model.memory import Workspace
from hivetune.train.worker.model.protocol import Document, halved

FAST_BUDGET_TOKENS = 4096


class FastModel:
    """A `LoraModel` (worker/model/protocol.py) computed by hand.

    Choices it reads: streamed (layers whose weights do not stay), stream_from, budget_tokens (of a micro-batch),
    pack_tokens (its aim where there are workers), halvings (of each), recompute (layers whose inner state is recomputed
    in the backward pass), share_prefixes, token_multiple, products (of float32 on a CPU), kernels (native or torch),
    attention (eager: no fused kernel), rank_multiple (the plain kernels' thin products are padded with zeros to it; the
    native ones call no library for them).

    The attribute `kernels` says which run, and why if they are the plain ones. Raises NotFast for a model that the fast
    path does not compute exactly.
    """

    path: Literal["fast", "general"] = "fast"
    why = ""

    def __init__(
        self,
        folder: Path,
        lora: LoraConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        choices: Choices = NO_CHOICES,
        first_layers: int | None = None,
    ):
        self.device, self.dtype = device, dtype
        if device.type == "cuda":  # by default torch sums partial products in half precision there
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.spec: ModelSpec = read_spec(folder, first_layers)
        self._backend, self.kernels = backend_of(choices, device, dtype)
        self._ops, self.product = self._backend.ops, self._backend.multiply
        rank_multiple = choices.rank_multiple or 1 if self._ops.name == "torch" else 1
        columns = -(-lora.r // rank_multiple) * rank_multiple
        self.weights = read_weights(folder, self.spec, lora, dtype, device, columns=columns, choices=choices)
        self.master_N, self.grad_N, self.adapter = bind_adapter(self.weights, lora, device, columns=columns)
        self.budget_tokens = choices.budget_tokens or FAST_BUDGET_TOKENS
        self.pack_tokens = choices.pack_tokens
        self.halvings = choices.halvings or 0
        self._scaling, self._lora = scaling(lora), lora
        recompute = min(choices.recompute or 0, len(self.spec.layers))
        self._passes = Passes(self.spec, self.weights, scaling=self._scaling, recompute=recompute)
        self._workspace = Workspace(device)
        precision = str(dtype).removeprefix("torch.")
        self._pad = multiples_of(choices.token_multiple or token_multiple(device.type, precision, choices.products))
        self._share = choices.share_prefixes is not False

    def backward(self, documents: Sequence[Document], scale: float) -> Tensor:
        draw, rows = self._draw(), _rows(documents)
        return self._compute(
            (self._tables(self._layout([rows[index] for index in batch]), draw) for batch in self._split(rows)), scale
        )

    def micro_batches(self, documents: Sequence[Document]) -> list[list[int]]:
        return self._split(_rows(documents))

    def backward_one(self, documents: Sequence[Document], scale: float) -> Tensor:
        return self._compute([self._tables(self._layout(_rows(documents)), self._draw())], scale)

    @torch.no_grad()
    def _compute(self, micro_batches: Iterable[BatchTables], scale: float) -> Tensor:
        """Compute `backward` of micro-batches, whose tables the host lays while the device computes the one before.

        Nothing here waits for the device, copies from it, or has a shape that depends on what it computed.
        """
        total = torch.zeros((), dtype=self.master_N.dtype, device=self.device)
        self._passes.refresh()
        for tables in micro_batches:
            there = tables.on(self.device)
            nll_E = self._passes.forward_backward(self._walk(there, scale=scale, keep=True))
            total += torch.dot(nll_E, there.count_E)
        return total

    @torch.no_grad()
    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        self._passes.refresh()
        rows = _rows(documents)
        sums_B = torch.zeros(len(documents), dtype=self.master_N.dtype, device=self.device)
        for batch in halved(split_documents(rows, self.budget_tokens, share=self._share), self.halvings):
            layout = make_layout([rows[index] for index in batch], share=self._share, pad=self._pad)
            walk = self._walk(self._tables(layout).on(self.device), adapter=adapter)
            nll_E = entry_nll(walk, final_norm(walk, *self._passes.forward_only(walk))[0], None)
            index_M, entry_M = self._owners(layout, batch)
            sums_B.index_add_(0, index_M, nll_E[entry_M])
        return sums_B

    def _owners(self, layout: Layout, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return, on the device, entries of a layout and the numbers of the documents that each belongs to."""
        owners = [(number, entry) for number, owned in zip(numbers, layout.owners, strict=True) for entry in owned]
        owner_M, entry_M = torch.tensor(owners, dtype=torch.int64, device=self.device).t()
        return owner_M, entry_M

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, adapter: bool = True) -> Tensor:
        """Return the logits [len(tokens), V] of one document, in the dtype of the model."""
        self._passes.refresh()
        everything = TrimmedDocument(tuple(tokens), tuple((index, 0) for index in range(len(tokens))))
        walk = self._walk(self._tables(make_layout([everything], share=False)).on(self.device), adapter=adapter)
        logits_TV = final_norm(walk, *self._passes.forward_only(walk))[0] @ self.weights.head_VD.t()
        cap = self.spec.logit_softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    def _split(self, rows: Sequence[TrimmedDocument]) -> list[list[int]]:
        batches = split_documents(
            rows, self.budget_tokens, share=self._share, aim_tokens=self.pack_tokens or self.budget_tokens
        )
        return halved(batches, self.halvings)

    def _layout(self, rows: Sequence[TrimmedDocument]) -> Layout:
        return make_layout(rows, share=self._share, pad=self._pad)

    def _draw(self) -> int | None:
        """Return the seed of a step's masks, from the generator that the loop seeds."""
        return int(torch.randint(2**62, ())) if self._lora.dropout else None

    def _walk(self, batch: BatchTables, *, adapter: bool = True, scale: float = 1.0, keep: bool = False) -> Walk:
        """Return a micro-batch, whose tables are on the device, at its first layer."""
        return Walk(
            self.spec,
            self.weights,
            self._ops,
            self._workspace,
            self.dtype,
            batch,
            self._backend.attention(batch.layout, batch.attention, self.spec, self._workspace),
            adapter=adapter,
            drop=None if batch.key_T is None else Drop(batch.key_T, self._lora.dropout, self._workspace),
            scale=scale,
            up_scale=scale * self._scaling,
            keep=keep,
        )

    def _tables(self, layout: Layout, draw: int | None = None) -> BatchTables:
        """Return the tables of a layout.

        `draw`: what dropout's masks follow from besides the rows; None without dropout.
        """
        attention = self._backend.attention_tables(layout)
        keys = None if draw is None else drop_keys(layout, draw)
        tables = lay_tables(layout, self.spec, self.dtype, attention, pad=self._pad, keys=keys)
        return tables if self.device.type == "cpu" else tables.changed(Tensor.pin_memory)  # a card reads it by itself


def _rows(documents: Sequence[Document]) -> list[TrimmedDocument]:
    return [trim_document(doc.tokens_L.tolist(), doc.trained_L.tolist(), doc.weight) for doc in documents]
