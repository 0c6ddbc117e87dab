"""What must not change the result: order, neighbours, sharing of prefixes, micro-batches, recomputing, chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, random_adapter, write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast import model as passes
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.protocol import Document

# fp64: sums in another order differ by their rounding; anything wrong is many orders larger.
SAME = 1e-11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "gemma2")


def load(folder: Path, dtype: torch.dtype = torch.float64, **choices: Any) -> FastModel:
    model = FastModel(
        folder, LoraConfig(r=4, alpha=12), dtype=dtype, device=torch.device("cpu"), choices=Choices(**choices)
    )
    random_adapter(model)
    return model


def step(folder: Path, docs: list[Document], **choices: Any) -> torch.Tensor:
    """Loss and all gradients as one vector."""
    model = load(folder, **choices)
    loss = model.backward(docs, 0.25)
    return torch.cat([loss[None], model.grad_N])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "choices",
    [
        {"budget_tokens": 1},
        {"budget_tokens": 40},
        {"budget_tokens": 60},
        *({"recompute": layers} for layers in (1, 2, 3)),
    ],
    ids=str,
)
def test_how_a_step_is_cut_changes_nothing(folder: Path, choices: dict[str, Any]) -> None:
    docs = documents()
    assert difference(step(folder, docs, **choices), step(folder, docs)) < SAME


def test_sharing_prefixes_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = documents()
    shared = step(folder, docs)
    for name in ("make_layout", "split_documents"):
        real = getattr(passes, name)
        monkeypatch.setattr(passes, name, lambda *given, real=real, **named: real(*given, **{**named, "share": False}))
    assert difference(step(folder, docs), shared) < SAME


@pytest.mark.parametrize("rows", [1, 7])
def test_how_logits_are_cut_changes_nothing(folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step(folder, documents())
    monkeypatch.setattr(passes, "chunk_rows", lambda vocab: rows)
    assert difference(step(folder, documents()), whole) < SAME


@pytest.mark.parametrize("multiple", [16, 64, 256])
@pytest.mark.parametrize("alike", [False, True])
def test_filling_up_changes_nothing(folder: Path, multiple: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each row predicts one token, entries are taken for rows in order; such documents share nothing."""
    apart = [Document(row, torch.arange(row, row + 11 + row), torch.arange(11 + row) >= 5) for row in range(20, 24)]
    docs = documents() if alike else apart
    plain, whole = load(folder).nll(docs), step(folder, docs)
    monkeypatch.setattr(passes, "token_multiple", lambda *_: multiple)
    assert difference(step(folder, docs), whole) < SAME and difference(load(folder).nll(docs), plain) < SAME


def test_order_of_documents_changes_nothing(folder: Path) -> None:
    docs = documents()
    assert torch.equal(step(folder, docs[::-1]), step(folder, docs))


def test_sharing_really_happens_and_saves_tokens(folder: Path) -> None:
    from hivetune.train.plan.layout import make_layout, trim_document

    rows = [trim_document(d.tokens_L.tolist(), d.trained_L.tolist()) for d in documents()]
    shared, apart = make_layout(rows, share=True), make_layout(rows, share=False)
    assert shared.size < 0.6 * apart.size
    assert apart.size == sum(len(row.tokens) for row in rows)
    assert sum(shared.counts) == sum(len(row.pairs) for row in rows)


def test_a_neighbour_is_not_seen(folder: Path) -> None:
    model, docs = load(folder), documents()
    alone = torch.cat([model.nll([document]) for document in docs])
    assert difference(model.nll(docs), alone) < SAME
    other = documents(seed=99)
    assert difference(model.nll([docs[2], *other])[:1], alone[2:3]) < SAME


def test_nothing_trained_is_nothing_done(folder: Path) -> None:
    model = load(folder)
    empty = [d for d in documents() if not d.trained_L.any()]
    assert float(model.backward(empty, 1.0)) == 0
    assert not model.grad_N.any()
    assert model.nll(empty).tolist() == [0.0] * len(empty)
    assert float(model.backward([], 1.0)) == 0


def test_gradients_add_up_over_calls(folder: Path) -> None:
    docs, once, twice = documents(), load(folder), load(folder)
    once.backward(docs, 0.5)
    twice.backward(docs[:4], 0.5)
    twice.backward(docs[4:], 0.5)
    assert difference(twice.grad_N, once.grad_N) < SAME


@pytest.mark.parametrize("products", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_of_the_kernels_are_equal_bit_for_bit(folder: Path, dtype: torch.dtype, products: str) -> None:
    docs = documents()
    first, second = (load(folder, dtype, kernels="native", products=products) for _ in range(2))
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
