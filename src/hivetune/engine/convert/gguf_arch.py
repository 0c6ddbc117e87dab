"""What llama.cpp must know of each architecture: its name, settings, and how tensors differ from transformers'. Pure.

Settings and names are those of the `gguf` package; what changes in a tensor follows from the mathematics:

- llama.cpp rotates neighbouring pairs (0, 1), (2, 3), ... in the `llama` architecture, transformers rotates position i
  with i + d/2. So the rows of q and k are reordered per head, from half-split to interleaved. The other architectures
  here rotate half-split in llama.cpp too.
- Gemma multiplies by (1 + weight) in its norms; llama.cpp multiplies by the weight, so 1 is added on the way.
"""

import math
from collections.abc import Mapping
from typing import Any

from hivetune.errors import UsageError
from hivetune.models.families import EXPERT_SETTINGS, FAMILIES, Family, Gguf

ModelConfig = Mapping[str, Any]
Setting = tuple[str, int | float | str]


# The names in config.json of the activation that llama.cpp runs for a family, the usual one first.
LLAMA_CPP_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_pytorch_tanh": ("gelu_pytorch_tanh", "gelu")}


def find_gguf(config: ModelConfig) -> Gguf:
    """How llama.cpp stores this model. Raises UsageError for one that can't be exported, before anything is read."""
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None or family.gguf is None:
        known = sorted(name for name, family in FAMILIES.items() if family.gguf)
        raise UsageError(
            f"GGUF export does not support the architecture {kind!r}",
            hint=f"supported: {', '.join(known)}; --to merged works for every model",
        )
    name, activations = family.gguf.architecture, LLAMA_CPP_ACTIVATIONS[family.activation]
    activation = config.get("hidden_activation") or config.get("hidden_act", activations[0])
    if activation not in activations:
        raise UsageError(f"llama.cpp runs {name} with {activations[0]}, this model needs {activation}")
    if family.experts is not None:
        _check_experts(config, family)
    elif any(config.get(setting) for setting in EXPERT_SETTINGS):
        raise UsageError(f"GGUF export does not support experts in {kind}", hint="use --to merged")
    return family.gguf


def _check_experts(config: ModelConfig, family: Family) -> None:
    """Raises UsageError for what llama.cpp computes otherwise."""
    assert family.experts is not None and family.gguf is not None
    name = family.gguf.architecture
    normalised = family.experts.normalised or bool(config.get("norm_topk_prob"))
    if normalised != family.gguf.normalised_experts:
        does = "do" if family.gguf.normalised_experts else "don't"
        raise UsageError(
            f"llama.cpp runs {name} with shares of experts that {does} add up to 1; this model's norm_topk_prob is "
            f"{normalised}",
            hint="use --to merged",
        )
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) > 1:
        raise UsageError(
            f"llama.cpp runs {name} with experts in every layer, this model has some without", hint="use --to merged"
        )
    if config.get("clip_qkv") is not None:
        raise UsageError(
            f"llama.cpp does not clip what {name}'s attention reads, this model does", hint="use --to merged"
        )


def expert_count(config: ModelConfig) -> int:
    """0 for a model without."""
    family = FAMILIES[config["model_type"]]
    if family.experts is None:
        return 0
    return int(next((config[name] for name in EXPERT_SETTINGS if name in config), family.experts.usual[0]))


def head_dim(config: ModelConfig) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def settings(config: ModelConfig, gguf: Gguf) -> list[Setting]:
    """(key below the architecture's name, value): int is written as u32, float as f32."""
    heads = config["num_attention_heads"]
    found: list[Setting] = [
        ("block_count", config["num_hidden_layers"]),
        ("context_length", config["max_position_embeddings"]),
        ("embedding_length", config["hidden_size"]),
        ("feed_forward_length", config["intermediate_size"]),
        ("attention.head_count", heads),
        ("attention.head_count_kv", config.get("num_key_value_heads") or heads),
        ("attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])),
        ("vocab_size", config["vocab_size"]),
    ]
    if gguf.writes_head_dim or head_dim(config) * heads != config["hidden_size"]:
        found += [("attention.key_length", head_dim(config)), ("attention.value_length", head_dim(config))]
    return found + _experts(config) + _rope(config, gguf) + _windows(config, gguf)


def _experts(config: ModelConfig) -> list[Setting]:
    experts = FAMILIES[config["model_type"]].experts
    if experts is None:
        return []
    _, active, width = experts.usual
    return [
        ("expert_count", expert_count(config)),
        ("expert_used_count", int(config.get("num_experts_per_tok", active))),
        ("expert_feed_forward_length", int(config.get(experts.width, width))),
    ]


def _rope(config: ModelConfig, gguf: Gguf) -> list[Setting]:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    share = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not gguf.partial_rotary:
        raise UsageError(f"GGUF export does not support {gguf.architecture} with a partial rotary factor")
    found: list[Setting] = [
        ("rope.freq_base", float(rope["rope_theta"])),
        ("rope.dimension_count", int(head_dim(config) * share)),
    ]
    if kind in ("default", "llama3"):  # llama3's factors are a tensor, see `rope_factors`
        return found
    if kind == "linear":
        return [*found, ("rope.scaling.type", "linear"), ("rope.scaling.factor", float(rope["factor"]))]
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return [
            *found,
            ("rope.scaling.type", "yarn"),
            ("rope.scaling.factor", float(rope["factor"])),
            ("rope.scaling.original_context_length", int(original)),
        ]
    raise UsageError(f"GGUF export does not support the rope type {kind!r}", hint="use --to merged")


def _windows(config: ModelConfig, gguf: Gguf) -> list[Setting]:
    """Sliding windows and soft caps of Gemma 2 and 3, window of Phi 3. Others run with full attention in llama.cpp."""
    family, window = FAMILIES[config["model_type"]], config.get("sliding_window")
    rows: list[Setting] = []
    if window and gguf.windows:
        rows.append(("attention.sliding_window", int(window)))
    elif window and config.get("use_sliding_window", family.sliding != "asked for"):
        # Up to the window both are the same; beyond it llama.cpp would attend to more than was trained.
        rows += [("context_length", int(window))] if window < config["max_position_embeddings"] else []
    if gguf.softcaps:
        attention, logits = gguf.softcaps
        rows.append(("attn_logit_softcapping", float(config.get("attn_logit_softcapping") or attention)))
        rows.append(("final_logit_softcapping", float(config.get("final_logit_softcapping") or logits)))
    scalar = config.get("query_pre_attn_scalar")
    ratio = config["hidden_size"] // config["num_attention_heads"]
    if family.query_scalar and scalar not in (None, head_dim(config), ratio):
        raise UsageError(f"llama.cpp scales {gguf.architecture}'s queries by the head size, this model needs {scalar}")
    return rows


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or the older `rope_theta` and `rope_scaling`; Gemma 3: of full attention."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "full_attention" in rope:
        rope = rope["full_attention"]
    if not isinstance(rope, Mapping):
        rope = config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return {**rope, "rope_type": kind, "rope_theta": theta}


def rope_factors(config: ModelConfig) -> list[float] | None:
    """Llama 3.1's divisors of the rotary frequencies, head_dim / 2 of them; None for other rope types.

    The rule (Llama 3.1's model card): long waves are stretched by `factor`, short ones kept, those between blended.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    size, base, factor = head_dim(config), float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    factors = []
    for i in range(0, size, 2):
        wave = 2 * math.pi * base ** (i / size)
        turns = original / wave
        if turns >= high:
            factors.append(1.0)
        elif turns <= low:
            factors.append(factor)
        else:
            blend = (turns - low) / (high - low)
            factors.append(1 / ((1 - blend) / factor + blend))
    return factors


def reordered_heads(name: str, config: ModelConfig, gguf: Gguf) -> int | None:
    """Number of heads whose rows of this transformers tensor are reordered, or None for tensors that stay."""
    if not gguf.interleaved:
        return None
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    if ".k_proj." in name:
        return int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return None
