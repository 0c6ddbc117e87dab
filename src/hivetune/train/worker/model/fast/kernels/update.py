"""The norm of a gradient and AdamW's update of all adapter weights, by the C++ kernels: CPU, fp32.

Shapes: N adapter weights.
"""

import ctypes

from torch import Tensor

from hivetune.train.worker.model.fast.kernels.build import library

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


def native_norm(grad_N: Tensor, norm: Tensor) -> None:
    """Into `norm`, which is fp64."""
    kernel = library().norm_of
    kernel.argtypes, kernel.restype = (POINTER, LONG, POINTER), None
    kernel(grad_N.data_ptr(), grad_N.numel(), norm.data_ptr())


def native_adamw(
    flat: tuple[Tensor, Tensor, Tensor, Tensor],
    terms: Tensor,
    constants: tuple[float, float],
    shrink: Tensor,
    ok: Tensor,
) -> None:
    """`flat`: master, gradient and both averages. `terms`: the five of optimizer.AdamW; `constants`: the new square's
    share and epsilon. `shrink` in fp64 and `ok`, a bool, are read when the kernel runs."""
    kernel = library().adamw
    kernel.argtypes, kernel.restype = (*[POINTER] * 4, LONG, POINTER, FLOAT, FLOAT, POINTER, POINTER), None
    addresses = (tensor.data_ptr() for tensor in flat)
    kernel(*addresses, flat[0].numel(), terms.data_ptr(), *constants, shrink.data_ptr(), ok.data_ptr())
