"""A micro-batch through all layers and back. With the kernels in C++ a layer's calls are kept and made again.

Shapes as at the head of layer.py.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.calls import Result
from hivetune.train.worker.model.fast.kernels.native import NativeAttention, NativeOps
from hivetune.train.worker.model.fast.layer import backward_layer, forward_layer
from hivetune.train.worker.model.fast.loss import Weigh, loss_and_gradient
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.state import Kept, Walk
from hivetune.train.worker.model.fast.weights.matrices import Weights, refresh_downs, refresh_ups


class Passes:
    """`recompute`: the first layers, whose inner state is recomputed in the backward pass. `keep_calls`: of the native
    kernels; not where torch computes something between them that answers in memory of its own."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, ops: Ops, *, scaling: float, recompute: int, keep_calls: bool
    ):
        self._spec, self._weights, self._ops, self._scaling = spec, weights, ops, scaling
        self.recompute = recompute
        self.calls = ops.calls if isinstance(ops, NativeOps) and keep_calls else None
        # Gemma's factor is rounded to the model's precision first, as it was in training (sqrt(2048) is 45.25 in bf16).
        self._embed_scale = spec.embed_scale
        if spec.family.scaled_embedding:
            self._embed_scale = torch.tensor(spec.embed_scale, dtype=weights.embedding_VD.dtype).item()

    def forget(self) -> None:
        """A buffer is about to move."""
        if self.calls is not None:
            self.calls.forget()

    def refresh(self) -> None:
        """Copy the fp32 masters to where the products read them: A below the base rows, scale * B^T on its own.

        Once a call, not a micro-batch: the optimizer changes them between calls only. Rows below matrices that are
        replaced come with those, see `_enter`.
        """
        if self.calls is None:
            self._refresh()
        else:
            self.calls.again("refresh", self._refresh)

    def forward_backward(self, walk: Walk, logit_rows: int | None, weigh: Weigh | None = None) -> Tensor:
        """nll [E] of each entry; the adapters' gradients are added up. `logit_rows`, `weigh`: of the loss."""
        walk = self._bring(walk)
        x_TD, delta_TD = self._embed(walk), None
        all_kept: list[Kept] = []
        for index in range(len(self._weights.layers)):
            self._enter(index, index + 1, index + 2)
            # Recomputed layers share one set of buffers; each keeps its input apart (x.INDEX).
            slot = "again" if index < self.recompute else str(index)
            kept = self._again("forward", forward_layer, walk, index, x_TD, delta_TD, slot)
            all_kept.append(kept)
            x_TD, delta_TD = kept.mid_SD, kept.delta_SD
        nll_E, dx_SD = loss_and_gradient(walk, self._weights, x_TD, all_kept[-1].delta_SD, logit_rows, weigh)
        dx: Tensor | None = dx_SD
        for index in reversed(range(len(all_kept))):
            self._enter(index, index - 1, index - 2)
            kept = all_kept.pop()
            if index < self.recompute:
                kept = self._again("recompute", forward_layer, walk, index, kept.x_TD, None, "again")
            if dx is not None:
                dx = self._again("backward", backward_layer, walk, index, kept, dx)
        return nll_E

    def forward_only(self, walk: Walk) -> tuple[Tensor, Tensor]:
        """The stream after the last layer and the delta still to be added, at the rows that predict something."""
        x_TD, delta_TD = self._embed(walk), None
        layers = len(self._weights.layers)
        for index in range(layers):
            self._enter(index, (index + 1) % layers, (index + 2) % layers)  # the next documents begin again at 0
            kept = forward_layer(walk, index, x_TD, delta_TD, "only")
            x_TD, delta_TD = kept.mid_SD, kept.delta_SD
        assert delta_TD is not None
        return x_TD, delta_TD

    def _again(self, name: str, layer: Callable[..., Result], walk: Walk, index: int, *given: Any) -> Result:
        """`layer` forward or backward, by kept calls if there are any; not the last one, whose rows are those that
        predict something. `given` may be what was kept for more tokens."""
        if self.calls is None:
            return layer(walk, index, *given)

        def work() -> Result:
            rows = len(walk.batch.tokens_T)
            return layer(walk, index, *(_first(part, rows) for part in given))

        return work() if walk.is_last(index) else self.calls.again((name, index, _kind(walk)), work)

    def _bring(self, walk: Walk) -> Walk:
        """What differs from one micro-batch to the next, to where kept calls read it."""
        if self.calls is None:
            return walk
        assert isinstance(walk.ops, NativeOps) and isinstance(walk.batch.attention, NativeAttention)
        walk.ops.calls.set_rows(len(walk.batch.tokens_T))
        walk.ops.set_scales(walk.scale, walk.up_scale)
        walk.batch.attention.lay()
        angles = tuple(
            (_brought(walk, f"cos.{number}", cos_TH), _brought(walk, f"sin.{number}", sin_TH))
            for number, (cos_TH, sin_TH) in enumerate(walk.batch.angles)
        )
        drop = walk.drop
        if drop is not None:
            drop = replace(drop, key_T=_brought(walk, "drop_keys", drop.key_T))
        return replace(walk, batch=replace(walk.batch, angles=angles), drop=drop)

    def _embed(self, walk: Walk) -> Tensor:
        x_TD = walk.buffer("x.0", len(walk.batch.tokens_T), self._spec.hidden, wide=True)
        tokens_TD = walk.buffer("y", len(x_TD), self._spec.hidden)  # free until the first norm
        x_TD.copy_(torch.index_select(self._weights.embedding_VD, 0, walk.batch.tokens_T, out=tokens_TD))
        if self._spec.embed_scale != 1.0:
            x_TD *= self._embed_scale
        return x_TD

    def _refresh(self) -> None:
        for index, layer in enumerate(self._weights.layers):
            refresh_ups(layer, self._scaling, self._ops.do)
            if index >= self._weights.num_replaced:
                refresh_downs(layer, self._ops.do)

    def _enter(self, index: int, *following: int) -> None:
        """What is computed next reads layer `index`; then, in this order, `following`."""
        self._weights.enter(index, following)
        if index < self._weights.num_replaced:
            refresh_downs(self._weights.layers[index], self._ops.do)


def _kind(walk: Walk) -> Hashable:
    """Equal where a layer's calls are the same, on other numbers."""
    assert isinstance(walk.batch.attention, NativeAttention)
    return walk.batch.attention.parts, walk.batch.rows_R is None, walk.drop is None


def _first(part: Any, rows: int) -> Any:
    if isinstance(part, Kept):
        return part.of(rows)
    return part[:rows] if isinstance(part, Tensor) and len(part) > rows else part


def _brought(walk: Walk, name: str, table: Tensor) -> Tensor:
    return walk.workspace.take(name, *table.shape, dtype=table.dtype).copy_(table)
