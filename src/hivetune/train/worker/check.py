"""Two checks that this machine computes correct numbers, since a wrong gradient would go unnoticed.

Before step 0, the fast path is compared with transformers: both compute a few rows of the run, with adapters that are
not zero. The loss of each row and the whole gradient must agree within the precision. So a config that the fast path
misreads, a kernel that the compiler got wrong, or a shape that a card computes wrongly is detected, and the run uses
another path.

Then, every ten minutes, matrix products of the run's own shapes are tested. Their factors are whole numbers, so small
that every sum is exact in the precision under test, and the result does not depend on the order of summation. It is
checked with a random vector (Freivalds, MFCS 1979) in float64, which costs less than the product and uses none of the
routines under test. An example of such a silent fault: ROCm/rocm-libraries#5706.

Shapes: B documents, N adapter weights; a product is [M, K] x [K, N].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import initialise, same_views
from hivetune.train.worker.model.memory import Multiply, uninitialized
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents

# What is compared: as much as takes a second or two in float64 on two cores.
ROWS, TOKENS = 4, 1024
# Nats a token, and relative to the gradient's length. Two right computations of SmolLM2 differ by 1e-6 and 4e-6 in
# float32, by 0.03 and 0.05 in bfloat16; a layout with its loss out of order was 10 nats off (docs/log.md).
LOSS = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.12, "float16": 0.06}
GRADIENT = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.15, "float16": 0.08}


def verified_choices(load: Callable[[Choices], LoraModel], documents: Sequence[Document], truth_dtype: str) -> Choices:
    """Return choices with which the model computes the same as transformers; `agreement` is the difference.

    `load` returns a model without dropout under these choices; no two models are alive at the same time. `truth_dtype`:
    the precision in which transformers computes, as wide as memory allows; in bfloat16, transformers differed more from
    float64 than the fast path did, for a mixture of experts.
    """
    truth = answer(load(Choices(path="general", dtype=truth_dtype)), documents)
    wrong = ""
    for changes in (Choices(), Choices(kernels="torch")):
        fast = answer(load(changes), documents)
        loss = float((fast.nll_B - truth.nll_B).abs().max())
        gradient = float((fast.grad_N - truth.grad_N).norm() / truth.grad_N.norm())
        if loss <= LOSS[fast.dtype] and gradient <= GRADIENT[fast.dtype]:  # NaN does not agree
            told = {"loss": loss, "gradient": gradient, "dtype": fast.dtype, "truth": truth_dtype}
            return replace(changes, agreement={**told, "instead_of": wrong})
        wrong = wrong or f"the fast path was {loss:.2g} nats a token and {gradient:.0%} of the gradient off"
    return Choices(path="general", path_why=wrong)


def check_documents(snapshot: Snapshot, rows: Sequence[int]) -> list[Document]:
    """Return documents of the shortest of `rows`: at least one, and as many as are cheap."""
    chosen: list[int] = []
    for row in sorted(rows, key=lambda row: (snapshot.length(row), row))[:ROWS]:
        if not chosen or sum(map(snapshot.length, [*chosen, row])) <= TOKENS:
            chosen.append(row)
    return read_documents(snapshot, chosen)


class Computed(NamedTuple):
    """Loss and gradient of a model: mean nll of each row in nats, and the gradient by PEFT name; float64 on the CPU."""

    nll_B: Tensor
    grad_N: Tensor
    dtype: str


def answer(model: LoraModel, documents: Sequence[Document]) -> Computed:
    """Return loss and gradient of the model, computed with test values of its adapters that follow from their names."""
    initialise(model.adapter, 0)
    for name, view in model.adapter.items():
        if ".lora_B." in name:
            initialise({name.replace(".lora_B.", ".lora_A."): view}, 1)
            view.mul_(0.1)
    trained_B = torch.tensor([int(document.trained_L.sum()) for document in documents], dtype=torch.float64)
    nll_B = model.nll(documents).to("cpu", torch.float64) / trained_B
    model.backward(documents, 1.0 / float(trained_B.sum()))
    gradients = same_views(model.grad_N, model.adapter)
    grad_N = torch.cat([gradients[name].flatten().to("cpu", torch.float64) for name in sorted(gradients)])
    return Computed(nll_B, grad_N, str(model.dtype).removeprefix("torch."))


# Whole numbers up to here are exact: 8, 11 and 24 bits of significand.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: 1 << 53}
# A weight of 16 M values takes 0.15 s to make and check; a larger one is cut in its outputs.
MAX_CANARY_VALUES = 1 << 24
# As in a micro-batch, but no more than takes half a second on two cores.
CANARY_TOKENS = 512


class CanaryFailed(HivetuneError):
    """Raised if the device computes a wrong product at a shape of this run. Results since the last test are
    doubtful."""


class Shape(NamedTuple):
    """The sizes of a product [m, k] x [k, n]."""

    m: int
    n: int
    k: int


def shapes_of(adapter: Mapping[str, Tensor], tokens: int) -> list[Shape]:
    """Return the sizes of the matrix products in a step of `tokens` tokens: forward and backward, of each adapted layer
    and its adapter.

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


def check_products(model: LoraModel) -> int:
    """Test matrix products of the model's own shapes; return their number. Raises CanaryFailed."""
    shapes = shapes_of(model.adapter, CANARY_TOKENS)
    for shape in shapes:
        if fault := fault_of(shape, model.dtype, model.device, model.multiply):
            m, n, k = shape
            raise CanaryFailed(
                f"canary product m {m} n {n} k {k} in {str(model.dtype).removeprefix('torch.')} on {model.device}: "
                f"{fault}",
                hint="if it happens again, the card, its driver or a library is broken; device: cpu avoids it",
            )
    return len(shapes)


def fault_of(shape: Shape, dtype: torch.dtype, device: torch.device, multiply: Multiply) -> str:
    """Return the fault of one matrix product in words, or "" if it is correct. torch's own generators are not changed.

    The factors contain -1, 0 and 1, with so few nonzeros in a row of the left one that all sums are exact. The values
    of the checking vector are so far below 2^53 / (K N) that its sums are exact too.
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
    out_MN = uninitialized(m, n, dtype=dtype, device=device)
    multiply(a_MK.to(device, dtype), b_KN.to(device, dtype), out_MN)
    c_MN = out_MN.to("cpu", torch.float64)
    broken = int((~torch.isfinite(c_MN)).sum())
    if broken:
        return f"{broken} of {c_MN.numel()} values are not finite"
    off_M = (c_MN @ v_N) != a_MK.to(torch.float64) @ (b_KN.to(torch.float64) @ v_N)
    return f"{int(off_M.sum())} of {m} rows are wrong" if bool(off_M.any()) else ""
