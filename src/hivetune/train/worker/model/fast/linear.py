"""One merged matrix with its adapters, forward and backward: one large product each, the rest is thin.

    weight' = [W; A]     forward   [Y | S] = X weight'^T,  then  Y += S B'^T             B' = scale * B
                         backward  dS = dY B',   dX = [dY | dS] weight',   dA += dS^T X,   dB += scale * dY^T S

So the base's output and X A^T come from one read of X, and the adapter's share of dX costs no pass of its own. With
dropout each adapted module sees an input of its own, and its thin products are made one by one.

Shapes: T tokens, K inputs, N outputs, R rank columns, W = N + R.
"""

from torch import Tensor

from hivetune.train.worker.model.fast.ops import Drop, Ops
from hivetune.train.worker.model.fast.weights.matrices import Group, Member
from hivetune.train.worker.model.memory import mm


def project(ops: Ops, group: Group, x_TK: Tensor, y_TW: Tensor, drop: Drop | None, *, adapter: bool) -> None:
    """y = [x W^T + bias + S B'^T | S] with S = x A^T; without adapter the rank columns are left as they were."""
    if adapter and drop is None:
        ops.project(x_TK, group, y_TW)
        return
    ops.multiply(x_TK, group.weight_NRK[: group.outputs].t(), y_TW[:, : group.outputs])
    for member in group.adapted if adapter else ():
        assert drop is not None
        dropped_TK, s_TR = _dropped(ops, x_TK, drop, member), y_TW[:, _ranks(group, member)]
        ops.rowwise(_thin, dropped_TK, s_TR, matrix=_down(group, member).t())
    ops.adapt(y_TW, group, adapter=adapter)


def input_gradient(ops: Ops, group: Group, dy_TW: Tensor, dx_TK: Tensor, drop: Drop | None) -> None:
    """dX = dY W + dS A, from dy = [dY | dS]."""
    if drop is None:
        ops.multiply(dy_TW, group.weight_NRK, dx_TK)
        return
    ops.multiply(dy_TW[:, : group.outputs], group.weight_NRK[: group.outputs], dx_TK)
    for member in group.adapted:
        product_TK = drop.workspace.take("undropped", *dx_TK.shape, dtype=dx_TK.dtype)
        ops.rowwise(_thin, dy_TW[:, _ranks(group, member)], product_TK, matrix=_down(group, member))
        ops.rowwise(Tensor.add_, dx_TK, _dropped(ops, product_TK, drop, member))


def down_gradient(ops: Ops, group: Group, dy_TW: Tensor, x_TK: Tensor, scale: float, drop: Drop | None) -> None:
    """dA += scale * dS^T (dropped x)."""
    if drop is None:
        ops.down_gradient(dy_TW[:, group.outputs :], x_TK, group, scale)
        return
    for member in group.adapted:
        assert member.d_down_RK is not None
        ds_TR = dy_TW[:, _ranks(group, member)]
        d_down_RK = drop.workspace.take("d_down", ds_TR.shape[1], x_TK.shape[1], dtype=x_TK.dtype)
        ops.rowwise(_across, ds_TR, _dropped(ops, x_TK, drop, member), out=d_down_RK)
        ops.add_scaled(d_down_RK[: len(member.d_down_RK)], member.d_down_RK, scale)


def _thin(x: Tensor, out: Tensor, matrix: Tensor) -> None:
    mm(x, matrix, out)


def _across(a_TR: Tensor, b_TK: Tensor, out: Tensor) -> None:
    mm(a_TR.t(), b_TK, out)


def _dropped(ops: Ops, x_TK: Tensor, drop: Drop, member: Member) -> Tensor:
    """x with the member's mask, in a buffer that the next call writes over."""
    dropped_TK = drop.workspace.take("dropped", *x_TK.shape, dtype=x_TK.dtype)
    ops.drop(x_TK, drop, member.salt, dropped_TK)
    return dropped_TK


def _ranks(group: Group, member: Member) -> slice:
    assert member.scaled_up_RN is not None
    start = group.outputs + member.rank_at
    return slice(start, start + len(member.scaled_up_RN))


def _down(group: Group, member: Member) -> Tensor:
    return group.weight_NRK[_ranks(group, member)]
