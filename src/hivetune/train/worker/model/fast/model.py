"""The fast path's `LoraModel`: documents in, one flat row of tokens through the layers and back, gradients out.

The loss is computed at the positions that predict something, in chunks, and its gradient is made in the forward pass.
So the vocabulary's matrix is used twice (2 products, 4 V D FLOPs an entry instead of 6 with recomputed logits), and
only one chunk of logits exists at a time, as in Liger-Kernel's fused linear cross entropy (arXiv 2410.10989).

Shapes as at the head of layer.py; R rows of the stream, E entries (a row and the token it must predict), C entries of a
chunk, N adapter weights, V tokens.
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
from hivetune.train.worker.model.fast.attention import attention_of, tables_for
from hivetune.train.worker.model.fast.layer import LayerContext, Saved, backward_layer, forward_layer
from hivetune.train.worker.model.fast.ops import Drop, ops_for
from hivetune.train.worker.model.fast.spec import ModelSpec, read_spec
from hivetune.train.worker.model.fast.tables import BatchTables, drop_keys, make_tables
from hivetune.train.worker.model.fast.weights import bind_adapter, read_weights
from hivetune.train.worker.model.memory import Workspace
from hivetune.train.worker.model.protocol import Document, halved

FAST_BUDGET_TOKENS = 4096
# Logits of a chunk: 340 entries at SmolLM2's 49k tokens, 110 at Qwen's 152k. More is not faster: 410 GFLOP/s a core at
# 192 entries, 411 at 320, 426 at 512 (docs/log.md).
CHUNK_LOGITS = 16 << 20


def chunk_rows(vocab: int) -> int:
    """Return the number of loss entries in a chunk of logits, a multiple of 64."""
    return max(64, CHUNK_LOGITS // vocab // 64 * 64)


def final_norm(ctx: LayerContext, x_RD: Tensor, delta_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized rows of the last layer's output x + delta, that output (wide), and its rstd."""
    sum_RD, rstd_R = ctx.buffer("final", *x_RD.shape, wide=True), ctx.buffer("final_rstd", len(x_RD), wide=True)
    y_RD = ctx.buffer("y", *x_RD.shape)
    ctx.ops.add_norm(x_RD, delta_RD, sum_RD, ctx.weights.norm_D, ctx.spec.eps, y_RD, rstd_R)
    return y_RD, sum_RD, rstd_R


def loss_and_gradient(ctx: LayerContext, x_RD: Tensor, delta_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nll [E] of each loss entry in nats, and the gradient of sum(weight * nll) with respect to the last
    layer's output.

    x_RD + delta_RD is that output; the gradient [R, D] is wide. The weight of an entry is its count.
    """
    batch = ctx.batch
    y_RD, sum_RD, rstd_R = final_norm(ctx, x_RD, delta_RD)
    dy_RD = ctx.buffer("dy", *x_RD.shape)
    if not batch.straight:
        dy_RD.zero_()  # several entries of a row add to it below
    nll_E = entry_nll(ctx, y_RD, dy_RD)
    dx_RD = ctx.buffer("dx", *x_RD.shape, wide=True).zero_()
    ctx.ops.norm_backward(dy_RD, sum_RD, rstd_R, ctx.weights.norm_D, dx_RD, None)
    return nll_E, dx_RD


def entry_nll(ctx: LayerContext, y_RD: Tensor, dy_RD: Tensor | None) -> Tensor:
    """Return the nll of all loss entries in nats, valid until the next micro-batch.

    If `dy_RD` is given, the gradient of the normalized rows is written to it.
    """
    spec, batch, head_VD = ctx.spec, ctx.batch, ctx.weights.head_VD
    count_E = batch.count_E
    entries, size = len(batch.entry_row_E), chunk_rows(spec.vocab)
    nll_E = ctx.buffer("nll", entries, wide=True)
    for start in range(0, entries, size):
        stop = min(start + size, entries)
        part, rows_C = slice(start, stop), batch.entry_row_E[start:stop]
        hidden_CD = y_RD[part]
        if not batch.straight:
            hidden_CD = torch.index_select(y_RD, 0, rows_C, out=ctx.buffer("entries", len(rows_C), spec.hidden))
        logits_CV = ctx.buffer("logits", stop - start, spec.vocab)
        ctx.ops.multiply(hidden_CD, head_VD.t(), logits_CV)
        ctx.ops.cross_entropy(
            logits_CV,
            batch.target_E[part],
            count_E[part],
            spec.logit_softcap,
            nll_E[part],
            gradient=dy_RD is not None,
        )
        if dy_RD is None:
            continue
        if batch.straight:
            ctx.ops.multiply(logits_CV, head_VD, dy_RD[part])
        else:
            dhidden_CD = ctx.buffer("dentries", len(rows_C), spec.hidden)
            ctx.ops.multiply(logits_CV, head_VD, dhidden_CD)
            dy_RD.index_add_(0, rows_C, dhidden_CD)
    return nll_E


class FastModel:
    """A `LoraModel` (worker/model/protocol.py) computed by hand.

    It reads these choices: streamed (number of layers whose weights are not kept), budget_tokens (the limit of a
    micro-batch), pack_tokens (its aim with `workers`), halvings (of each micro-batch), recompute (number of layers
    whose inner values are recomputed in the backward pass), products, kernels (native or torch), attention (eager: no
    fused kernel).

    The attribute `kernels` names the kernels in use, with the reason if they are those of torch. Raises NotFast for a
    model that the fast path does not compute exactly.
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
    ):
        self.device, self.dtype = device, dtype
        if device.type == "cuda":  # by default torch sums partial products in half precision there
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.spec: ModelSpec = read_spec(folder)
        self._ops = ops_for(choices, device, dtype)
        self.kernels, self.multiply = self._ops.name, self._ops.multiply
        self.weights = read_weights(folder, self.spec, lora, dtype, device, streamed=choices.streamed or 0)
        self.master_N, self.grad_N, self.adapter = bind_adapter(self.weights, lora, device)
        self.budget_tokens = choices.budget_tokens or FAST_BUDGET_TOKENS
        self.pack_tokens = choices.pack_tokens
        self.halvings = choices.halvings or 0
        self._scaling, self._lora = scaling(lora), lora
        self._recompute = choices.recompute or 0
        # Gemma's factor is rounded to the model's precision first, as it was in training (sqrt(2048) is 45.25 in bf16).
        self._embed_scale = self.spec.embed_scale
        if self.spec.family.scaled_embedding:
            self._embed_scale = torch.tensor(self.spec.embed_scale, dtype=dtype).item()
        self._workspace = Workspace(device)
        precision = str(dtype).removeprefix("torch.")
        self._pad = multiples_of(token_multiple(device.type, precision, choices.products))

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
        # The host lays the tables of one while a card computes the one before: nothing here waits for the device,
        # copies from it, or has a shape that depends on what it computed.
        total = torch.zeros((), dtype=self.master_N.dtype, device=self.device)
        self._refresh()
        for tables in micro_batches:
            there = tables.on(self.device)
            nll_E = self._forward_backward(self._context(there, scale=scale, keep=True))
            total += torch.dot(nll_E, there.count_E)
        return total

    @torch.no_grad()
    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        self._refresh()
        rows = _rows(documents)
        sums_B = torch.zeros(len(documents), dtype=self.master_N.dtype, device=self.device)
        for batch in halved(split_documents(rows, self.budget_tokens), self.halvings):
            layout = make_layout([rows[index] for index in batch], pad=self._pad)
            ctx = self._context(self._tables(layout).on(self.device), adapter=adapter)
            nll_E = entry_nll(ctx, final_norm(ctx, *self._forward_only(ctx))[0], None)
            owners = [(index, entry) for index, owned in zip(batch, layout.owners, strict=True) for entry in owned]
            index_M, entry_M = torch.tensor(owners, dtype=torch.int64, device=self.device).t()
            sums_B.index_add_(0, index_M, nll_E[entry_M])
        return sums_B

    def _refresh(self) -> None:
        """Copy the fp32 masters to where the products read them: A below the base rows, scale * B^T on its own."""
        # Once a call, not a micro-batch: the optimizer changes them between calls only. Rows below matrices that are
        # replaced come with those, see `_enter`.
        for index, layer in enumerate(self.weights.layers):
            for matrix in layer.matrices:
                for member in matrix.adapted:
                    torch.mul(member.up_NR.t(), self._scaling, out=member.scaled_up_RN)
                if index >= self.weights.num_replaced:
                    matrix.refresh_downs()

    def _forward_backward(self, ctx: LayerContext) -> Tensor:
        """Return nll [E] of each entry and add up the adapters' gradients."""
        x_TD, delta_TD = self._embed(ctx), None
        all_saved: list[Saved] = []
        for index in range(len(self.weights.layers)):
            self._enter(index, index + 1, index + 2)
            # Recomputed layers share one set of buffers; each keeps its input apart (x.INDEX).
            slot = "again" if index < self._recompute else str(index)
            saved = forward_layer(ctx, index, x_TD, delta_TD, slot)
            all_saved.append(saved)
            x_TD, delta_TD = saved.mid_SD, saved.delta_SD
        nll_E, dx_SD = loss_and_gradient(ctx, x_TD, all_saved[-1].delta_SD)
        dx: Tensor | None = dx_SD
        for index in reversed(range(len(all_saved))):
            self._enter(index, index - 1, index - 2)
            saved = all_saved.pop()
            if index < self._recompute:
                saved = forward_layer(ctx, index, saved.x_TD, None, "again")
            if dx is not None:
                dx = backward_layer(ctx, index, saved, dx)
        return nll_E

    def _forward_only(self, ctx: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the stream after the last layer and the delta still to be added, at the rows that predict."""
        x_TD, delta_TD = self._embed(ctx), None
        layers = len(self.weights.layers)
        for index in range(layers):
            self._enter(index, (index + 1) % layers, (index + 2) % layers)  # the next documents begin again at 0
            saved = forward_layer(ctx, index, x_TD, delta_TD, "only")
            x_TD, delta_TD = saved.mid_SD, saved.delta_SD
        assert delta_TD is not None
        return x_TD, delta_TD

    def _embed(self, ctx: LayerContext) -> Tensor:
        x_TD = ctx.buffer("x.0", len(ctx.batch.tokens_T), self.spec.hidden, wide=True)
        tokens_TD = ctx.buffer("y", len(x_TD), self.spec.hidden)  # free until the first norm
        x_TD.copy_(torch.index_select(self.weights.embedding_VD, 0, ctx.batch.tokens_T, out=tokens_TD))
        if self.spec.embed_scale != 1.0:
            x_TD *= self._embed_scale
        return x_TD

    def _enter(self, index: int, *following: int) -> None:
        """Bring the matrices of layer `index`, which is computed next; then, in this order, `following`."""
        self.weights.enter(index, following)
        if index < self.weights.num_replaced:  # adapters' A lie below the frozen rows, and went with those
            for matrix in self.weights.layers[index].matrices:
                matrix.refresh_downs()

    def _split(self, rows: Sequence[TrimmedDocument]) -> list[list[int]]:
        batches = split_documents(rows, self.budget_tokens, aim_tokens=self.pack_tokens or self.budget_tokens)
        return halved(batches, self.halvings)

    def _layout(self, rows: Sequence[TrimmedDocument]) -> Layout:
        return make_layout(rows, pad=self._pad)

    def _draw(self) -> int | None:
        """Return the seed of a step's masks, from the generator that the loop seeds."""
        return int(torch.randint(2**62, ())) if self._lora.dropout else None

    def _context(
        self, batch: BatchTables, *, adapter: bool = True, scale: float = 1.0, keep: bool = False
    ) -> LayerContext:
        """Return a micro-batch, whose tables are on the device, at its first layer."""
        return LayerContext(
            self.spec,
            self.weights,
            self._ops,
            self._workspace,
            self.dtype,
            batch,
            attention_of(self._ops, batch.layout, batch.attention, self.spec, self._workspace),
            adapter=adapter,
            drop=None if batch.key_T is None else Drop(batch.key_T, self._lora.dropout, self._workspace),
            scale=scale,
            up_scale=scale * self._scaling,
            keep=keep,
        )

    def _tables(self, layout: Layout, draw: int | None = None) -> BatchTables:
        """Return the tables of a layout. `draw`: what dropout's masks follow from besides the rows; None without."""
        attention = tables_for(self._ops, layout)
        keys = None if draw is None else drop_keys(layout, draw)
        tables = make_tables(layout, self.spec, self.dtype, attention, pad=self._pad, keys=keys)
        return tables if self.device.type == "cpu" else tables.changed(Tensor.pin_memory)  # a card reads it by itself


def _rows(documents: Sequence[Document]) -> list[TrimmedDocument]:
    return [trim_document(doc.tokens_L.tolist(), doc.trained_L.tolist(), doc.weight) for doc in documents]
