"""One decoder layer forward and backward by hand: the values that are saved or recomputed, the rows that are computed.

A layer, with RMSNorm and the four merged products of weights.py (each one carries its adapters):

    y = norm(x)     [q k v] = qkv(y)     out = attention(rope(q), rope(k), v)     x += o(out)         -> mid
    y = norm(mid)   [gate up] = gate_up(y)   h = act(gate) * up                   mid += down(h)      -> next x

The residual stream x stays wide (fp32 for bf16: a sum over all layers, whose small terms bf16 would drop). A layer gets
it as x plus a `delta` that is not yet added, so that the sum and the next norm are one pass over memory. The last layer
computes o and the MLP only at rows that predict something; the first one computes no gradient of its input.

A name's suffix gives its shape, one letter a dimension:

    T  tokens of the micro-batch                       D  hidden size, the width of the stream
    S  rows that continue after attention: T, in the      F  width of the MLP
       last layer the R rows that predict something    H  query heads
    R  as a first letter those rows, as a last letter  W  outputs of a merged matrix, then its rank columns:
       the rank columns of a merged matrix                [q | k | v | ranks], [gate | up | ranks], [D | ranks]
    E  as a first letter loss entries (model.py)         N  width of attention's output, H times head size
    n  rows of an inner norm: one per head and token (q, k) or per token; E as its last letter: its columns

Gradients are named d + what they are the gradient of. Buffers live in the Workspace under these names; a slot is the
layer's number, "again" for layers that are recomputed (they share one set), "only" when nothing is kept for a backward:

    buffer                              holds                                    until
    x.INDEX (x.only without backward)   the stream at the layer's input, wide    this layer's backward
    rstd, qkv, out, lse, mid, rstd_mid, what backward reads, see `Saved`         this layer's backward, or the slot's
    gate_up, s_o, s_down .SLOT                                                   next use ("again": the next layer)
    q_in, k_in, after_*_in, *_rstd      inputs of inner norms (Qwen 3, Gemma)    as above
    y                                   a norm's output, input of one product    the next norm; recomputed in backward
    o, down                             outputs of the two products whose        the next layer's; so `delta_SD` is
                                        columns are the delta of the stream      valid until the next `add_norm` only
    h, normed                           act(gate) * up; an inner norm's output   the next use; h recomputed in backward
    x_rows, out_rows                    rows selected in the last layer          the end of that layer's forward;
                                                                                 out_rows again in its backward
    dx (model.py), dx_all                 gradient of the stream, wide; each       the end of the backward pass
                                        layer adds to it in place
    dqkv, do, ddown, dgate_up, dout,    gradients inside a layer                 the next layer's backward
    dout_all, dh, dy, dnormed, dnormed_wide
    logits, entries, dentries (model.py)   one chunk of logits, then its gradient   the next chunk
    final, final_rstd, nll (model.py)      the last norm's input; loss of entries   the next micro-batch
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.attention import Attention
from hivetune.train.worker.model.fast.ops import Drop, Ops, down_gradient, input_gradient, project
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.tables import BatchTables
from hivetune.train.worker.model.fast.weights import Group, Weights
from hivetune.train.worker.model.memory import Workspace, wide_dtype


@dataclass
class Saved:
    """The inputs of one layer's backward pass; the plan counts these bytes (plan/memory.py, `saved_bytes_per_token`).

    x_TD: the stream at the input, delta added; rstd_T: 1 / root mean square of its rows. qkv_TW: after inner norms and
    rotation, with X A^T in the rank columns. out_TN, lse_TH: attention's output and the log-sum-exp of its scores, from
    which backward recomputes them (FlashAttention, arXiv 2205.14135). s_o_SR: X A^T of o, whose output buffer is used
    again. mid_SD, rstd_mid_S: the stream after attention. gate_up_SW:
    before the activation, with X A^T in the rank columns. s_down_SR: X A^T of the down projection. delta_SD: not part
    of backward; what the next layer has still to add.
    """

    x_TD: Tensor
    rstd_T: Tensor
    qkv_TW: Tensor
    out_TN: Tensor
    lse_TH: Tensor
    s_o_SR: Tensor
    mid_SD: Tensor
    rstd_mid_S: Tensor
    gate_up_SW: Tensor
    s_down_SR: Tensor
    delta_SD: Tensor
    inner: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and rstd of further norms, flattened to one row per norm: q, k, after_attention, after_mlp."""


@dataclass
class LayerContext:
    """The state of one micro-batch on its way through the layers. `adapter` False: compute the base alone. `keep`: keep
    what a backward pass needs."""

    spec: ModelSpec
    weights: Weights
    ops: Ops
    workspace: Workspace
    dtype: torch.dtype
    batch: BatchTables
    attention: Attention
    adapter: bool = True
    drop: Drop | None = None
    # The chain of gradients runs unscaled, because 1 / trained tokens would push fp16 gradients below its smallest
    # number (6e-8). dA is multiplied by `scale` and dB by `up_scale` (scale * alpha / r) when they are added up.
    scale: float = 1.0
    up_scale: float = 1.0
    keep: bool = True

    def buffer(self, name: str, *shape: int, wide: bool = False) -> Tensor:
        return self.workspace.take(name, *shape, dtype=wide_dtype(self.dtype) if wide else self.dtype)

    def is_last(self, index: int) -> bool:
        return index == len(self.weights.layers) - 1

    def drop_of(self, index: int) -> Drop | None:
        """Return the dropout of the S rows that a product of layer `index` reads after attention, or None."""
        rows_R = self.batch.rows_R
        return self.drop if self.drop is None or rows_R is None or not self.is_last(index) else self.drop.of(rows_R)


def forward_layer(ctx: LayerContext, index: int, x_TD: Tensor, delta_TD: Tensor | None, slot: str) -> Saved:
    """Compute a layer; its output is `saved.mid_SD + saved.delta_SD`. `slot` is a part of its buffers' names."""
    spec, layer = ctx.spec, ctx.weights.layers[index]
    tokens = len(x_TD)
    # The input is kept under the layer's own name, whatever the slot, so that a recompute finds it.
    saved_x_TD = (
        x_TD if delta_TD is None else ctx.buffer(f"x.{index if ctx.keep else slot}", tokens, spec.hidden, wide=True)
    )
    y_TD, rstd_T = ctx.buffer("y", tokens, spec.hidden), ctx.buffer(f"rstd.{slot}", tokens, wide=True)
    enter(ctx, layer.norms_D.get("input"), x_TD, delta_TD, saved_x_TD, y_TD, rstd_T)
    qkv_TW = ctx.buffer(f"qkv.{slot}", tokens, layer.qkv.width)
    project(ctx.ops, layer.qkv, y_TD, qkv_TW, ctx.drop, adapter=ctx.adapter)
    inner = turn(ctx, index, qkv_TW, slot)
    out_TN = ctx.buffer(f"out.{slot}", tokens, spec.q_width)
    lse_TH = ctx.buffer(f"lse.{slot}", tokens, spec.heads, wide=True)
    ctx.attention.forward(qkv_TW, out_TN, lse_TH, spec.layers[index].window)
    x_SD, out_SN = _select(ctx, index, saved_x_TD, out_TN)
    rows, drop = len(x_SD), ctx.drop_of(index)
    o_SW = ctx.buffer("o", rows, layer.o.width)
    project(ctx.ops, layer.o, out_SN, o_SW, drop, adapter=ctx.adapter)
    s_o_SR = _keep_ranks(ctx, f"s_o.{slot}", layer.o, o_SW)  # the next layer writes over "o"
    delta_SD = sandwich(ctx, index, "after_attention", o_SW, inner, slot)
    mid_SD, rstd_mid_S = (
        ctx.buffer(f"mid.{slot}", rows, spec.hidden, wide=True),
        ctx.buffer(f"rstd_mid.{slot}", rows, wide=True),
    )
    y_SD = ctx.buffer("y", rows, spec.hidden)  # qkv has read the first norm's output: the buffer is free
    enter(ctx, layer.norms_D.get("mlp"), x_SD, delta_SD, mid_SD, y_SD, rstd_mid_S)
    gate_up_SW = ctx.buffer(f"gate_up.{slot}", rows, layer.gate_up.width)
    project(ctx.ops, layer.gate_up, y_SD, gate_up_SW, drop, adapter=ctx.adapter)
    h_SF = ctx.buffer("h", rows, layer.down.inputs)
    ctx.ops.glu(gate_up_SW[:, : layer.gate_up.outputs], h_SF, spec.gelu)
    down_SW = ctx.buffer("down", rows, layer.down.width)
    project(ctx.ops, layer.down, h_SF, down_SW, drop, adapter=ctx.adapter)
    s_down_SR = _keep_ranks(ctx, f"s_down.{slot}", layer.down, down_SW)
    return Saved(
        x_TD=saved_x_TD,
        rstd_T=rstd_T,
        qkv_TW=qkv_TW,
        out_TN=out_TN,
        lse_TH=lse_TH,
        s_o_SR=s_o_SR,
        mid_SD=mid_SD,
        rstd_mid_S=rstd_mid_S,
        gate_up_SW=gate_up_SW,
        s_down_SR=s_down_SR,
        delta_SD=sandwich(ctx, index, "after_mlp", down_SW, inner, slot),
        inner=inner,
    )


def backward_layer(ctx: LayerContext, index: int, saved: Saved, dx_SD: Tensor) -> Tensor | None:
    """Return the gradient of the layer's input (None for layer 0), and add the adapters' gradients.

    `dx_SD` (wide) is overwritten: the gradient of the residual stream passes through it.
    """
    _backward_mlp(ctx, index, saved, dx_SD)
    spec, layer = ctx.spec, ctx.weights.layers[index]
    dout_SN, dx_TD = _backward_o(ctx, index, saved, dx_SD)
    if index == 0 and not layer.qkv.adapted:
        return None  # nothing below learns: attention's backward, its most expensive part, is left out
    tokens = len(saved.x_TD)
    dqkv_TW = ctx.buffer("dqkv", tokens, layer.qkv.width)
    ctx.attention.backward(dout_SN, saved.qkv_TW, saved.out_TN, saved.lse_TH, dqkv_TW, spec.layers[index].window)
    norm_and_rotate_backward(ctx, index, dqkv_TW, saved)
    ctx.ops.adapt_backward(dqkv_TW, layer.qkv)
    ctx.ops.up_gradient(dqkv_TW, saved.qkv_TW[:, layer.qkv.outputs :], layer.qkv, ctx.up_scale)
    y_TD, dy_TD = ctx.buffer("y", tokens, spec.hidden), ctx.buffer("dy", tokens, spec.hidden)
    if index == 0:
        # Only dA is wanted, so the norm's output is recomputed alone, without the gradient of its input.
        enter(ctx, layer.norms_D.get("input"), saved.x_TD, None, saved.x_TD, y_TD, saved.rstd_T)
        down_gradient(ctx.ops, layer.qkv, dqkv_TW, y_TD, ctx.scale, ctx.drop)
        return None
    input_gradient(ctx.ops, layer.qkv, dqkv_TW, dy_TD, ctx.drop)
    enter_backward(ctx, layer.norms_D.get("input"), dy_TD, saved.x_TD, saved.rstd_T, dx_TD, y_TD)
    down_gradient(ctx.ops, layer.qkv, dqkv_TW, y_TD, ctx.scale, ctx.drop)
    return dx_TD


def _backward_mlp(ctx: LayerContext, index: int, saved: Saved, dx_SD: Tensor) -> None:
    """Turn `dx_SD`, the gradient of the layer's output, into that of the stream after attention, in place."""
    # Order matters: each down_gradient (dA) reads the product's input, which the line before it has recomputed into
    # "h" or "y".
    spec, layer, ops, rows = ctx.spec, ctx.weights.layers[index], ctx.ops, len(dx_SD)
    drop = ctx.drop_of(index)
    dy_SD, y_SD = ctx.buffer("dy", rows, spec.hidden), ctx.buffer("y", rows, spec.hidden)
    ddown_SW = ctx.buffer("ddown", rows, layer.down.width)
    sandwich_backward(ctx, index, "after_mlp", dx_SD, saved, ddown_SW)
    ops.adapt_backward(ddown_SW, layer.down)
    ops.up_gradient(ddown_SW, saved.s_down_SR, layer.down, ctx.up_scale)
    dh_SF = ctx.buffer("dh", rows, layer.down.inputs)
    input_gradient(ops, layer.down, ddown_SW, dh_SF, drop)
    dgate_up_SW, h_SF = ctx.buffer("dgate_up", rows, layer.gate_up.width), ctx.buffer("h", rows, layer.down.inputs)
    pair = slice(0, layer.gate_up.outputs)
    ops.glu_backward(dh_SF, saved.gate_up_SW[:, pair], dgate_up_SW[:, pair], h_SF, spec.gelu)
    down_gradient(ops, layer.down, ddown_SW, h_SF, ctx.scale, drop)
    ops.adapt_backward(dgate_up_SW, layer.gate_up)
    ops.up_gradient(dgate_up_SW, saved.gate_up_SW[:, layer.gate_up.outputs :], layer.gate_up, ctx.up_scale)
    input_gradient(ops, layer.gate_up, dgate_up_SW, dy_SD, drop)
    enter_backward(ctx, layer.norms_D.get("mlp"), dy_SD, saved.mid_SD, saved.rstd_mid_S, dx_SD, y_SD)
    down_gradient(ops, layer.gate_up, dgate_up_SW, y_SD, ctx.scale, drop)


def _backward_o(ctx: LayerContext, index: int, saved: Saved, dx_SD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of attention's output and of the stream, both for all T rows."""
    spec, layer, ops = ctx.spec, ctx.weights.layers[index], ctx.ops
    rows = len(dx_SD)
    do_SW = ctx.buffer("do", rows, layer.o.width)
    sandwich_backward(ctx, index, "after_attention", dx_SD, saved, do_SW)
    ops.adapt_backward(do_SW, layer.o)
    ops.up_gradient(do_SW, saved.s_o_SR, layer.o, ctx.up_scale)
    dout_SN = ctx.buffer("dout", rows, spec.q_width)
    drop = ctx.drop_of(index)
    input_gradient(ops, layer.o, do_SW, dout_SN, drop)
    # The last layer's o saw the selected rows only; the others' gradient of attention's output is 0.
    picked = ctx.is_last(index) and ctx.batch.rows_R is not None
    down_gradient(ops, layer.o, do_SW, _rows_of(ctx, saved.out_TN) if picked else saved.out_TN, ctx.scale, drop)
    if not picked:
        return dout_SN, dx_SD
    tokens = len(saved.x_TD)
    dout_TN = ctx.buffer("dout_all", tokens, spec.q_width).zero_()
    dx_TD = ctx.buffer("dx_all", tokens, spec.hidden, wide=True).zero_()
    dout_TN[ctx.batch.rows_R] = dout_SN
    dx_TD[ctx.batch.rows_R] = dx_SD
    return dout_TN, dx_TD


def _select(ctx: LayerContext, index: int, x_TD: Tensor, out_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return stream and attention's output at the needed rows: in the last layer the rows that predict a token."""
    # Keys and values are needed everywhere, the rest is not: in a chat with short answers most rows end here.
    rows_R = ctx.batch.rows_R
    if not ctx.is_last(index) or rows_R is None:
        return x_TD, out_TN
    x_RD = ctx.buffer("x_rows", len(rows_R), x_TD.shape[1], wide=True)
    return torch.index_select(x_TD, 0, rows_R, out=x_RD), _rows_of(ctx, out_TN)


def _rows_of(ctx: LayerContext, out_TN: Tensor) -> Tensor:
    rows_R = ctx.batch.rows_R
    assert rows_R is not None
    return torch.index_select(out_TN, 0, rows_R, out=ctx.buffer("out_rows", len(rows_R), out_TN.shape[1]))


def _keep_ranks(ctx: LayerContext, name: str, group: Group, y_SW: Tensor) -> Tensor:
    """Copy S = x A^T out of a buffer that is about to be used again."""
    s_SR = ctx.buffer(name, len(y_SW), group.width - group.outputs)
    s_SR.copy_(y_SW[:, group.outputs :])
    return s_SR


# Norms around the products of a layer, and the rotation of queries and keys.


def enter(
    ctx: LayerContext,
    w_D: Tensor | None,
    x_TD: Tensor,
    delta_TD: Tensor | None,
    sum_TD: Tensor,
    y_TD: Tensor,
    rstd_T: Tensor,
) -> None:
    """Write the stream, and its norm (or the stream itself), which attention or the MLP reads."""
    # OLMo 2 norms what attention and the MLP return instead (`sandwich`).
    if w_D is not None:
        ctx.ops.add_norm(x_TD, delta_TD, sum_TD, w_D, ctx.spec.eps, y_TD, rstd_T)
        return
    if delta_TD is not None:
        torch.add(x_TD, delta_TD, out=sum_TD)
    y_TD.copy_(sum_TD)


def enter_backward(
    ctx: LayerContext, w_D: Tensor | None, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, dx_TD: Tensor, y_TD: Tensor
) -> None:
    """Add the gradient of `enter` to the stream's, and recompute the input of attention or of the MLP."""
    if w_D is not None:
        ctx.ops.norm_backward(dy_TD, x_TD, rstd_T, w_D, dx_TD, y_TD)
        return
    dx_TD.add_(dy_TD)
    y_TD.copy_(x_TD)


def turn(ctx: LayerContext, index: int, qkv_TW: Tensor, slot: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalize the heads of q and k if the model does so, then rotate them, in place. Return the norms' inputs."""
    inner = {}
    for name, part_TN in _normed_parts(ctx.spec, qkv_TW):
        size = part_TN.shape[1] if ctx.spec.family.wide_norms else ctx.spec.head_dim
        inner[name], normed_TN = _inner_norm(ctx, index, name, part_TN, size, slot)
        part_TN.copy_(normed_TN)
    _rotate(ctx, index, qkv_TW, inverse=False)
    return inner


def norm_and_rotate_backward(ctx: LayerContext, index: int, dqkv_TW: Tensor, saved: Saved) -> None:
    """Compute the gradients of `turn` in place: of the rotation first, then of the norms of the heads."""
    _rotate(ctx, index, dqkv_TW, inverse=True)
    for name, part_TN in _normed_parts(ctx.spec, dqkv_TW):
        part_TN.copy_(_inner_norm_backward(ctx, index, name, part_TN, saved))


def _rotate(ctx: LayerContext, index: int, qkv_TW: Tensor, *, inverse: bool) -> None:
    spec, rope = ctx.spec, ctx.spec.layers[index].rope
    if rope is not None:
        cos_TH, sin_TH = ctx.batch.angles[2 * rope : 2 * rope + 2]
        ctx.ops.rope(qkv_TW[:, : spec.q_width + spec.kv_width], cos_TH, sin_TH, spec.head_dim, inverse=inverse)


def _normed_parts(spec: ModelSpec, qkv_TW: Tensor) -> list[tuple[str, Tensor]]:
    """Return the columns of q and of k by the names of their norms; none where the model has no such norms."""
    if "q" not in spec.family.norms:
        return []
    q_TN, k_TN = qkv_TW[:, : spec.q_width + spec.kv_width].split([spec.q_width, spec.kv_width], dim=1)
    return [("q", q_TN), ("k", k_TN)]


def sandwich(
    ctx: LayerContext, index: int, name: str, y_SW: Tensor, inner: dict[str, tuple[Tensor, Tensor]], slot: str
) -> Tensor:
    """Return the delta of the stream: the product's output without its rank columns.

    It is normalized again in Gemma 2 and 3, and multiplied by a factor in Granite.
    """
    delta_SD = y_SW[:, : ctx.spec.hidden]
    if ctx.spec.delta_scale != 1.0:
        delta_SD.mul_(ctx.spec.delta_scale)
    if name not in ctx.spec.family.norms:
        return delta_SD
    inner[name], normed_SD = _inner_norm(ctx, index, name, delta_SD, ctx.spec.hidden, slot)
    return normed_SD


def sandwich_backward(ctx: LayerContext, index: int, name: str, dx_SD: Tensor, saved: Saved, dy_SW: Tensor) -> None:
    """Write the gradient of the product's output (not its rank columns) into `dy_SW`, rounded from the wide stream."""
    dy_SD = dy_SW[:, : ctx.spec.hidden]
    if ctx.spec.delta_scale == 1.0:
        dy_SD.copy_(dx_SD)  # which torch rounds four times as fast as a product
    else:
        torch.mul(dx_SD, ctx.spec.delta_scale, out=dy_SD)
    if name in ctx.spec.family.norms:
        dy_SD.copy_(_inner_norm_backward(ctx, index, name, dy_SD, saved))


def _inner_norm(
    ctx: LayerContext, index: int, name: str, x_TN: Tensor, size: int, slot: str
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Norm each `size` columns of x. Return its input and rstd, kept for backward, and the result in the shape of x."""
    rows = x_TN.numel() // size
    x_nE = ctx.buffer(f"{name}_in.{slot}", rows, size, wide=True)
    x_nE.view(x_TN.shape).copy_(x_TN)
    rstd_n = ctx.buffer(f"{name}_rstd.{slot}", rows, wide=True)
    y_nE = ctx.buffer("normed", rows, size)
    ctx.ops.add_norm(x_nE, None, x_nE, ctx.weights.layers[index].norms_D[name], ctx.spec.eps, y_nE, rstd_n)
    return (x_nE, rstd_n), y_nE.view(x_TN.shape)


def _inner_norm_backward(ctx: LayerContext, index: int, name: str, dy_TN: Tensor, saved: Saved) -> Tensor:
    x_nE, rstd_n = saved.inner[name]
    dy_nE = ctx.buffer("dnormed", *x_nE.shape)
    dy_nE.view(dy_TN.shape).copy_(dy_TN)
    dx_nE = ctx.buffer("dnormed_wide", *x_nE.shape, wide=True).zero_()
    ctx.ops.norm_backward(dy_nE, x_nE, rstd_n, ctx.weights.layers[index].norms_D[name], dx_nE, None)
    return dx_nE.view(dy_TN.shape)
