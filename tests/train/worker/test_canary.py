"""Test products: right arithmetic passes in every precision, each way of being wrong is caught."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train.worker.models import write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.check import EXACT, CanaryFailed, Shape, check_products, fault_of, shapes_of
from hivetune.train.worker.model.fast.backend import by_native
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.memory import mm

CPU = torch.device("cpu")
# A base product, the two thin ones of a rank, a wide and an odd one.
SHAPES = [Shape(64, 96, 128), Shape(64, 4, 128), Shape(4, 128, 64), Shape(3, 2000, 700), Shape(1, 1, 1)]


@pytest.mark.parametrize("dtype", list(EXACT))
def test_right_arithmetic_is_exact(dtype: torch.dtype) -> None:
    assert not any(fault_of(shape, dtype, CPU, mm) for shape in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_product_is_exact(dtype: torch.dtype) -> None:
    """Also rows and columns that fill no tile, and an inner size of several parts of a panel."""
    for shape in (*SHAPES, Shape(37, 75, 4100), Shape(8, 16, 31)):
        assert fault_of(shape, dtype, CPU, by_native) == ""


def zeros_above(c_MN: Tensor) -> None:
    """As in ROCm/rocm-libraries#5706: nothing but zeros beyond a size."""
    c_MN[:, 90:] = 0


def one_off(c_MN: Tensor) -> None:
    c_MN[-1, c_MN.shape[1] // 2] += 1


def two_swapped(c_MN: Tensor) -> None:
    """A sum of all values, or of each row, would not see it."""
    c_MN[0, :2] = c_MN[0, :2].flip(0) + torch.tensor([1, -1])


def not_a_number(c_MN: Tensor) -> None:
    c_MN[0, 0] = math.nan


def low_precision(c_MN: Tensor) -> None:
    """Sums kept in too few bits: 3 instead of 8."""
    c_MN.copy_(c_MN.to(torch.float8_e5m2))


@pytest.mark.parametrize("spoil", [zeros_above, one_off, two_swapped, not_a_number, low_precision])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_way_of_being_wrong_is_caught(spoil: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    def wrong(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        mm(a_MK, b_KN, out_MN)
        spoil(out_MN)

    before = torch.get_rng_state()
    assert fault_of(Shape(64, 96, 128), dtype, CPU, wrong)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_tested_at_its_own_shapes_with_its_own_product(tmp_path: Path) -> None:
    model = load_model(
        write_model(tmp_path),
        LoraConfig(r=8, target_modules=["q_proj"]),
        method="lora",
        dtype=torch.bfloat16,
        device=CPU,
        choices=Choices(kernels="native", products="native"),
    )
    expected = [(412, 64, 48), (412, 48, 64), (412, 8, 48), (412, 64, 8), (8, 48, 412), (64, 8, 412)]
    assert shapes_of(model.adapter, 412) == sorted(Shape(*sizes) for sizes in expected)
    assert check_products(model) == 6
    model.multiply = lambda a_MK, b_KN, out_MN: mm(a_MK, b_KN.flip(0), out_MN)  # type: ignore[method-assign]
    with pytest.raises(CanaryFailed, match=r"canary product m 8 n 48 k 512 in bfloat16 on cpu: \d+ of 8 rows"):
        check_products(model)
