"""The loss of bad answers: its gradient is fp64 autograd's on both paths, whatever the packing, and nothing at step 0
depends on a margin."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import documents, random_adapter, write_model
from train.worker.reference import Reference

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import split_units, trim_document
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.general import GeneralModel, load_general
from hivetune.train.worker.model.preference import judged_documents, preference_loss, units
from hivetune.train.worker.model.protocol import Bad, Document, LoraModel

LORA = LoraConfig(r=4, alpha=12)
BETA, WEIGHT, SCALE = 5.0, 0.3, 1 / 37


def load(folder: Path, path: str, dtype: torch.dtype = torch.float64, **choices: Any) -> LoraModel:
    asked = Choices(**choices)
    cpu = torch.device("cpu")
    model: LoraModel
    if path == "fast":
        model = FastModel(folder, LORA, dtype=dtype, device=cpu, choices=asked)
    else:
        model = load_general(folder, LORA, method="lora", dtype=dtype, device=cpu, choices=asked, why="asked for")
    random_adapter(model)
    return model


def some_documents(references: list[float] | None = None) -> list[Document]:
    """A good row alone; a bad row alone; a good row with two worse answers to its question, one of which begins as the
    good one does; a bad row whose better one is not there. `references` are a little off what any model says."""
    docs = documents()[:4]
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, 97, (24,), generator=generator)

    def answer(row: int, tokens: list[int]) -> Document:
        whole = torch.cat([prompt, torch.tensor(tokens)])
        return Document(row, whole, torch.arange(len(whole)) >= len(prompt))

    better = answer(20, [5, 6, 7, 8, 9])
    found = [
        docs[0],
        docs[1]._replace(bad=Bad(WEIGHT)),
        better,
        answer(21, [5, 6, 50, 51])._replace(bad=Bad(WEIGHT, 20)),
        answer(22, [60, 61, 62, 63, 64, 65, 66])._replace(bad=Bad(WEIGHT / 2, 20)),
        docs[3]._replace(bad=Bad(WEIGHT, 999)),
    ]
    if references is not None:
        found = [document._replace(reference=value) for document, value in zip(found, references, strict=True)]
    return found


def textbook(nll_of: Callable[[Document], torch.Tensor], docs: list[Document]) -> torch.Tensor:
    """The loss as docs/learn.md has it, one document at a time."""
    nll = {d.row: nll_of(d) for d in docs}
    size = {d.row: int(d.trained_L.sum()) for d in docs}
    gained = {d.row: (d.reference - nll[d.row]) / size[d.row] for d in docs}
    total = torch.zeros((), dtype=torch.float64)
    for d in docs:
        if d.bad is None:
            total = total + nll[d.row]
        elif d.bad.better is None:
            total = total + d.bad.weight * size[d.row] * (4 / BETA) * torch.sigmoid(BETA * gained[d.row])
        elif d.bad.better in nll:
            least, margin = min(size[d.row], size[d.bad.better]), gained[d.bad.better] - gained[d.row]
            total = total + d.bad.weight * least * (2 / BETA) * torch.log1p(torch.exp(-BETA * margin))
    return total


def gradients(model: LoraModel) -> dict[str, torch.Tensor]:
    return {
        name: model.grad_N.as_strided(view.size(), view.stride(), view.storage_offset()).clone()
        for name, view in model.adapter.items()
    }


def by_autograd(folder: Path, model: LoraModel, docs: list[Document]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of SCALE times it: of the textbook's model, or of transformers' own, whose rotary angles are
    fp32 whatever the precision, one document at a time."""
    if isinstance(model, FastModel):
        reference = Reference(folder, dict(model.adapter), 3.0)
        loss = textbook(lambda d: reference.nll(d.tokens_L.tolist(), d.trained_L.tolist()), docs)
        (loss * SCALE).backward()
        return loss.item(), {name: leaf.grad for name, leaf in reference.adapter.items() if leaf.grad is not None}
    assert isinstance(model, GeneralModel)

    def nll_of(document: Document) -> torch.Tensor:
        logits = model.module(input_ids=document.tokens_L[None], use_cache=False).logits[0, :-1]
        trained = document.trained_L[1:]
        nll: torch.Tensor = torch.nn.functional.cross_entropy(
            logits[trained], document.tokens_L[1:][trained], reduction="sum"
        )
        return nll

    loss = textbook(nll_of, docs)
    (loss * SCALE).backward()
    found = gradients(model)
    model.grad_N.zero_()
    return loss.item(), found


def references_of(model: LoraModel) -> list[float]:
    """As if stage 1 had ended elsewhere: gains between -0.4 and 0.4 nats a token."""
    docs = some_documents()
    offsets = (0.0, 0.4, -0.3, 0.2, -0.4, 0.1)
    return [
        nll + offset * int(d.trained_L.sum())
        for nll, offset, d in zip(model.nll(docs).tolist(), offsets, docs, strict=True)
    ]


@pytest.mark.parametrize("budget", [4096, 40])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("path", ["fast", "general"])
def test_the_gradient_is_that_of_autograd_in_fp64(path: str, share: bool, budget: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = load(folder, path, budget_tokens=budget, share_prefixes=share)
    docs = some_documents(references_of(model))
    loss, expected = by_autograd(folder, model, docs)
    found = model.backward_judged(docs, SCALE, BETA)
    assert float(found.sum()) == pytest.approx(loss, rel=1e-10)
    for name, gradient in gradients(model).items():
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < 1e-10, name


@pytest.mark.parametrize("path", ["fast", "general"])
def test_without_bad_answers_it_is_the_ordinary_step(path: str, tmp_path: Path) -> None:
    model, docs = load(write_model(tmp_path), path), documents()
    nll = model.backward(docs, SCALE)
    plain = model.grad_N.clone()
    model.grad_N.zero_()
    found = model.backward_judged(docs, SCALE, BETA)
    assert float(found[0]) == pytest.approx(float(nll), rel=1e-12) and float(found[1]) == 0
    assert float((model.grad_N - plain).norm() / plain.norm()) < 1e-12


@pytest.mark.parametrize("path", ["fast", "general"])
def test_at_the_reference_every_gain_and_margin_is_zero(path: str, tmp_path: Path) -> None:
    """Scored alone or in a step, each row has the same nll; so step 0 pushes with exactly lambda."""
    model = load(write_model(tmp_path), path)
    docs = some_documents()
    docs = some_documents(model.nll(docs).tolist())
    about = judged_documents(docs, torch.device("cpu"), torch.float64)
    weight_B, _ = preference_loss(about, model.nll(docs), BETA)
    sizes = [int(d.trained_L.sum()) for d in docs]
    pulled = (WEIGHT * 4 + WEIGHT / 2 * 5) / sizes[2]  # m is 4 and 5 tokens; a margin of zero weighs 1
    expected = [1.0, -WEIGHT, 1.0 + pulled, -WEIGHT * 4 / sizes[3], -WEIGHT / 2 * 5 / sizes[4], 0.0]
    assert weight_B.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(model.backward_judged(docs, SCALE, BETA)[1]) == pytest.approx(
        WEIGHT * sizes[1] * 2 / BETA + (WEIGHT * 4 + WEIGHT / 2 * 5) * (2 / BETA) * 0.6931471805599453, rel=1e-12
    )


def test_the_push_is_a_leash() -> None:
    """At most lambda, and a hundredth of it once an answer is a nat a token less likely."""
    rows = [Document(n, torch.zeros(11, dtype=torch.int64), torch.arange(11) > 0, Bad(WEIGHT)) for n in range(41)]
    about = judged_documents(rows, torch.device("cpu"), torch.float64)
    nll_B = torch.linspace(-20, 20, 41, dtype=torch.float64)  # gains of 2 to -2 nats a token
    weight_B, _ = preference_loss(about, nll_B, BETA)
    assert float(weight_B.min()) == pytest.approx(-WEIGHT) and float(weight_B.max()) <= 0
    assert abs(float(weight_B[-11])) < 0.03 * WEIGHT and abs(float(weight_B[0])) < 0.001 * WEIGHT


def test_answers_that_are_compared_share_a_micro_batch() -> None:
    docs = some_documents()
    assert sorted(map(sorted, units(docs))) == [[0], [1], [2, 3, 4], [5]]
    rows = [trim_document(d.tokens_L.tolist(), d.trained_L.tolist()) for d in docs]
    for budget in (8, 30, 60, 4096):
        batches = split_units(rows, units(docs), budget, share=True)
        assert [2, 3, 4] in [sorted(unit) for batch in batches for unit in batch]
        assert sorted(i for batch in batches for unit in batch for i in unit) == list(range(6))
