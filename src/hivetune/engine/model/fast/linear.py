"""One merged matrix with its adapters, forward and backward: one large product each, the rest is thin.

    weight' = [W; A]     forward   [Y | S] = X weight'^T,  then  Y += S B'^T             B' = scale * B
                         backward  dS = dY B',   dX = [dY | dS] weight',   dA += dS^T X,   dB += scale * dY^T S

So the base's output and X A^T come from one read of X, and the adapter's share of dX costs no pass of its own. With
dropout each adapted module sees an input of its own, and its products are made one by one.

Shapes: T tokens, K inputs, N outputs, R rank columns, W = N + R.
"""

import torch
from torch import Tensor

from hivetune.engine.model.fast.ops import Ops
from hivetune.engine.model.fast.weights import Group, Member

Masks = dict[str, Tensor]
"""Dropout of each adapted module's input, [T, K], already divided by the share that is kept; by module name."""


def project(ops: Ops, group: Group, x_TK: Tensor, y_TW: Tensor, masks: Masks | None, *, adapter: bool) -> None:
    """y = [x W^T + bias + S B'^T | S] with S = x A^T; without adapter the rank columns are left as they were."""
    if adapter and not masks:
        torch.mm(x_TK, group.weight_NRK.t(), out=y_TW)
    else:
        torch.mm(x_TK, group.weight_NRK[: group.outputs].t(), out=y_TW[:, : group.outputs])
        for member in group.adapted if adapter else ():
            dropped_TK = x_TK * _mask(masks, member)
            y_TW[:, _ranks(group, member)] = dropped_TK @ _down(group, member).t()
    ops.adapt(y_TW, group, adapter=adapter)


def input_gradient(group: Group, dy_TW: Tensor, dx_TK: Tensor, masks: Masks | None) -> None:
    """dX = dY W + dS A, from dy = [dY | dS]."""
    if not masks:
        torch.mm(dy_TW, group.weight_NRK, out=dx_TK)
        return
    torch.mm(dy_TW[:, : group.outputs], group.weight_NRK[: group.outputs], out=dx_TK)
    for member in group.adapted:
        dx_TK += (dy_TW[:, _ranks(group, member)] @ _down(group, member)) * _mask(masks, member)


def down_gradient(ops: Ops, group: Group, dy_TW: Tensor, x_TK: Tensor, scale: float, masks: Masks | None) -> None:
    """dA += scale * dS^T (dropped x)."""
    if not masks:
        ops.down_gradient(dy_TW[:, group.outputs :], x_TK, group, scale)
        return
    for member in group.adapted:
        assert member.d_down_RK is not None
        d_down_RK = dy_TW[:, _ranks(group, member)].t() @ (x_TK * _mask(masks, member))
        member.d_down_RK.add_(d_down_RK[: len(member.d_down_RK)], alpha=scale)


def draw_masks(group: Group, tokens: int, dropout: float) -> Masks:
    """One mask for each adapted module, from torch's generator of the device: a checkpoint keeps that generator."""
    like = group.weight_NRK
    return {
        member.name: torch.empty(tokens, group.inputs, dtype=like.dtype, device=like.device).bernoulli_(1 - dropout)
        / (1 - dropout)
        for member in group.adapted
    }


def _mask(masks: Masks | None, member: Member) -> Tensor:
    assert masks is not None
    return masks[member.name]


def _ranks(group: Group, member: Member) -> slice:
    assert member.scaled_up_RN is not None
    start = group.outputs + member.rank_at
    return slice(start, start + len(member.scaled_up_RN))


def _down(group: Group, member: Member) -> Tensor:
    return group.weight_NRK[_ranks(group, member)]
