"""Norms around the products of a layer, and the rotation of queries and keys, forward and backward.

Shapes as at the head of layer.py.
"""

import torch
from torch import Tensor

from hivetune.engine.model.fast.state import Kept, Walk


def enter(
    walk: Walk,
    w_D: Tensor | None,
    x_TD: Tensor,
    delta_TD: Tensor | None,
    sum_TD: Tensor,
    y_TD: Tensor,
    rstd_T: Tensor,
) -> None:
    """The stream and what attention or the MLP reads of it: its norm; itself where norms stand behind (OLMo 2)."""
    if w_D is not None:
        walk.ops.add_norm(x_TD, delta_TD, sum_TD, w_D, walk.spec.eps, y_TD, rstd_T)
        return
    if delta_TD is not None:
        walk.ops.do(torch.add, x_TD, delta_TD, out=sum_TD)
    walk.ops.do(y_TD.copy_, sum_TD)


def enter_backward(
    walk: Walk, w_D: Tensor | None, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, dx_TD: Tensor, y_TD: Tensor
) -> None:
    if w_D is not None:
        walk.ops.norm_backward(dy_TD, x_TD, rstd_T, w_D, dx_TD, y_TD)
        return
    walk.ops.do(dx_TD.add_, dy_TD)
    walk.ops.do(y_TD.copy_, x_TD)


def turn(walk: Walk, index: int, qkv_TW: Tensor, slot: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Norms of the heads of q and k where the model has them, then their rotation, in place."""
    spec, rope = walk.spec, walk.spec.layers[index].rope
    inner = {}
    if "q" in spec.family.norms:
        for name, columns in (("q", slice(0, spec.q_width)), ("k", slice(spec.q_width, spec.q_width + spec.kv_width))):
            size = columns.stop - columns.start if spec.family.wide_norms else spec.head_dim
            inner[name] = _inner_norm(walk, index, name, qkv_TW[:, columns], size, slot)
            normed_TN = walk.buffer("normed", len(qkv_TW), columns.stop - columns.start)
            walk.ops.do(qkv_TW[:, columns].copy_, normed_TN)
    if rope is not None:
        both = qkv_TW[:, : spec.q_width + spec.kv_width]
        walk.ops.rope(both, *walk.batch.angles[rope], spec.head_dim, inverse=False)
    return inner


def turn_backward(walk: Walk, index: int, dqkv_TW: Tensor, kept: Kept) -> None:
    """A rotation's gradient is the rotation back; then the norms of the heads, in place."""
    spec, rope = walk.spec, walk.spec.layers[index].rope
    if rope is not None:
        both = dqkv_TW[:, : spec.q_width + spec.kv_width]
        walk.ops.rope(both, *walk.batch.angles[rope], spec.head_dim, inverse=True)
    if "q" in spec.family.norms:
        for name, columns in (("q", slice(0, spec.q_width)), ("k", slice(spec.q_width, spec.q_width + spec.kv_width))):
            dx_TN = _inner_norm_backward(walk, index, name, dqkv_TW[:, columns], kept)
            walk.ops.do(dqkv_TW[:, columns].copy_, dx_TN)


def sandwich(
    walk: Walk, index: int, name: str, y_SW: Tensor, inner: dict[str, tuple[Tensor, Tensor]], slot: str
) -> Tensor:
    """The delta of the stream: the product's output without rank columns, normed once more in Gemma 2 and 3,
    multiplied in Granite."""
    delta_SD = y_SW[:, : walk.spec.hidden]
    if walk.spec.delta_scale != 1.0:
        walk.ops.do(delta_SD.mul_, walk.spec.delta_scale)
    if name not in walk.spec.family.norms:
        return delta_SD
    inner[name] = _inner_norm(walk, index, name, delta_SD, walk.spec.hidden, slot)
    return walk.buffer("normed", *delta_SD.shape)


def sandwich_backward(walk: Walk, index: int, name: str, dx_SD: Tensor, kept: Kept, dy_SW: Tensor) -> None:
    """Gradient of the product's output (not its rank columns) into `dy_SW`, rounded from the wide stream."""
    dy_SD = dy_SW[:, : walk.spec.hidden]
    if walk.spec.delta_scale == 1.0:
        walk.ops.do(dy_SD.copy_, dx_SD)  # which torch rounds four times as fast as a product
    else:
        walk.ops.do(torch.mul, dx_SD, walk.spec.delta_scale, out=dy_SD)
    if name in walk.spec.family.norms:
        walk.ops.do(dy_SD.copy_, _inner_norm_backward(walk, index, name, dy_SD, kept))


def _inner_norm(walk: Walk, index: int, name: str, x_TN: Tensor, size: int, slot: str) -> tuple[Tensor, Tensor]:
    """Norm of each `size` columns of x into the buffer "normed"; its input and rstd, kept for backward."""
    rows = x_TN.numel() // size
    x_nE = walk.buffer(f"{name}_in.{slot}", rows, size, wide=True)
    walk.ops.do(x_nE.view(x_TN.shape).copy_, x_TN)
    rstd_n = walk.buffer(f"{name}_rstd.{slot}", rows, wide=True)
    y_nE = walk.buffer("normed", rows, size)
    walk.ops.add_norm(x_nE, None, x_nE, walk.layers[index].norms_D[name], walk.spec.eps, y_nE, rstd_n)
    return x_nE, rstd_n


def _inner_norm_backward(walk: Walk, index: int, name: str, dy_TN: Tensor, kept: Kept) -> Tensor:
    x_nE, rstd_n = kept.inner[name]
    dy_nE = walk.buffer("dnormed", *x_nE.shape)
    walk.ops.do(dy_nE.view(dy_TN.shape).copy_, dy_TN)
    dx_nE = walk.buffer("dnormed_wide", *x_nE.shape, wide=True)
    walk.ops.do(dx_nE.zero_)
    walk.ops.norm_backward(dy_nE, x_nE, rstd_n, walk.layers[index].norms_D[name], dx_nE, None)
    return dx_nE.view(dy_TN.shape)
