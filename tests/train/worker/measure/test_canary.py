"""Test products: right arithmetic passes in every precision, each way of being wrong is caught."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hivetune.train.worker.measure import canary
from hivetune.train.worker.measure.canary import CanaryFailed, Product, must_pass, shapes_of, wrong_products
from hivetune.train.worker.model.products import by_torch_anew, step_product

# A base product, the two thin ones of a rank, a wide and an odd one.
PRODUCTS = [Product(64, 96, 128), Product(64, 4, 128), Product(4, 128, 64), Product(3, 2000, 700), Product(1, 1, 1)]


@pytest.mark.parametrize("dtype", list(canary.EXACT))
def test_right_arithmetic_is_exact(dtype: torch.dtype) -> None:
    assert wrong_products(PRODUCTS, dtype=dtype, device="cpu") == []


def zeros_above(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """As in ROCm/rocm-libraries#5706: nothing but zeros beyond a size."""
    c_MN = a_MK @ b_KN
    c_MN[:, 90:] = 0
    return c_MN


def one_off(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    c_MN = a_MK @ b_KN
    c_MN[-1, c_MN.shape[1] // 2] += 1
    return c_MN


def two_swapped(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """A sum of all values, or of each row, would not see it."""
    c_MN = a_MK @ b_KN
    c_MN[0, :2] = c_MN[0, :2].flip(0) + torch.tensor([1, -1])
    return c_MN


def not_a_number(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    c_MN = a_MK @ b_KN
    c_MN[0, 0] = math.nan
    return c_MN


def low_precision(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Sums kept in too few bits: 3 instead of 8."""
    c_MN = a_MK @ b_KN
    return c_MN.to(torch.float8_e5m2).to(c_MN.dtype)


def transposed(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return a_MK @ b_KN.flip(0)


@pytest.mark.parametrize("wrong", [zeros_above, one_off, two_swapped, not_a_number, low_precision, transposed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_way_of_being_wrong_is_caught(wrong: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    found = wrong_products([Product(64, 96, 128)], dtype=dtype, device="cpu", multiply=wrong)
    assert [each.product for each in found] == [Product(64, 96, 128)]


def test_shapes_are_those_of_the_run() -> None:
    adapter = {
        "m.q.lora_A.weight": torch.empty(8, 96),
        "m.q.lora_B.weight": torch.empty(64, 8),
        "m.k.lora_A.weight": torch.empty(8, 96),
        "m.k.lora_B.weight": torch.empty(64, 8),
    }
    assert shapes_of(adapter, 412) == sorted(
        [
            Product(412, 64, 96),
            Product(412, 96, 64),
            Product(412, 8, 96),
            Product(412, 64, 8),
            Product(8, 96, 412),
            Product(64, 8, 412),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_product_is_exact_and_what_a_run_with_it_is_tested_with(dtype: torch.dtype) -> None:
    """Also rows and columns that fill no tile, and an inner size of several parts of a panel."""
    multiply = step_product("native", "native")
    products = [*PRODUCTS, Product(37, 75, 4100), Product(8, 16, 31)]
    assert wrong_products(products, dtype=dtype, device="cpu", multiply=multiply) == []
    assert multiply not in (torch.mm, by_torch_anew)
    assert step_product("native", "torch") is step_product("torch", "native") is by_torch_anew


def test_the_error_names_shape_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "EXACT", {torch.float32: 1 << 24})
    assert must_pass(PRODUCTS, dtype=torch.float32, device="cpu") >= 0
    monkeypatch.setattr(
        canary, "wrong_products", lambda *_, **__: [canary.Wrong(Product(8, 412, 896), "3 of 8 rows are wrong")]
    )
    with pytest.raises(CanaryFailed, match="canary product m 8 n 412 k 896 in float32 on cpu: 3 of 8 rows"):
        must_pass(PRODUCTS, dtype=torch.float32, device="cpu")


def test_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    wrong_products(PRODUCTS, dtype=torch.float32, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
