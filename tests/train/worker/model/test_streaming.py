"""Frozen layers that do not stay on the device: the same bits, three places, clear errors."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, each_family, load_fast, write_model

from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.fast.weights import LayerStream

LAYERS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def load(folder: Path, dtype: torch.dtype = torch.float32, **choices: Any) -> FastModel:
    return load_fast(folder, dtype, LoraConfig(r=5, alpha=12), kernels="torch", **choices)


def step(model: FastModel) -> list[torch.Tensor]:
    """What two steps with an update between them and two evaluations come to."""
    found = [model.nll(documents(seed=5))]
    for seed in (0, 1):
        loss = model.backward(documents(seed=seed), 0.25)
        found += [loss[None].clone(), model.grad_N.clone()]
        model.master_N.sub_(model.grad_N, alpha=0.01)
    return [*found, model.nll(documents(seed=5)), model.nll(documents(seed=6), adapter=False)]


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("streamed", [1, 3, 4, LAYERS])
def test_the_same_bits(folder: Path, streamed: int) -> None:
    whole = step(load(folder, recompute=2, budget_tokens=60))
    model = load(folder, recompute=2, budget_tokens=60, streamed=streamed)
    assert model.weights.num_replaced == streamed
    assert_same_bits(step(model), whole)


@pytest.mark.parametrize("case", each_family("gemma3"))
def test_every_family_with_its_own_precision(case: str, tmp_path: Path) -> None:
    """Layers of different sizes share places; float32 files are converted to what is computed in, piece by piece."""
    folder = write_model(tmp_path / "model", case)
    layers = len(load(folder).weights.layers)
    for dtype in (torch.float64, torch.bfloat16):
        assert_same_bits(step(load(folder, dtype, streamed=layers)), step(load(folder, dtype)))


def test_only_three_layers_have_memory(folder: Path) -> None:
    whole, streamed = load(folder), load(folder, streamed=5)
    addresses = [
        {layer.qkv.weight_NRK.untyped_storage().data_ptr() for layer in model.weights.layers}
        for model in (whole, streamed)
    ]
    assert [len(found) for found in addresses] == [LAYERS, LAYERS - 5 + 3]


def test_what_the_forward_pass_left_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one micro-batch reads all streamed layers but three forward, and again backward; the first all."""
    model = load(folder, streamed=6)
    brought: list[int] = []
    bring = LayerStream._bring

    def counted(stream: LayerStream, layer: int, *rest: Any) -> Any:
        brought.append(layer)
        return bring(stream, layer, *rest)

    monkeypatch.setattr(LayerStream, "_bring", counted)
    counts = []
    for _ in range(2):
        brought.clear()
        model.backward(documents(), 1.0)
        counts.append(len(brought))
    assert counts == [9, 6]
    few = load(folder, streamed=3)
    few.backward(documents(), 1.0)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("a layer that is there was read"))
    few.backward(documents(), 1.0)


def test_a_file_that_becomes_shorter_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    model, weights = load(copy, streamed=6), copy / "model.safetensors"
    model.backward(documents(), 1.0)
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(UsageError, match=r"model\.safetensors became shorter while a run read weights") as refused:
        model.backward(documents(), 1.0)
    assert "hivetune train" in refused.value.hint


def test_a_file_that_is_deleted_is_still_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    model = load(copy, streamed=6)
    (copy / "model.safetensors").unlink()
    assert_same_bits(step(model), step(load(folder)))


def test_a_disk_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, streamed=6)
    model.backward(documents(), 1.0)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output error, while weights were read: .*model.safetensors"):
        model.backward(documents(), 1.0)
