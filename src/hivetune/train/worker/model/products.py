"""The library of a CPU's large products: torch, oneDNN for float32, or our own kernel, as measured on the machine.

torch multiplies float32 with MKL, which takes its AVX2 path on other vendors' processors that have AVX-512: 84 GFLOP/s
a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN reaches 175. In bfloat16 torch's product is oneDNN's, which
packs the weights in every call, and the adapter's share takes passes of its own. Our kernel (kernels/products.cpp) does
both on the way. All sum in float32, each in another order.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.build import NoKernels
from hivetune.train.worker.model.fast.kernels.calls import kernels_for, product_arguments
from hivetune.train.worker.model.memory import Multiply, left_factor, mm, unwritten

Products = Literal["torch", "onednn", "native"]
ROWS = 512  # oneDNN's float32 product takes so many rows at a time
# A small step is timed: rows by each of several weights, which together do not fit the nearer caches.
TIMED_ROWS, WIDTH, WEIGHTS, ROUNDS = 256, 1024, 4, 5
ONEDNN_WORTH_IT = 1.25  # times as fast as torch: its result is copied once, and its code is kept for each row count
# What our product saves elsewhere, as a share of its time: the passes for S B' (3 % of all products' time on
# SmolLM2-135M at rank 8) and the padding to 32 rows. So a tie, which noise would decide, goes to it.
SAVED_BESIDE = 0.05
HOPELESS = 10.0  # times the fastest in the warm-up, in which oneDNN also compiles: 15 ms beside 15


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
    """Multiply by our own kernel; where there is none, `fastest_products` never calls it."""
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


def timed(work: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of each of `rounds`, after one to warm up; each waits for the device."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def product_seconds(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of x W^T by the fastest library, some times after a warm-up."""
    rows, inner, columns = shape
    x, w = (torch.ones(n, inner, dtype=dtype, device=device) for n in (rows, columns))
    out = torch.empty(rows, columns, dtype=dtype, device=device)

    def seconds(multiply: Multiply) -> list[float]:
        return timed(lambda: multiply(x, w.t(), out), device, rounds)

    return min(map(seconds, libraries(dtype, device).values()), key=statistics.median)


def chosen_products(decided: str | None, dtype: torch.dtype) -> Products:
    """Return the earlier choice from this machine's profile, else the fastest on this CPU."""
    return next((name for name in get_args(Products) if name == decided), None) or fastest_products(dtype)


def fastest_products(dtype: torch.dtype) -> Products:
    """Return the fastest library for this dtype on this CPU, all timed in turns.

    One that is hopeless in the warm-up is timed no further: with AVX2 alone our own kernel makes 4 GFLOP/s where torch
    makes 140, and its rounds took most of the 13 s before a first run.
    """
    x, out = torch.ones(TIMED_ROWS, WIDTH, dtype=dtype), torch.empty(TIMED_ROWS, WIDTH, dtype=dtype)
    weights = [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(WEIGHTS)]
    candidates = libraries(dtype, torch.device("cpu"))
    with contextlib.suppress(NoKernels):  # reported elsewhere: `kernels` says which run, and why
        kernels_for(dtype)
        candidates["native"] = by_native
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS + 1):
        for name, multiply in candidates.items():
            started = time.perf_counter()
            for w in weights:
                multiply(x, w.t(), out)
            seconds[name].append(time.perf_counter() - started)
        fastest = min(of_one[0] for of_one in seconds.values())
        candidates = {
            name: multiply
            for name, multiply in candidates.items()
            if name == "torch" or seconds[name][0] < HOPELESS * fastest
        }
    seconds = {name: seconds[name] for name in candidates}
    # The least after a warm-up: a disturbance makes it slower, nothing faster.
    least = {name: min(of_one[1:]) for name, of_one in seconds.items()}
    if "native" in least:
        least["native"] *= 1 - SAVED_BESIDE
    if "onednn" in least and least["onednn"] * ONEDNN_WORTH_IT > least["torch"]:
        del least["onednn"]
    return cast(Products, min(least, key=least.__getitem__))
