"""A PEFT adapter's folder as arrays: A and B of each module and the scale of their product. No torch."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivetune.base.disk import read_json
from hivetune.errors import UsageError
from hivetune.models.peft_names import expert_tensors
from hivetune.models.worker.weights import Array, Stored, open_adapter
from hivetune.run.folder import ADAPTER_CONFIG

NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# Experts one by one in the files, and what is one tensor of them in the module.
_EXPERT = re.compile(r"(?P<layer>.*\.layers\.\d+\.).*experts\.(?P<expert>\d+)\.(?P<tensor>\w+)\.weight")
_FUSED = re.compile(r"(?P<layer>.*\.layers\.\d+\.).*experts\.(?P<tensor>gate_up_proj|up_proj|down_proj)")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_HALVES: Mapping[str, tuple[tuple[int | None, tuple[str, ...]], ...]] = {
    "gate_up_proj": ((0, _GATE), (1, _UP)),
    "up_proj": ((None, _UP),),
    "down_proj": ((None, _DOWN),),
}
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


@dataclass(frozen=True)
class Part:
    """What one adapted module adds to one tensor of the model's files, `file_name`.

    expert: its number where the module holds several and the tensor one. half: 0 gate, 1 up, where the module holds
    both. transposed: the file stores [I, O].
    """

    file_name: str
    module: Module
    expert: int | None = None
    half: int | None = None
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.file_name.removesuffix(".weight")

    def halves(self) -> tuple[Array, Array]:
        """A [R, I] and B [O, R] without the scale, float32, of the tensor as the file stores it; with experts in front
        of both where the tensor holds all of them."""
        a, b = self.module.read_a(), self.module.read_b()
        if self.half is not None:
            middle = b.shape[1] // 2
            b = b[:, self.half * middle : (self.half + 1) * middle]
        if self.transposed:
            a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
        if self.expert is not None:
            return a[self.expert], b[self.expert]
        return (a, b) if self.module.experts > 1 else (a[0], b[0])

    def change(self) -> Array:
        """scale * B A, float32, in the shape of the file's tensor."""
        a, b = self.halves()
        array: Array = np.multiply(b @ a, np.float32(self.module.scale))
        return array


def file_parts(lora: Lora, stored: Mapping[str, Stored], transposed: set[str]) -> list[Part]:
    """What the adapter adds to each tensor of the model's files. `transposed`: weights that are stored [I, O].

    Raises UsageError for a module whose weights the files do not have under a name that is known.
    """
    experts = {
        (match["layer"], int(match["expert"]), match["tensor"]): name
        for name in stored
        if (match := _EXPERT.fullmatch(name))
    }
    found: list[Part] = []
    for name, module in lora.modules.items():
        parts = list(_parts_of(name, module, stored, experts, transposed))
        if not parts:
            raise UsageError(
                f"the adapter changes {name}, which the model's files do not have",
                hint="is it an adapter of another base model?",
            )
        found += parts
    return found


def _parts_of(
    name: str,
    module: Module,
    stored: Mapping[str, Stored],
    experts: Mapping[tuple[str, int, str], str],
    transposed: set[str],
) -> Iterator[Part]:
    # Files may leave out the model's prefix, as GPT-2's do. A tensor of all experts has no ".weight".
    for candidate in (name, f"{name}.weight", f"{name.partition('.')[2]}.weight"):
        if candidate in stored:
            yield Part(candidate, module, transposed=bool({name, f"{name}.weight"} & transposed))
            return
    match = _FUSED.fullmatch(name)
    if match is None:
        return
    for half, names in _HALVES[match["tensor"]]:
        for expert in range(module.experts):
            for own in names:
                if (key := (match["layer"], expert, own)) in experts:
                    yield Part(experts[key], module, expert, half)


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
