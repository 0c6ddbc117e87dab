"""A PEFT adapter's folder as arrays: A and B of each module and the scale of their product. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivetune.base.disk import read_json
from hivetune.engine.convert.weights import Array, Stored, open_adapter
from hivetune.errors import UsageError
from hivetune.models.peft_names import expert_tensors
from hivetune.run.folder import ADAPTER_CONFIG

NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
REFUSED = ("use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias")


@dataclass(frozen=True)
class Module:
    """One adapted module: a [R, I], b [O, R]; W becomes W + scale * b a. Of several experts in one tensor a is
    [E * R, I] and b [O, R * E], as PEFT keeps them."""

    a: Stored
    b: Stored
    scale: float
    experts: int = 1

    @property
    def rank(self) -> int:
        return self.a.shape[0] // self.experts

    def product(self, expert: int = 0) -> Array:
        """scale * b a, float32 [O, I]."""
        array: Array = np.multiply(self.read_b()[expert] @ self.read_a()[expert], np.float32(self.scale))
        return array

    def read_a(self) -> Array:
        """[E, R, I], float32."""
        return self.a.read().reshape(self.experts, self.rank, -1)

    def read_b(self) -> Array:
        """[E, O, R], float32."""
        return self.b.read().reshape(-1, self.rank, self.experts).transpose(2, 0, 1)


@dataclass(frozen=True)
class Lora:
    """An adapter: modules by their name in the base model, and the file's own alpha."""

    modules: Mapping[str, Module]
    alpha: float


def read_lora(folder: Path) -> Lora:
    """Raises UsageError for a folder without an adapter, and for kinds other than plain LoRA."""
    tensors = open_adapter(folder)
    settings = read_json(folder / ADAPTER_CONFIG)
    if settings.get("peft_type", "LORA") != "LORA" or any(settings.get(key) for key in REFUSED):
        raise UsageError(f"{folder}: unsupported adapter; GGUF export takes plain LoRA and rsLoRA")
    halves: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise UsageError(f"{folder}: {name} is not a LoRA weight")
        halves.setdefault(match["module"], {})[match["half"]] = stored
    modules, experts = {}, _experts(tensors, settings)
    for name, pair in halves.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[-1]:
            raise UsageError(f"{folder}: {name} has only one of A and B, or their ranks differ")
        rows = pair["A"].shape[0]
        count = rows // int(settings["r"]) if name in experts else 1
        modules[experts.get(name, name)] = Module(pair["A"], pair["B"], _scale(settings, name, rows // count), count)
    if not modules:
        raise UsageError(f"no adapter weights in {folder}")
    return Lora(modules, float(settings["lora_alpha"]))


def _experts(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, str]:
    """Modules of adapters on experts -> the tensor that it is of."""
    named = settings.get("target_parameters")
    if not named:
        return {}
    shapes = {name.replace(".default.weight", ".weight"): stored.shape for name, stored in tensors.items()}
    return expert_tensors(shapes, int(settings["r"]), named)


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's scale of one module: alpha / r or, rank-stabilised, alpha / sqrt(r). Patterns name a module's end."""
    alpha = float(settings["lora_alpha"])
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
