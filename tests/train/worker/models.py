"""Small random models of every family, written as prepared folders by transformers, and documents for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.base.disk import write_json, write_manifest
from hivetune.config import LoraConfig
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker.model.adapter import same_views
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.general import GeneralModel, load_general
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

CPU = torch.device("cpu")
LORA = LoraConfig(r=4, alpha=12)

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-mha-biased": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "olmo2": ("olmo2", {"head_dim": 12}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "head_dim": 12,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
}
# On the general path.
EXPERTS = {
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


def each_family(*quick: str, others: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Return all families as parameters. Those that are not named get the mark `others`."""
    return [pytest.param(case, marks=() if case in quick else others) for case in FAMILIES]


def write_model(folder: Path, case: str = "llama", **changes: object) -> Path:
    """A random model of `case` in fp32; biases and norms random too, so that none is silently left out."""
    family, extra = {**FAMILIES, **EXPERTS}[case]
    settings = {**SMALL, **extra, **changes}
    config = AutoConfig.for_model(family, **{k: v for k, v in settings.items()})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def describe(folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """Make the folder of a model a prepared one, with the sizes that were counted."""
    described = {"schema": 1, "name": "tiny", "source": "tiny", "revision": None, "kind": "hub", "sizes": sizes}
    write_json(folder / "hivetune.json", described)
    write_manifest(folder, {"kind": "model"})
    return folder


def documents(seed: int = 0, *, prefix: int = 20, count: int = 6, vocab: int = 97) -> list[Document]:
    """Two groups with a shared beginning, a loner, one without a target, and one of one token. Masks with gaps."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> torch.Tensor:
        return torch.randint(3, vocab, (size,), generator=generator)

    shared = [draw(prefix), draw(prefix + 3)]
    found = []
    for row in range(count):
        tokens = torch.cat([shared[row % 2], draw(5 + 4 * row)])
        trained = torch.rand(len(tokens), generator=generator) < 0.5
        trained[0] = False
        found.append(Document(row, tokens, trained))
    found.append(Document(count, draw(11), torch.tensor([False] + [True] * 10)))
    found.append(Document(count + 1, draw(7), torch.zeros(7, dtype=torch.bool)))
    found.append(Document(count + 2, draw(1), torch.zeros(1, dtype=torch.bool)))
    found.append(found[0]._replace(row=count + 3))
    return found


def random_adapter(model: object, seed: int = 3, size: float = 0.1) -> None:
    """Both A and B away from zero: with B = 0 every dA is 0 and half of the bugs are invisible."""
    generator = torch.Generator().manual_seed(seed)
    for view in model.adapter.values():  # type: ignore[attr-defined]
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64) * size)


def load_fast(folder: Path, dtype: torch.dtype = torch.float64, lora: LoraConfig = LORA, **choices: Any) -> FastModel:
    model = FastModel(folder, lora, dtype=dtype, device=CPU, choices=Choices(**choices))
    random_adapter(model)
    return model


def load_any(
    folder: Path, dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA, choices: Choices = NO_CHOICES
) -> LoraModel:
    """The model as a run with these choices loads it, with an adapter of zeros."""
    return load_model(folder, lora, method="lora", dtype=dtype, device=CPU, choices=choices)


def load_slow(
    folder: Path, dtype: torch.dtype = torch.float64, lora: LoraConfig = LORA, **choices: Any
) -> GeneralModel:
    """The same on the general path."""
    model = load_general(folder, lora, method="lora", dtype=dtype, device=CPU, choices=Choices(**choices), why="asked")
    random_adapter(model)
    return model


def gradients(model: LoraModel) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in same_views(model.grad_N, model.adapter).items()}


def worst_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative error of any tensor, by its own norm."""
    return max(difference(found[name].double(), tensor.double()) for name, tensor in expected.items())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def as_source(folder: Path) -> Path:
    """A folder with a tokenizer and a template becomes one as `save_pretrained` leaves it: 2 random layers, 32 wide."""
    for name in ("hivetune.json", "manifest.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = max(max(tokenizer["model"]["vocab"].values()), *(t["id"] for t in tokenizer["added_tokens"])) + 1
    eos = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_end|>")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    write_model(folder, vocab_size=vocab, eos_token_id=eos, tie_word_embeddings=True, **sizes)
    return folder
