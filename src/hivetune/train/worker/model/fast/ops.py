"""The work between matrix products, in plain torch: correct on any device and dtype. native.py must equal it.

Every result goes to a buffer of the caller. "Wide" is the dtype of the residual stream, of norms and of every
reduction: fp32, or fp64 when computing in fp64. Matrices may be columns of a wider buffer (strided rows).

Shapes: T tokens, D hidden, N outputs of a merged matrix, R its rank columns, W = N + R, K its inputs, F MLP width, H
rotated pairs of a head, C rows of logits, V tokens of the vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hivetune.train.worker.model.fast.weights import Group, Member
from hivetune.train.worker.model.memory import Multiply, Workspace, left_factor, mm, wide_of

LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Drop:
    """Dropout of the rows of a product. `rate`: the share of inputs that is left out; key_T: int64, one for each row.

    A mask is a function, no draw: of the row's key, which follows from the step and from the tokens up to this one, of
    the module and of the column. So it is the same in the backward pass, after a resume, and in any order of the rows.
    """

    key_T: Tensor
    rate: float
    workspace: Workspace

    def of(self, rows: Tensor | slice) -> "Drop":
        return replace(self, key_T=self.key_T[rows])


class TorchOps:
    """The operations in plain torch.

    `wide_products`: half-precision products can give wide results here; no gradient is rounded on its way then.
    `multiply`: the large products.
    """

    name = "torch"

    def __init__(self, *, wide_products: bool = False, multiply: Multiply = mm):
        self._wide_products, self._multiply = wide_products, multiply

    def multiply(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        self._multiply(a_MK, b_KN, out_MN)

    def project(self, x_TK: Tensor, group: Group, y_TW: Tensor) -> None:
        """Compute y = [x W^T + bias + S B'^T | S] with S = x A^T: one product of all rows, then `adapt`."""
        self.multiply(x_TK, group.weight_NRK.t(), y_TW)
        self.adapt(y_TW, group, adapter=True)

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        sum_TD: Tensor,
        w_D: Tensor,
        eps: float,
        y_TD: Tensor,
        rstd_T: Tensor,
    ) -> None:
        """Compute sum = x + delta; y = RMSNorm(sum) * w. x, sum, w, rstd are wide. Without delta, `sum` is x itself."""
        if delta_TD is not None:
            torch.add(x_TD, delta_TD, out=sum_TD)
        rstd_T.copy_(torch.rsqrt(sum_TD.square().mean(1) + eps))
        y_TD.copy_(sum_TD * rstd_T[:, None] * w_D)

    def norm_backward(
        self, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, w_D: Tensor, dx_TD: Tensor, y_TD: Tensor | None
    ) -> None:
        """Add the gradient of y = x * rstd * w to dx, which is wide; y itself is recomputed on request.

        With u = x * rstd and du = dy * w, RMSNorm's gradient is rstd * (du - u * mean(du * u)).
        """
        unit_TD = x_TD * rstd_T[:, None]
        dunit_TD = dy_TD.to(dx_TD.dtype) * w_D
        dx_TD += rstd_T[:, None] * (dunit_TD - unit_TD * (dunit_TD * unit_TD).mean(1, keepdim=True))
        if y_TD is not None:
            y_TD.copy_(unit_TD * w_D)

    def rope(self, x_TN: Tensor, cos_TH: Tensor, sin_TH: Tensor, head_dim: int, *, inverse: bool) -> None:
        """Rotate pairs (i, i + H) of the first 2H channels of each head, in place; `inverse` for the gradient.

        Rotary positions (arXiv 2104.09864) in transformers' order; channels beyond 2H stay (Phi's partial rotation).
        """
        half = cos_TH.shape[1]
        x_TnH = x_TN.unflatten(1, (-1, head_dim))
        first, second = x_TnH[..., :half], x_TnH[..., half : 2 * half]
        cos, sin = cos_TH[:, None], (-sin_TH if inverse else sin_TH)[:, None]
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)

    def glu(self, gate_up_TN: Tensor, h_TF: Tensor, activation: str) -> None:
        """Compute h = act(gate) * up (arXiv 2002.05202), with act SiLU or the tanh form of GELU."""
        gate, up = gate_up_TN.to(wide_of(h_TF.dtype)).chunk(2, 1)
        h_TF.copy_((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up)

    def glu_backward(
        self, dh_TF: Tensor, gate_up_TN: Tensor, dgate_up_TN: Tensor, h_TF: Tensor, activation: str
    ) -> None:
        """Compute the gradients of gate and up from h's; h is recomputed, for dA of the down projection."""
        dh = dh_TF.to(wide_of(dh_TF.dtype))
        gate, up = gate_up_TN.to(dh.dtype).chunk(2, 1)
        if activation == "silu":
            act, dgate = F.silu(gate), torch.ops.aten.silu_backward(dh * up, gate)
        else:
            act = F.gelu(gate, approximate="tanh")
            dgate = torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh")
        dgate_up_TN.copy_(torch.cat([dgate, dh * act], 1))
        h_TF.copy_(act * up)

    def adapt(self, y_TW: Tensor, group: Group, *, adapter: bool) -> None:
        """Add the bias to y, and S B'^T to each member's columns; S lies in the rank columns of y itself."""
        if group.bias_N is not None:
            y_TW[:, : group.outputs] += group.bias_N
        for member in group.adapted if adapter else ():
            start = group.outputs + member.rank_at
            up_RN = member.scaled_up_RN
            y_TW[:, member.start : member.stop].addmm_(left_factor(y_TW[:, start : start + len(up_RN)]), up_RN)

    def adapt_backward(self, dy_TW: Tensor, group: Group) -> None:
        """Write dS = dY B' to the rank columns of dy, and zeros to its padding: the next product reads all columns."""
        dy_TW[:, group.outputs + group.ranks :].zero_()
        for member in group.adapted:
            start = group.outputs + member.rank_at
            up_RN = member.scaled_up_RN
            mm(dy_TW[:, member.start : member.stop], up_RN.t(), dy_TW[:, start : start + len(up_RN)])

    def up_gradient(self, dy_TW: Tensor, s_TR: Tensor, group: Group, scale: float) -> None:
        """Add scale * dY^T S to dB of each member."""
        for member in group.adapted:
            d_up_NR = member.d_up_NR
            s = s_TR[:, member.rank_at : member.rank_at + len(member.scaled_up_RN)]
            product_NR = self._wide_product(dy_TW[:, member.start : member.stop].t(), s)
            d_up_NR.add_(product_NR[:, : d_up_NR.shape[1]], alpha=scale)

    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        """Add scale * dS^T X to dA of all members at once."""
        if group.adapted:
            product_RK = self._wide_product(ds_TR[:, : group.ranks].t(), x_TK)
            d_downs_mRK, product_mRK = (
                t.unflatten(0, (len(group.adapted), -1)) for t in (group.d_downs_RK, product_RK)
            )
            d_downs_mRK.add_(product_mRK[:, : d_downs_mRK.shape[1]], alpha=scale)

    def drop(self, x_TK: Tensor, drop: Drop, salt: int, out_TK: Tensor) -> None:
        """Write x / (1 - rate) where the mask of (row's key, salt, column) keeps it, else 0.

        Two rounds of a 32-bit mixing function (Chris Wellons, "Prospecting for hash functions", 2018: lowbias32) over
        the column, the first with one half of the key and the salt, the second with the other.
        """
        key_T1 = (drop.key_T ^ salt)[:, None]
        mixed_TK = _mix((torch.arange(x_TK.shape[1], device=x_TK.device) * 0x9E3779B9 + _mix(key_T1 & LOW)) & LOW)
        keep_TK = _mix(mixed_TK ^ ((key_T1 >> 32) & LOW)) >= drop_below(drop.rate)
        out_TK.copy_(x_TK.to(wide_of(x_TK.dtype)) * (1 / (1 - drop.rate)) * keep_TK)

    def cross_entropy(
        self,
        logits_CV: Tensor,
        target_C: Tensor,
        count_C: Tensor,
        softcap: float | None,
        nll_C: Tensor,
        *,
        gradient: bool,
    ) -> None:
        """Write nll [C] of each row, in nats; with `gradient`, the logits become count * d nll / d logits in place.

        d nll / d logits = softmax - one-hot, times 1 - (z / cap)^2 where logits are capped.
        """
        z_CV = logits_CV.to(wide_of(logits_CV.dtype))
        if softcap is not None:
            z_CV = softcap * torch.tanh(z_CV / softcap)
        lse_C = torch.logsumexp(z_CV, 1)
        nll_C.copy_(lse_C - z_CV.gather(1, target_C[:, None])[:, 0])
        if not gradient:
            return
        dz_CV = torch.exp(z_CV - lse_C[:, None])
        dz_CV.scatter_add_(1, target_C[:, None], torch.full_like(lse_C, -1.0)[:, None])
        if softcap is not None:
            dz_CV *= 1 - (z_CV / softcap).square()
        logits_CV.copy_(dz_CV * count_C[:, None])

    def _wide_product(self, a: Tensor, b: Tensor) -> Tensor:
        a = left_factor(a)
        return torch.mm(a, b, out_dtype=torch.float32) if self._wide_products else torch.mm(a, b)


def drop_below(rate: float) -> int:
    """Return the number below which a share `rate` of all 32-bit numbers lies."""
    return round(rate * 2**32)


def _mix(x: Tensor) -> Tensor:
    """Return lowbias32 of 32-bit numbers in int64: a product's high half is cut off, sign and all."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


def has_wide_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch.mm takes two matrices of `dtype` to an fp32 result here (torch 2.8 and later, on GPUs)."""
    if dtype.itemsize != 2:
        return False
    square = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(square, square, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


# One merged matrix with its adapters, forward and backward: one large product each, the rest is thin.
#
#     weight' = [W; A]     forward   [Y | S] = X weight'^T,  then  Y += S B'^T             B' = scale * B
#                          backward  dS = dY B',   dX = [dY | dS] weight',   dA += dS^T X,   dB += scale * dY^T S
#
# So the base's output and X A^T come from one read of X, and the adapter's share of dX costs no pass of its own. With
# dropout each adapted module sees an input of its own, and its thin products are made one by one.
#
# Shapes: T tokens, K inputs, N outputs, R rank columns, W = N + R.


def project(ops: TorchOps, group: Group, x_TK: Tensor, y_TW: Tensor, drop: Drop | None, *, adapter: bool) -> None:
    """Compute y = [x W^T + bias + S B'^T | S] with S = x A^T; without adapter the rank columns stay as they were."""
    if adapter and drop is None:
        ops.project(x_TK, group, y_TW)
        return
    ops.multiply(x_TK, group.weight_NRK[: group.outputs].t(), y_TW[:, : group.outputs])
    for member in group.adapted if adapter else ():
        assert drop is not None
        dropped_TK, s_TR = _dropped(ops, x_TK, drop, member), y_TW[:, _ranks(group, member)]
        mm(dropped_TK, _down(group, member).t(), s_TR)
    ops.adapt(y_TW, group, adapter=adapter)


def input_gradient(ops: TorchOps, group: Group, dy_TW: Tensor, dx_TK: Tensor, drop: Drop | None) -> None:
    """Compute dX = dY W + dS A, from dy = [dY | dS]."""
    if drop is None:
        ops.multiply(dy_TW, group.weight_NRK, dx_TK)
        return
    ops.multiply(dy_TW[:, : group.outputs], group.weight_NRK[: group.outputs], dx_TK)
    for member in group.adapted:
        product_TK = drop.workspace.take("undropped", *dx_TK.shape, dtype=dx_TK.dtype)
        mm(dy_TW[:, _ranks(group, member)], _down(group, member), product_TK)
        dx_TK.add_(_dropped(ops, product_TK, drop, member))


def down_gradient(ops: TorchOps, group: Group, dy_TW: Tensor, x_TK: Tensor, scale: float, drop: Drop | None) -> None:
    """Add scale * dS^T (dropped x) to dA."""
    if drop is None:
        ops.down_gradient(dy_TW[:, group.outputs :], x_TK, group, scale)
        return
    for member in group.adapted:
        ds_TR = dy_TW[:, _ranks(group, member)]
        d_down_RK = drop.workspace.take("d_down", ds_TR.shape[1], x_TK.shape[1], dtype=x_TK.dtype)
        mm(ds_TR.t(), _dropped(ops, x_TK, drop, member), d_down_RK)
        member.d_down_RK.add_(d_down_RK[: len(member.d_down_RK)], alpha=scale)


def _dropped(ops: TorchOps, x_TK: Tensor, drop: Drop, member: Member) -> Tensor:
    """Return x with the member's dropout mask, in a buffer that the next call overwrites."""
    dropped_TK = drop.workspace.take("dropped", *x_TK.shape, dtype=x_TK.dtype)
    ops.drop(x_TK, drop, member.salt, dropped_TK)
    return dropped_TK


def _ranks(group: Group, member: Member) -> slice:
    start = group.outputs + member.rank_at
    return slice(start, start + len(member.scaled_up_RN))


def _down(group: Group, member: Member) -> Tensor:
    return group.weight_NRK[_ranks(group, member)]
