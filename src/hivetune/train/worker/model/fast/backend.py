"""The back ends of a model, and which one computes: our C++ kernels on a CPU (fp32 and bf16), else ops.py's torch.

Arguments of the kernels are addresses and strides; the caller's buffers are as ops.py describes them.

The large products of a CPU (device.products_for chooses): torch multiplies float32 with MKL, which takes its AVX2 path
on other vendors' processors that have AVX-512: 84 GFLOP/s a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN
reaches 175. In bfloat16 torch's product is oneDNN's, which packs the weights in every call, and the adapter's share
takes passes of its own. Our kernel (kernels/products.cpp) does both on the way. All sum in float32, each in another
order.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hivetune.errors import MachineNotFit
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.kernels.build import NoKernels, library
from hivetune.train.worker.model.fast.ops import Attention, Drop, TorchOps, drop_below, has_wide_products
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.weights import Group
from hivetune.train.worker.model.memory import Multiply, Workspace, mm

ROWS = 512  # oneDNN's float32 product takes so many rows at a time
LANES = 16
# Attention's backward pass is divided by trees of segments, by heads that share keys, and by parts of the keys where
# the others are fewer than TASKS or a row longer than LONG_KEYS, so that they keep many cores busy. The division
# follows from the rows alone: sums have the same order on any machine. A part takes turns with the others, PIECE_KEYS
# keys at a time (attention.h: PIECE).
PIECE_KEYS, LONG_KEYS, TASKS, MAX_PARTS = 256, 1024, 6, 8
KERNEL_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "add_norm": (POINTER, POINTER, LONG, POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, LONG),
    "norm_backward": (*[POINTER] * 6, LONG, LONG),
    "rope": (POINTER, LONG, POINTER, POINTER, FLOAT, LONG, *[LONG] * 3),
    "glu": (POINTER, LONG, POINTER, INT, LONG, LONG),
    "glu_backward": (POINTER, POINTER, LONG, POINTER, LONG, POINTER, INT, LONG, LONG),
    "drop": (POINTER, POINTER, LONG, LONG, FLOAT, POINTER, LONG, LONG),
    "cross_entropy": (*[POINTER] * 3, FLOAT, POINTER, INT, LONG, LONG),
    "adapt": (POINTER, LONG, LONG, LONG, POINTER, POINTER, LONG),
    "adapt_backward": (POINTER, LONG, LONG, LONG, LONG, POINTER, LONG),
    "up_gradient": (POINTER, LONG, POINTER, LONG, LONG, POINTER, LONG, FLOAT),
    "down_gradient": (POINTER, LONG, POINTER, LONG, LONG, POINTER, LONG, FLOAT),
    "multiply": (POINTER, LONG, POINTER, LONG, INT, POINTER, LONG, LONG, LONG, LONG),
    "project": (POINTER, LONG, POINTER, POINTER, LONG, LONG, *[LONG] * 3, POINTER, POINTER, LONG),
    "attention": (POINTER,) * 5,
    "attention_backward": (*[POINTER] * 7, LONG, POINTER, LONG, LONG),
}


@functools.cache
def kernels_for(dtype: torch.dtype) -> dict[str, Callable[..., None]]:
    """Return the kernels of a dtype by name. Raises NoKernels."""
    if dtype not in KERNEL_SUFFIXES:
        raise NoKernels(f"the kernels support float32 and bfloat16, not {dtype}")
    loaded, kernels = library(), dict[str, Callable[..., None]]()
    for name, kinds in SIGNATURES.items():
        kernels[name] = kernel = loaded[f"{name}_{KERNEL_SUFFIXES[dtype]}"]
        kernel.argtypes, kernel.restype = kinds, None
    return kernels


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


def by_onednn(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by oneDNN in blocks of rows, because it keeps code for each row count and returns a new tensor."""
    b_NK = b_KN.t()
    for first in range(0, len(a_MK), ROWS):
        rows = slice(first, first + ROWS)
        out_MN[rows].copy_(torch.ops.mkldnn._linear_pointwise(a_MK[rows], b_NK, None, "none", [], ""))


def by_native(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by our own kernel: rows of all three may be strided; b may lie as [N, K]. Raises ValueError else."""
    if a_MK.stride(1) != 1 or out_MN.stride(1) != 1 or 1 not in b_KN.stride():
        raise ValueError(f"rows of {a_MK.stride()}, {b_KN.stride()} and {out_MN.stride()} are not contiguous")
    turned, (rows, depth) = b_KN.stride(1) != 1, a_MK.shape
    kernels_for(a_MK.dtype)["multiply"](
        a_MK.data_ptr(), a_MK.stride(0), b_KN.data_ptr(), b_KN.stride(1 if turned else 0), int(turned),
        out_MN.data_ptr(), out_MN.stride(0), rows, b_KN.shape[1], depth,
    )  # fmt: skip


class NativeOps(TorchOps):
    """The operations of ops.TorchOps, in C++. One object serves one model: it holds the addresses of its adapters.

    `multiply`: the library of the large products, None for our own. Raises NoKernels with the reason.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype, multiply: Multiply | None = mm, *, eager: bool = False):
        super().__init__(multiply=multiply or mm, eager=eager)
        self._kernels, self._own_product = kernels_for(dtype), multiply is None
        # With the group itself: while it is held, no other one can get its id.
        self._members: dict[int, tuple[Group, ctypes.Array[MemberArguments]]] = {}

    def run(self, kernel: str, *arguments: Any) -> None:
        """Call a kernel; of a tensor its address."""
        self._kernels[kernel](*[value.data_ptr() if isinstance(value, Tensor) else value for value in arguments])

    def attention_tables(self, layout: Layout) -> tuple[Tensor, ...]:
        return super().attention_tables(layout) if self._eager else ()  # the kernels make their own

    def attention(self, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace) -> Attention:
        if self._eager:
            return super().attention(layout, tables, spec, workspace)
        return NativeAttention(layout, spec, self, workspace)

    def multiply(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        (by_native if self._own_product else super().multiply)(a_MK, b_KN, out_MN)

    def project(self, x_TK: Tensor, group: Group, y_TW: Tensor) -> None:
        if not self._own_product:
            super().project(x_TK, group, y_TW)
            return
        members, bias = self._arguments(group), group.bias_N
        self.run(
            "project", x_TK, x_TK.stride(0), group.weight_NRK, y_TW, y_TW.stride(0),
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
        delta = (None, 0) if delta_TD is None else (delta_TD, delta_TD.stride(0))
        self.run(
            "add_norm", x_TD, *delta, sum_TD, w_D, eps, y_TD,
            rstd_T, *x_TD.shape,
        )  # fmt: skip

    def norm_backward(
        self, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, w_D: Tensor, dx_TD: Tensor, y_TD: Tensor | None
    ) -> None:
        self.run(
            "norm_backward", dy_TD, x_TD, rstd_T, w_D, dx_TD, y_TD,
            *x_TD.shape,
        )  # fmt: skip

    def rope(self, x_TN: Tensor, cos_TH: Tensor, sin_TH: Tensor, head_dim: int, *, inverse: bool) -> None:
        rows, width = x_TN.shape
        self.run(
            "rope", x_TN, x_TN.stride(0), cos_TH, sin_TH, -1.0 if inverse else 1.0,
            rows, width // head_dim, head_dim, cos_TH.shape[1],
        )  # fmt: skip

    def glu(self, gate_up_TN: Tensor, h_TF: Tensor, activation: str) -> None:
        kind = int(activation == "gelu")
        self.run("glu", gate_up_TN, gate_up_TN.stride(0), h_TF, kind, *h_TF.shape)

    def glu_backward(
        self, dh_TF: Tensor, gate_up_TN: Tensor, dgate_up_TN: Tensor, h_TF: Tensor, activation: str
    ) -> None:
        self.run(
            "glu_backward", dh_TF, gate_up_TN, gate_up_TN.stride(0), dgate_up_TN,
            dgate_up_TN.stride(0), h_TF, int(activation == "gelu"), *h_TF.shape,
        )  # fmt: skip

    def adapt(self, y_TW: Tensor, group: Group, *, adapter: bool) -> None:
        bias = group.bias_N
        members = self._arguments(group) if adapter else (MemberArguments * 0)()
        if bias is None and not len(members):
            return
        rows, stride = len(y_TW), y_TW.stride(0)
        self.run("adapt", y_TW, stride, rows, group.outputs, bias, members, len(members))

    def adapt_backward(self, dy_TW: Tensor, group: Group) -> None:
        members, rows, stride = self._arguments(group), len(dy_TW), dy_TW.stride(0)
        if len(members):
            self.run(
                "adapt_backward", dy_TW, stride, rows, group.outputs, group.width, members, len(members)
            )  # fmt: skip

    def up_gradient(self, dy_TW: Tensor, s_TR: Tensor, group: Group, scale: float) -> None:
        members, rows, stride = self._arguments(group), len(dy_TW), dy_TW.stride(0)
        if len(members):
            self.run(
                "up_gradient", dy_TW, stride, s_TR, s_TR.stride(0), rows, members, len(members),
                scale,
            )  # fmt: skip

    def down_gradient(self, ds_TR: Tensor, x_TK: Tensor, group: Group, scale: float) -> None:
        members, (rows, width) = self._arguments(group), x_TK.shape
        if len(members):
            self.run(
                "down_gradient", ds_TR, ds_TR.stride(0), x_TK, width, rows, members, group.ranks,
                scale,
            )  # fmt: skip

    def drop(self, x_TK: Tensor, drop: Drop, salt: int, out_TK: Tensor) -> None:
        self.run(
            "drop", x_TK, drop.key_T, salt, drop_below(drop.rate), 1 / (1 - drop.rate),
            out_TK, *x_TK.shape,
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
            "cross_entropy", logits_CV, target_C, count_C, softcap or 0.0,
            nll_C, int(gradient), *logits_CV.shape,
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
            "attention", ctypes.byref(self._shape(qkv_TW, window)), ctypes.byref(self._layout), qkv_TW,
            out_TN, lse_TH,
        )  # fmt: skip

    def backward(
        self, dout_TN: Tensor, qkv_TW: Tensor, out_TN: Tensor, lse_TH: Tensor, dqkv_TW: Tensor, window: int | None
    ) -> None:
        sums = None
        if self.parts > 1:
            width = -(-self._spec.head_dim // LANES) * LANES
            shape = self.parts, self._spec.heads, self._size, width
            sums = self._workspace.take("attention_sums", *shape, dtype=torch.float32)
        self._ops.run(
            "attention_backward", ctypes.byref(self._shape(qkv_TW, window)), ctypes.byref(self._layout),
            dout_TN, qkv_TW, out_TN, lse_TH, dqkv_TW,
            dqkv_TW.stride(0), sums, self._size, self.parts,
        )  # fmt: skip

    def _shape(self, qkv_TW: Tensor, window: int | None) -> AttentionArguments:
        spec = self._spec
        return AttentionArguments(
            spec.heads, spec.kv_heads, spec.head_dim, qkv_TW.stride(0), window or 0, spec.attention_scale,
            spec.attention_softcap or 0.0,
        )  # fmt: skip


def backend_of(choices: Choices, device: torch.device, dtype: torch.dtype) -> TorchOps:
    """Return the back end that these choices ask for; its name says why it is the plain one.

    Raises MachineNotFit when the `native` kernels can't be had: a run that began with them must not continue with other
    roundings silently. A run that continues on a card computes with torch, whatever it began with.
    """
    can_onednn = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
    multiply = by_onednn if choices.products == "onednn" and can_onednn else mm
    eager = choices.attention == "eager"
    if device.type != "cpu" or choices.kernels == "torch":
        return TorchOps(wide_products=has_wide_products(dtype, device), multiply=multiply, eager=eager)
    try:
        return NativeOps(dtype, None if choices.products == "native" else multiply, eager=eager)
    except NoKernels as reason:
        if choices.kernels == "native":
            hint = "install g++, or set HIVETUNE_KERNELS to a folder on a disk that runs programs; or start a new run: "
            hint += "this one began with these kernels, and others round differently"
            raise MachineNotFit(f"cannot have the CPU kernels: {reason}", hint=hint) from None
        plain = TorchOps(multiply=multiply, eager=eager)
        plain.name = f"torch ({reason})"
        return plain
