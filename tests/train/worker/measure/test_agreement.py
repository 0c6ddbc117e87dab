"""The check before step 0: a fast path that is right passes, one that is wrong is not trained with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, write_model
from train.worker.runs import write_snapshot

from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.run.choices import Choices
from hivetune.train.worker.device import DTYPES
from hivetune.train.worker.measure.agreement import ROWS, TOKENS, check_documents, right_choices
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel


class Loader:
    """Loads the model of `folder`; the fast path computes with one weight off under the choices in `wrong`.

    `noise`: what some of transformers' weights are multiplied by in the precision of the run.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, wrong: tuple[Choices, ...] = (), noise: float = 1.0):
        self.folder, self.dtype, self.wrong, self.noise = folder, dtype, wrong, noise
        self.asked: list[Choices] = []

    def __call__(self, changes: Choices) -> LoraModel:
        self.asked.append(changes)
        dtype = DTYPES[changes.dtype] if changes.dtype else self.dtype
        model = load_model(
            self.folder, LoraConfig(r=4), method="lora", dtype=dtype, device=torch.device("cpu"), choices=changes
        )
        if changes == Choices(path="general"):
            with torch.no_grad():
                model.module.model.layers[0].mlp.down_proj.base.weight.mul_(self.noise)  # type: ignore[attr-defined]
        if changes in self.wrong:
            model.weights.layers[0].qkv.weight_NRK[:8] *= -1.0  # type: ignore[attr-defined]
        return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2")


def some_documents() -> list[Any]:
    return [document for document in documents() if document.trained_L.any()]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_right_fast_path_agrees(folder: Path, dtype: torch.dtype, most: float) -> None:
    load = Loader(folder, dtype)
    told = right_choices(load, some_documents())
    assert told.agreement is not None and set(told.made()) == {"agreement"}
    assert told.agreement["loss"] < most and told.agreement["gradient"] < most
    assert load.asked == [Choices(), Choices(path="general")]


def test_a_noisy_transformers_is_not_the_truth(folder: Path) -> None:
    """It was: of a mixture of experts in bfloat16 the fast path was nearer to float64, and refused."""
    load = Loader(folder, torch.bfloat16, noise=1.6)
    assert right_choices(load, some_documents()).path == "general"
    told = right_choices(load, some_documents(), truth_dtype="float64")
    assert set(told.made()) == {"agreement"} and told.agreement is not None
    assert told.agreement["truth"] == "float64" and told.agreement["theirs"]["gradient"] > 0.15
    assert told.agreement["gradient"] < 0.1


def test_a_wrong_fast_path_is_wrong_beside_float64_too(folder: Path) -> None:
    load = Loader(folder, torch.bfloat16, (Choices(), Choices(kernels="torch")))
    assert right_choices(load, some_documents(), truth_dtype="float64").path == "general"
    kernels = Loader(folder, torch.bfloat16, (Choices(),), noise=1.6)
    assert right_choices(kernels, some_documents(), truth_dtype="float64").kernels == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_kernels_give_way_to_the_plain_ones(folder: Path, dtype: torch.dtype) -> None:
    told = right_choices(Loader(folder, dtype, (Choices(),)), some_documents())
    assert told.kernels == "torch" and told.path is None and told.agreement is not None
    assert "with its own kernels" in told.agreement["instead_of"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_fast_path_is_not_taken_and_said(folder: Path, dtype: torch.dtype) -> None:
    told = right_choices(Loader(folder, dtype, (Choices(), Choices(kernels="torch"))), some_documents())
    assert told.path == "general" and told.path_why and "nats a token" in told.path_why
    assert Loader(folder, dtype)(told).why == told.path_why


def test_not_a_number_is_no_agreement(folder: Path) -> None:
    def load(changes: Choices) -> LoraModel:
        model = Loader(folder, torch.float32)(changes)
        if changes == Choices():
            model.weights.layers[0].qkv.weight_NRK[0] = torch.nan  # type: ignore[attr-defined]
        return model

    assert right_choices(load, some_documents()).kernels == "torch"


def test_the_general_path_is_not_compared_with_itself(folder: Path) -> None:
    asked = []

    def load(changes: Choices) -> LoraModel:
        asked.append(changes)
        return Loader(folder, torch.float32)(Choices(path="general"))

    assert right_choices(load, some_documents()) == Choices()
    assert asked == [Choices()]


def test_the_rows_are_short_and_few(tmp_path: Path) -> None:
    lengths = [TOKENS + 200, 30, 20, TOKENS, 40, 50, 60]
    write_snapshot(tmp_path / "snapshot", [([5] * n, [0] * (n - 2) + [1] * 2) for n in lengths])
    snapshot = open_snapshot(tmp_path / "snapshot")
    assert [d.row for d in check_documents(snapshot, [0, 1, 2, 4, 5, 6])] == [2, 1, 4, 5][:ROWS]
    assert [d.row for d in check_documents(snapshot, [0, 3])] == [3]
