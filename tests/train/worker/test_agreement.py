"""The check before step 0: a fast path that is right passes, one that is wrong is not trained with."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, write_model
from train.worker.runs import write_snapshot

from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.run.choices import Choices
from hivetune.train.worker.check import ROWS, TOKENS, check_documents, right_choices
from hivetune.train.worker.device import DTYPES
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel


class Loader:
    """Loads the model of `folder`; the fast path computes with one weight off under the choices in `wrong`."""

    def __init__(self, folder: Path, dtype: torch.dtype, wrong: tuple[Choices, ...] = (), by: float = -1.0):
        self.folder, self.dtype, self.wrong, self.by = folder, dtype, wrong, by
        self.asked: list[Choices] = []

    def __call__(self, changes: Choices) -> LoraModel:
        self.asked.append(changes)
        dtype = DTYPES[changes.dtype] if changes.dtype else self.dtype
        model = load_model(
            self.folder, LoraConfig(r=4), method="lora", dtype=dtype, device=torch.device("cpu"), choices=changes
        )
        if changes in self.wrong:
            model.weights.layers[0].qkv.weight_NRK[:8] *= self.by  # type: ignore[attr-defined]
        return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2")


def some_documents() -> list[Any]:
    return [document for document in documents() if document.trained_L.any()]


PLAIN = Choices(kernels="torch")
DTYPES_OF_RUNS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_right_fast_path_agrees(folder: Path, dtype: torch.dtype, most: float) -> None:
    load = Loader(folder, dtype)
    told = right_choices(load, some_documents(), "float64")
    assert told.agreement is not None and set(told.made()) == {"agreement"}
    assert told.agreement["loss"] < most and told.agreement["gradient"] < most
    assert load.asked == [Choices(path="general", dtype="float64"), Choices()]


@pytest.mark.parametrize("dtype", DTYPES_OF_RUNS)
@pytest.mark.parametrize("by", [-1.0, math.nan])
def test_wrong_kernels_give_way_to_the_plain_ones(folder: Path, dtype: torch.dtype, by: float) -> None:
    """NaN is no agreement."""
    told = right_choices(Loader(folder, dtype, (Choices(),), by), some_documents(), "float64")
    assert told.kernels == "torch" and told.path is None and told.agreement is not None
    assert "of the gradient off" in told.agreement["instead_of"]


@pytest.mark.parametrize("dtype", DTYPES_OF_RUNS)
def test_a_wrong_fast_path_is_not_taken_and_said(folder: Path, dtype: torch.dtype) -> None:
    told = right_choices(Loader(folder, dtype, (Choices(), PLAIN)), some_documents(), "float64")
    assert told.path == "general" and told.path_why and "nats a token" in told.path_why
    assert Loader(folder, dtype)(told).why == told.path_why


def test_the_rows_are_short_and_few(tmp_path: Path) -> None:
    lengths = [TOKENS + 200, 30, 20, TOKENS, 40, 50, 60]
    write_snapshot(tmp_path / "snapshot", [([5] * n, [0] * (n - 2) + [1] * 2) for n in lengths])
    snapshot = open_snapshot(tmp_path / "snapshot")
    assert [d.row for d in check_documents(snapshot, [0, 1, 2, 4, 5, 6])] == [2, 1, 4, 5][:ROWS]
    assert [d.row for d in check_documents(snapshot, [0, 3])] == [3]
