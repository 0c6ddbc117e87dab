"""The back end in plain torch, correct on any device and dtype: the work between matrix products, and attention.

backend.py computes the same in C++, and must equal it. Every result goes to a buffer of the caller. "Wide" is the dtype
of the residual stream, of norms and of every reduction: fp32, or fp64 when computing in fp64. Matrices may be columns
of a wider buffer (strided rows).

Shapes: T tokens, D hidden, N outputs of a merged matrix, R its rank columns, W = N + R, K its inputs, F MLP width, H
rotated pairs of a head, C rows of logits, V tokens of the vocabulary. Attention has its own, below.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.spec import ModelSpec
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


class Attention(Protocol):
    """Attention of one layout; see `TorchAttention` for what the buffers hold."""

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None: ...

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None: ...


class TorchOps:
    """The operations in plain torch.

    `wide_products`: half-precision products can give wide results here; no gradient is rounded on its way then.
    `multiply`: the large products. `eager`: attention by two plain products and a softmax, without a fused kernel.
    """

    name = "torch"

    def __init__(self, *, wide_products: bool = False, multiply: Multiply = mm, eager: bool = False):
        self._wide_products, self._multiply, self._eager = wide_products, multiply, eager

    def attention_tables(self, layout: Layout) -> tuple[Tensor, ...]:
        """Return the tables of a layout that `attention` reads, on the host."""
        return segment_tables(layout)

    def attention(self, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace) -> Attention:
        """Return attention of one layout, its tables on the device."""
        return TorchAttention(tables, spec, eager=self._eager)

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
            d_up_NR.add_(self._wide_product(dy_TW[:, member.start : member.stop].t(), s), alpha=scale)

    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        """Add scale * dS^T X to dA of all members at once."""
        if group.adapted:
            group.d_downs_RK.add_(self._wide_product(ds_TR[:, : group.ranks].t(), x_TK), alpha=scale)

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
        member.d_down_RK.add_(d_down_RK, alpha=scale)


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


# Attention: each query sees its parents' keys and its own segment's before it. Segments of similar size form a batch
# for torch's SDPA. Their keys are gathered along their paths, so nothing crosses documents. Backward recomputes the
# scores.
#
# Shapes: T tokens, H query heads, E channels of a head, S segments of a batch, Q queries and K keys of each, padded.


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of similar size. query_SQ, key_SK: flat token numbers; padding repeats token 0.

    place_N: where the real queries stand among the S * Q; row_N: which flat row each of them is.
    """

    query_SQ: Tensor
    key_SK: Tensor
    ago_SQK: Tensor
    """How many positions a key lies before a query; negative for keys that it must not see."""
    place_N: Tensor
    row_N: Tensor


TABLES = len(fields(SegmentBatch))


class TorchAttention:
    """Attention of one layout by its `segment_tables`, on the device.

    The qkv buffer holds [q | k | v | ...] in each row, rotary already applied.
    """

    def __init__(self, tables: Sequence[Tensor], spec: ModelSpec, *, eager: bool = False):
        self._spec, self._eager = spec, eager
        self._biases: dict[tuple[int, int | None], Tensor] = {}
        self._batches = [SegmentBatch(*tables[at : at + TABLES]) for at in range(0, len(tables), TABLES)]

    def forward(self, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, window: int | None) -> None:
        """Write attention's output [T, heads * head_dim] into `out_TN`.

        Other kernels keep `lse_TH`; here it is unused.
        """
        for number, batch in enumerate(self._batches):
            bias_S1QK = self._bias(number, window, qkv_TW.dtype)
            out_SHQE = _attend(*self._gather(qkv_TW, batch), bias_S1QK, self._spec, self._eager)
            out_TN[batch.row_N] = out_SHQE.transpose(1, 2).flatten(0, 1).flatten(1)[batch.place_N]

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        """Write the gradients of q, k and v into the first columns of `dqkv_TW`, by torch's autograd.

        Keys of a shared prefix get gradients from every segment after it, so they are summed, in the wide dtype.
        """
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
    if cap is None and not eager:
        return F.scaled_dot_product_attention(q_SHQE, k_SHKE, v_SHKE, attn_mask=bias_S1QK, scale=spec.attention_scale)
    wide = wide_of(q_SHQE.dtype)
    score_SHQK = (q_SHQE.to(wide) @ k_SHKE.to(wide).transpose(2, 3)) * spec.attention_scale
    if cap is not None:
        score_SHQK = cap * torch.tanh(score_SHQK / cap)
    return (torch.softmax(score_SHQK + bias_S1QK, 3) @ v_SHKE.to(wide)).to(q_SHQE.dtype)


# Segments are batched by sizes rounded up to this, for little padding. Fused kernels want lengths that are multiples of
# 8 at least; their own blocks are 64 or 128.
SIZE_STEP = 64


def segment_tables(layout: Layout) -> tuple[Tensor, ...]:
    """Return the index tables of a layout, on the host: a SegmentBatch's for each class of similar segments."""
    classes: dict[tuple[int, int], list[int]] = {}
    for number, segment in enumerate(layout.segments):
        sizes = segment.size, segment.depth + segment.size
        queries, keys = (-(-size // SIZE_STEP) * SIZE_STEP for size in sizes)
        classes.setdefault((queries, keys), []).append(number)
    return tuple(table for like in sorted(classes) for table in _class_tables(layout, classes[like], *like))


def _class_tables(layout: Layout, numbers: Sequence[int], queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return the tables of segments that are computed with so many queries and keys each."""
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
