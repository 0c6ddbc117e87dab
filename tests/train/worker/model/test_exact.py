"""The fast step is the textbook's LoRA: loss and every dA and dB, in fp64 to rounding, whatever the packing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.models import (
    FAMILIES,
    LORA,
    documents,
    gradients,
    load_fast,
    load_slow,
    worst_difference,
    write_model,
)
from train.worker.reference import Reference
from transformers import AutoModelForCausalLM

import hivetune
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.train.worker.model.adapter import initialise, write_adapter
from hivetune.train.worker.model.fast.spec import NotFast, spec_from_config
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.session import AdamW


def expect(
    folder: Path, model: LoraModel, docs: list, scale: float
) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and nll of each document by the reference, with the adapter that `model` holds."""
    reference = Reference(folder, dict(model.adapter), 3.0)
    nll = [reference.nll(d.tokens_L.tolist(), d.trained_L.tolist()) for d in docs]
    total = sum(nll)
    (total * scale).backward()
    return float(total), {name: leaf.grad for name, leaf in reference.adapter.items()}, [float(x) for x in nll]


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_equals_the_reference_and_transformers_with_peft(case: str, tmp_path: Path) -> None:
    """fp64 by torch and fp32 by each kernel; the loss by the code that users will load the adapter with."""
    folder, docs = write_model(tmp_path / "model", case), documents()
    model = load_fast(folder)
    loss, grads, nll = expect(folder, model, docs, 1 / 37)
    assert float(model.backward(docs, 1 / 37)) == pytest.approx(loss, rel=1e-10)
    assert worst_difference(gradients(model), grads) < 1e-10
    assert model.nll(docs).tolist() == pytest.approx(nll, rel=1e-10)
    for kernels, products in (("native", "native"), ("native", "torch"), ("torch", "torch")):
        model = load_fast(folder, torch.float32, kernels=kernels, products=products)
        assert float(model.backward(docs, 1 / 37)) == pytest.approx(loss, rel=1e-5)
        assert worst_difference(gradients(model), grads) < 1e-5, (kernels, products)
    write_adapter(tmp_path / "adapter", model.adapter, LORA, str(folder), None)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    asked = docs[3]
    with torch.no_grad():
        log_probabilities = torch.log_softmax(theirs(asked.tokens_L[None]).logits[0, :-1].double(), 1)
    losses = -log_probabilities.gather(1, asked.tokens_L[1:, None])[:, 0]
    assert model.nll([asked]).tolist() == pytest.approx([float(losses[asked.trained_L[1:]].sum())], rel=1e-4)


COMPILED = """
import sys
from pathlib import Path
import torch
from train.worker.model.test_exact import expect
from train.worker.models import documents, gradients, load_fast, worst_difference, write_model
folder, docs = write_model(Path(sys.argv[1]), "gemma2"), documents()
model = load_fast(folder, torch.float32, kernels="compiled", products="torch")
loss, grads, _ = expect(folder, model, docs, 1 / 37)
first = float(model.backward(docs, 1 / 37))
difference = worst_difference(gradients(model), grads)
model.grad_N.zero_()
print(loss, first, difference, float(model.backward(docs, 1 / 37)))
"""


@pytest.mark.slow
def test_compiled_functions_of_rows_equal_the_reference(tmp_path: Path) -> None:
    """As cards compute them; here torch.compile writes C++. Gemma 2 has caps and GELU, and norms on both sides."""
    packages = tmp_path / "packages"  # torch's compiler call breaks where torch lies below a folder with a space
    packages.symlink_to(Path(torch.__file__).parents[1])
    tests, source = Path(__file__).parents[3], Path(hivetune.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{tests}:{source}"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are processes that import torch: a quarter of all here
    command = [sys.executable, "-c", COMPILED, str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss, first, difference, second = map(float, done.stdout.split())
    assert first == pytest.approx(loss, rel=1e-5) and difference < 1e-5 and second == first


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["k_proj"], ["o_proj"], ["gate_proj"], ["down_proj"], ["self_attn.q_proj", "up_proj"]],
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_any_subset_of_modules(targets: list[str], kernels: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    dtype = torch.float32 if kernels == "native" else torch.float64
    model = load_fast(
        folder, dtype, LoraConfig(r=5, alpha=15, target_modules=targets), kernels=kernels, products=kernels
    )
    assert {name.split(".")[-3] for name in model.adapter} == {target.split(".")[-1] for target in targets}
    docs = documents()
    loss, grads, _ = expect(folder, model, docs, 2.0)
    assert float(model.backward(docs, 2.0)) == pytest.approx(loss, rel=1e-5)
    assert worst_difference(gradients(model), grads) < (1e-5 if kernels == "native" else 1e-10)


@pytest.mark.parametrize("rank", [1, 4, 8, 20, 64])
def test_any_rank(rank: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = load_fast(folder, torch.float32, LoraConfig(r=rank, alpha=3 * rank), kernels="native", products="native")
    model.master_N *= 0.2
    docs = documents()
    _, grads, _ = expect(folder, model, docs, 1.0)
    model.backward(docs, 1.0)
    assert worst_difference(gradients(model), grads) < 1e-5


@pytest.mark.parametrize("load", [load_fast, load_slow])
def test_a_module_without_a_place_for_an_adapter_is_refused_by_name(load: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for name in ("wq", "lm_head", "embed_tokens"):
        with pytest.raises(UsageError, match=name) as caught:
            load(folder, lora=LoraConfig(target_modules=[name]))
        assert "all-linear" in caught.value.hint


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
    model = load_fast(folder, torch.float32)
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


class Counter(TorchDispatchMode):
    """Floating point operations of all two-dimensional products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:] if name == "aten::mm" else args[1:3]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_products_of_a_step_are_those_of_the_formula(tmp_path: Path) -> None:
    """4 per frozen weight and token, 6 per adapter weight, 4 V d per trained token; no weight gradient anywhere.

    Attention is left out on both sides: its blocks are rectangles here and triangles in the kernels.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 12, "head_dim": 64, "vocab_size": 512}
    folder = write_model(tmp_path, **sizes)
    model = load_fast(folder, torch.float32, LoraConfig(r=8, alpha=16), kernels="torch")
    length, count = 64, 4
    docs = [
        Document(row, torch.randint(3, 512, (length,)), torch.tensor([False] + [True] * (length - 1)))
        for row in range(count)
    ]
    with Counter() as counter:
        model.backward(docs, 1.0)
    tokens = count * (length - 1)
    frozen = sum(g.outputs * g.inputs for x in model.weights.layers for g in x.matrices)
    formula = tokens * (4 * frozen + 6 * model.master_N.numel() + 4 * 512 * 256)
    assert abs(counter.flops / formula - 1) < 0.02
