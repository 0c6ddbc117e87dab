"""The fast path's `LoraModel`: documents in, one flat row of tokens through the layers and back, gradients out.

Shapes: T tokens, D hidden, E entries of the loss, N adapter weights.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.engine.model.adapter import scaling
from hivetune.engine.model.fast.attention import says_math_path
from hivetune.engine.model.fast.computing import attention_of, choose_ops
from hivetune.engine.model.fast.layer import backward_layer, forward_layer
from hivetune.engine.model.fast.loss import Weigh, loss_and_gradient, loss_only
from hivetune.engine.model.fast.ops import Drop, TorchOps, wide_of
from hivetune.engine.model.fast.spec import ModelSpec, Rope, read_spec
from hivetune.engine.model.fast.state import Kept, LayerBatch, Walk
from hivetune.engine.model.fast.weights.bind import bind_adapter
from hivetune.engine.model.fast.weights.matrices import groups_of, stacks_of
from hivetune.engine.model.fast.weights.read import read_weights
from hivetune.engine.model.fast.workspace import Workspace
from hivetune.engine.model.preference import JudgedDocuments, judged_documents, preference_loss, units
from hivetune.engine.model.protocol import Document, halved
from hivetune.plan.layout import (
    Layout,
    TrimmedDocument,
    make_layout,
    shares_prefixes,
    split_documents,
    split_units,
    token_multiple,
    trim_document,
)
from hivetune.run.choices import NO_CHOICES, Choices

FAST_BUDGET_TOKENS = 4096
MASK_64 = (1 << 64) - 1


class JudgedBatch(NamedTuple):
    """A micro-batch with bad answers in it. Document owner_M[i] has the entry entry_M[i]."""

    batch: LayerBatch
    about: JudgedDocuments
    owner_M: Tensor
    entry_M: Tensor


class FastModel:
    """A `LoraModel` (engine/model/protocol.py).

    Choices it reads: budget_tokens (tokens of a micro-batch), pack_tokens (what it aims at where there are workers),
    halvings (of each), recompute (layers whose inner state is recomputed in the backward pass), share_prefixes,
    token_multiple, chunk_rows (logit rows of a chunk), kernels (native or torch; default: native where they can be
    built), attention (eager: no fused kernel), rank_multiple (the plain kernels' thin products are padded with zeros
    to it; the native ones call no library for them). The attribute `kernels` says which run, and why if it is the
    plain ones; `attention` says why attention is on a slow path, or is empty. Raises NotFast for a model that the
    fast path does not compute exactly.
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
        if device.type == "cuda":  # sums of partial products in half precision are torch's default there
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.spec: ModelSpec = read_spec(folder)
        self._ops, self.kernels = choose_ops(dtype, device, choices.kernels)
        rank_multiple = choices.rank_multiple or 1 if isinstance(self._ops, TorchOps) else 1
        columns = -(-lora.r // rank_multiple) * rank_multiple
        self.weights = read_weights(folder, self.spec, lora, dtype, device, columns=columns)
        self.master_N, self.grad_N, self.adapter = bind_adapter(self.weights, lora, device, columns=columns)
        self.budget_tokens = choices.budget_tokens or FAST_BUDGET_TOKENS
        self.pack_tokens = choices.pack_tokens
        self.halvings = choices.halvings or 0
        self.recompute = min(choices.recompute or 0, len(self.spec.layers))
        self.multiple = choices.token_multiple or token_multiple(device.type, str(dtype).removeprefix("torch."))
        self.logit_rows = choices.logit_rows
        self._scaling, self._lora = scaling(lora), lora
        self._share_in_scoring = choices.share_prefixes is not False
        self.share_prefixes = self._share_in_scoring and shares_prefixes(lora)
        # Gemma's factor is rounded to the model's precision first, as it was in training (sqrt(2048) is 45.25 in bf16).
        self._embed_scale = self.spec.embed_scale
        if self.spec.family.scaled_embedding:
            self._embed_scale = torch.tensor(self.spec.embed_scale, dtype=dtype).item()
        self._workspace = Workspace(device)
        self._eager = choices.attention == "eager"
        self.attention = "the choices ask for it" if self._eager else says_math_path(self.spec, dtype, device)

    def backward(self, documents: Sequence[Document], scale: float) -> Tensor:
        return self.compute(self.prepare(documents), scale)

    def prepare(self, documents: Sequence[Document]) -> Iterator[LayerBatch]:
        """The micro-batches of a step, laid out and copied to the device one by one: all that the host does of it."""
        rows = _rows(documents)
        draw = self._draw()
        for batch in self._split(rows):
            yield self._laid_out([rows[index] for index in batch], draw)

    def micro_batches(self, documents: Sequence[Document]) -> list[list[int]]:
        return self._split(_rows(documents))

    def backward_one(self, documents: Sequence[Document], scale: float) -> Tensor:
        return self.compute([self._laid_out(_rows(documents), self._draw())], scale)

    @torch.no_grad()
    def compute(self, batches: Iterable[LayerBatch], scale: float) -> Tensor:
        """`backward` of prepared micro-batches. Nothing here waits for the device, copies from it, or has a shape that
        depends on what it computed (tests/engine/model/test_host.py), but the routing of experts."""
        total = torch.zeros((), dtype=self.master_N.dtype, device=self.device)
        self._refresh()
        for batch in batches:
            walk = self._walk(batch, scale=scale, keep=True)
            nll_E = self._forward_backward(walk)
            total += torch.dot(nll_E, batch.count_E)
        return total

    def backward_judged(self, documents: Sequence[Document], scale: float, beta: float) -> Tensor:
        return self.compute_judged(self.prepare_judged(documents), scale, beta)

    def prepare_judged(self, documents: Sequence[Document]) -> Iterator[JudgedBatch]:
        """As `prepare`; an answer and those that it is compared with are in one micro-batch."""
        rows, parts, draw = _rows(documents), units(documents), self._draw()
        for batch in halved(split_units(rows, parts, self.budget_tokens, share=self.share_prefixes), self.halvings):
            numbers = [number for unit in batch for number in unit]
            layout = make_layout(
                [rows[number] for number in numbers], share=self.share_prefixes, multiple=self.multiple
            )
            about = judged_documents([documents[number] for number in numbers], self.device, self.master_N.dtype)
            owners = [(number, entry) for number, owned in enumerate(layout.owners) for entry in owned]
            owner_M, entry_M = torch.tensor(owners).t().to(self.device)
            yield JudgedBatch(self._batch(layout, draw), about, owner_M, entry_M)

    @torch.no_grad()
    def compute_judged(self, batches: Iterable[JudgedBatch], scale: float, beta: float) -> Tensor:
        """`backward_judged` of prepared micro-batches; as `compute`, nothing here waits for the device."""
        losses: list[Tensor] = [torch.zeros(2, dtype=self.master_N.dtype, device=self.device)]
        self._refresh()
        for part in batches:

            def weigh(nll_E: Tensor, part: JudgedBatch = part) -> Tensor:
                nll_B = torch.zeros_like(part.about.good_B).index_add_(0, part.owner_M, nll_E[part.entry_M])
                weight_B, loss = preference_loss(part.about, nll_B, beta)
                losses.append(loss)
                return torch.zeros_like(nll_E).index_add_(0, part.entry_M, weight_B[part.owner_M])

            self._forward_backward(self._walk(part.batch, scale=scale, keep=True), weigh)
        return torch.stack(losses).sum(0)

    @torch.no_grad()
    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        self._refresh()
        rows = _rows(documents)
        sums_B = torch.zeros(len(documents), dtype=self.master_N.dtype, device=self.device)
        for batch in halved(split_documents(rows, self.budget_tokens, share=self._share_in_scoring), self.halvings):
            layout = make_layout([rows[index] for index in batch], share=self._share_in_scoring, multiple=self.multiple)
            walk = self._walk(self._batch(layout), adapter=adapter)
            nll_E = loss_only(walk, self.weights, *self._forward_only(walk), self.logit_rows)
            owners = [(index, entry) for index, owned in zip(batch, layout.owners, strict=True) for entry in owned]
            index_M, entry_M = torch.tensor(owners, device=self.device).t()
            sums_B.index_add_(0, index_M, nll_E[entry_M])
        return sums_B

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, adapter: bool = True) -> Tensor:
        """[len(tokens), V] of one document, in the dtype of the model."""
        self._refresh()
        everything = TrimmedDocument(tuple(tokens), tuple((index, 0) for index in range(len(tokens))))
        walk = self._walk(self._batch(make_layout([everything], share=False)), adapter=adapter)
        x_TD, delta_TD = self._forward_only(walk)
        y_TD, rstd_T = torch.empty_like(delta_TD), torch.empty_like(x_TD[:, 0])
        walk.ops.add_norm(x_TD, delta_TD, torch.empty_like(x_TD), self.weights.norm_D, self.spec.eps, y_TD, rstd_T)
        logits_TV = y_TD @ self.weights.head_VD.t()
        cap = self.spec.logit_softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    def _split(self, rows: Sequence[TrimmedDocument]) -> list[list[int]]:
        batches = split_documents(
            rows, self.budget_tokens, share=self.share_prefixes, aim_tokens=self.pack_tokens or self.budget_tokens
        )
        return halved(batches, self.halvings)

    def _laid_out(self, rows: Sequence[TrimmedDocument], draw: int | None) -> LayerBatch:
        return self._batch(make_layout(rows, share=self.share_prefixes, multiple=self.multiple), draw)

    def _forward_backward(self, walk: Walk, weigh: Weigh | None = None) -> Tensor:
        x_TD, delta_TD = self._embed(walk), None
        all_kept: list[Kept] = []
        for index in range(len(self.weights.layers)):
            # Recomputed layers share one set of buffers; each keeps its input apart (x.INDEX).
            slot = "again" if index < self.recompute else str(index)
            kept = forward_layer(walk, index, x_TD, delta_TD, slot)
            all_kept.append(kept)
            x_TD, delta_TD = kept.mid_SD, kept.delta_SD
        nll_E, dx_SD = loss_and_gradient(walk, self.weights, x_TD, all_kept[-1].delta_SD, self.logit_rows, weigh)
        dx: Tensor | None = dx_SD
        for index in reversed(range(len(all_kept))):
            kept = all_kept.pop()
            if index < self.recompute:
                kept = forward_layer(walk, index, kept.x_TD, None, "again")
            if dx is not None:
                dx = backward_layer(walk, index, kept, dx)
        return nll_E

    def _forward_only(self, walk: Walk) -> tuple[Tensor, Tensor]:
        """The stream after the last layer and the delta still to be added, at the rows that predict something."""
        x_TD, delta_TD = self._embed(walk), None
        for index in range(len(self.weights.layers)):
            kept = forward_layer(walk, index, x_TD, delta_TD, "only")
            x_TD, delta_TD = kept.mid_SD, kept.delta_SD
        assert delta_TD is not None
        return x_TD, delta_TD

    def _embed(self, walk: Walk) -> Tensor:
        x_TD = walk.buffer("x.0", walk.batch.layout.size, self.spec.hidden, wide=True)
        x_TD.copy_(self.weights.embedding_VD[walk.batch.tokens_T])
        if self.spec.embed_scale != 1.0:
            x_TD *= self._embed_scale
        return x_TD

    def _draw(self) -> int | None:
        """What the masks of a step follow from besides its rows, from the generator that the loop seeds."""
        return int(torch.randint(2**62, ())) if self._lora.dropout else None

    def _refresh(self) -> None:
        """Copy the fp32 masters to where the products read them: A below the base rows, scale * B^T on its own.

        Once a call, not a micro-batch: the optimizer changes them between calls only.
        """
        for layer in self.weights.layers:
            for group in groups_of(layer):
                for member in group.adapted:
                    assert member.down_RK is not None and member.up_NR is not None and member.scaled_up_RN is not None
                    group.weight_NRK[group.outputs + member.rank_at :][: len(member.down_RK)].copy_(member.down_RK)
                    torch.mul(member.up_NR.t(), self._scaling, out=member.scaled_up_RN[: member.up_NR.shape[1]])
            for stack in stacks_of(layer):
                stack.refresh(self._scaling)

    def _walk(self, batch: LayerBatch, *, adapter: bool = True, scale: float = 1.0, keep: bool = False) -> Walk:
        return Walk(
            self.spec,
            self.weights.layers,
            self._ops,
            self._workspace,
            self.dtype,
            batch,
            adapter=adapter,
            drop=None if batch.key_T is None else Drop(batch.key_T, self._lora.dropout, self._workspace),
            scale=scale,
            up_scale=scale * self._scaling,
            keep=keep,
        )

    def _batch(self, layout: Layout, draw: int | None = None) -> LayerBatch:
        """`draw`: what dropout's masks follow from besides the rows; None without dropout."""

        def put(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            here = torch.tensor(values, dtype=dtype)
            return here if self.device.type == "cpu" else here.pin_memory().to(self.device, non_blocking=True)

        # Padding entries may fall on rows that have one already; then the number of rows is no multiple, and rows
        # without an entry are added until it is.
        taken = set(layout.rows)
        idle = (row for row in range(layout.size) if row not in taken)
        rows = sorted(taken.union(itertools.islice(idle, -len(taken) % self.multiple)))
        place = {row: number for number, row in enumerate(rows)}
        entry_rows = [place[row] for row in layout.rows]
        return LayerBatch(
            layout=layout,
            tokens_T=put(layout.tokens),
            angles=tuple(_angles(rope, layout.positions, wide_of(self.dtype), self.device) for rope in self.spec.ropes),
            attention=attention_of(self._ops, layout, self.spec, self.dtype, self._workspace, eager=self._eager),
            rows_R=None if len(rows) == layout.size else put(rows),
            entry_row_E=put(entry_rows),
            target_E=put(layout.targets),
            count_E=put(layout.counts, wide_of(self.dtype)),
            straight=entry_rows == list(range(len(rows))),
            key_T=None if draw is None else put(drop_keys(layout, draw, whole_rows=not shares_prefixes(self._lora))),
        )


def drop_keys(layout: Layout, draw: int, *, whole_rows: bool) -> list[int]:
    """What the dropout of each token follows from: `draw` (of the step) and the tokens up to this one.

    So rows with a common prefix have the same masks in it, whether it is computed once or not, and the masks of a row
    are the same in any company. `whole_rows`: from all tokens of the row instead, so that no two rows share a mask.
    """
    keys = [0] * layout.size
    for segment in layout.segments:
        places = range(segment.start, segment.start + segment.size)
        key = draw
        if segment.parents:
            last = layout.segments[segment.parents[-1]]
            key = keys[last.start + last.size - 1]
        if whole_rows:
            for place in places:
                key = _next_key(key, layout.tokens[place])
        for place in places:
            keys[place] = key = _next_key(key, layout.tokens[place])
    return [key - (key >> 63 << 64) for key in keys]


def _next_key(key: int, token: int) -> int:
    """64 bits from 64 bits: the step of splitmix64 (Vigna), with the token in place of its counter."""
    key = (key + token * 2 + 0x9E3779B97F4A7C15) & MASK_64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK_64
    return key ^ (key >> 31)


def _rows(documents: Sequence[Document]) -> list[TrimmedDocument]:
    return [trim_document(document.tokens_L.tolist(), document.trained_L.tolist()) for document in documents]


def _angles(rope: Rope, positions: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rotated pairs], computed in fp64: fp32 angles are off by 1e-3 at position 32,000."""
    angle_TH = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(
        rope.frequencies, dtype=torch.float64
    )
    return tuple((part * rope.scale).to(device, dtype) for part in (angle_TH.cos(), angle_TH.sin()))  # type: ignore[return-value]
