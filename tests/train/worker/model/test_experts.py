"""Adapters on routed experts: gradients, files and merged weights as PEFT's, the router frozen."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from train.worker.models import documents, random_adapter
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.process.child import Heartbeat
from hivetune.release.worker.merge import merge
from hivetune.train.worker.model.adapter import fill, read_adapter, same_views, write_adapter
from hivetune.train.worker.model.general import GeneralModel, load_general

LORA = LoraConfig(r=3, alpha=6)
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 8},
    "olmoe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
QUICK = ("qwen3_moe",)


def write_kind(folder: Path, kind: str) -> Path:
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return folder


def load(folder: Path, lora: LoraConfig = LORA) -> GeneralModel:
    model = load_general(folder, lora, method="lora", dtype=torch.float64, device=torch.device("cpu"), why="asked")
    random_adapter(model)
    return model


def peft_gradients(base: Path, adapter: Path, docs: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")
    wrapped = peft.PeftModel.from_pretrained(module, adapter, is_trainable=True, autocast_adapter_dtype=False).eval()
    total = torch.zeros((), dtype=torch.float64)
    for document in docs:
        logits = wrapped(input_ids=document.tokens_L[None], use_cache=False).logits[0, :-1]
        target, trained = document.tokens_L[1:], document.trained_L[1:]
        total = total + torch.nn.functional.cross_entropy(logits[trained], target[trained], reduction="sum")
    (total / 37).backward()
    leaves = {name.replace(".default", ""): leaf for name, leaf in wrapped.named_parameters() if "lora_" in name}
    return float(total.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS])
def test_gradients_files_and_merged_weights_are_pefts(kind: str, tmp_path: Path) -> None:
    base = write_kind(tmp_path / "base", kind)
    model, docs = load(base), [d for d in documents() if d.trained_L[1:].any()]
    for view in model.adapter.values():  # the file holds fp32
        view.copy_(view.float())
    write_adapter(tmp_path / "adapter", model.adapter, LORA, str(base), None)
    total, expected = peft_gradients(base, tmp_path / "adapter", docs)
    assert float(model.backward(docs, 1 / 37)) == pytest.approx(total, rel=1e-6)
    assert expected.keys() == model.adapter.keys()
    found = same_views(model.grad_N, model.adapter)
    for name, gradient in expected.items():
        # transformers computes rotary angles, norms and routers' softmax in fp32, whatever the model's precision.
        assert float((found[name] - gradient).norm()) <= 2e-5 * float(gradient.norm()) + 1e-9, name
    assert not any(".gate.lora" in name or "router" in name for name in expected)
    lora, tensors = read_adapter(tmp_path / "adapter")
    again = load(base, lora)
    fill(again.adapter, tensors, "adapter")
    assert float(again.nll(docs).sum()) == pytest.approx(total, rel=1e-6)
    merge(base, tmp_path / "adapter", tmp_path / "merged", "source", Heartbeat(None))
    merged = load_general(
        tmp_path / "merged", LORA, method="lora", dtype=torch.float64, device=torch.device("cpu"), why="asked"
    )
    assert float(merged.nll(docs).sum()) == pytest.approx(total, rel=1e-5)
    assert set(tensors_of(tmp_path / "merged")) == set(tensors_of(base))


def tensors_of(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("wanted", [["q_proj", "down_proj"], ["experts.gate_up_proj", "o_proj"], ["q_proj"]])
def test_single_tensors_of_experts(wanted: list[str], tmp_path: Path) -> None:
    """PEFT names the adapter of one tensor alone otherwise than that of the same tensor beside the other."""
    base = write_kind(tmp_path / "base", "qwen3_moe")
    lora = LoraConfig(r=3, alpha=6, target_modules=wanted)
    model, docs = load(base, lora), [d for d in documents() if d.trained_L[1:].any()]
    for view in model.adapter.values():
        view.copy_(view.float())
    write_adapter(tmp_path / "adapter", model.adapter, lora, str(base), None)
    total, _ = peft_gradients(base, tmp_path / "adapter", docs)
    assert float(model.nll(docs).sum()) == pytest.approx(total, rel=1e-6)
    assert read_adapter(tmp_path / "adapter")[1].keys() == model.adapter.keys()
    known = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert bool(known["target_parameters"]) == (wanted != ["q_proj"])
