"""Both checks: a wrong fast path is not trained with, and each way in which a product can be wrong is caught."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.planned import write_snapshot
from train.worker.models import CPU, documents, load_any, write_model

from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.run.choices import Choices
from hivetune.train.worker.check import (
    EXACT,
    ROWS,
    TOKENS,
    CanaryFailed,
    Shape,
    check_documents,
    check_products,
    fault_of,
    shapes_of,
    verified_choices,
)
from hivetune.train.worker.model.fast.backend import by_native
from hivetune.train.worker.model.memory import mm
from hivetune.train.worker.model.protocol import LoraModel
from hivetune.train.worker.settle import DTYPES


class Loader:
    """Loads the model of `folder`; the fast path computes with one weight off under the choices in `wrong`."""

    def __init__(self, folder: Path, dtype: torch.dtype, wrong: tuple[Choices, ...] = (), by: float = -1.0):
        self.folder, self.dtype, self.wrong, self.by = folder, dtype, wrong, by
        self.asked: list[Choices] = []

    def __call__(self, changes: Choices) -> LoraModel:
        self.asked.append(changes)
        dtype = DTYPES[changes.dtype] if changes.dtype else self.dtype
        model = load_any(self.folder, dtype, choices=changes)
        if changes in self.wrong:
            model.weights.layers[0].qkv.weight_NRK[:8] *= self.by  # type: ignore[attr-defined]
        return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2")


def some_documents() -> list[Any]:
    return [document for document in documents() if document.trained_L.any()]


PLAIN = Choices(kernels="torch")


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_right_fast_path_agrees(folder: Path, dtype: torch.dtype, most: float) -> None:
    loader = Loader(folder, dtype)
    told = verified_choices(loader, some_documents(), "float64")
    assert told.agreement is not None and set(told.as_dict()) == {"agreement"}
    assert told.agreement["loss"] < most and told.agreement["gradient"] < most
    assert loader.asked == [Choices(path="general", dtype="float64"), Choices()]


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, -1.0), (torch.bfloat16, -1.0), (torch.float32, math.nan)])
def test_wrong_kernels_give_way_to_the_plain_ones_and_those_to_transformers(
    folder: Path, dtype: torch.dtype, by: float
) -> None:
    """NaN does not agree."""
    told = verified_choices(Loader(folder, dtype, (Choices(),), by), some_documents(), "float64")
    assert told.kernels == "torch" and told.path is None and told.agreement is not None
    assert "of the gradient off" in told.agreement["instead_of"]
    told = verified_choices(Loader(folder, dtype, (Choices(), PLAIN), by), some_documents(), "float64")
    assert told.path == "general" and told.path_why and "nats a token" in told.path_why
    assert load_any(folder, dtype, choices=told).why == told.path_why


def test_the_rows_are_short_and_few(tmp_path: Path) -> None:
    lengths = [TOKENS + 200, 30, 20, TOKENS, 40, 50, 60, TOKENS - 50]
    write_snapshot(tmp_path / "snapshot", [([5] * n, [0] * (n - 2) + [1] * 2) for n in lengths])
    snapshot = open_snapshot(tmp_path / "snapshot")
    assert [d.row for d in check_documents(snapshot, [0, 1, 2, 4, 5, 6])] == [2, 1, 4, 5][:ROWS]
    assert [d.row for d in check_documents(snapshot, [0, 3])] == [3]
    assert [d.row for d in check_documents(snapshot, [1, 2, 7])] == [2, 1, 7]


# A base product, the two thin ones of a rank, a wide and an odd one.
SHAPES = [Shape(64, 96, 128), Shape(64, 4, 128), Shape(4, 128, 64), Shape(3, 2000, 700), Shape(1, 1, 1)]


@pytest.mark.parametrize("dtype", list(EXACT))
def test_right_arithmetic_is_exact(dtype: torch.dtype) -> None:
    assert not any(fault_of(shape, dtype, CPU, mm) for shape in SHAPES)
    if dtype in (torch.float32, torch.bfloat16):  # our own: no tile is filled; several parts of a panel
        assert not any(fault_of(s, dtype, CPU, by_native) for s in (*SHAPES, Shape(37, 75, 4100), Shape(8, 16, 31)))


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
def test_each_way_of_being_wrong_is_caught(spoil: Callable[[Tensor], None]) -> None:
    def wrong(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        mm(a_MK, b_KN, out_MN)
        spoil(out_MN)

    before = torch.get_rng_state()
    assert all(fault_of(Shape(64, 96, 128), dtype, CPU, wrong) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_tested_at_its_own_shapes_with_its_own_product(tmp_path: Path) -> None:
    lora = LoraConfig(r=8, target_modules=["q_proj"])
    model = load_any(write_model(tmp_path), torch.bfloat16, lora, Choices(kernels="native", products="native"))
    expected = [(412, 64, 48), (412, 48, 64), (412, 8, 48), (412, 64, 8), (8, 48, 412), (64, 8, 412)]
    assert shapes_of(model.adapter, 412) == sorted(Shape(*sizes) for sizes in expected)
    assert check_products(model) == 6
    model.multiply = lambda a_MK, b_KN, out_MN: mm(a_MK, b_KN.flip(0), out_MN)  # type: ignore[method-assign]
    with pytest.raises(CanaryFailed, match=r"canary product m 8 n 48 k 512 in bfloat16 on cpu: \d+ of 8 rows"):
        check_products(model)
