"""The fast step is the textbook's LoRA: loss and every dA and dB, in fp64 to rounding, whatever the packing."""

from pathlib import Path

import pytest
import torch
from engine.models import FAMILIES, documents, random_adapter, write_model
from engine.reference import Reference

from hivetune.config import LoraConfig
from hivetune.engine.fast.model import FastModel

LORA = LoraConfig(r=4, alpha=12)


def load(folder: Path, dtype: torch.dtype = torch.float64, lora: LoraConfig = LORA, **choices: object) -> FastModel:
    model = FastModel(folder, lora, dtype=dtype, device=torch.device("cpu"), choices=choices)
    random_adapter(model)
    return model


def worst_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative error of any tensor, by its own norm."""
    return max(float((found[n].double() - e).norm() / e.norm()) for n, e in expected.items())


def gradients(model: FastModel) -> dict[str, torch.Tensor]:
    start = model.master_N.data_ptr()
    return {
        name: model.grad_N[(view.data_ptr() - start) // view.element_size() :][: view.numel()].view(view.shape).clone()
        for name, view in model.adapter.items()
    }


def expect(
    folder: Path, model: FastModel, docs: list, scale: float
) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and nll of each document by the reference, with the adapter that `model` holds."""
    reference = Reference(folder, dict(model.adapter), 3.0)
    nll = [reference.nll(d.tokens_L.tolist(), d.trained_L.tolist()) for d in docs]
    total = sum(nll)
    (total * scale).backward()
    return float(total), {name: leaf.grad for name, leaf in reference.adapter.items()}, [float(x) for x in nll]


@pytest.mark.parametrize("case", FAMILIES)
def test_loss_and_gradients_equal_the_reference_in_fp64(case: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, case)
    model, docs = load(folder), documents()
    loss, grads, nll = expect(folder, model, docs, 1 / 37)
    total = model.backward(docs, 1 / 37)
    assert float(total) == pytest.approx(loss, rel=1e-10)
    assert worst_difference(gradients(model), grads) < 1e-10
    assert model.nll(docs).tolist() == pytest.approx(nll, rel=1e-10)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("case", FAMILIES)
def test_fp32_equals_the_reference_to_its_rounding(case: str, kernels: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, case)
    model, docs = load(folder, torch.float32, kernels=kernels), documents()
    loss, grads, _ = expect(folder, model, docs, 1 / 37)
    total = model.backward(docs, 1 / 37)
    assert float(total) == pytest.approx(loss, rel=1e-5)
    assert worst_difference(gradients(model), grads) < 1e-5
