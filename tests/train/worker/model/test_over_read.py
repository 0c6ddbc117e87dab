"""Products read past their operands on some machines: it changes no result, and there is memory to read.

`over_read.AmxProducts` multiplies neighbours by zero as AMX does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.worker.models import CPU, documents, each_family, load_any, random_adapter, write_model
from train.worker.over_read import AmxProducts

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.model import memory
from hivetune.train.worker.model.memory import TILE, left_factor, padded_zeros

PATHS: list[dict[str, Any]] = [
    {"kernels": "torch", "products": "torch"},
    {"kernels": "torch", "products": "torch", "attention": "eager", "recompute": 2},
    {"kernels": "native", "products": "torch"},
    {"kernels": "native", "products": "native", "recompute": 1},
    {"path": "general"},
]


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor's operands lie as a card's do."""
    monkeypatch.setattr(memory, "PADDED_DEVICES", frozenset({"cpu"}))
    return iter(())


def slice_beside(neighbour: float, *, inner: int = 80) -> Tensor:
    wider = torch.full((8, inner + 16), neighbour, dtype=torch.bfloat16)
    wider[:, :inner] = 1.0
    return wider[:, :inner]


def test_the_double_reads_as_amx_does() -> None:
    """It differs from the product where NaN lies behind a row that ends inside a block, and nowhere else."""
    b = torch.ones(80, 5, dtype=torch.bfloat16)
    with AmxProducts():
        assert slice_beside(torch.nan).mm(b).isnan().all()
        assert torch.equal(slice_beside(7.0)[:-1].mm(b), torch.full((7, 5), 80.0).bfloat16())
        assert torch.equal(slice_beside(torch.nan).contiguous().mm(b), torch.full((8, 5), 80.0).bfloat16())
        assert torch.equal(slice_beside(torch.nan, inner=64).mm(b[:64]), torch.full((8, 5), 64.0).bfloat16())
        assert torch.equal(left_factor(slice_beside(torch.nan)).mm(b), torch.full((8, 5), 80.0).bfloat16())


def test_only_slices_are_copied() -> None:
    for whole in (torch.ones(8, 80).bfloat16(), torch.ones(80, 8).bfloat16().t(), slice_beside(0.0, inner=64)):
        assert left_factor(whole) is whole
    assert left_factor(slice_beside(0.0).float()).stride() == (80, 1)
    for part in (slice_beside(0.0), slice_beside(0.0)[:1], slice_beside(0.0).t()):
        copied = left_factor(part)
        assert torch.equal(copied, part) and copied.stride() == (-(-part.shape[1] // 32) * 32, 1)


def step(folder: Path, choices: dict[str, Any], dtype: torch.dtype, dropout: float) -> list[Tensor]:
    """Of a large micro-batch, then of a smaller one in the same buffers."""
    model = load_any(folder, dtype, LoraConfig(r=5, alpha=15, dropout=dropout), Choices(**choices))
    random_adapter(model)
    found = []
    for rows in (documents(), documents()[:4]):
        torch.manual_seed(len(rows))
        model.grad_N.zero_()
        found += [model.backward(rows, 1.0).clone(), model.grad_N.clone(), model.nll(rows)]
    return [*found, model.nll(documents()[:1], adapter=False)]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("case", each_family("llama", "gemma2", others=pytest.mark.proof))
def test_nothing_comes_of_what_was_not_written(
    case: str, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits where every buffer is NaN before it is written and beside each slice, by AMX's products."""
    folder = write_model(tmp_path, case)
    for choices in PATHS:
        monkeypatch.setattr(memory, "POISONED", False)
        plain = step(folder, choices, torch.bfloat16, dropout)
        monkeypatch.setattr(memory, "POISONED", True)
        with AmxProducts():
            found = step(folder, choices, torch.bfloat16, dropout)
        assert all(map(torch.equal, found, plain)), choices


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("choices", PATHS[:1] + PATHS[-1:])
def test_slack_changes_nothing(choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands as on a card, with NaN behind them: to rounding what they are without, since ranks are padded too."""
    folder = write_model(tmp_path)
    monkeypatch.setattr(memory, "POISONED", True)
    found = step(folder, choices, torch.float32, 0.0)
    monkeypatch.setattr(memory, "PADDED_DEVICES", frozenset())
    for one, other in zip(found, step(folder, choices, torch.float32, 0.0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("padded")
def test_an_operand_ends_in_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POISONED", False)
    operand = padded_zeros(8, 48, dtype=torch.bfloat16, device=CPU)
    operand.fill_(1.0)
    behind = torch.tensor([], dtype=torch.bfloat16).set_(operand.untyped_storage())[operand.numel() :]
    assert len(behind) >= (TILE - 8) * 48 + TILE and not behind.any()
