"""Norms around the products of a layer, and the rotation of queries and keys, forward and backward.

Shapes as at the head of layer.py.
"""

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.state import Kept, Walk


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
        walk.ops.rowwise(_add, x_TD, delta_TD, sum_TD)
    walk.ops.rowwise(Tensor.copy_, y_TD, sum_TD)


def enter_backward(
    walk: Walk, w_D: Tensor | None, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, dx_TD: Tensor, y_TD: Tensor
) -> None:
    if w_D is not None:
        walk.ops.norm_backward(dy_TD, x_TD, rstd_T, w_D, dx_TD, y_TD)
        return
    walk.ops.rowwise(Tensor.add_, dx_TD, dy_TD)
    walk.ops.rowwise(Tensor.copy_, y_TD, x_TD)


def turn(walk: Walk, index: int, qkv_TW: Tensor, slot: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Norms of the heads of q and k where the model has them, then their rotation, in place."""
    spec, rope = walk.spec, walk.spec.layers[index].rope
    inner = {}
    if "q" in spec.family.norms:
        for name, columns in (("q", slice(0, spec.q_width)), ("k", slice(spec.q_width, spec.q_width + spec.kv_width))):
            size = columns.stop - columns.start if spec.family.wide_norms else spec.head_dim
            inner[name], normed_TN = _inner_norm(walk, index, name, qkv_TW[:, columns], size, slot)
            walk.ops.rowwise(Tensor.copy_, qkv_TW[:, columns], normed_TN)
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
            walk.ops.rowwise(Tensor.copy_, dqkv_TW[:, columns], dx_TN)


def sandwich(
    walk: Walk, index: int, name: str, y_SW: Tensor, inner: dict[str, tuple[Tensor, Tensor]], slot: str
) -> Tensor:
    """The delta of the stream: the product's output without rank columns, normed once more in Gemma 2 and 3,
    multiplied in Granite."""
    delta_SD = y_SW[:, : walk.spec.hidden]
    if walk.spec.delta_scale != 1.0:
        walk.ops.rowwise(Tensor.mul_, delta_SD, other=walk.spec.delta_scale)
    if name not in walk.spec.family.norms:
        return delta_SD
    inner[name], normed_SD = _inner_norm(walk, index, name, delta_SD, walk.spec.hidden, slot)
    return normed_SD


def sandwich_backward(walk: Walk, index: int, name: str, dx_SD: Tensor, kept: Kept, dy_SW: Tensor) -> None:
    """Gradient of the product's output (not its rank columns) into `dy_SW`, rounded from the wide stream."""
    dy_SD = dy_SW[:, : walk.spec.hidden]
    if walk.spec.delta_scale == 1.0:
        walk.ops.rowwise(Tensor.copy_, dy_SD, dx_SD)  # which torch rounds four times as fast as a product
    else:
        walk.ops.rowwise(_multiply, dx_SD, dy_SD, factor=walk.spec.delta_scale)
    if name in walk.spec.family.norms:
        walk.ops.rowwise(Tensor.copy_, dy_SD, _inner_norm_backward(walk, index, name, dy_SD, kept))


def _add(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


def _multiply(x: Tensor, out: Tensor, factor: float) -> None:
    torch.mul(x, factor, out=out)


def _inner_norm(
    walk: Walk, index: int, name: str, x_TN: Tensor, size: int, slot: str
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Norm of each `size` columns of x: its input and rstd, kept for backward, and the result in the buffer "normed"
    in the shape of x."""
    rows = x_TN.numel() // size
    x_nE = walk.buffer(f"{name}_in.{slot}", rows, size, wide=True)
    walk.ops.rowwise(Tensor.copy_, x_nE.view(x_TN.shape), x_TN)
    rstd_n = walk.buffer(f"{name}_rstd.{slot}", rows, wide=True)
    y_nE = walk.buffer("normed", rows, size)
    walk.ops.add_norm(x_nE, None, x_nE, walk.layers[index].norms_D[name], walk.spec.eps, y_nE, rstd_n)
    return (x_nE, rstd_n), y_nE.view(x_TN.shape)


def _inner_norm_backward(walk: Walk, index: int, name: str, dy_TN: Tensor, kept: Kept) -> Tensor:
    x_nE, rstd_n = kept.inner[name]
    dy_nE = walk.buffer("dnormed", *x_nE.shape)
    walk.ops.rowwise(Tensor.copy_, dy_nE.view(dy_TN.shape), dy_TN)
    dx_nE = walk.buffer("dnormed_wide", *x_nE.shape, wide=True)
    walk.ops.rowwise(Tensor.zero_, dx_nE)
    walk.ops.norm_backward(dy_nE, x_nE, rstd_n, walk.layers[index].norms_D[name], dx_nE, None)
    return dx_nE.view(dy_TN.shape)
