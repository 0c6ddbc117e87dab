"""The specification of a model for the fast path, from its config.json: activation, windows, rotations, scales.

Sizes and differences between families come from models/. A config with an unknown setting is refused with a reason.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.models.architecture import parse_architecture
from hivetune.models.families import FAMILIES, Family

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_tanh": "gelu"}


class NotFast(Exception):
    """Raised, with the reason, for a model that the fast path does not compute."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties that differ between layers. `rope`: index into `ModelSpec.ropes`, None: no positions (SmolLM3).

    window: number of positions that a position attends to, itself included; None: all positions up to itself.
    """

    rope: int | None
    window: int | None


Frequencies = tuple[float, ...]
"""Frequencies of a rotation: radians per position, one for each pair of channels."""


@dataclass(frozen=True)
class ModelSpec:
    """The specification of a model. Sizes are numbers of elements; `family`: see models/families.py.

    eps: what RMS norms add to the mean square. delta_scale: the factor of each part of a layer before it is added to
    the stream; logit_scale: the factor of the logits.
    """

    family: Family
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    gelu: bool
    """The gate's activation: the tanh form of GELU, else SiLU."""
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Frequencies, ...]
    tied: bool
    embed_scale: float
    attention_scale: float
    delta_scale: float
    logit_scale: float
    attention_softcap: float
    logit_softcap: float
    """Scores or logits z become cap * tanh(z / cap); 0: they stay."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of a model folder. Raises NotFast with the reason."""
    return spec_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a config.json of transformers 4 or 5. Raises NotFast with the reason."""
    family = _known_family(config)
    sizes = parse_architecture(config, "config.json")
    layers, ropes = _layers(config, family, sizes.head_size)

    def multiplier(name: str, default: float) -> float:
        return float(config.get(name, 1.0)) if family.multipliers else default

    by = config.get("query_pre_attn_scalar", family.query_scalar) if family.query_scalar else sizes.head_size
    return ModelSpec(
        family=family,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_size,
        ffn=sizes.ffn,
        vocab=sizes.vocabulary,
        eps=config.get("rms_norm_eps", family.eps),
        gelu=ACTIVATIONS[_activation(config, family)] == "gelu",
        layers=layers,
        ropes=ropes,
        tied=sizes.tied,
        embed_scale=multiplier("embedding_multiplier", math.sqrt(sizes.hidden) if family.scaled_embedding else 1.0),
        attention_scale=multiplier("attention_multiplier", by**-0.5),
        delta_scale=multiplier("residual_multiplier", 1.0),
        logit_scale=1 / multiplier("logits_scaling", 1.0),
        attention_softcap=config.get("attn_logit_softcapping") or 0.0 if family.softcaps else 0.0,
        logit_softcap=config.get("final_logit_softcapping") or 0.0 if family.softcaps else 0.0,
    )


def _activation(config: Mapping[str, Any], family: Family) -> str:
    name = str(config.get("hidden_activation") or config.get("hidden_act") or family.activation)
    return family.activation if family.gelu_is_tanh and name == "gelu" else name


def _known_family(config: Mapping[str, Any]) -> Family:
    """Return the family if the fast path computes this config exactly. Raises NotFast with the reason."""
    name = config.get("model_type", "")
    family = FAMILIES.get(name)
    if family is None:
        raise NotFast(f"the fast path does not support model_type {name!r}")
    if _activation(config, family) not in ACTIVATIONS:
        raise NotFast(f"the fast path does not support the activation {_activation(config, family)!r}")
    if config.get("quantization_config"):
        raise NotFast("the weights are stored quantized")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise NotFast("attention is bidirectional")
    if config.get("attention_dropout"):
        raise NotFast("attention_dropout is not 0")
    return family


def _layers(
    config: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[tuple[LayerSpec, ...], tuple[Frequencies, ...]]:
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    slides = _sliding(config, family, count)
    kinds: list[int | None] = [0] * count
    parameters = [_rope_parameters(config)]
    if family.local_rope:
        parameters = list(_gemma3_rope(config))
        kinds = [0 if on else 1 for on in slides]
    if family.no_rope_interval:
        interval = config.get("no_rope_layer_interval", family.no_rope_interval)
        used = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        kinds = [0 if flag else None for flag in used]
    layers = tuple(LayerSpec(kind, window if on else None) for kind, on in zip(kinds, slides, strict=True))
    return layers, tuple(_rope(parameters_of_layer, head_dim) for parameters_of_layer in parameters)


def _sliding(config: Mapping[str, Any], family: Family, count: int) -> list[bool]:
    """Return for each layer whether it looks back only `sliding_window` positions, with each family's default."""
    off = family.sliding == "asked for" and not config.get("use_sliding_window")
    if config.get("sliding_window") is None or off:
        return [False] * count
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    defaults: dict[str, Callable[[int], bool]] = {
        "asked for": lambda index: index >= config.get("max_window_layers", 28),
        "alternating": lambda index: index % 2 == 0,
        "all but each sixth": lambda index: (index + 1) % pattern != 0,
    }
    if family.sliding not in defaults:
        return [family.sliding == "always"] * count
    types = config.get("layer_types")
    if types is not None:
        return [kind == "sliding_attention" for kind in types]
    return list(map(defaults[family.sliding], range(count)))


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation's parameters.

    transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return parameters


def _gemma3_rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested:
        return dict(nested["sliding_attention"]), dict(nested["full_attention"])
    wide = _rope_parameters({"rope_theta": 1e6, **config})
    return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10000.0)}, wide


def _rope(parameters: Mapping[str, Any], head_dim: int) -> Frequencies:
    """Return frequencies theta^(-2i/d) (RoFormer, arXiv 2104.09864), scaled as the config says.

    Linear scaling divides them (arXiv 2306.15595); Llama 3.1 stretches them. Raises NotFast for other kinds (YaRN,
    longrope, dynamic).
    """
    kind = parameters.get("rope_type", "default")
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    theta = parameters["rope_theta"]
    frequencies = [theta ** (-2 * pair / size) for pair in range(size // 2)]
    if kind == "linear":
        frequencies = [frequency / parameters["factor"] for frequency in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(frequency, parameters) for frequency in frequencies]
    elif kind != "default":
        raise NotFast(f"the fast path does not support rope_type {kind!r}")
    return tuple(frequencies)


def _llama3(frequency: float, parameters: Mapping[str, Any]) -> float:
    """Return the frequency divided by `factor` if low, as it is if high, blended between (Llama 3.1's model card)."""
    wavelength = 2 * math.pi / frequency
    old = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if wavelength < old / high:
        return frequency
    if wavelength > old / low:
        return float(frequency / parameters["factor"])
    blend = (old / wavelength - low) / (high - low)
    return float((1 - blend) * frequency / parameters["factor"] + blend * frequency)
