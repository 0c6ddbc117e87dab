"""The operations of a step between buffers: each is declared here once, with its form in plain torch.

That form is correct on any device and dtype. Where the C++ kernels are loaded (fp32 and bf16 on a CPU), the kernel of
the same name computes an operation instead, and must equal it. Every result goes to a buffer of the caller. "Wide" is
the dtype of the residual stream, of norms and of every reduction: fp32, or fp64 when computing in fp64. Matrices may be
columns of a wider buffer (strided rows).

Shapes: T tokens, D hidden, N outputs of a merged matrix, R its rank columns, W = N + R, K its inputs, F MLP width, H
rotated pairs of a head, C rows of logits, V tokens of the vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from hivetune.errors import MachineNotFit
from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast.backend import C_TYPES, PROJECT, by_native, by_onednn, kernel_of
from hivetune.train.worker.model.fast.build import NoKernels
from hivetune.train.worker.model.fast.weights import Group, Member
from hivetune.train.worker.model.memory import Multiply, Workspace, left_factor, mm, wide_dtype

LOW = 0xFFFFFFFF
_Arguments = ParamSpec("_Arguments")
_Operation = Callable[Concatenate["Ops", _Arguments], None]
KERNELS: dict[str, tuple[Any, ...]] = {"project": PROJECT}
"""The operations that have a kernel of their name, and the C types of its arguments."""
ROW_FUNCTIONS: dict[str, Callable[..., None]] = {}
"""The operations on rows, which torch.compile fuses."""


def has_kernel(operation: _Operation[_Arguments]) -> _Operation[_Arguments]:
    """Mark an operation that has a kernel of the same name, which computes it if the kernels are loaded.

    The kernel takes the operation's arguments, in this order.
    """
    name, declared = operation.__name__, get_type_hints(operation)
    KERNELS[name] = tuple(C_TYPES[kind] for argument, kind in declared.items() if argument != "return")
    if Group not in declared.values():  # else its products take the time, which torch.compile leaves to the library
        ROW_FUNCTIONS[name] = operation

    @functools.wraps(operation)
    def compute(ops: "Ops", /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        if name not in ops.kernels:
            operation(ops, *arguments, **named)
        elif ops.native:  # C has no names of arguments
            ops.kernels[name](*arguments, *named.values())
        else:
            ops.kernels[name](*arguments, **named)

    return compute


class Ops:
    """The operations of one back end. `multiply` computes the large products.

    `native`: the dtype of the kernels, None for plain torch. Raises NoKernels with the reason. `compiled`:
    torch.compile compiles the operations on rows. `wide_products`: half-precision products can return wide results, so
    that no gradient is rounded on its way. `eager`: attention by two plain products and a softmax, without a fused
    kernel.
    """

    def __init__(
        self,
        native: torch.dtype | None = None,
        *,
        multiply: Multiply = mm,
        compiled: bool = False,
        wide_products: bool = False,
        eager: bool = False,
    ):
        self.name, self.native, self.multiply, self.eager = "native" if native else "torch", native, multiply, eager
        self.kernels: dict[str, Callable[..., None]] = {}
        if native:
            self.kernels = {name: kernel_of(native, name, kinds) for name, kinds in KERNELS.items()}
        elif compiled:
            self.name = "compiled"
            self.kernels = {name: functools.partial(_compiled(one), self) for name, one in ROW_FUNCTIONS.items()}
        self._wide_products = wide_products

    def project(self, x_TK: Tensor, group: Group, y_TW: Tensor) -> None:
        """Compute y = [x W^T + bias + S B'^T | S] with S = x A^T, by one product for all columns, and then `adapt`."""
        # Our own product adds bias and adapters in its sums, which are rounded once.
        if self.multiply is by_native:
            self.kernels["project"](x_TK, group, y_TW)
            return
        self.multiply(x_TK, group.weight_NRK.t(), y_TW)
        self.adapt(y_TW, group, adapter=True)

    @has_kernel
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

    @has_kernel
    def norm_backward(
        self, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, w_D: Tensor, dx_TD: Tensor, y_TD: Tensor | None
    ) -> None:
        """Add the gradient of y = x * rstd * w to dx, which is wide; recompute y if requested.

        With u = x * rstd and du = dy * w, RMSNorm's gradient is rstd * (du - u * mean(du * u)).
        """
        unit_TD = x_TD * rstd_T[:, None]
        dunit_TD = dy_TD.to(dx_TD.dtype) * w_D
        dx_TD += rstd_T[:, None] * (dunit_TD - unit_TD * (dunit_TD * unit_TD).mean(1, keepdim=True))
        if y_TD is not None:
            y_TD.copy_(unit_TD * w_D)

    @has_kernel
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

    @has_kernel
    def glu(self, gate_up_TN: Tensor, h_TF: Tensor, gelu: bool) -> None:
        """Compute h = act(gate) * up (arXiv 2002.05202), with act SiLU, or the tanh form of GELU."""
        gate, up = gate_up_TN.to(wide_dtype(h_TF.dtype)).chunk(2, 1)
        h_TF.copy_((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up)

    @has_kernel
    def glu_backward(self, dh_TF: Tensor, gate_up_TN: Tensor, dgate_up_TN: Tensor, h_TF: Tensor, gelu: bool) -> None:
        """Compute the gradients of gate and up from that of h; recompute h, which dA of the down projection needs."""
        dh = dh_TF.to(wide_dtype(dh_TF.dtype))
        gate, up = gate_up_TN.to(dh.dtype).chunk(2, 1)
        if gelu:
            act = F.gelu(gate, approximate="tanh")
            dgate = torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh")
        else:
            act, dgate = F.silu(gate), torch.ops.aten.silu_backward(dh * up, gate)
        dgate_up_TN.copy_(torch.cat([dgate, dh * act], 1))
        h_TF.copy_(act * up)

    @has_kernel
    def adapt(self, y_TW: Tensor, group: Group, *, adapter: bool) -> None:
        """Add the bias to y, and S B'^T to the columns of each member; S is in the rank columns of y itself."""
        if group.bias_N is not None:
            y_TW[:, : group.outputs] += group.bias_N
        for member in group.adapted if adapter else ():
            start = group.outputs + member.rank_at
            up_RN = member.scaled_up_RN
            y_TW[:, member.start : member.stop].addmm_(left_factor(y_TW[:, start : start + len(up_RN)]), up_RN)

    @has_kernel
    def adapt_backward(self, dy_TW: Tensor, group: Group) -> None:
        """Write dS = dY B' to the rank columns of dy, and zeros to their padding, which the next product reads too."""
        dy_TW[:, group.outputs + group.ranks :].zero_()
        for member in group.adapted:
            start = group.outputs + member.rank_at
            up_RN = member.scaled_up_RN
            mm(dy_TW[:, member.start : member.stop], up_RN.t(), dy_TW[:, start : start + len(up_RN)])

    @has_kernel
    def up_gradient(self, dy_TW: Tensor, s_TR: Tensor, group: Group, scale: float) -> None:
        """Add scale * dY^T S to dB of each member."""
        for member in group.adapted:
            d_up_NR = member.d_up_NR
            s = s_TR[:, member.rank_at : member.rank_at + len(member.scaled_up_RN)]
            d_up_NR.add_(self._wide_product(dy_TW[:, member.start : member.stop].t(), s), alpha=scale)

    @has_kernel
    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        """Add scale * dS^T X to dA of all members at once."""
        if group.adapted:
            group.d_downs_RK.add_(self._wide_product(ds_TR[:, : group.ranks].t(), x_TK), alpha=scale)

    @has_kernel
    def drop(self, x_TK: Tensor, key_T: Tensor, salt: int, rate: float, out_TK: Tensor) -> None:
        """Write x / (1 - rate) where the mask of (row's key, salt, column) keeps it, else 0."""
        # Two rounds of a 32-bit mixing function (Chris Wellons, "Prospecting for hash functions", 2018: lowbias32) over
        # the column, the first with one half of the key and the salt, the second with the other.
        key_T1 = (key_T ^ salt)[:, None]
        mixed_TK = _mix((torch.arange(x_TK.shape[1], device=x_TK.device) * 0x9E3779B9 + _mix(key_T1 & LOW)) & LOW)
        keep_TK = _mix(mixed_TK ^ ((key_T1 >> 32) & LOW)) >= round(rate * 2**32)
        out_TK.copy_(x_TK.to(wide_dtype(x_TK.dtype)) * (1 / (1 - rate)) * keep_TK)

    @has_kernel
    def cross_entropy(
        self,
        logits_CV: Tensor,
        target_C: Tensor,
        count_C: Tensor,
        softcap: float,
        nll_C: Tensor,
        *,
        gradient: bool,
    ) -> None:
        """Write nll [C] of each row, in nats, of logits capped at `softcap`; 0: not capped.

        With `gradient`, the logits become count * d nll / d logits in place: softmax - one-hot for a count of 1, times
        1 - (z / cap)^2 where logits are capped.
        """
        z_CV = logits_CV.to(wide_dtype(logits_CV.dtype))
        if softcap:
            z_CV = softcap * torch.tanh(z_CV / softcap)
        lse_C = torch.logsumexp(z_CV, 1)
        nll_C.copy_(lse_C - z_CV.gather(1, target_C[:, None])[:, 0])
        if not gradient:
            return
        dz_CV = torch.exp(z_CV - lse_C[:, None])
        dz_CV.scatter_add_(1, target_C[:, None], torch.full_like(lse_C, -1.0)[:, None])
        if softcap:
            dz_CV *= 1 - (z_CV / softcap).square()
        logits_CV.copy_(dz_CV * count_C[:, None])

    def _wide_product(self, a: Tensor, b: Tensor) -> Tensor:
        a = left_factor(a)
        return torch.mm(a, b, out_dtype=torch.float32) if self._wide_products else torch.mm(a, b)


def _compiled(operation: Callable[..., None]) -> Callable[..., None]:
    # Sizes are symbols, since every micro-batch has others. Inductor would time several kernels of a function and take
    # the fastest, whose sums may be rounded otherwise in the next run; `deterministic` leaves it one.
    compiled: Callable[..., None] = torch.compile(operation, dynamic=True, options={"deterministic": True})
    return compiled


def _mix(x: Tensor) -> Tensor:
    """Return lowbias32 of 32-bit numbers in int64: a product's high half is cut off, sign and all."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


def ops_for(choices: Choices, device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the operations for these choices; if they are in plain torch, the name gives the reason.

    Raises MachineNotFit if the `native` kernels are missing: a run that began with them must not continue with other
    roundings silently. A run that continues on a card computes with torch, even if it began with kernels on a CPU.
    """
    can_onednn = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
    multiply = by_onednn if choices.products == "onednn" and can_onednn else mm
    eager = choices.attention == "eager"
    if device.type != "cpu" or choices.kernels in ("compiled", "torch"):
        wide_products, compiled = _has_wide_products(dtype, device), choices.kernels == "compiled"
        return Ops(multiply=multiply, compiled=compiled, wide_products=wide_products, eager=eager)
    try:
        return Ops(dtype, multiply=by_native if choices.products == "native" else multiply, eager=eager)
    except NoKernels as reason:
        if choices.kernels == "native":
            hint = "install g++, or set HIVETUNE_KERNELS to a folder on a disk that runs programs; or start a new run: "
            hint += "this one began with these kernels, and others round differently"
            raise MachineNotFit(f"the CPU kernels of this run are not available now: {reason}", hint=hint) from None
        plain = Ops(multiply=multiply, eager=eager)
        plain.name = f"torch ({reason})"
        return plain


def _has_wide_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch.mm takes two matrices of `dtype` to an fp32 result here (torch 2.8 and later, on GPUs)."""
    if dtype.itemsize != 2:
        return False
    square = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(square, square, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class Drop:
    """Dropout of the rows of a product. `rate`: the share of inputs set to zero. key_T: int64 seed of each row."""

    # A mask is a function, no draw: of the row's key, which follows from the step and from the tokens up to this one,
    # of the module and of the column. So it is the same in the backward pass, after a resume, in any order of the rows.

    key_T: Tensor
    rate: float
    workspace: Workspace

    def of(self, rows: Tensor | slice) -> "Drop":
        return replace(self, key_T=self.key_T[rows])


# One merged matrix with its adapters, forward and backward: one large product each, the rest is thin.
#
#     weight' = [W; A]     forward   [Y | S] = X weight'^T,  then  Y += S B'^T             B' = scale * B
#                          backward  dS = dY B',   dX = [dY | dS] weight',   dA += dS^T X,   dB += scale * dY^T S
#
# So the base's output and X A^T come from one read of X, and the adapter's share of dX costs no pass of its own. With
# dropout each adapted module sees an input of its own, and its thin products are made one by one.
#
# Shapes: T tokens, K inputs, N outputs, R rank columns, W = N + R.


def project(ops: Ops, group: Group, x_TK: Tensor, y_TW: Tensor, drop: Drop | None, *, adapter: bool) -> None:
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


def input_gradient(ops: Ops, group: Group, dy_TW: Tensor, dx_TK: Tensor, drop: Drop | None) -> None:
    """Compute dX = dY W + dS A, from dy = [dY | dS]."""
    if drop is None:
        ops.multiply(dy_TW, group.weight_NRK, dx_TK)
        return
    ops.multiply(dy_TW[:, : group.outputs], group.weight_NRK[: group.outputs], dx_TK)
    for member in group.adapted:
        product_TK = drop.workspace.take("undropped", *dx_TK.shape, dtype=dx_TK.dtype)
        mm(dy_TW[:, _ranks(group, member)], _down(group, member), product_TK)
        dx_TK.add_(_dropped(ops, product_TK, drop, member))


def down_gradient(ops: Ops, group: Group, dy_TW: Tensor, x_TK: Tensor, scale: float, drop: Drop | None) -> None:
    """Add scale * dS^T (dropped x) to dA."""
    if drop is None:
        ops.down_gradient(dy_TW[:, group.outputs :], x_TK, group, scale)
        return
    for member in group.adapted:
        ds_TR = dy_TW[:, _ranks(group, member)]
        d_down_RK = drop.workspace.take("d_down", ds_TR.shape[1], x_TK.shape[1], dtype=x_TK.dtype)
        mm(ds_TR.t(), _dropped(ops, x_TK, drop, member), d_down_RK)
        member.d_down_RK.add_(d_down_RK, alpha=scale)


def _dropped(ops: Ops, x_TK: Tensor, drop: Drop, member: Member) -> Tensor:
    """Return x with the member's dropout mask, in a buffer that the next call overwrites."""
    dropped_TK = drop.workspace.take("dropped", *x_TK.shape, dtype=x_TK.dtype)
    ops.drop(x_TK, drop.key_T, member.salt, drop.rate, dropped_TK)
    return dropped_TK


def _ranks(group: Group, member: Member) -> slice:
    start = group.outputs + member.rank_at
    return slice(start, start + len(member.scaled_up_RN))


def _down(group: Group, member: Member) -> Tensor:
    return group.weight_NRK[_ranks(group, member)]
