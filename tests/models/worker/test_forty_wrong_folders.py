"""Forty more wrong model folders, of seven families, in ways that test_wrong_folders.py does not have.

Written as a person would who has those tests before them and wants a run that ends well on weights that are not the
model's: each is prepared, loaded and trained for a step, and must stop at one of these with words about the cause.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from spoil import Tensors, bytes_of, edit, header, pop, renamed, shards, template, tokenizer, weights
from train.worker.models import documents
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.errors import HivetuneError
from hivetune.models.worker.prepare_model import prepare_model
from hivetune.train.worker.model.adapter import initialise
from hivetune.train.worker.model.load import load_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_positions": 64},
    "gemma2": {},
    "granite": {},
}


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    return lambda folder: weights(folder, change)


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **changes)


def of_expert(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"


def empty_shard(folder: Path) -> None:
    (folder / min(shards(folder).values())).write_bytes(b"")


def shard_elsewhere(folder: Path) -> None:
    known = shards(folder)
    shutil.copytree(folder, folder.parent / "elsewhere")
    first = min(known.values())
    (folder / first).unlink()
    known = {name: f"../elsewhere/{file}" if file == first else file for name, file in known.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": known}))


def pickled(folder: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(32)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def unmerged(found: Tensors) -> None:
    name = "model.layers.0.self_attn.q_proj"
    found |= {f"{name}.lora_A.weight": torch.randn(4, 32), f"{name}.lora_B.weight": torch.randn(32, 4)}


def quantized_by_bytes(found: Tensors) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    found[name] = torch.randint(0, 255, (512, 1), dtype=torch.uint8)
    found[f"{name}.absmax"] = torch.randint(0, 255, (16,), dtype=torch.uint8)
    found[f"{name}.quant_map"] = torch.randn(16)


def normed_weights(found: Tensors) -> None:
    weight = found.pop("model.layers.1.mlp.down_proj.weight")
    found["model.layers.1.mlp.down_proj.weight_v"] = weight
    found["model.layers.1.mlp.down_proj.weight_g"] = weight.norm(dim=1, keepdim=True)


def halves_apart(found: Tensors) -> None:
    """Tensor parallel parts of another program's checkpoint, only the first of two."""
    for name in [name for name in found if "proj.weight" in name]:
        found[name] = found[name][: len(found[name]) // 2].clone()


# (family, how, words of the refusal)
CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "one bias of six": (
        "qwen2",
        tensors(lambda t: t.pop("model.layers.1.self_attn.v_proj.bias")),
        "lack .*v_proj.bias",
    ),
    "a whole expert": ("qwen3_moe", tensors(lambda t: pop(t, "layers.1.mlp.experts.2.")), "experts"),
    "one half of one expert": (
        "qwen3_moe",
        tensors(lambda t: t.pop(of_expert(0, 3, "gate_proj"))),
        "be combined|lack",
    ),
    "an expert too many": (
        "qwen3_moe",
        tensors(
            lambda t: t.update({n.replace("experts.3", "experts.4"): v + 1 for n, v in t.items() if "experts.3" in n})
        ),
        "experts|hold",
    ),
    "more experts in the config": ("qwen3_moe", config(num_local_experts=8), "experts|by config"),
    "fewer experts in the config": ("mixtral", config(num_local_experts=2), "gate|by config"),
    "more experts for a token than there are": ("qwen3_moe", config(num_experts_per_tok=9), "of 4 experts"),
    "no expert for a token": ("mixtral", config(num_experts_per_tok=0), "of 4 experts"),
    "a router of fewer experts": (
        "qwen3_moe",
        tensors(lambda t: t.update({"model.layers.0.mlp.gate.weight": t["model.layers.0.mlp.gate.weight"][:3]})),
        r"gate.weight is \[3, 32\]",
    ),
    "NaN in one expert": (
        "qwen3_moe",
        tensors(lambda t: t[of_expert(1, 3, "up_proj")][5, 5:7].fill_(torch.nan)),
        "NaN or infinity",
    ),
    "an expert of another width": (
        "mixtral",
        tensors(lambda t: [t.update({n: v[:20]}) for n, v in list(t.items()) if "experts.1.w1" in n]),
        "be combined|by config",
    ),
    "a transposed Conv1D": (
        "gpt2",
        tensors(lambda t: [t.update({n: v.T}) for n, v in list(t.items()) if "c_attn.weight" in n]),
        r"c_attn.weight is \[96, 32\]",
    ),
    "fewer positions in the weights": (
        "gpt2",
        tensors(lambda t: t.update({"transformer.wpe.weight": t["transformer.wpe.weight"][:32]})),
        r"wpe.weight is \[32, 32\]",
    ),
    "no embedding of positions": ("gpt2", tensors(lambda t: t.pop("transformer.wpe.weight")), "lack .*wpe"),
    "a norm of four": (
        "gemma2",
        tensors(lambda t: pop(t, "layers.0.pre_feedforward_layernorm")),
        "lack .*pre_feedforward",
    ),
    "queries merged with keys and values": (
        "llama",
        tensors(
            lambda t: t.update(
                {
                    "model.layers.0.self_attn.qkv_proj.weight": torch.cat(
                        [t.pop(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
                    )
                }
            )
        ),
        "lack .*_proj",
    ),
    "tensor parallel parts": ("llama", tensors(halves_apart), "by config.json it is"),
    "adapters beside the weights": ("llama", tensors(unmerged), "hold .*lora_A"),
    "four-bit bytes": ("llama", tensors(quantized_by_bytes), "q_proj|stored as U8"),
    "weights as length and direction": ("llama", tensors(normed_weights), "lack .*down_proj.weight"),
    "a bias of the head": (
        "granite",
        tensors(lambda t: t.update({"lm_head.bias": torch.randn(len(t["model.embed_tokens.weight"]))})),
        "hold lm_head.bias",
    ),
    "numbers of eight bits": (
        "llama",
        tensors(lambda t: [t.update({n: v.to(torch.float8_e4m3fn)}) for n, v in list(t.items()) if "up_proj" in n]),
        "F8_E4M3",
    ),
    "a norm with a dimension more": (
        "llama",
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][None]})),
        r"norm.weight is \[1, 32\]",
    ),
    "layers counted from one": (
        "llama",
        tensors(lambda t: [renamed(t, f"layers.{i}.", f"layers.{i + 1}.") for i in (1, 0)]),
        "lack model.layers.0",
    ),
    "an empty shard": ("qwen2", empty_shard, "is empty"),
    "a shard in another folder": ("qwen2", shard_elsewhere, "elsewhere|has no"),
    "a pickle alone": ("llama", pickled, "safetensors"),
    "a header that is longer than the file": (
        "llama",
        lambda f: bytes_of(f, lambda c: bytearray((1 << 40).to_bytes(8, "little")) + c[8:]),
        "not a safetensors file",
    ),
    "a header that is not text": (
        "llama",
        lambda f: bytes_of(f, lambda c: c[:8] + bytearray(b"\xff" * 40) + c[48:]),
        "damaged header|not a safetensors",
    ),
    "a negative place": (
        "llama",
        lambda f: header(f, lambda h: h["model.norm.weight"].update(data_offsets=[-128, 0])),
        "outside|damaged",
    ),
    "head size that is odd": (
        "llama",
        config(head_dim=7),
        "by config.json it is|transformers can't build a model from config.json",
    ),
    "key heads that do not divide": (
        "llama",
        config(num_key_value_heads=3),
        "by config.json it is|transformers can't build a model from config.json",
    ),
    "no heads": ("granite", config(num_attention_heads=0), "transformers can't build a model from config.json"),
    "a width that is negative": (
        "llama",
        config(hidden_size=-32),
        "transformers can't build a model from config.json|by config",
    ),
    "an epsilon in words": ("llama", config(rms_norm_eps="tiny"), "transformers can't build a model from config.json"),
    "a rotation without a base": (
        "llama",
        config(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        "rope_theta",
    ),
    "the code of a stranger": (
        "llama",
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
        "code|transformers can't build a model from config.json",
    ),
    "awq by its word": (
        "llama",
        config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}),
        "config.json|quantized|lack",
    ),
    "a template that does not parse": ("llama", lambda f: template(f, "{% for m in messages %}{{ m }"), "template"),
    "a tokenizer with two names for a number": (
        "llama",
        lambda f: tokenizer(f, lambda c: c["model"]["vocab"].update({"\u0436\u0436": 5})),
        "number|tokenizer",
    ),
}


@pytest.fixture(scope="session")
def whole(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A good folder of each family, with the same tokenizer."""

    @cache
    def make(kind: str) -> Path:
        made = Path(shutil.copytree(tiny_source, tmp_path_factory.mktemp("whole") / "model"))
        (made / "generation_config.json").unlink(missing_ok=True)
        known = json.loads((made / "config.json").read_text())
        ids = {"vocab_size": known["vocab_size"], "eos_token_id": known["eos_token_id"], "bos_token_id": None}
        torch.manual_seed(5)
        made_config = AutoConfig.for_model(kind, **{**SIZES, **ids, **FAMILIES[kind]})
        AutoModelForCausalLM.from_config(made_config).save_pretrained(made)
        (made / "generation_config.json").unlink(missing_ok=True)
        return made

    return make


def train_a_step(source: Path, target: Path) -> float:
    """The loss of one step after preparing and loading, as a run does, without its supervisor. Raises what stops it."""
    prepare_model(str(source), target)
    model = load_model(target, LoraConfig(r=2), method="lora", dtype=torch.float32, device=torch.device("cpu"))
    initialise(model.adapter, 0)
    loss = float(model.backward(documents(), 1.0))
    assert bool(model.grad_N.isfinite().all())
    return loss


def test_there_are_forty() -> None:
    assert len(CASES) == 40


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_folder_never_trains(case: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    kind, change, words = CASES[case]
    folder = Path(shutil.copytree(whole(kind), tmp_path / "model"))
    change(folder)
    with pytest.raises(Exception, match=words) as caught:
        train_a_step(folder, tmp_path / "prepared")
    assert isinstance(caught.value, HivetuneError) or "template" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_same_folder_unspoiled_trains(kind: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    assert 0 < train_a_step(whole(kind), tmp_path / "prepared") < float("inf")
