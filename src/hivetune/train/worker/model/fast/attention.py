"""Attention of a layout: a query attends to the keys of its parent segments, and to earlier ones of its own segment.

There are two implementations: the C++ kernels, and torch, whose SDPA computes segments of similar size as a batch. For
torch the keys are gathered along their paths, so documents stay separate. The backward pass recomputes the scores.

Shapes: T tokens, H query heads, E channels of a head, S segments of a batch, Q queries and K keys of each, padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hivetune.train.plan.layout import Layout, rounded_up
from hivetune.train.worker.model.fast.backend import (
    ATTENTION,
    ATTENTION_BACKWARD,
    AttentionArguments,
    LayoutArguments,
    kernel_of,
)
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.memory import Workspace, wide_dtype

LANES = 16
# Attention's backward pass is divided by trees of segments, by heads that share keys, and by parts of the keys where
# the others are fewer than TASKS or a row longer than LONG_KEYS, so that they keep many cores busy. The division
# follows from the rows alone: sums have the same order on any machine. A part takes turns with the others, PIECE_KEYS
# keys at a time (attention.cpp: PIECE).
PIECE_KEYS, LONG_KEYS, TASKS, MAX_PARTS = 256, 1024, 6, 8
# Segments are batched by sizes rounded up to this, for little padding. Fused kernels want lengths that are multiples of
# 8 at least; their own blocks are 64 or 128.
SIZE_STEP = 64


class Attention(Protocol):
    """Attention of one layout. Each row of the qkv buffer is [q | k | v | ...], after rotary positions."""

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        """Write attention's output [T, heads * head_dim], and for `backward` the logarithm of each softmax's sum.

        torch's implementation does not write `lse_TH`. window: as in `LayerSpec`.
        """

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        """Write the gradients of q, k and v into the first columns of `dqkv_TW`."""


def attention_of(
    ops: Ops, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace
) -> Attention:
    """Return the attention of one layout. `tables`: the result of `tables_for`, moved to the device."""
    if ops.native and not ops.eager:
        return NativeAttention(layout, spec, ops.native, workspace)
    return TorchAttention(tables, spec, eager=ops.eager)


def tables_for(ops: Ops, layout: Layout) -> tuple[Tensor, ...]:
    """Return the index tables of torch's attention, on the host; an empty tuple for the kernels, which need none."""
    return () if ops.native and not ops.eager else segment_tables(layout)


class NativeAttention:
    """Attention by the C++ kernels. `parts`: number of parts into which the keys are divided in the backward pass."""

    def __init__(self, layout: Layout, spec: ModelSpec, dtype: torch.dtype, workspace: Workspace):
        self._spec, self._workspace = spec, workspace
        self._forward = kernel_of(dtype, "attention", ATTENTION)
        self._backward = kernel_of(dtype, "attention_backward", ATTENTION_BACKWARD)
        segments: list[tuple[int, ...]] = []
        paths: list[int] = []
        trees: list[list[int]] = []
        for number, segment in enumerate(layout.segments):
            path = (*segment.parents, number)
            segments.append((segment.start, segment.size, segment.depth, len(paths), len(path)))
            paths += path
            if segment.tree == len(trees):
                trees.append([number, 0, segment.start, 0])
            trees[-1][1] += 1
            trees[-1][3] += segment.size
        self._tables = tuple(torch.tensor(table, dtype=torch.int64) for table in (segments, paths, trees))
        self._layout = LayoutArguments(*(table.data_ptr() for table in self._tables), len(segments), len(trees))
        longest = max(segment.depth + segment.size for segment in layout.segments)
        parts = max(-(-TASKS // (len(trees) * spec.kv_heads)), longest // LONG_KEYS)
        self.parts = min(parts, -(-longest // PIECE_KEYS), MAX_PARTS)

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        self._forward(self._shape(qkv_TW, window), self._layout, qkv_TW, out_TN, lse_TH)

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        sums = None
        if self.parts > 1:
            shape = self.parts, self._spec.heads, len(qkv_TW), rounded_up(self._spec.head_dim, LANES)
            sums = self._workspace.take("attention_sums", *shape, dtype=torch.float32)
        shape_and_layout = self._shape(qkv_TW, window), self._layout
        self._backward(*shape_and_layout, dout_TN, qkv_TW, out_TN, lse_TH, dqkv_TW, sums, self.parts)

    def _shape(self, qkv_TW: Tensor, window: int | None) -> AttentionArguments:
        spec, scales = self._spec, (self._spec.attention_scale, self._spec.attention_softcap)
        return AttentionArguments(spec.heads, spec.kv_heads, spec.head_dim, qkv_TW.stride(0), window or 0, *scales)


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of similar size. query_SQ, key_SK: flat token numbers; padding repeats token 0.

    place_N: the positions of the real queries among the S * Q; row_N: the flat row of each of them.
    """

    query_SQ: Tensor
    key_SK: Tensor
    ago_SQK: Tensor
    """The distance in positions from a query back to a key; negative for keys that it must not see."""
    place_N: Tensor
    row_N: Tensor


TABLES = len(fields(SegmentBatch))


class TorchAttention:
    """Attention in torch, by the `segment_tables` of a layout."""

    def __init__(self, tables: Sequence[Tensor], spec: ModelSpec, *, eager: bool = False):
        self._spec, self._eager = spec, eager
        self._biases: dict[tuple[int, int | None], Tensor] = {}
        self._batches = [SegmentBatch(*tables[at : at + TABLES]) for at in range(0, len(tables), TABLES)]

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        for number, batch in enumerate(self._batches):
            bias_S1QK = self._bias(number, window, qkv_TW.dtype)
            out_SHQE = _attend(*self._gather(qkv_TW, batch), bias_S1QK, self._spec, self._eager)
            out_TN[batch.row_N] = out_SHQE.transpose(1, 2).flatten(0, 1).flatten(1)[batch.place_N]

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        # Keys of a shared prefix get gradients from every segment after it, so they are summed, in the wide dtype.
        spec = self._spec
        k_at, v_at = spec.q_width, spec.q_width + spec.kv_width
        total_TW = torch.zeros(len(qkv_TW), spec.qkv_width, dtype=lse_TH.dtype, device=qkv_TW.device)
        for number, batch in enumerate(self._batches):
            bias_S1QK = self._bias(number, window, qkv_TW.dtype)
            q, k, v = (part.requires_grad_() for part in self._gather(qkv_TW, batch))
            dout_nN = torch.zeros(batch.query_SQ.numel(), spec.q_width, dtype=dout_TN.dtype, device=dout_TN.device)
            dout_nN[batch.place_N] = dout_TN[batch.row_N]
            with torch.enable_grad():
                out_SHQE = _attend(q, k, v, bias_S1QK, spec, self._eager)
            dq, dk, dv = torch.autograd.grad(out_SHQE, (q, k, v), self._heads(dout_nN.view(*batch.query_SQ.shape, -1)))
            total_TW[batch.row_N, :k_at] = dq.transpose(1, 2).flatten(0, 1).flatten(1)[batch.place_N].to(total_TW.dtype)
            for start, grad_SHKE in ((k_at, dk), (v_at, dv)):
                grad_SGKE = grad_SHKE.to(total_TW.dtype).unflatten(1, (spec.kv_heads, -1)).sum(2)
                columns_TN = total_TW[:, start : start + spec.kv_width]
                columns_TN.index_add_(0, batch.key_SK.flatten(), grad_SGKE.transpose(1, 2).flatten(0, 1).flatten(1))
        dqkv_TW[:, : spec.qkv_width].copy_(total_TW)

    def _bias(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 where a query sees a key, -inf elsewhere; made once for all layers with this window."""
        key = (number, window)
        if key not in self._biases:
            ago_SQK = self._batches[number].ago_SQK
            mask_SQK = ago_SQK >= 0 if window is None else (ago_SQK >= 0) & (ago_SQK < window)
            self._biases[key] = torch.zeros_like(mask_SQK, dtype=dtype).masked_fill_(~mask_SQK, float("-inf"))[:, None]
        return self._biases[key]

    def _gather(self, qkv_TW: Tensor, batch: SegmentBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [S, H, Q, E], k and v [S, H, K, E]: key-value heads repeated for the queries that share them."""
        spec, share = self._spec, self._spec.heads // self._spec.kv_heads
        k_at, v_at = spec.q_width, spec.q_width + spec.kv_width
        q_SHQE = self._heads(qkv_TW[:, :k_at][batch.query_SQ])
        k_SGKE = self._heads(qkv_TW[:, k_at:v_at][batch.key_SK])
        v_SGKE = self._heads(qkv_TW[:, v_at : v_at + spec.kv_width][batch.key_SK])
        return q_SHQE, k_SGKE.repeat_interleave(share, 1), v_SGKE.repeat_interleave(share, 1)

    def _heads(self, x_SQN: Tensor) -> Tensor:
        return x_SQN.unflatten(2, (-1, self._spec.head_dim)).transpose(1, 2)


def _attend(q_SHQE: Tensor, k_SHKE: Tensor, v_SHKE: Tensor, bias_S1QK: Tensor, spec: ModelSpec, eager: bool) -> Tensor:
    """Attend by torch's SDPA where that can express it; `eager`: by two products and a softmax, without a fused kernel.

    Gemma 2 caps its scores (cap * tanh(score / cap)), which SDPA has no argument for.
    """
    cap = spec.attention_softcap
    if not cap and not eager:
        return F.scaled_dot_product_attention(q_SHQE, k_SHKE, v_SHKE, attn_mask=bias_S1QK, scale=spec.attention_scale)
    wide = wide_dtype(q_SHQE.dtype)
    score_SHQK = (q_SHQE.to(wide) @ k_SHKE.to(wide).transpose(2, 3)) * spec.attention_scale
    if cap:
        score_SHQK = cap * torch.tanh(score_SHQK / cap)
    return (torch.softmax(score_SHQK + bias_S1QK, 3) @ v_SHKE.to(wide)).to(q_SHQE.dtype)


def segment_tables(layout: Layout) -> tuple[Tensor, ...]:
    """Return a layout's index tables, on the host: of a SegmentBatch for each group of segments of similar size."""
    classes: dict[tuple[int, int], list[int]] = {}
    for number, segment in enumerate(layout.segments):
        sizes = segment.size, segment.depth + segment.size
        queries, keys = (rounded_up(size, SIZE_STEP) for size in sizes)
        classes.setdefault((queries, keys), []).append(number)
    return tuple(table for like in sorted(classes) for table in _class_tables(layout, classes[like], *like))


def _class_tables(layout: Layout, numbers: Sequence[int], queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return the tables of segments that are padded to `queries` and `keys` each."""
    query_SQ = torch.zeros(len(numbers), queries, dtype=torch.int64)
    key_SK = torch.zeros(len(numbers), keys, dtype=torch.int64)
    ago_SQK = torch.full((len(numbers), queries, keys), -1, dtype=torch.int32)
    place, row = [], []
    for at, number in enumerate(numbers):
        segment = layout.segments[number]
        path = [layout.segments[parent] for parent in (*segment.parents, number)]
        length = segment.depth + segment.size
        key_SK[at, :length] = torch.cat([torch.arange(part.start, part.start + part.size) for part in path])
        query_SQ[at, : segment.size] = torch.arange(segment.start, segment.start + segment.size)
        position_Q = torch.arange(segment.depth, length, dtype=torch.int32)
        ago_SQK[at, : segment.size, :length] = position_Q[:, None] - torch.arange(length, dtype=torch.int32)
        ago_SQK[at, segment.size :, 0] = 0  # padding looks at one key, so that no softmax is over nothing
        place.append(torch.arange(segment.size) + at * queries)
        row.append(query_SQ[at, : segment.size])
    return query_SQ, key_SK, ago_SQK, torch.cat(place), torch.cat(row)
