"""Test products at a run's own shapes: check that the device still computes right numbers in its precision.

The factors are whole numbers, so small that every sum is exact in the precision under test. So the answer is known to
the bit, whatever the order of summation. It is checked with a random vector (Freivalds, MFCS 1979) in float64, which
costs less than the product and uses none of the routines under test. A silent fault of this kind:
ROCm/rocm-libraries#5706.

Shapes: a product is [M, K] x [K, N].
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.errors import HivetuneError
from hivetune.train.worker.model.protocol import LoraModel

# Whole numbers up to here are exact: 8, 11 and 24 bits of significand.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: 1 << 53}
# A weight of 16 M values takes 0.15 s to make and check; a larger one is cut in its outputs.
MAX_CANARY_VALUES = 1 << 24
EVERY_S = 600.0
# Of the products that a run is tested with: as in a micro-batch, but no more than takes half a second on two cores.
TOKENS = 512


class CanaryFailed(HivetuneError):
    """Raised when the device computes wrong numbers at a shape of this run; all since the last test is doubtful."""


class Product(NamedTuple):
    """The sizes of a product [m, k] x [k, n]."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Wrong:
    """One product with a wrong result."""

    product: Product
    what: str


def shapes_of(adapter: Mapping[str, Tensor], tokens: int) -> list[Product]:
    """Return the products of a step of `tokens` tokens: forward and backward of each adapted layer and of its factors.

    `adapter` is by PEFT name: `X.lora_A.weight` [r, in] and `X.lora_B.weight` [out, r].
    """
    products = set()
    for name, a_RI in adapter.items():
        if not name.endswith(".lora_A.weight"):
            continue
        rank, size_in = a_RI.shape
        size_out = adapter[name.replace(".lora_A.", ".lora_B.")].shape[0]
        products |= {
            Product(tokens, cut_outputs(size_out, size_in), size_in),  # x W
            Product(tokens, cut_outputs(size_in, size_out), size_out),  # dy W'
            Product(tokens, rank, size_in),  # x A
            Product(tokens, size_out, rank),  # (x A) B
            Product(rank, size_in, tokens),  # dA
            Product(size_out, rank, tokens),  # dB
        }
    return sorted(products)


def wrong_products(
    products: Iterable[Product],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> list[Wrong]:
    """Return the products that come out wrong. torch's own generators are not touched."""
    return [Wrong(product, fault) for product in products if (fault := _test(product, dtype, device, multiply))]


def must_pass(
    products: Sequence[Product],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> float:
    """Test the products and return the seconds that it took. Raises CanaryFailed naming the first wrong product."""
    started = time.perf_counter()
    wrong = wrong_products(products, dtype=dtype, device=device, multiply=multiply)
    if wrong:
        (m, n, k), fault = wrong[0].product, wrong[0].what
        raise CanaryFailed(
            f"canary product m {m} n {n} k {k} in {str(dtype).removeprefix('torch.')} on {device}: {fault}; "
            f"{len(wrong)} of {len(products)} products are wrong",
            hint="if it happens again, the card, its driver or a library is broken; device: cpu avoids it",
        )
    return time.perf_counter() - started


def check_model(model: LoraModel) -> tuple[int, float]:
    """Test products at the model's own shapes. Return how many, and the seconds. Raises as `must_pass`."""
    products = shapes_of(model.adapter, TOKENS)
    return len(products), must_pass(products, dtype=model.dtype, device=model.device, multiply=model.product)


def _test(
    product: Product, dtype: torch.dtype, device: torch.device | str, multiply: Callable[[Tensor, Tensor], Tensor]
) -> str:
    a_MK, b_KN, v_N = _factors(product, EXACT[dtype])
    c_MN = multiply(a_MK.to(device, dtype), b_KN.to(device, dtype)).to("cpu", torch.float64)
    broken = int((~torch.isfinite(c_MN)).sum())
    if broken:
        return f"{broken} of {c_MN.numel()} values are not finite"
    off_M = (c_MN @ v_N) != a_MK.to(torch.float64) @ (b_KN.to(torch.float64) @ v_N)
    return f"{int(off_M.sum())} of {product.m} rows are wrong" if bool(off_M.any()) else ""


def _factors(product: Product, exact: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors of -1, 0 and 1, at most `exact` of them nonzero in a row of the left one, and the check vector.

    Its values are far enough below 2^53 / (K N) that its sums are exact too.
    """
    m, n, k = product
    generator = torch.Generator().manual_seed((m << 40) ^ (n << 20) ^ k)
    a_MK = torch.randint(-1, 2, (m, k), generator=generator, dtype=torch.int8)
    stride = -(-k // exact)
    if stride > 1:
        offset_M1 = torch.randint(0, stride, (m, 1), generator=generator)
        a_MK *= (torch.arange(k) + offset_M1) % stride == 0
    b_KN = torch.randint(-1, 2, (k, n), generator=generator, dtype=torch.int8)
    return a_MK, b_KN, torch.randint(1, 1 << 20, (n,), generator=generator, dtype=torch.int64).to(torch.float64)


def cut_outputs(outputs: int, inputs: int) -> int:
    """Return how many outputs of a weight with these inputs are tested."""
    return min(outputs, max(1, MAX_CANARY_VALUES // inputs))
