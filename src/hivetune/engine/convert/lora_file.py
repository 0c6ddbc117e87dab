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
from hivetune.run.folder import ADAPTER_CONFIG

NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
REFUSED = ("use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias")


@dataclass(frozen=True)
class Module:
    """One adapted module: a [R, I], b [O, R]; W becomes W + scale * b a."""

    a: Stored
    b: Stored
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def product(self) -> Array:
        """scale * b a, float32 [O, I]."""
        array: Array = np.multiply(self.b.read() @ self.a.read(), np.float32(self.scale))
        return array


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
    modules = {}
    for name, pair in halves.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[-1]:
            raise UsageError(f"{folder}: {name} has only one of A and B, or their ranks differ")
        modules[name] = Module(pair["A"], pair["B"], _scale(settings, name, pair["A"].shape[0]))
    if not modules:
        raise UsageError(f"no adapter weights in {folder}")
    return Lora(modules, float(settings["lora_alpha"]))


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's scale of one module: alpha / r or, rank-stabilised, alpha / sqrt(r). Patterns name a module's end."""
    alpha = float(settings["lora_alpha"])
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
