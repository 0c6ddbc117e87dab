"""The low-rank adapters as data: which modules have one, first values, and PEFT's two files. No forward pass.

Shapes: R rank, I inputs and O outputs of a linear module, N all adapter weights.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from hivetune.base.disk import read_json, write_atomic, write_json
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG

PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Target:
    """One linear module that gets an adapter. `transposed`: its weight is stored [I, O] (GPT-2's Conv1D)."""

    name: str
    inputs: int
    outputs: int
    transposed: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """PEFT's names of A [R, I] and B [O, R]."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"


def choose_targets(linear: Iterable[Target], wanted: str | list[str], *, head: str | None) -> list[Target]:
    """The targets among the model's `linear` modules, in their order; `head` (lm_head) is only ever named explicitly.

    A wanted name matches as in PEFT: the whole module name, or its end after a dot.
    Raises UsageError naming what no module answers to, with the names that exist.
    """
    linear = list(linear)
    if wanted == ALL_LINEAR:
        return [target for target in linear if target.name != head]
    wanted = [wanted] if isinstance(wanted, str) else wanted
    unknown = [end for end in wanted if not any(_matches(target.name, end) for target in linear)]
    if unknown or not wanted:
        what = ", ".join(map(repr, unknown)) or "in an empty list"
        ends = sorted({target.name.rpartition(".")[2] for target in linear if target.name != head})
        raise UsageError(
            f"lora.target_modules: the model has no linear module {what}",
            hint=f"use {ALL_LINEAR}, or some of: {', '.join(ends)}",
        )
    chosen = [target for target in linear if any(_matches(target.name, end) for end in wanted)]
    if any(target.name == head for target in chosen):
        raise UsageError(
            f"lora.target_modules: {head} turns into token scores and can't have an adapter here",
            hint=f"leave it out, or use {ALL_LINEAR}",
        )
    return chosen


def scaling(lora: LoraConfig) -> float:
    """What B A is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732)."""
    return lora.alpha / math.sqrt(lora.r) if lora.rslora else lora.alpha / lora.r


def allocate(
    targets: Iterable[Target], rank: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat buffer of zeros and its views by PEFT name: A and B of each target one after the other."""
    shapes: dict[str, tuple[int, int]] = {}
    for target in targets:
        name_a, name_b = target.names
        shapes[name_a], shapes[name_b] = (rank, target.inputs), (target.outputs, rank)
    master_N = torch.zeros(sum(math.prod(shape) for shape in shapes.values()), dtype=dtype, device=device)
    views, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        views[name] = master_N[start:end].view(shape)
        start = end
    return master_N, views


def same_views(flat_N: Tensor, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views into `flat_N` that lie there as those of `adapter` lie in the master buffer."""
    return {
        name: flat_N.as_strided(view.size(), view.stride(), view.storage_offset()) for name, view in adapter.items()
    }


@torch.no_grad()
def initialise(adapter: Mapping[str, Tensor], seed: int) -> None:
    """A uniform in +-1/sqrt(I) as PEFT and the LoRA authors do, B zero; each tensor from its own name and `seed`.

    So the values do not depend on the order of the modules, on the path or on which others have an adapter.
    """
    for name, view in adapter.items():
        if ".lora_A." not in name:
            view.zero_()
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        bound = 1 / math.sqrt(view.shape[1])
        view.copy_(torch.empty(view.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def write_adapter(
    folder: Path, adapter: Mapping[str, Tensor], lora: LoraConfig, base: str, revision: str | None
) -> None:
    """PEFT's two files, fp32, each whole or not at all. `base`, `revision`: where PEFT finds the base model."""
    names = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name]
    ends = sorted({name.rpartition(".")[2] for name in names})
    wanted = [lora.target_modules] if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": ends if wanted == [ALL_LINEAR] else wanted,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    tensors = {name: view.detach().to("cpu", torch.float32).contiguous() for name, view in adapter.items()}
    write_atomic(folder / ADAPTER, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(folder / ADAPTER_CONFIG, config)


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Settings and fp32 tensors of a PEFT LoRA folder. Raises UsageError for anything else or what we can't apply."""
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        tensors = safetensors.torch.load_file(folder / ADAPTER)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"{folder} holds no adapter: {error}", hint="give a finished run or a PEFT folder") from None
    unsupported = [key for key in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern") if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unsupported:
        what = ", ".join(unsupported) or f"peft_type {config.get('peft_type')}, bias {config.get('bias')}"
        raise UsageError(f"{folder / ADAPTER_CONFIG}: {what} is not supported", hint="plain LoRA and rsLoRA are")
    modules = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    lora = LoraConfig(
        r=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        target_modules=modules,
        rslora=config.get("use_rslora", False),
    )
    return lora, {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


@torch.no_grad()
def fill(adapter: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into the views. Raises UsageError when names or shapes differ: another model or rank."""
    if adapter.keys() != tensors.keys():
        odd = sorted(adapter.keys() ^ tensors.keys())
        raise UsageError(
            f"{where}: {len(odd)} tensors do not belong together, first {odd[0]}", hint="other base model?"
        )
    for name, view in adapter.items():
        if view.shape != tensors[name].shape:
            raise UsageError(f"{where}: {name} is {list(tensors[name].shape)}, the model needs {list(view.shape)}")
        view.copy_(tensors[name])


def _matches(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)
