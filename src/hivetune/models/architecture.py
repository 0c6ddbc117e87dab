"""What a model's config.json says about its size: its linear layers, its parameters, and what a rank adds to them.

Formulas per family, without torch and without the weights. A family that is not listed but uses the usual names is
read as Llama-like and says so (`exact` False).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.errors import UsageError


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of each decoder layer: y = W x, W of shape [outputs, inputs]."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family differs from Llama: biases, norms, head size, and the defaults its config may leave out."""

    qkv_bias: bool = False
    norms_per_layer: int = 2  # each of hidden size
    head_norms: bool = False  # norms of head size on queries and keys
    fused: bool = False  # one qkv_proj and one gate_up_proj
    tied: bool = False
    head_size: int | None = None  # None: hidden / heads


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms=True, head_size=128),
    "gemma": Family(tied=True, head_size=256),
    "gemma2": Family(norms_per_layer=4, tied=True, head_size=256),
    "gemma3_text": Family(norms_per_layer=4, head_norms=True, tied=True, head_size=256),
    "phi3": Family(fused=True),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Architecture:
    """Sizes of a dense decoder. q and k are the widths of all query heads and of all key heads together."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_size: int
    kv_heads: int
    vocabulary: int
    tied: bool
    norm_parameters: int
    linears: tuple[Linear, ...]
    exact: bool = True

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' GEMMs, without biases: the N of FLOPs per token."""
        return self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        in_layers = self.layers * sum(linear.parameters for linear in self.linears)
        return in_layers + self.norm_parameters + self.embedding_parameters

    def targets(self, target_modules: str | Sequence[str] = "all-linear") -> tuple[Linear, ...]:
        """The layers that get adapters. Raises UsageError for a name that no layer has.

        A single string is a regular expression over the whole name, as in PEFT; names of a list match their end.
        """
        if target_modules == "all-linear":
            return self.linears
        if isinstance(target_modules, str):
            pattern = re.compile(target_modules)
            chosen = [
                x for x in self.linears if pattern.fullmatch(x.name) or pattern.search(f"model.layers.0.{x.name}")
            ]
            unknown = [] if chosen else [target_modules]
        else:
            wanted = {name.split(".")[-1] for name in target_modules}
            chosen = [linear for linear in self.linears if linear.name in wanted]
            unknown = sorted(wanted - {linear.name for linear in chosen})
        if unknown:
            known = ", ".join(linear.name for linear in self.linears)
            raise UsageError(f"lora.target_modules: no layer is named {', '.join(unknown)}", hint=f"it has {known}")
        return tuple(chosen)

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str] = "all-linear") -> int:
        """rank * (inputs + outputs) for each adapted layer."""
        return self.layers * sum(rank * (x.inputs + x.outputs) for x in self.targets(target_modules))


def read_architecture(path: Path) -> Architecture:
    """The architecture in a config.json (or in the folder that holds one). Raises UsageError when it can't be told."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="prepare the model: hivetune fetch") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no settings of a model")
    return parse_architecture(config, str(path))


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """As `read_architecture`, from plain values."""
    if isinstance(config.get("text_config"), dict):  # image-and-text models: the language part is what is trained
        config = config["text_config"]
    kind = str(config.get("model_type", ""))
    if any(config.get(name) for name in EXPERTS):
        raise UsageError(f"{where}: {kind} has experts; there is no formula for them", hint="choose a dense model")
    family = FAMILIES.get(kind, Family())

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
            raise UsageError(f"{where}: '{name}' is {value!r}: this is not a causal language model that can be planned")
        return value

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    head_size = number("head_dim", family.head_size or hidden // heads)
    kv_heads = number("num_key_value_heads", heads)
    ffn = number("intermediate_size")
    q, k = heads * head_size, kv_heads * head_size
    biased = bool(config.get("attention_bias", False))
    norms = layers * (family.norms_per_layer * hidden + (2 * head_size if family.head_norms else 0)) + hidden
    return Architecture(
        family=kind or "unknown",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_size=head_size,
        kv_heads=kv_heads,
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        norm_parameters=norms,
        linears=_linears(family, hidden, ffn, q, k, biased, bool(config.get("mlp_bias", False))),
        exact=kind in FAMILIES,
    )


def _linears(family: Family, hidden: int, ffn: int, q: int, k: int, biased: bool, mlp_bias: bool) -> tuple[Linear, ...]:
    if family.fused:
        return (
            Linear("qkv_proj", hidden, q + 2 * k),
            Linear("o_proj", q, hidden),
            Linear("gate_up_proj", hidden, 2 * ffn),
            Linear("down_proj", ffn, hidden),
        )
    qkv_bias = family.qkv_bias or biased
    return (
        Linear("q_proj", hidden, q, qkv_bias),
        Linear("k_proj", hidden, k, qkv_bias),
        Linear("v_proj", hidden, k, qkv_bias),
        Linear("o_proj", q, hidden, biased),
        Linear("gate_proj", hidden, ffn, mlp_bias),
        Linear("up_proj", hidden, ffn, mlp_bias),
        Linear("down_proj", ffn, hidden, mlp_bias),
    )
