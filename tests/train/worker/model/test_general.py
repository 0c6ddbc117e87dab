"""The general path is exact on any architecture: against the textbook in fp64, and against PEFT where there is none."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from train.worker.model.test_exact import expect
from train.worker.models import (
    CPU,
    LORA,
    documents,
    each_family,
    gradients,
    load_slow,
    random_adapter,
    worst_difference,
    write_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.errors import MachineNotFit, UsageError
from hivetune.train.worker.model import general
from hivetune.train.worker.model.general import GeneralModel
from hivetune.train.worker.model.load import load_model

SIZES: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Kinds that no fast path knows: other linear modules (GPT-2's Conv1D), fused qkv, ALiBi, recurrence.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "cohere": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.parametrize("case", each_family("llama"))
def test_loss_and_gradients_equal_the_reference_in_fp64(case: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, case)
    model, docs = load_slow(folder), documents()
    loss, grads, nll = expect(folder, model, docs, 1 / 37)
    # transformers computes rotary angles and RMS norms in fp32, whatever the model's precision.
    assert float(model.backward(docs, 1 / 37)) == pytest.approx(loss, rel=1e-6)
    assert worst_difference(gradients(model), grads) < 2e-5
    assert model.nll(docs).tolist() == pytest.approx(nll, rel=1e-6)


def write_other(folder: Path, kind: str) -> Path:
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SIZES, **OTHERS[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_loss_and_gradients_equal_peft_on_any_architecture(kind: str, tmp_path: Path) -> None:
    folder = write_other(tmp_path, kind)
    # PEFT refuses the other modules of Mamba, whose fused kernels read their weights past any adapter.
    lora = LoraConfig(r=4, alpha=12, target_modules=["in_proj", "x_proj"]) if kind == "mamba" else LORA
    model, docs = load_slow(folder, lora=lora), [d for d in documents() if len(d.tokens_L) > 1]
    expected, total = peft_gradients(folder, model, docs)
    assert float(model.backward(docs, 1 / 37)) == pytest.approx(total, rel=1e-6)
    assert worst_difference(gradients(model), expected) < 2e-5  # rotary angles in fp32, as above


def peft_gradients(folder: Path, model: GeneralModel, docs: list[Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Sum of nll over trained tokens and d(nll / 37), one document at a time through the whole model."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    names = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in model.adapter})
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    leaves = {name.replace(".default", ""): p for name, p in wrapped.named_parameters() if "lora_" in name}
    assert leaves.keys() == model.adapter.keys()
    total = 0.0
    for name, leaf in leaves.items():
        leaf.data = model.adapter[name].clone()
    for document in docs:
        logits = wrapped(input_ids=document.tokens_L[None], use_cache=False).logits[0, :-1].double()
        target, trained = document.tokens_L[1:], document.trained_L[1:]
        nll = torch.nn.functional.cross_entropy(logits[trained], target[trained], reduction="sum")
        if trained.any():
            (nll / 37).backward()
        total += float(nll.detach())
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, total


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_micro_batches_change_nothing_but_rounding(budget: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    docs = documents()
    whole, cut = load_slow(folder), load_slow(folder, budget_tokens=budget)
    totals = [float(model.backward(docs, 0.1)) for model in (whole, cut)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)
    assert worst_difference(gradients(cut), gradients(whole)) < 1e-10


def test_chunks_of_logits_and_recomputed_layers_change_nothing_but_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, docs = write_model(tmp_path), documents()
    plain = load_slow(folder)
    plain.backward(docs, 0.1)
    monkeypatch.setattr(general, "RECOMPUTED_CHUNK_LOGITS", 97 * 5)
    for choices in ({}, {"recompute": 2}):
        model = load_slow(folder, **choices)
        model.backward(docs, 0.1)
        assert worst_difference(gradients(model), gradients(plain)) < 1e-10


def test_without_the_adapter_it_is_the_base(tmp_path: Path) -> None:
    folder, docs = write_model(tmp_path), documents()
    model = load_slow(folder)
    tuned, base = model.nll(docs), model.nll(docs, adapter=False)
    for view in model.adapter.values():
        view.zero_()
    assert torch.equal(model.nll(docs), base) and not torch.equal(tuned, base)


def test_dropout_counts_in_training_only_and_follows_the_seed(tmp_path: Path) -> None:
    model, docs = load_slow(write_model(tmp_path), lora=LoraConfig(r=4, alpha=12, dropout=0.3)), documents()
    assert torch.equal(model.nll(docs), model.nll(docs))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.grad_N.zero_()
        model.backward(docs, 1.0)
        found.append(model.grad_N.clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_qlora_learns_on_four_bits(tmp_path: Path) -> None:
    """NF4 moves the loss a little (about 1 % here), has gradients everywhere, and goes through `load_model`."""
    folder = write_model(tmp_path, hidden_size=64, intermediate_size=128, initializer_range=0.02)
    docs = documents()
    model = load_model(folder, LORA, method="qlora", dtype=torch.float32, device=CPU)
    random_adapter(model)
    assert model.path == "general" and "quantized" in model.why
    exact = load_slow(folder, torch.float32)
    assert model.nll(docs).tolist() == pytest.approx(exact.nll(docs).tolist(), rel=0.05)
    assert model.nll(docs).tolist() != exact.nll(docs).tolist()
    model.backward(docs, 0.1)
    assert all(bool(grad.any()) for grad in gradients(model).values())


def test_qlora_of_rows_that_bitsandbytes_unpacks_wrongly_is_refused(tmp_path: Path) -> None:
    """The model is 48 wide: on a processor a row's scales were taken for those of other rows, in silence."""
    with pytest.raises(UsageError, match="has 48 inputs") as caught:
        load_model(write_model(tmp_path), LORA, method="qlora", dtype=torch.float32, device=CPU)
    assert "method: lora" in caught.value.hint


def test_qlora_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match="bitsandbytes") as caught:
        load_model(write_model(tmp_path), LORA, method="qlora", dtype=torch.float32, device=CPU)
    assert "pip install" in caught.value.hint
