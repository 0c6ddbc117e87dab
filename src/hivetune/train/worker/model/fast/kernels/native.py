"""The operations and attention (ops.TorchOps, attention.TorchAttention) by the C++ kernels: CPU, fp32 and bf16.

Arguments are addresses and strides; the caller's buffers are as ops.py describes them.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.kernels.calls import FLOAT, POINTER, kernels_for, product_arguments
from hivetune.train.worker.model.fast.ops import Drop, TorchOps, drop_below
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.weights import Group
from hivetune.train.worker.model.memory import Multiply, Workspace, mm

LANES = 16
# Attention's backward pass is divided by trees of segments, by heads that share keys, and by parts of the keys where
# the others are fewer than TASKS or a row longer than LONG_KEYS, so that they keep many cores busy. The division
# follows from the rows alone: sums have the same order on any machine. A part takes turns with the others, PIECE_KEYS
# keys at a time (attention.h: PIECE).
PIECE_KEYS, LONG_KEYS, TASKS, MAX_PARTS = 256, 1024, 6, 8


class MemberArguments(ctypes.Structure):
    """The struct Member of ranks.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "size", "rank_at", "rank")),
        *((name, POINTER) for name in ("up", "d_down", "d_up")),
    )


class AttentionArguments(ctypes.Structure):
    """The struct Shape of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "stride", "window")),
        ("scale", FLOAT),
        ("softcap", FLOAT),
    )


class LayoutArguments(ctypes.Structure):
    """The struct Layout of attention.h."""

    _fields_ = (
        *((name, POINTER) for name in ("segments", "paths", "trees")),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_trees")),
    )


def by_native(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by our own kernel: rows of all three may be strided; b may lie as [N, K]. Raises ValueError else."""
    kernels_for(a_MK.dtype)["multiply"](*product_arguments(a_MK, b_KN, out_MN))


class NativeOps(TorchOps):
    """The operations of ops.TorchOps, in C++. One object serves one model: it holds the addresses of its adapters.

    `multiply`: the library of the large products, None for our own.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype, multiply: Multiply | None = mm):
        super().__init__(multiply=multiply or mm)
        self._kernels, self._own_product = kernels_for(dtype), multiply is None
        # With the group itself: while it is held, no other one can get its id.
        self._members: dict[int, tuple[Group, ctypes.Array[MemberArguments]]] = {}

    def run(self, kernel: str, *arguments: Any) -> None:
        self._kernels[kernel](*arguments)

    def multiply(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        (by_native if self._own_product else super().multiply)(a_MK, b_KN, out_MN)

    def project(self, x_TK: Tensor, group: Group, y_TW: Tensor) -> None:
        if not self._own_product:
            super().project(x_TK, group, y_TW)
            return
        members, bias = self._arguments(group), None if group.bias_N is None else group.bias_N.data_ptr()
        self.run(
            "project", x_TK.data_ptr(), x_TK.stride(0), group.weight_NRK.data_ptr(), y_TW.data_ptr(), y_TW.stride(0),
            len(x_TK), group.outputs, group.width, group.inputs, bias, members, len(members),
        )  # fmt: skip

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
        delta = (None, 0) if delta_TD is None else (delta_TD.data_ptr(), delta_TD.stride(0))
        self.run(
            "add_norm", x_TD.data_ptr(), *delta, sum_TD.data_ptr(), w_D.data_ptr(), eps, y_TD.data_ptr(),
            rstd_T.data_ptr(), *x_TD.shape,
        )  # fmt: skip

    def norm_backward(
        self, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, w_D: Tensor, dx_TD: Tensor, y_TD: Tensor | None
    ) -> None:
        y = None if y_TD is None else y_TD.data_ptr()
        self.run(
            "norm_backward", dy_TD.data_ptr(), x_TD.data_ptr(), rstd_T.data_ptr(), w_D.data_ptr(), dx_TD.data_ptr(), y,
            *x_TD.shape,
        )  # fmt: skip

    def rope(self, x_TN: Tensor, cos_TH: Tensor, sin_TH: Tensor, head_dim: int, *, inverse: bool) -> None:
        rows, width = x_TN.shape
        self.run(
            "rope", x_TN.data_ptr(), x_TN.stride(0), cos_TH.data_ptr(), sin_TH.data_ptr(), -1.0 if inverse else 1.0,
            rows, width // head_dim, head_dim, cos_TH.shape[1],
        )  # fmt: skip

    def glu(self, gate_up_TN: Tensor, h_TF: Tensor, activation: str) -> None:
        kind = int(activation == "gelu")
        self.run("glu", gate_up_TN.data_ptr(), gate_up_TN.stride(0), h_TF.data_ptr(), kind, *h_TF.shape)

    def glu_backward(
        self, dh_TF: Tensor, gate_up_TN: Tensor, dgate_up_TN: Tensor, h_TF: Tensor, activation: str
    ) -> None:
        self.run(
            "glu_backward", dh_TF.data_ptr(), gate_up_TN.data_ptr(), gate_up_TN.stride(0), dgate_up_TN.data_ptr(),
            dgate_up_TN.stride(0), h_TF.data_ptr(), int(activation == "gelu"), *h_TF.shape,
        )  # fmt: skip

    def adapt(self, y_TW: Tensor, group: Group, *, adapter: bool) -> None:
        bias = None if group.bias_N is None else group.bias_N.data_ptr()
        members = self._arguments(group) if adapter else (MemberArguments * 0)()
        if bias is None and not len(members):
            return
        rows, stride = len(y_TW), y_TW.stride(0)
        self.run("adapt", y_TW.data_ptr(), stride, rows, group.outputs, bias, members, len(members))

    def adapt_backward(self, dy_TW: Tensor, group: Group) -> None:
        members, rows, stride = self._arguments(group), len(dy_TW), dy_TW.stride(0)
        if len(members):
            self.run(
                "adapt_backward", dy_TW.data_ptr(), stride, rows, group.outputs, group.width, members, len(members)
            )  # fmt: skip

    def up_gradient(self, dy_TW: Tensor, s_TR: Tensor, group: Group, scale: float) -> None:
        members, rows, stride = self._arguments(group), len(dy_TW), dy_TW.stride(0)
        if len(members):
            self.run(
                "up_gradient", dy_TW.data_ptr(), stride, s_TR.data_ptr(), s_TR.stride(0), rows, members, len(members),
                scale,
            )  # fmt: skip

    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        members, (rows, width) = self._arguments(group), x_TK.shape
        if len(members):
            self.run(
                "down_gradient", ds_TR.data_ptr(), ds_TR.stride(0), x_TK.data_ptr(), width, rows, members, group.ranks,
                scale,
            )  # fmt: skip

    def drop(self, x_TK: Tensor, drop: Drop, salt: int, out_TK: Tensor) -> None:
        self.run(
            "drop", x_TK.data_ptr(), drop.key_T.data_ptr(), salt, drop_below(drop.rate), 1 / (1 - drop.rate),
            out_TK.data_ptr(), *x_TK.shape,
        )  # fmt: skip

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
        self.run(
            "cross_entropy", logits_CV.data_ptr(), target_C.data_ptr(), count_C.data_ptr(), softcap or 0.0,
            nll_C.data_ptr(), int(gradient), *logits_CV.shape,
        )  # fmt: skip

    def _arguments(self, group: Group) -> "ctypes.Array[MemberArguments]":
        if id(group) in self._members:
            return self._members[id(group)][1]
        arguments = (MemberArguments * len(group.adapted))()
        for entry, member in zip(arguments, group.adapted, strict=True):
            entry.start, entry.size, entry.rank_at = member.start, member.size, member.rank_at
            entry.rank, entry.up = len(member.scaled_up_RN), member.scaled_up_RN.data_ptr()
            entry.d_down, entry.d_up = member.d_down_RK.data_ptr(), member.d_up_NR.data_ptr()
        self._members[id(group)] = (group, arguments)
        return arguments


class NativeAttention:
    """The attention of attention.TorchAttention, in C++. `parts`: of the keys, in the backward pass."""

    def __init__(self, layout: Layout, spec: ModelSpec, ops: NativeOps, workspace: Workspace):
        self._ops, self._spec, self._workspace, self._size = ops, spec, workspace, layout.size
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
        self._ops.run(
            "attention", ctypes.byref(self._shape(qkv_TW, window)), ctypes.byref(self._layout), qkv_TW.data_ptr(),
            out_TN.data_ptr(), lse_TH.data_ptr(),
        )  # fmt: skip

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        sums = None
        if self.parts > 1:
            width = -(-self._spec.head_dim // LANES) * LANES
            shape = self.parts, self._spec.heads, self._size, width
            sums = self._workspace.take("attention_sums", *shape, dtype=torch.float32).data_ptr()
        self._ops.run(
            "attention_backward", ctypes.byref(self._shape(qkv_TW, window)), ctypes.byref(self._layout),
            dout_TN.data_ptr(), qkv_TW.data_ptr(), out_TN.data_ptr(), lse_TH.data_ptr(), dqkv_TW.data_ptr(),
            dqkv_TW.stride(0), sums, self._size, self.parts,
        )  # fmt: skip

    def _shape(self, qkv_TW: Tensor, window: int | None) -> AttentionArguments:
        spec = self._spec
        return AttentionArguments(
            spec.heads, spec.kv_heads, spec.head_dim, qkv_TW.stride(0), window or 0, spec.attention_scale,
            spec.attention_softcap or 0.0,
        )  # fmt: skip
