"""The low-rank adapters as data: the modules that have one, initial values, and PEFT's two files. No forward pass.

Shapes: R rank, I inputs and O outputs of a linear module, N all adapter weights.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hivetune.base.disk import read_json, write_atomic, write_json
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.architecture import A_WEIGHT, PREFIX, Linear, parameter_names, peft_targets
from hivetune.models.prepared import DESCRIPTION
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG


def scaling(lora: LoraConfig) -> float:
    """Return the factor of B A in the adapted weight, alpha / r (LoRA, arXiv 2106.09685)."""
    return lora.alpha / lora.r


def allocate(
    linears: Sequence[Linear], rank: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a flat buffer of zeros and its views by PEFT name: A and B of each module, in order."""
    shapes: dict[str, tuple[int, int]] = {}
    for linear in linears:
        name_a, name_b = parameter_names(linear.name)
        shapes[name_a], shapes[name_b] = (rank, linear.inputs), (linear.outputs, rank)
    master_N = torch.zeros(sum(math.prod(shape) for shape in shapes.values()), dtype=dtype, device=device)
    views, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        views[name] = master_N[start:end].view(shape)
        start = end
    return master_N, views


def same_views(flat_N: Tensor, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views into `flat_N` with the same layout as `adapter` has in the master buffer."""
    return {
        name: flat_N.as_strided(view.size(), view.stride(), view.storage_offset()) for name, view in adapter.items()
    }


@torch.no_grad()
def initialise(adapter: Mapping[str, Tensor], seed: int) -> None:
    """Draw A uniformly from +-1/sqrt(I), as PEFT and the authors of LoRA do, and set B to zero. The seed of each tensor
    depends on its name and `seed`.

    So the values do not depend on the order of the modules, on the path, or on which other modules have an adapter.
    """
    for name, view in adapter.items():
        if ".lora_A." not in name:
            view.zero_()
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        # PEFT's kaiming_uniform_(a=sqrt(5)) has the bound sqrt(6 / ((1 + 5) I)) = 1 / sqrt(I).
        bound = 1 / math.sqrt(view.shape[1])
        view.copy_(torch.empty(view.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def begin(adapter: Mapping[str, Tensor], lora: LoraConfig, seed: int, model_folder: Path) -> None:
    """Set the values before the first step: drawn by `initialise`, or those of the adapter in the folder `lora.start`.

    Raises UsageError for an adapter of another base, rank or scale.
    """
    if lora.start is None:
        initialise(adapter, seed)
        return
    theirs, tensors = read_adapter(Path(lora.start))
    named, base = (
        read_json(Path(lora.start) / ADAPTER_CONFIG).get("base_model_name_or_path"),
        base_name(model_folder)[0],
    )
    # Folders of the same name count as one base: homes are moved and copied.
    if named and Path(named).name != Path(base).name:
        raise UsageError(
            f"lora.start: {lora.start} was trained on {named}, this run's model is {base}",
            hint="choose an adapter of the same base model, or that model",
        )
    if scaling(theirs) != scaling(lora):
        raise UsageError(
            f"lora.start: {lora.start} is scaled by {scaling(theirs):g}, this run by {scaling(lora):g}",
            hint="set lora.r and lora.alpha as in the run that trained it",
        )
    fill(adapter, tensors, f"lora.start: {lora.start}")


def is_as_begun(adapter: Mapping[str, Tensor], lora: LoraConfig) -> bool:
    """Return whether the adapter still computes the same as before the first step."""
    if lora.start is None:
        return not any(bool(view.any()) for name, view in adapter.items() if ".lora_B." in name)
    tensors = read_adapter(Path(lora.start))[1]
    return all(torch.equal(view.cpu().to(torch.float32), tensors[name]) for name, view in adapter.items())


def base_name(model_folder: Path) -> tuple[str, str | None]:
    """Return the name from which PEFT loads the base: the Hub's name and revision, else the prepared folder."""
    described = read_json(model_folder / DESCRIPTION)
    if described["kind"] == "hub":
        return described["source"], described.get("revision")
    return str(model_folder.resolve()), None


def write_adapter(
    folder: Path, adapter: Mapping[str, Tensor], lora: LoraConfig, base: str, revision: str | None
) -> None:
    """Write PEFT's two files in fp32, each complete or not at all. `base`, `revision`: PEFT's name of the base."""
    modules = [name.removeprefix(PREFIX).removesuffix(A_WEIGHT) for name in adapter if name.endswith(A_WEIGHT)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": False,
        "target_modules": peft_targets(modules, lora.target_modules),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    tensors = {name: view.detach().to("cpu", torch.float32).contiguous() for name, view in adapter.items()}
    write_atomic(folder / ADAPTER, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(folder / ADAPTER_CONFIG, config)


# Settings of PEFT that change what the weights mean.
UNSUPPORTED = (
    *("use_dora", "use_qalora", "modules_to_save", "rank_pattern", "alpha_pattern", "alora_invocation_tokens"),
    *("layer_replication", "trainable_token_indices", "lora_bias", "megatron_config", "target_parameters"),
)
# First values for which PEFT changes the base: such an adapter belongs to another base than the one that it names.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Read settings and fp32 tensors of a PEFT LoRA folder. Raises UsageError for anything that can't be applied."""
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        tensors = safetensors.torch.load_file(folder / ADAPTER)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"no adapter in {folder}: {error}", hint="give a finished run or a PEFT folder") from None
    if fault := _fault_of(config, tensors):
        raise UsageError(f"{folder / ADAPTER_CONFIG} has an unsupported adapter: {fault}", hint="use plain LoRA")
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    alpha = config["lora_alpha"]
    lora = LoraConfig(
        r=config["r"],
        # rsLoRA (arXiv 2312.03732) divides by the root of r.
        alpha=alpha * math.sqrt(config["r"]) if config.get("use_rslora") else alpha,
        dropout=config.get("lora_dropout", 0.0),
        target_modules=sorted(modules),
    )
    return lora, {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def _fault_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return why an adapter can't be applied as plain LoRA; empty if it can."""
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        return f"peft_type {config.get('peft_type')}, bias {config.get('bias')}"
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), int | float):
            return f"{name} is {config.get(name)!r}"
    if unsupported := [key for key in UNSUPPORTED if config.get(key)]:
        return ", ".join(unsupported)
    drawn = str(config.get("init_lora_weights", True)).lower()
    if drawn.startswith(CHANGES_BASE):
        return f"init_lora_weights {drawn}, for which PEFT changes the base model"
    bad = next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    return f"{bad} is not finite" if bad else ""


@torch.no_grad()
def fill(adapter: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into those of the adapter. Raises UsageError that names their origin, `where`, if names or shapes
    differ, because they belong to another base model or LoRA rank."""
    if adapter.keys() != tensors.keys():
        differing = sorted(adapter.keys() ^ tensors.keys())
        raise UsageError(
            f"{where}: {len(differing)} tensors are not in both adapter and model, first {differing[0]}",
            hint="choose an adapter of this base model",
        )
    for name, view in adapter.items():
        if view.shape != tensors[name].shape:
            raise UsageError(
                f"{where}: {name} has the shape {list(tensors[name].shape)}, this run needs {list(view.shape)}"
            )
        view.copy_(tensors[name])
