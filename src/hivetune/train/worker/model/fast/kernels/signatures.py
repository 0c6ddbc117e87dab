"""Which kernels there are, and the kinds of their arguments."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.build import NoKernels, library
from hivetune.train.worker.model.fast.kernels.calls import Kernel, RowCount

KERNEL_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "add_norm": (POINTER, POINTER, LONG, POINTER, POINTER, FLOAT, POINTER, POINTER, RowCount, LONG),
    "norm_backward": (*[POINTER] * 6, RowCount, LONG),
    "rope": (POINTER, LONG, POINTER, POINTER, FLOAT, RowCount, *[LONG] * 3),
    "glu": (POINTER, LONG, POINTER, INT, RowCount, LONG),
    "glu_backward": (POINTER, POINTER, LONG, POINTER, LONG, POINTER, INT, RowCount, LONG),
    "drop": (POINTER, POINTER, LONG, LONG, FLOAT, POINTER, RowCount, LONG),
    "cross_entropy": (*[POINTER] * 3, FLOAT, POINTER, INT, LONG, LONG),
    "adapt": (POINTER, LONG, RowCount, LONG, POINTER, POINTER, LONG),
    "adapt_backward": (POINTER, LONG, RowCount, LONG, LONG, POINTER, LONG),
    "up_gradient": (POINTER, LONG, POINTER, LONG, RowCount, POINTER, LONG, FLOAT),
    "down_gradient": (POINTER, LONG, POINTER, LONG, RowCount, POINTER, LONG, FLOAT),
    "multiply": (POINTER, LONG, POINTER, LONG, INT, POINTER, LONG, RowCount, LONG, LONG),
    "project": (POINTER, LONG, POINTER, POINTER, LONG, RowCount, *[LONG] * 3, POINTER, POINTER, LONG),
    "attention": (POINTER,) * 5,
    "attention_backward": (*[POINTER] * 7, LONG, POINTER, RowCount, LONG),
}


@functools.cache
def kernels_for(dtype: torch.dtype) -> dict[str, Kernel]:
    """The kernels of a dtype by name. Raises NoKernels."""
    if dtype not in KERNEL_SUFFIXES:
        raise NoKernels(f"the kernels support float32 and bfloat16, not {dtype}")
    loaded, found = library(), {}
    for name, kinds in SIGNATURES.items():
        symbol = f"{name}_{KERNEL_SUFFIXES[dtype]}"
        checked, bare = loaded[symbol], loaded[symbol]  # two objects for one function
        checked.argtypes, checked.restype, bare.restype = kinds, None, None
        found[name] = Kernel(checked, bare, kinds)
    return found


def product_arguments(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> tuple[Any, ...]:
    """Of the kernel `multiply`: rows of all three may be strided; b may lie as [N, K]."""
    if a_MK.stride(1) != 1 or out_MN.stride(1) != 1 or 1 not in b_KN.stride():
        raise ValueError(f"rows of {a_MK.stride()}, {b_KN.stride()} and {out_MN.stride()} are not whole in memory")
    turned = b_KN.stride(1) != 1
    b = b_KN.data_ptr(), b_KN.stride(1 if turned else 0), int(turned)
    rows, depth = a_MK.shape
    return a_MK.data_ptr(), a_MK.stride(0), *b, out_MN.data_ptr(), out_MN.stride(0), rows, b_KN.shape[1], depth
