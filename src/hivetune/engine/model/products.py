"""The library of large products: torch's own, or oneDNN for float32 on a CPU where it is measured to be faster.

torch multiplies float32 with MKL, which takes its AVX2 path on other vendors' processors that have AVX-512: 84 GFLOP/s
a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN reaches 175. Both sum in float32, in another order.
"""

import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

# a [M, K] times b [K, N] into the third one; rows may be strided.
Multiply = Callable[[Tensor, Tensor, Tensor], None]
Products = Literal["torch", "onednn"]
# Rows of a product at a time and of the timed one, as in a small model's step; how much faster the other library must
# be: its result is copied once.
ROWS, WIDTH, ROUNDS, WORTH_IT = 512, 1024, 5, 1.25


def by_torch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    torch.mm(a_MK, b_KN, out=out_MN)


def by_onednn(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """In blocks of rows: each result is a tensor of its own, and oneDNN keeps code for each number of rows."""
    b_NK = b_KN.t()
    for first in range(0, len(a_MK), ROWS):
        rows = slice(first, first + ROWS)
        out_MN[rows].copy_(torch.ops.mkldnn._linear_pointwise(a_MK[rows], b_NK, None, "none", [], ""))


def multiply_with(products: str | None, dtype: torch.dtype, device: torch.device) -> Multiply:
    """`products`: as chosen for the run (run/choices.py); it holds for float32 on a CPU."""
    return by_onednn if products == "onednn" and dtype == torch.float32 and device.type == "cpu" else by_torch


def at_hand(dtype: torch.dtype, device: torch.device) -> tuple[Multiply, ...]:
    """The libraries that could be chosen."""
    both = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
    return (by_torch, by_onednn) if both else (by_torch,)


def chosen_products(decided: str | None) -> Products:
    """What the profile says was decided on this machine before, else the fastest."""
    return fastest_products() if decided is None else "onednn" if decided == "onednn" else "torch"


def fastest_products() -> Products:
    """The library for float32 on this CPU, all timed in turns."""
    x, w = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    out = torch.empty(ROWS, WIDTH)
    seconds: dict[Multiply, list[float]] = {multiply: [] for multiply in at_hand(x.dtype, x.device)}
    for _ in range(ROUNDS + 1):
        for multiply, of_one in seconds.items():
            started = time.perf_counter()
            multiply(x, w.t(), out)
            of_one.append(time.perf_counter() - started)
    # The least after a warm-up: whatever disturbs makes it slower, nothing faster.
    least = {multiply: min(of_one[1:]) for multiply, of_one in seconds.items()}
    return "onednn" if least.get(by_onednn, math.inf) * WORTH_IT < least[by_torch] else "torch"
