"""The library of a CPU's large products: torch, oneDNN for float32, or our own kernel (device.products_for).

torch multiplies float32 with MKL, which takes its AVX2 path on other vendors' processors that have AVX-512: 84 GFLOP/s
a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN reaches 175. In bfloat16 torch's product is oneDNN's, which
packs the weights in every call, and the adapter's share takes passes of its own. Our kernel (kernels/products.cpp) does
both on the way. All sum in float32, each in another order.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.calls import kernels_for, product_arguments
from hivetune.train.worker.model.memory import Multiply, left_factor, mm, unwritten

Products = Literal["torch", "onednn", "native"]
ROWS = 512  # oneDNN's float32 product takes so many rows at a time


def by_torch_anew(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Multiply by torch (memory.mm) into a new tensor."""
    return torch.mm(left_factor(a_MK), b_KN)


def by_onednn(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by oneDNN in blocks of rows, because it keeps code for each row count and returns a new tensor."""
    b_NK = b_KN.t()
    for first in range(0, len(a_MK), ROWS):
        rows = slice(first, first + ROWS)
        out_MN[rows].copy_(torch.ops.mkldnn._linear_pointwise(a_MK[rows], b_NK, None, "none", [], ""))


def by_native(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by our own kernel."""
    kernels_for(a_MK.dtype)["multiply"](*product_arguments(a_MK, b_KN, out_MN))


def step_product(kernels: str, products: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the matrix product of a step, in torch.mm's form, for test products.

    If rows of the left factor are not contiguous, as for gradients of weights, it is torch's product.
    """

    def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
        if a_MK.stride(1) != 1:
            return by_torch_anew(a_MK, b_KN)
        out_MN = unwritten(len(a_MK), b_KN.shape[1], dtype=a_MK.dtype)
        by_native(a_MK, b_KN, out_MN)
        return out_MN

    return product if kernels == products == "native" else by_torch_anew


def libraries(dtype: torch.dtype, device: torch.device) -> dict[str, Multiply]:
    """Return the libraries that could be chosen, by name of the choice `products` (run/choices.py).

    Our own kernel is no library: where it is chosen, and there are no kernels, torch takes its place.
    """
    by_name: dict[str, Multiply] = {"torch": mm}
    if dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available():
        by_name["onednn"] = by_onednn
    return by_name
