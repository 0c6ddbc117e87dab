"""Test products at a run's own shapes: check that the device still computes right numbers in its precision.

The factors are whole numbers, so small that every sum is exact in the precision under test. So the answer is known to
the bit, whatever the order of summation. It is checked with a random vector (Freivalds, MFCS 1979) in float64, which
costs less than the product and uses none of the routines under test. A silent fault of this kind:
ROCm/rocm-libraries#5706.

Shapes: a product is [M, K] x [K, N].
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.errors import HivetuneError
from hivetune.train.worker.model.protocol import LoraModel, Product

# Whole numbers up to here are exact: 8, 11 and 24 bits of significand.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: 1 << 53}
# A weight of 16 M values takes 0.15 s to make and check; a larger one is cut in its outputs.
MAX_CANARY_VALUES = 1 << 24
EVERY_S = 600.0
# Of the products that a run is tested with: as in a micro-batch, but no more than takes half a second on two cores.
TOKENS = 512


class CanaryFailed(HivetuneError):
    """Raised when the device computes wrong numbers at a shape of this run; all since the last test is doubtful."""


class Shape(NamedTuple):
    """The sizes of a product [m, k] x [k, n]."""

    m: int
    n: int
    k: int


def shapes_of(adapter: Mapping[str, Tensor], tokens: int) -> list[Shape]:
    """Return the products of a step of `tokens` tokens: forward and backward of each adapted layer and of its factors.

    `adapter` is by PEFT name: `X.lora_A.weight` [r, in] and `X.lora_B.weight` [out, r].
    """
    shapes = set()
    for name, a_RI in adapter.items():
        if not name.endswith(".lora_A.weight"):
            continue
        rank, inputs = a_RI.shape
        outputs = adapter[name.replace(".lora_A.", ".lora_B.")].shape[0]
        shapes |= {
            Shape(tokens, min(outputs, max(1, MAX_CANARY_VALUES // inputs)), inputs),  # x W
            Shape(tokens, min(inputs, max(1, MAX_CANARY_VALUES // outputs)), outputs),  # dy W'
            Shape(tokens, rank, inputs),  # x A
            Shape(tokens, outputs, rank),  # (x A) B
            Shape(rank, inputs, tokens),  # dA
            Shape(outputs, rank, tokens),  # dB
        }
    return sorted(shapes)


def check_model(model: LoraModel) -> int:
    """Test products at the model's own shapes and return how many. Raises CanaryFailed with the first wrong one."""
    shapes = shapes_of(model.adapter, TOKENS)
    for shape in shapes:
        if fault := fault_of(shape, model.dtype, model.device, model.product):
            m, n, k = shape
            raise CanaryFailed(
                f"canary product m {m} n {n} k {k} in {str(model.dtype).removeprefix('torch.')} on {model.device}: "
                f"{fault}",
                hint="if it happens again, the card, its driver or a library is broken; device: cpu avoids it",
            )
    return len(shapes)


def fault_of(shape: Shape, dtype: torch.dtype, device: torch.device, multiply: Product) -> str:
    """Return what is wrong with one product; empty if it is right. torch's own generators are not touched.

    The factors are of -1, 0 and 1, with so few nonzeros in a row of the left one that sums are exact. The values of the
    vector that checks are far enough below 2^53 / (K N) that its sums are exact too.
    """
    m, n, k = shape
    generator = torch.Generator().manual_seed((m << 40) ^ (n << 20) ^ k)
    a_MK = torch.randint(-1, 2, (m, k), generator=generator, dtype=torch.int8)
    stride = -(-k // EXACT[dtype])
    if stride > 1:
        offset_M1 = torch.randint(0, stride, (m, 1), generator=generator)
        a_MK *= (torch.arange(k) + offset_M1) % stride == 0
    b_KN = torch.randint(-1, 2, (k, n), generator=generator, dtype=torch.int8)
    v_N = torch.randint(1, 1 << 20, (n,), generator=generator, dtype=torch.int64).to(torch.float64)
    c_MN = multiply(a_MK.to(device, dtype), b_KN.to(device, dtype)).to("cpu", torch.float64)
    broken = int((~torch.isfinite(c_MN)).sum())
    if broken:
        return f"{broken} of {c_MN.numel()} values are not finite"
    off_M = (c_MN @ v_N) != a_MK.to(torch.float64) @ (b_KN.to(torch.float64) @ v_N)
    return f"{int(off_M.sum())} of {m} rows are wrong" if bool(off_M.any()) else ""
