"""The C++ kernels (kernels/) by their Python names, and the libraries of a CPU's large products.

torch multiplies float32 with MKL, which takes its AVX2 path on other vendors' processors that have AVX-512: 84 GFLOP/s
a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN reaches 175. In bfloat16 torch's product is oneDNN's, which
packs the weights in every call, and the adapter's share takes passes of its own. Our kernel (kernels/products.cpp) does
both on the way. All sum in float32, each in another order. settle.products_for chooses.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.build import library
from hivetune.train.worker.model.fast.weights import Group

ROWS = 512  # oneDNN's float32 product takes this many rows at a time
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class MatrixArguments(ctypes.Structure):
    """The struct Matrix of lanes.h. Rows may be strided; the numbers of a row lie one after another."""

    _fields_ = (("at", POINTER), *((name, INT) for name in ("stride", "rows", "columns")))

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> "MatrixArguments":
        if tensor is None:
            return cls()
        return cls(tensor.data_ptr(), tensor.stride(0), tensor.shape[0], tensor.shape[-1])


class MemberArguments(ctypes.Structure):
    """The struct Member of products.cpp."""

    _fields_ = (
        *((name, INT) for name in ("start", "size", "rank_at", "rank")),
        *((name, POINTER) for name in ("up", "d_down", "d_up")),
    )


class GroupArguments(ctypes.Structure):
    """The struct Group of products.cpp. It is made once for a group, whose tensors stay where they are."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "bias", "members")),
        *((name, INT) for name in ("count", "outputs", "width", "inputs", "ranks")),
    )

    @classmethod
    def from_param(cls, group: Group) -> "GroupArguments":
        if group.arguments is None:
            members = (MemberArguments * len(group.adapted))()
            for entry, member in zip(members, group.adapted, strict=True):
                entry.start, entry.size, entry.rank_at = member.start, member.size, member.rank_at
                entry.rank, entry.up = len(member.scaled_up_RN), member.scaled_up_RN.data_ptr()
                entry.d_down, entry.d_up = member.d_down_RK.data_ptr(), member.d_up_NR.data_ptr()
            bias = None if group.bias_N is None else group.bias_N.data_ptr()
            sizes = len(members), group.outputs, group.width, group.inputs, group.ranks
            made = cls(group.weight_NRK.data_ptr(), bias, ctypes.addressof(members), *sizes)
            group.arguments = made, members  # the first one points to the second
        return group.arguments[0]  # type: ignore[no-any-return]


class AttentionArguments(ctypes.Structure):
    """The struct Shape of attention.cpp."""

    _fields_ = (
        *((name, INT) for name in ("heads", "kv_heads", "head_dim", "stride", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class LayoutArguments(ctypes.Structure):
    """The struct Layout of attention.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("segments", "paths", "trees")),
        *((name, INT) for name in ("num_segments", "num_trees")),
    )


# What C++ takes for what an operation of ops.py declares.
C_TYPES: dict[Any, Any] = {
    **{Tensor: MatrixArguments, Tensor | None: MatrixArguments, Group: GroupArguments},
    **{int: INT, bool: INT, float: FLOAT},
}
MULTIPLY = (MatrixArguments, MatrixArguments, INT, MatrixArguments)
PROJECT = (MatrixArguments, GroupArguments, MatrixArguments)
ATTENTION = (AttentionArguments, LayoutArguments, *[MatrixArguments] * 3)
ATTENTION_BACKWARD = (AttentionArguments, LayoutArguments, *[MatrixArguments] * 6, INT)


@functools.cache
def kernel_of(dtype: torch.dtype, name: str, kinds: tuple[Any, ...]) -> Callable[..., None]:
    """Return the kernel of a dtype, which takes arguments of these C types. Raises NoKernels."""
    kernel = library(str(dtype).removeprefix("torch."))[name]
    kernel.argtypes, kernel.restype = kinds, None
    return kernel


def by_onednn(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply with oneDNN in blocks of rows, because it compiles code for each number of rows."""
    b_NK = b_KN.t()
    for first in range(0, len(a_MK), ROWS):
        rows = slice(first, first + ROWS)
        out_MN[rows].copy_(torch.ops.mkldnn._linear_pointwise(a_MK[rows], b_NK, None, "none", [], ""))


def by_native(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply with our kernel. Rows of all three may be strided; b may be stored as [N, K]. Raises ValueError
    otherwise."""
    if a_MK.stride(1) != 1 or out_MN.stride(1) != 1 or 1 not in b_KN.stride():
        raise ValueError(f"rows of {a_MK.stride()}, {b_KN.stride()} and {out_MN.stride()} are not contiguous")
    turned = b_KN.stride(1) != 1
    kernel_of(a_MK.dtype, "multiply", MULTIPLY)(a_MK, b_KN.t() if turned else b_KN, turned, out_MN)
