"""The linear layers of a model: their sizes, which of them get an adapter, and PEFT's names of it. Needs no torch."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json
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
# Far above any real model (126 in Llama 3.1 405B), far below what a made-up config would cost to count.
MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 4096


def match_targets(names: Iterable[str], targets: str | Sequence[str], *, head: str | None) -> list[str]:
    """Return the linear modules among `names` that get an adapter, in their order. The one matcher of
    `lora.target_modules`: plan, both implementations of the model and the adapter's files use it.

    targets: "all-linear" (every linear module but `head`, the output embedding), a list of names (a whole module name,
    or its end after a dot), or a regular expression that matches the whole module name. A single plain name means a
    list of it.

    Raises UsageError for a name or pattern that matches no module, for an empty list, an invalid pattern, and for
    `head`. The message names the modules that exist.
    """
    # As PEFT: `LoraConfig.target_modules` and `check_target_module_exists`.
    names = list(names)
    if _is_all_linear(targets):
        return [name for name in names if name != head]
    chosen = {target: _matches(names, target, targets) for target in _as_list(targets)}
    unknown = [target for target, found in chosen.items() if not found]
    if unknown or not chosen:
        existing = sorted({name.rpartition(".")[2] for name in names if name != head})
        fault = f"no linear module matches {', '.join(map(repr, unknown))}" if unknown else "the list is empty"
        raise UsageError(f"lora.target_modules: {fault}", hint=f"use {ALL_LINEAR}, or some of: {', '.join(existing)}")
    wanted = set[str]().union(*chosen.values())
    if head in wanted:
        raise UsageError(
            f"lora.target_modules: {head} is the output embedding; an adapter on it is unsupported",
            hint=f"leave it out, or use {ALL_LINEAR}",
        )
    return [name for name in names if name in wanted]


def peft_targets(adapted: Iterable[str], targets: str | Sequence[str]) -> str | list[str]:
    """Return `target_modules` of an adapter_config.json, so that PEFT puts the adapters on the same modules as
    `adapted`."""
    # "all-linear" is written out as names: other programs (vLLM, llama.cpp's converter) read names only.
    if _is_all_linear(targets):
        return sorted({_named_end(name) for name in adapted})
    return targets if isinstance(targets, str) and _is_pattern(targets) else _as_list(targets)


def _is_all_linear(targets: str | Sequence[str]) -> bool:
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR  # PEFT takes the word in any case


def _is_pattern(targets: str | Sequence[str]) -> bool:
    return isinstance(targets, str) and not PLAIN_NAME.fullmatch(targets)


def _as_list(targets: str | Sequence[str]) -> list[str]:
    return [targets] if isinstance(targets, str) else list(targets)


def _matches(names: Sequence[str], target: str, targets: str | Sequence[str]) -> list[str]:
    if not _is_pattern(targets):
        return [name for name in names if name == target or name.endswith("." + target)]
    try:
        return [name for name in names if re.fullmatch(target, name)]
    except re.error as error:
        raise UsageError(
            f"lora.target_modules: {target!r} is not a regular expression: {error}",
            hint="use all-linear, a list of names such as [q_proj, v_proj], or a pattern such as .*_proj",
        ) from None


def _named_end(name: str) -> str:
    """Return the end of a module name that is more than a number (`ffn.0` in `h.1.ffn.0`)."""
    match = re.search(r"[^.]+(\.\d+)*$", name)
    return match[0] if match else name


def parameter_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of A [R, I] and B [O, R] of a linear module."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear module: y = W x, W of shape [outputs, inputs]; `name` below the decoder layer, or in full.

    experts: how many of them one tensor of this name holds; each token meets `active` of them.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 1
    active: int = 1

    @property
    def weights(self) -> int:
        """Return the number of weights of its matrix, or of the matrices of all experts."""
        return self.experts * self.inputs * self.outputs

    def adapter_shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B, as PEFT stores them."""
        return (rank, self.inputs), (self.outputs, rank)


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder. q and k are the widths of all query heads and of all key heads together.

    linears: of each layer, where all layers are alike. modules: those that can have an adapter, and experts, which stay
    frozen, by full name, where the model was counted module by module. counted: all parameters of such a model.
    other_weights: the weights of its further products that each token takes part in.
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
    norm_parameters: int
    linears: tuple[Linear, ...]
    modules: tuple[Linear, ...] = ()
    counted: int = 0
    other_weights: int = 0

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def is_fast(self) -> bool:
        """Return whether the fast path computes models of its family, unless another setting of its config prevents
        it."""
        return self.family in FAMILIES

    @property
    def linear_parameters(self) -> int:
        """Return the weights of the layers' GEMMs that one token meets, without biases: the N of FLOPs per token."""
        if self.modules:
            return self.other_weights + sum(linear.active * linear.inputs * linear.outputs for linear in self.modules)
        return self.layers * sum(linear.weights for linear in self.linears)

    @property
    def quantizable_parameters(self) -> int:
        """Return the weights that `method: qlora` keeps in 4 bits: of linear modules, not of experts in one tensor."""
        if self.modules:
            return sum(linear.weights for linear in self.modules if linear.experts == 1)
        return self.linear_parameters

    @property
    def has_whole_blocks(self) -> bool:
        """Return whether rows of all linear modules are whole blocks of NF4's 64 values."""
        return not any(linear.inputs % 64 for linear in self.modules or self.linears)

    @property
    def layer_weights(self) -> int:
        """Return the mean number of weights in the matrices of a decoder layer."""
        return sum(linear.weights for linear in self.modules or self.linears) // (self.layers if self.modules else 1)

    @property
    def widths_per_token(self) -> int:
        """Return the inputs and outputs of all products that one token takes part in, where modules were counted."""
        return sum(linear.active * (linear.inputs + linear.outputs) for linear in self.modules)

    @property
    def largest_linear(self) -> int:
        """Return the number of weights of the largest matrix."""
        return max(linear.inputs * linear.outputs for linear in self.modules or self.linears)

    @property
    def parameters(self) -> int:
        if self.counted:
            return self.counted
        in_layer = sum(linear.weights + (linear.outputs if linear.bias else 0) for linear in self.linears)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * in_layer + self.norm_parameters + embeddings

    def adapted(self, target_modules: str | Sequence[str] = ALL_LINEAR) -> list[Linear]:
        """Return the linear modules of all layers that get an adapter, by full name. Raises UsageError as
        `match_targets`."""
        linears = {linear.name: linear for linear in self.modules if linear.experts == 1} or {
            f"model.layers.{layer}.{linear.name}": linear for layer in range(self.layers) for linear in self.linears
        }
        chosen = match_targets([*linears, OUTPUT_EMBEDDING], target_modules, head=OUTPUT_EMBEDDING)
        return [replace(linears[name], name=name) for name in chosen]

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str] = ALL_LINEAR) -> int:
        """Return the number of adapter weights: rank * (inputs + outputs) for each adapted module."""
        return sum(rank * (part.inputs + part.outputs) for part in self.adapted(target_modules))


def read_architecture(path: Path) -> Architecture:
    """Return the architecture of a model folder, prepared or not, or of a config.json. Raises UsageError when it is
    none."""
    described = path / DESCRIPTION
    # Families that families.py lists are counted from config.json by formula. Of every other model, and of those with
    # experts, the preparation counts the modules that transformers builds (models/worker/linears.py) and writes them
    # into hivetune.json. Before that its sizes are not known: nothing is guessed from a config.json.
    sizes = read_json(described).get("sizes") if described.is_file() else None
    if sizes is not None and sizes["family"] not in FAMILIES:
        modules = tuple(Linear(**part) for part in sizes["modules"])
        return Architecture(**{**sizes, "linears": (), "modules": modules})
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="prepare the model: hivetune fetch") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="get the model again") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object", hint="get the model again")
    return parse_architecture(config, str(path))


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture in plain values. Raises as `read_architecture`."""
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
            raise UsageError(f"{where}: '{name}' is {value!r}: this is not the config of a causal language model")
        return value

    hidden, layers = number("hidden_size"), number("num_hidden_layers")
    heads, ffn = number("num_attention_heads"), number("intermediate_size")
    if layers > MAX_LAYERS:
        raise UsageError(f"{where}: 'num_hidden_layers' is {layers}, at most {MAX_LAYERS} are supported")
    head_size = number("head_dim", family.head_dim or hidden // heads)
    kv_heads = number("num_key_value_heads", heads)
    widths: dict[Width, int] = {"hidden": hidden, "q": heads * head_size, "kv": kv_heads * head_size, "ffn": ffn}
    # Norms of heads have the size of a head or of all, others that of the stream; one more is before the logits.
    of_heads = {"q": widths["q"], "k": widths["kv"]} if family.wide_norms else dict.fromkeys(HEAD_NORMS, head_size)
    attention_bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    qkv_bias = family.qkv_bias or attention_bias
    biases = {"qkv": qkv_bias, "attention": attention_bias, "mlp": mlp_bias, "never": False}
    return Architecture(
        family=kind,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_size=head_size,
        kv_heads=kv_heads,
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        norm_parameters=layers * sum(of_heads.get(name, hidden) for name in family.norms) + hidden,
        linears=tuple(
            Linear(part.name, widths[part.inputs], sum(widths[width] for width in part.outputs), biases[part.bias])
            for part in family.projections
        ),
    )
