"""What a model's config.json says about its size: its linear layers, its parameters, and what a rank adds to them.

Without torch and without the weights; how families differ is told in families.py. A family that is not listed there
but uses the usual names is counted as if it were Llama, and says so (`exact` False).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.private import read_bounded
from hivetune.errors import UsageError
from hivetune.models.families import EXPERT_SETTINGS, FAMILIES, HEAD_NORMS, Family, Width
from hivetune.models.targets import ALL_LINEAR, match_targets

OUTPUT_EMBEDDING = "lm_head"
# Far above any real model (126 in Llama 3.1 405B), far below what a made-up config would cost to count.
LARGEST_CONFIG_BYTES = 16 << 20
MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear module: y = W x, W of shape [outputs, inputs]; `name` below the decoder layer, or in full."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


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

    def adapted(self, target_modules: str | Sequence[str] = ALL_LINEAR) -> list[Linear]:
        """The linear modules of all layers that get an adapter, by full name. Raises UsageError as `match_targets`."""
        linears = {
            f"model.layers.{layer}.{linear.name}": linear for layer in range(self.layers) for linear in self.linears
        }
        chosen = match_targets([*linears, OUTPUT_EMBEDDING], target_modules, head=OUTPUT_EMBEDDING)
        return [replace(linears[name], name=name) for name in chosen]

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str] = ALL_LINEAR) -> int:
        """rank * (inputs + outputs) for each adapted module."""
        return sum(rank * (linear.inputs + linear.outputs) for linear in self.adapted(target_modules))


def read_architecture(path: Path) -> Architecture:
    """The architecture in a config.json (or in the folder that holds one). Raises UsageError when it is unknown."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_bounded(path, LARGEST_CONFIG_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="prepare the model: hivetune fetch") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object")
    return parse_architecture(config, str(path))


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """As `read_architecture`, from plain values."""
    if (
        isinstance(config.get("text_config"), dict) and "hidden_size" not in config
    ):  # image-and-text models: the language part is what is trained
        config = config["text_config"]
    kind = str(config.get("model_type", ""))
    if any(config.get(name) for name in EXPERT_SETTINGS):
        raise UsageError(f"{where}: {kind} is a mixture of experts, which is unsupported", hint="choose a dense model")
    family = FAMILIES.get(kind, Family())

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
            raise UsageError(f"{where}: '{name}' is {value!r}: this is not a causal language model that can be planned")
        return value

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    if layers > MOST_LAYERS:
        raise UsageError(f"{where}: 'num_hidden_layers' is {layers}, at most {MOST_LAYERS} are supported")
    head_size = number("head_dim", family.head_dim or hidden // heads)
    kv_heads = number("num_key_value_heads", heads)
    ffn = number("intermediate_size")
    widths: dict[Width, int] = {"hidden": hidden, "q": heads * head_size, "kv": kv_heads * head_size, "ffn": ffn}
    # Norms of heads have the size of a head, all others that of the stream; and there is the one before the logits.
    norms = layers * sum(head_size if name in HEAD_NORMS else hidden for name in family.norms) + hidden
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
        linears=_linears(family, widths, config),
        exact=kind in FAMILIES,
    )


def _linears(family: Family, widths: Mapping[Width, int], config: Mapping[str, Any]) -> tuple[Linear, ...]:
    attention_bias = bool(config.get("attention_bias", False))
    biases = {
        "qkv": family.qkv_bias or attention_bias,
        "attention": attention_bias,
        "mlp": bool(config.get("mlp_bias", False)),
        "never": False,
    }
    return tuple(
        Linear(part.name, widths[part.inputs], sum(widths[width] for width in part.outputs), biases[part.bias])
        for part in family.projections
    )
