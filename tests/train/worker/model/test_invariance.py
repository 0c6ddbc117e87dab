"""What must not change the result: order, neighbours, shared prefixes, micro-batches, recomputing, chunks, threads.

With dropout the same holds: a mask is a function of step, tokens and module, and draws nothing.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import difference, documents, load_fast, write_model

from hivetune.config import LoraConfig
from hivetune.train.plan.layout import make_layout, trim_document
from hivetune.train.worker.model.fast import model as passes
from hivetune.train.worker.model.fast.model import drop_keys
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.protocol import Document

# fp64: sums in another order differ by their rounding; anything wrong is many orders larger.
SAME = 1e-11
DROPOUT = LoraConfig(r=4, alpha=12, dropout=0.3)
PLAIN = LoraConfig(r=4, alpha=12)
both_ways = pytest.mark.parametrize("lora", [PLAIN, DROPOUT], ids=["plain", "dropout"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "gemma2")


def step(folder: Path, docs: list[Document], lora: LoraConfig = PLAIN, seed: int = 5, **choices: Any) -> torch.Tensor:
    """Loss and all gradients as one vector, of one draw."""
    model = load_fast(folder, lora=lora, **choices)
    torch.manual_seed(seed)
    loss = model.backward(docs, 0.25)
    return torch.cat([loss[None], model.grad_N])


@both_ways
@pytest.mark.parametrize(
    "choices", [{"budget_tokens": 1}, {"budget_tokens": 40}, {"recompute": 2}, {"recompute": 3}], ids=str
)
def test_how_a_step_is_cut_changes_nothing(folder: Path, choices: dict[str, Any], lora: LoraConfig) -> None:
    docs = documents()
    assert difference(step(folder, docs, lora, **choices), step(folder, docs, lora)) < SAME


@both_ways
def test_order_and_company_change_nothing(folder: Path, lora: LoraConfig) -> None:
    docs = documents()
    together = step(folder, docs, lora)
    assert torch.equal(step(folder, docs[::-1], lora), together)
    assert difference(sum(step(folder, part, lora) for part in (docs[:3], docs[3:])), together) < SAME


def test_sharing_prefixes_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = documents()
    shared = step(folder, docs)
    real = passes.make_layout
    monkeypatch.setattr(passes, "make_layout", lambda *given, **named: real(*given, **{**named, "share": False}))
    assert difference(step(folder, docs), shared) < SAME


def test_sharing_really_happens_and_saves_tokens() -> None:
    rows = [trim_document(d.tokens_L.tolist(), d.trained_L.tolist()) for d in documents()]
    shared, apart = make_layout(rows), make_layout(rows, share=False)
    assert shared.size < 0.6 * apart.size


@pytest.mark.parametrize("rows", [1, 7])
def test_how_logits_are_cut_changes_nothing(folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step(folder, documents())
    monkeypatch.setattr(passes, "chunk_rows", lambda vocab: rows)
    assert difference(step(folder, documents()), whole) < SAME


@pytest.mark.parametrize("multiple", [16, 256])
@pytest.mark.parametrize("alike", [False, True])
def test_filling_up_changes_nothing(folder: Path, multiple: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each row predicts one token, entries are taken for rows in order; such documents share nothing."""
    apart = [Document(row, torch.arange(row, row + 11 + row), torch.arange(11 + row) >= 5) for row in range(20, 24)]
    docs = documents() if alike else apart
    plain, whole = load_fast(folder).nll(docs), step(folder, docs)
    monkeypatch.setattr(passes, "token_multiple", lambda *_: multiple)
    assert difference(step(folder, docs), whole) < SAME and difference(load_fast(folder).nll(docs), plain) < SAME


def test_a_neighbour_is_not_seen(folder: Path) -> None:
    model, docs = load_fast(folder), documents()
    alone = torch.cat([model.nll([document]) for document in docs])
    assert difference(model.nll(docs), alone) < SAME
    other = documents(seed=99)
    assert difference(model.nll([docs[2], *other])[:1], alone[2:3]) < SAME


def test_nothing_trained_is_nothing_done(folder: Path) -> None:
    model = load_fast(folder)
    empty = [d for d in documents() if not d.trained_L.any()]
    assert float(model.backward(empty, 1.0)) == 0 and not model.grad_N.any()
    assert model.nll(empty).tolist() == [0.0] * len(empty)
    assert float(model.backward([], 1.0)) == 0


@pytest.mark.parametrize("products", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_of_the_kernels_are_equal_bit_for_bit(folder: Path, dtype: torch.dtype, products: str) -> None:
    docs = documents()
    first, second = (load_fast(folder, dtype, kernels="native", products=products) for _ in range(2))
    loss = first.backward(docs, 1.0)
    second.backward(documents(seed=4), 1.0)  # what a buffer held before must not matter
    second.grad_N.zero_()
    assert torch.equal(loss, second.backward(docs, 1.0))
    assert torch.equal(first.grad_N, second.grad_N)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        second.grad_N.zero_()
        second.backward(docs, 1.0)
    finally:
        torch.set_num_threads(threads)
    # torch's products are cut by the number of threads, our own give the same bits.
    assert difference(second.grad_N, first.grad_N) <= (0 if products == "native" else 1e-5)


def test_a_draw_is_repeated_and_counts_in_training_only(folder: Path) -> None:
    docs = documents()
    drawn = step(folder, docs, DROPOUT)
    assert torch.equal(step(folder, docs, DROPOUT), drawn)
    assert difference(step(folder, docs, DROPOUT, seed=6), drawn) > 0.1
    plain = load_fast(folder).nll(docs)
    assert torch.equal(load_fast(folder, lora=DROPOUT).nll(docs), plain)
    assert float(drawn[0]) != pytest.approx(float(plain.sum()), rel=1e-6)


def test_the_gradient_is_that_of_what_was_drawn(folder: Path) -> None:
    """Against differences of the loss under the same draw."""
    docs, size, losses = documents(), 1e-6, []
    found = step(folder, docs, DROPOUT)[1:] / 0.25
    direction = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for shift in (size, -size):
        moved = load_fast(folder, lora=DROPOUT)
        moved.master_N += shift * direction
        torch.manual_seed(5)
        losses.append(float(moved.backward(docs, 1.0)))
    assert float(found @ direction) == pytest.approx((losses[0] - losses[1]) / (2 * size), rel=1e-6)


def test_keys_follow_the_tokens() -> None:
    rows = [trim_document([7] * 40 + [row, row + 1, 2], [0] * 41 + [1, 1]) for row in (3, 4)]
    shared, apart = (make_layout(rows, share=share) for share in (True, False))
    keys = drop_keys(shared, 11)
    assert len(set(keys)) == shared.size < apart.size
    assert set(drop_keys(apart, 11)) == set(keys)
    assert not set(drop_keys(shared, 12)) & set(keys)


def masks(rate: float, rows: int, columns: int, salt: int = 99) -> torch.Tensor:
    layout = make_layout([trim_document(list(range(5, rows + 6)), [0] * rows + [1])], share=True)
    out_TK = torch.empty(rows, columns)
    Ops().drop(torch.ones(rows, columns), torch.tensor(drop_keys(layout, 17)), salt, rate, out_TK)
    return out_TK


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_masks_are_of_the_right_share_and_without_order(rate: float) -> None:
    """Shares of all, of rows, of columns, and of pairs of neighbours, against the binomial distribution's."""
    mask_TK = masks(rate, 500, 400)
    assert mask_TK.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    z_TK, other = (
        ((mask > 0).double() - (1 - rate)) / math.sqrt(rate * (1 - rate))
        for mask in (mask_TK, masks(rate, 500, 400, salt=98))
    )
    assert abs(float(z_TK.sum()) / math.sqrt(z_TK.numel())) < 4
    for of in (z_TK.sum(0) / math.sqrt(500), z_TK.sum(1) / math.sqrt(400)):
        assert float(of.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(of)))
    for pair in (z_TK[1:] * z_TK[:-1], z_TK[:, 1:] * z_TK[:, :-1], z_TK[:, 16:] * z_TK[:, :-16], z_TK * other):
        assert abs(float(pair.sum()) / math.sqrt(pair.numel())) < 4
