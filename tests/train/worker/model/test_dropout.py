"""Dropout with shared prefixes: masks are functions of step, tokens and module, and the mean gradient is the same."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, random_adapter, write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import make_layout, trim_document
from hivetune.train.worker.model.fast.model import FastModel, drop_keys
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.protocol import Document

SAME = 1e-11  # fp64, sums in another order


def load(folder: Path, dropout: float = 0.3, dtype: torch.dtype = torch.float64, **choices: Any) -> FastModel:
    lora = LoraConfig(r=4, alpha=12, dropout=dropout)
    model = FastModel(folder, lora, dtype=dtype, device=torch.device("cpu"), choices=Choices(**choices))
    random_adapter(model)
    return model


def step(model: FastModel, docs: list[Document], seed: int = 5) -> torch.Tensor:
    """Loss and all gradients as one vector, of one draw."""
    model.grad_N.zero_()
    torch.manual_seed(seed)
    loss = model.backward(docs, 1.0)
    return torch.cat([loss[None], model.grad_N])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module", params=["gemma2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("choices", [{"budget_tokens": 40}, {"recompute": 2}], ids=str)
def test_how_a_step_is_cut_changes_no_mask(folder: Path, choices: dict[str, Any]) -> None:
    docs = documents()
    assert difference(step(load(folder, **choices), docs), step(load(folder), docs)) < SAME


def test_rows_in_any_order_and_company_have_the_same_masks(folder: Path) -> None:
    docs = documents()
    together = step(load(folder), docs)
    assert torch.equal(step(load(folder), docs[::-1]), together)
    apart = sum(step(load(folder), part) for part in (docs[:3], docs[3:]))
    assert difference(apart, together) < SAME
    assert difference(step(load(folder), docs, seed=6), together) > 0.1


def test_a_draw_is_repeated_and_counts_in_training_only(folder: Path) -> None:
    docs = documents()
    assert torch.equal(step(load(folder), docs), step(load(folder), docs))
    plain = load(folder, dropout=0.0).nll(docs)
    assert torch.equal(load(folder).nll(docs), plain)
    assert float(step(load(folder), docs)[0]) != pytest.approx(float(plain.sum()), rel=1e-6)


def test_the_gradient_is_that_of_what_was_drawn(folder: Path) -> None:
    """Against differences of the loss under the same draw."""
    docs, model = documents(), load(folder)
    direction = torch.randn(model.master_N.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses, size = [], 1e-6
    for shift in (size, -size):
        moved = load(folder)
        moved.master_N += shift * direction
        losses.append(float(step(moved, docs)[0]))
    found = float(step(model, docs)[1:] @ direction)
    assert found == pytest.approx((losses[0] - losses[1]) / (2 * size), rel=1e-6)


def test_keys_follow_the_tokens() -> None:
    rows = [trim_document([7] * 40 + [row, row + 1, 2], [0] * 41 + [1, 1]) for row in (3, 4)]
    shared, apart = (make_layout(rows, share=share) for share in (True, False))
    keys = drop_keys(shared, 11)
    assert len(set(keys)) == shared.size < apart.size
    assert set(drop_keys(apart, 11)) == set(keys)
    assert not set(drop_keys(shared, 12)) & set(keys)


def masks(rate: float, rows: int, columns: int, salt: int = 99) -> torch.Tensor:
    layout = make_layout([trim_document(list(range(5, rows + 6)), [0] * rows + [1])], share=True)
    key_T = torch.tensor(drop_keys(layout, 17))
    out_TK = torch.empty(rows, columns)
    Ops().drop(torch.ones(rows, columns), key_T, salt, rate, out_TK)
    return out_TK


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_masks_are_of_the_right_share_and_without_order(rate: float) -> None:
    """Shares of all, of rows, of columns, and of pairs of neighbours, against the binomial distribution's."""
    mask_TK = masks(rate, 500, 400)
    assert mask_TK.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    kept_TK = (mask_TK > 0).double()
    z_TK = (kept_TK - (1 - rate)) / math.sqrt(rate * (1 - rate))
    assert abs(float(z_TK.sum()) / math.sqrt(z_TK.numel())) < 4
    for of in (z_TK.sum(0) / math.sqrt(500), z_TK.sum(1) / math.sqrt(400)):
        assert float(of.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(of)))
    other = ((masks(rate, 500, 400, salt=98) > 0).double() - (1 - rate)) / math.sqrt(rate * (1 - rate))
    for pair in (z_TK[1:] * z_TK[:-1], z_TK[:, 1:] * z_TK[:, :-1], z_TK[:, 16:] * z_TK[:, :-16], z_TK * other):
        assert abs(float(pair.sum()) / math.sqrt(pair.numel())) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_drops_what_the_plain_form_drops(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for rows, columns in ((1, 1), (7, 17), (33, 576)):
        x_TK = torch.randn(rows, columns, generator=generator).to(dtype)
        key_T = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        found, expected = torch.empty_like(x_TK), torch.empty_like(x_TK)
        Ops(dtype).drop(x_TK, key_T, -5, 0.2, found)
        Ops().drop(x_TK, key_T, -5, 0.2, expected)
        assert torch.equal(found, expected)
