"""The linear modules of a model: their sizes, which of them get an adapter, and their names in PEFT. Needs no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hivetune.base.disk import parse_json, read_json
from hivetune.base.private import read_bounded
from hivetune.errors import UsageError
from hivetune.models.families import FAMILIES, HEAD_NORMS, Width
from hivetune.models.prepared import DESCRIPTION

ALL_LINEAR = "all-linear"
PLAIN_NAME = re.compile(r"[\w.]+")
OUTPUT_EMBEDDING = "lm_head"
# PEFT's names of the weights of an adapter.
PREFIX = "base_model.model."
A_WEIGHT = ".lora_A.weight"
# Far above any real model (126 layers in Llama 3.1 405B), far below what a made-up config would cost to count.
MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 4096


# Which modules get an adapter. The one matcher of `lora.target_modules`: plan, both implementations of the model and
# the adapter's files use it.


def match_targets(names: Iterable[str], targets: str | Sequence[str], *, head: str | None) -> list[str]:
    """Return the linear modules among `names` that get an adapter, in their order.

    targets: "all-linear" (every linear module but `head`, the output embedding), a list of names (a whole module name,
    or its end after a dot), or a regular expression that matches the whole module name. A single plain name means a
    list of it.

    Raises UsageError for a name or pattern that matches no module, for an empty list, an invalid pattern, and for
    `head`. The message names the existing modules.
    """
    # As PEFT: `LoraConfig.target_modules` and `check_target_module_exists`.
    names = list(names)
    if _is_all_linear(targets):
        return [name for name in names if name != head]
    found = {target: set(filter(pattern.fullmatch, names)) for target, pattern in _patterns(targets).items()}
    unknown = [target for target, matched in found.items() if not matched]
    if unknown or not found:
        existing = sorted({name.rpartition(".")[2] for name in names if name != head})
        fault = f"no linear module matches {', '.join(map(repr, unknown))}" if unknown else "the list is empty"
        raise UsageError(f"lora.target_modules: {fault}", hint=f"use {ALL_LINEAR}, or some of: {', '.join(existing)}")
    wanted = set[str]().union(*found.values())
    if head in wanted:
        raise UsageError(
            f"lora.target_modules: {head} is the output embedding; an adapter on it is unsupported",
            hint=f"leave it out, or use {ALL_LINEAR}",
        )
    return [name for name in names if name in wanted]


def peft_targets(adapted: Iterable[str], targets: str | Sequence[str]) -> str | list[str]:
    """Return `target_modules` for adapter_config.json, with which PEFT puts adapters on exactly the modules
    `adapted`.
    """
    if _is_all_linear(targets):
        # Written out, since other programs (vLLM, llama.cpp's converter) read names only: the end of each module's name
        # that is more than a number (`ffn.0` in `h.1.ffn.0`).
        return sorted({re.sub(r".*?([^.]+(\.\d+)*)$", r"\1", name) for name in adapted})
    if isinstance(targets, str):
        return [targets] if PLAIN_NAME.fullmatch(targets) else targets
    return list(targets)


def _is_all_linear(targets: str | Sequence[str]) -> bool:
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR  # PEFT takes the word in any case


def _patterns(targets: str | Sequence[str]) -> dict[str, re.Pattern[str]]:
    """Return target -> pattern that whole module names must match. Raises UsageError."""
    if not isinstance(targets, str) or PLAIN_NAME.fullmatch(targets):
        plain = [targets] if isinstance(targets, str) else targets
        return {name: re.compile(rf"(.*\.)?{re.escape(name)}") for name in plain}
    try:
        return {targets: re.compile(targets)}
    except re.error as error:
        raise UsageError(
            f"lora.target_modules: {targets!r} is not a regular expression: {error}",
            hint="use all-linear, a list of names such as [q_proj, v_proj], or a pattern such as .*_proj",
        ) from None


def parameter_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of the matrices A [R, I] and B [O, R] of a linear module."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


# Sizes.


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear module by its full name: y = W x, W of shape [outputs, inputs].

    experts: the number of experts in one tensor of this name; each token is computed by `active` of them.
    """

    name: str
    inputs: int
    outputs: int
    experts: int = 1
    active: int = 1

    @property
    def weights(self) -> int:
        """Return the number of weights in the module's matrix, or in the matrices of all its experts."""
        return self.experts * self.inputs * self.outputs


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder, also stored as `sizes` in hivetune.json.

    parameters: the number of all weights, tied embeddings once. modules: the linear modules that can have an adapter,
    and the experts, which stay frozen. other_weights: the number of weights in the other products for each token.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_size: int
    kv_heads: int
    vocabulary: int
    tied: bool
    parameters: int
    modules: tuple[Linear, ...]
    other_weights: int = 0

    @property
    def q(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_size

    @property
    def k(self) -> int:
        """Return the width of all key heads together."""
        return self.kv_heads * self.head_size

    @property
    def is_fast(self) -> bool:
        """Return whether the family is in families.py, so that the fast path computes it unless a setting of its config
        prevents that.
        """
        return self.family in FAMILIES

    # Each is asked for hundreds of times by one plan, and Llama 3.1 405B has 882 modules.

    @cached_property
    def linear_parameters(self) -> int:
        """Return the number of weights in the layers' matrix products for one token, without biases: the N of "6 N
        FLOPs per token"."""
        return self.other_weights + sum(linear.active * linear.inputs * linear.outputs for linear in self.modules)

    @cached_property
    def quantizable_parameters(self) -> int:
        """Return the number of weights that `method: qlora` keeps in 4 bits: those of linear modules, not of fused
        experts.
        """
        return sum(linear.weights for linear in self.modules if linear.experts == 1)

    @cached_property
    def has_whole_blocks(self) -> bool:
        """Return whether the rows of all linear modules can be divided into NF4's blocks of 64 values."""
        return not any(linear.inputs % 64 for linear in self.modules)

    @cached_property
    def layer_weights(self) -> int:
        """Return the mean number of weights in the matrices of a decoder layer."""
        return sum(linear.weights for linear in self.modules) // self.layers

    @cached_property
    def widths_per_token(self) -> int:
        """Return the sum of the inputs and outputs of all products for one token."""
        return sum(linear.active * (linear.inputs + linear.outputs) for linear in self.modules)

    @cached_property
    def largest_linear(self) -> int:
        """Return the number of weights of the largest matrix."""
        return max(linear.inputs * linear.outputs for linear in self.modules)

    def adapted(self, target_modules: str | Sequence[str] = ALL_LINEAR) -> list[Linear]:
        """Return the linear modules that get an adapter. Raises UsageError as `match_targets`."""
        linears = {linear.name: linear for linear in self.modules if linear.experts == 1}
        chosen = match_targets([*linears, OUTPUT_EMBEDDING], target_modules, head=OUTPUT_EMBEDDING)
        return [linears[name] for name in chosen]

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str] = ALL_LINEAR) -> int:
        """Return the number of adapter weights: rank * (inputs + outputs) for each adapted module."""
        return sum(rank * (part.inputs + part.outputs) for part in self.adapted(target_modules))


def read_architecture(path: Path) -> Architecture:
    """Return the architecture of a model folder, prepared or not, or of a config.json. Raises UsageError if it is not
    one.
    """
    # Families that families.py lists are counted from config.json by formula. Of every other model the preparation
    # counts the modules that transformers builds (models/worker/linears.py) and writes them into hivetune.json. Before
    # that its sizes are not known: nothing is guessed from a config.json.
    described = path / DESCRIPTION
    sizes = read_json(described).get("sizes") if described.is_file() else None
    if sizes is not None and sizes["family"] not in FAMILIES:
        return Architecture(**{**sizes, "modules": tuple(Linear(**part) for part in sizes["modules"])})
    path = path / "config.json" if path.is_dir() else path
    try:
        return parse_architecture(parse_json(read_bounded(path, MAX_CONFIG_BYTES)), str(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {path}: {reason}", hint="prepare the model: hivetune fetch MODEL") from None


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a model of families.py from its config. Raises as `read_architecture`."""
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        config = config["text_config"]  # of an image-and-text model the language part is trained
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:
        raise UsageError(
            f"{where}: the sizes of a {kind or 'model'} do not follow from its config",
            hint="they are counted when it is prepared: hivetune fetch MODEL",
        )

    def number(name: str, default: int | None = None) -> int:
        value = default if config.get(name) is None else config[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
            raise UsageError(f"{where}: '{name}' is {value!r}, which no causal language model has: use another model")
        return value

    hidden, layers, vocabulary = number("hidden_size"), number("num_hidden_layers"), number("vocab_size")
    heads, ffn = number("num_attention_heads"), number("intermediate_size")
    if layers > MAX_LAYERS:
        raise UsageError(f"{where}: 'num_hidden_layers' is {layers}, at most {MAX_LAYERS} are supported")
    head_size = number("head_dim", family.head_dim or hidden // heads)
    kv_heads = number("num_key_value_heads", heads)
    widths: dict[Width, int] = {"hidden": hidden, "q": heads * head_size, "kv": kv_heads * head_size, "ffn": ffn}
    has_bias = {"attention": bool(config.get("attention_bias")), "mlp": bool(config.get("mlp_bias")), "never": False}
    has_bias["qkv"] = family.qkv_bias or has_bias["attention"]
    # Norms of heads have the size of a head or of all, others that of the stream; one more is before the logits.
    of_heads = {"q": widths["q"], "k": widths["kv"]} if family.wide_norms else dict.fromkeys(HEAD_NORMS, head_size)
    in_layer = sum(of_heads.get(name, hidden) for name in family.norms)
    linears = list[Linear]()
    for part in family.projections:
        linears.append(Linear(part.name, widths[part.inputs], sum(widths[width] for width in part.outputs)))
        in_layer += linears[-1].weights + linears[-1].outputs * has_bias[part.bias]
    tied = bool(config.get("tie_word_embeddings", family.tied))
    return Architecture(
        family=kind,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_size=head_size,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        tied=tied,
        parameters=layers * in_layer + hidden + vocabulary * hidden * (1 if tied else 2),
        modules=tuple(
            Linear(f"model.layers.{layer}.{each.name}", each.inputs, each.outputs)
            for layer in range(layers)
            for each in linears
        ),
    )
