"""The fast step is the textbook's LoRA: loss and every dA and dB, in fp64 to rounding, whatever the packing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from train.worker.models import FAMILIES, documents, random_adapter, write_model
from train.worker.reference import Reference
from transformers import AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import initialise, write_adapter
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.fast.spec import NotFast, spec_from_config
from hivetune.train.worker.session import AdamW

LORA = LoraConfig(r=4, alpha=12)


def load(folder: Path, dtype: torch.dtype = torch.float64, lora: LoraConfig = LORA, **choices: Any) -> FastModel:
    model = FastModel(folder, lora, dtype=dtype, device=torch.device("cpu"), choices=Choices(**choices))
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
def test_a_family_equals_the_reference_and_transformers_with_peft(case: str, tmp_path: Path) -> None:
    """fp64 by torch and fp32 by each kernel; the logits by the code that users will load the adapter with."""
    folder, docs = write_model(tmp_path / "model", case), documents()
    model = load(folder)
    loss, grads, nll = expect(folder, model, docs, 1 / 37)
    assert float(model.backward(docs, 1 / 37)) == pytest.approx(loss, rel=1e-10)
    assert worst_difference(gradients(model), grads) < 1e-10
    assert model.nll(docs).tolist() == pytest.approx(nll, rel=1e-10)
    for kernels, products in (("native", "native"), ("native", "torch"), ("torch", "torch")):
        model = load(folder, torch.float32, kernels=kernels, products=products)
        assert float(model.backward(docs, 1 / 37)) == pytest.approx(loss, rel=1e-5)
        assert worst_difference(gradients(model), grads) < 1e-5, (kernels, products)
    write_adapter(tmp_path / "adapter", model.adapter, LORA, str(folder), None)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    tokens = docs[3].tokens_L
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert float((model.logits(tokens.tolist()) - expected).abs().max()) < 2e-4 * float(expected.abs().max())


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["k_proj"], ["o_proj"], ["gate_proj"], ["down_proj"], ["self_attn.q_proj", "up_proj"]],
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_any_subset_of_modules(targets: list[str], kernels: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    dtype = torch.float32 if kernels == "native" else torch.float64
    model = load(folder, dtype, LoraConfig(r=5, alpha=15, target_modules=targets), kernels=kernels, products=kernels)
    assert {name.split(".")[-3] for name in model.adapter} == {target.split(".")[-1] for target in targets}
    docs = documents()
    loss, grads, _ = expect(folder, model, docs, 2.0)
    assert float(model.backward(docs, 2.0)) == pytest.approx(loss, rel=1e-5)
    assert worst_difference(gradients(model), grads) < (1e-5 if kernels == "native" else 1e-10)


@pytest.mark.parametrize("rank", [1, 4, 8, 20, 64])
def test_any_rank(rank: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = load(folder, torch.float32, LoraConfig(r=rank, alpha=3 * rank), kernels="native", products="native")
    model.master_N *= 0.2
    docs = documents()
    _, grads, _ = expect(folder, model, docs, 1.0)
    model.backward(docs, 1.0)
    assert worst_difference(gradients(model), grads) < 1e-5


def test_an_unknown_module_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no linear module matches 'wq'(.|\n)*q_proj"):
        load(write_model(tmp_path), lora=LoraConfig(target_modules=["wq"]))
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(UsageError, match=name):
            load(tmp_path, lora=LoraConfig(target_modules=[name]))


def test_what_the_fast_path_does_not_know_is_left_to_the_general_one(tmp_path: Path) -> None:
    config = json.loads((write_model(tmp_path) / "config.json").read_text())
    for change in (
        {"model_type": "gpt2"},
        {"hidden_act": "relu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"quantization_config": {"bits": 4}},
    ):
        with pytest.raises(NotFast):
            spec_from_config({**config, **change})


@pytest.mark.slow
def test_two_hundred_steps_stay_with_the_reference(tmp_path: Path) -> None:
    """fp32 engine against the textbook in fp64 with torch's AdamW, from B = 0."""
    folder = write_model(tmp_path)
    model = load(folder, torch.float32)
    initialise(model.adapter, 0)
    reference = Reference(folder, dict(model.adapter), 3.0)
    theirs = torch.optim.AdamW(reference.adapter.values(), lr=1e-3, weight_decay=0.01)
    ours = AdamW(model.master_N, model.grad_N, weight_decay=0.01)
    for number in range(200):
        docs = documents(seed=number % 20, prefix=17, count=1)[:1]
        trained = max(1, int(docs[0].trained_L.sum()))
        theirs.zero_grad()
        (sum(reference.nll(d.tokens_L.tolist(), d.trained_L.tolist()) for d in docs) / trained).backward()
        theirs.step()
        model.grad_N.zero_()
        model.backward(docs, 1 / trained)
        ours.update(rate=1e-3, number=number + 1)
    expected = torch.cat([reference.adapter[name].detach().flatten() for name in model.adapter])
    found = torch.cat([view.flatten() for view in model.adapter.values()]).double()
    assert float((found - expected).norm() / expected.norm()) < 1e-4
