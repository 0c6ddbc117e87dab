"""The C++ kernels as functions of Python: their signatures, and the arguments of the product."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.build import NoKernels, library

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


def product_arguments(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> tuple[Any, ...]:
    """Return arguments of the kernel `multiply`: rows of all three may be strided; b may lie as [N, K]."""
    if a_MK.stride(1) != 1 or out_MN.stride(1) != 1 or 1 not in b_KN.stride():
        raise ValueError(f"rows of {a_MK.stride()}, {b_KN.stride()} and {out_MN.stride()} are not contiguous")
    turned = b_KN.stride(1) != 1
    b = b_KN.data_ptr(), b_KN.stride(1 if turned else 0), int(turned)
    rows, depth = a_MK.shape
    return a_MK.data_ptr(), a_MK.stride(0), *b, out_MN.data_ptr(), out_MN.stride(0), rows, b_KN.shape[1], depth
