"""Adapter and base as one folder that transformers loads: W + scale * B A, added in fp32 one tensor at a time.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hivetune.base.disk import MANIFEST, read_json, write_json
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.architecture import A_WEIGHT, PREFIX
from hivetune.models.prepared import DESCRIPTION, WEIGHTS_INDEX
from hivetune.models.worker.weights import SafetensorsFile, open_weights, shard_files, write_weights
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Merge
from hivetune.train.worker.model.adapter import read_adapter, scaling

# Precisions that a merged weight may be written in: safetensors' name, torch's.
KIND_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def main(task: Merge, heartbeat: Heartbeat) -> dict[str, int]:
    return {"merged_tensors": merge(task.model, task.adapter, task.target, task.dtype, heartbeat)}


class Part(NamedTuple):
    """The change of one stored weight by an adapter: scale * B A, with A [R, I] and B [O, R].

    transposed: the file stores the weight [I, O], and A and B have changed places for it.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    def add(self, weight: Tensor) -> Tensor:
        """Return `weight` plus scale * B A, in fp32."""
        return (self.b @ self.a).mul_(self.scale) + weight.to(torch.float32)


def read_parts(model: Path, adapter: Path) -> dict[str, Part]:
    """Return the adapter's change of each tensor of the model's files, as the file stores it.

    Raises UsageError when the files have no tensor of a name that the adapter changes.
    """
    lora, tensors = read_adapter(adapter)
    transposed, stored = _transposed_weights(model), open_weights(model)
    parts = dict[str, Part]()
    for name, a_RI in tensors.items():
        if not name.endswith(A_WEIGHT):
            continue
        weight, b_OR = name.removeprefix(PREFIX).removesuffix(A_WEIGHT) + ".weight", tensors[_half_b(name)]
        # Files may leave out the model's prefix, as GPT-2's do.
        stored_as = next((each for each in (weight, weight.partition(".")[2]) if each in stored), None)
        if stored_as is None:
            raise UsageError(
                f"the adapter changes {weight}, which the files of {model} do not have under this name",
                hint="export the adapter alone, which PEFT loads beside its base: --to adapter",
            )
        a, b = (b_OR.mT, a_RI.mT) if weight in transposed else (a_RI, b_OR)
        parts[stored_as] = Part(a, b, scaling(lora), weight in transposed)
    return parts


def _half_b(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.")


def _transposed_weights(model: Path) -> set[str]:
    """Return the names of the weights that the architecture stores [I, O] (GPT-2's Conv1D)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    return {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}


def merge(model: Path, adapter: Path, target: Path, dtype: str, heartbeat: Heartbeat) -> int:
    """Write the merged model to the new folder `target`; return how many tensors the adapter changed.

    Needs memory for one tensor, not for the model. `dtype` "source" rounds each merged weight once, to the base's type;
    "exact" keeps merged weights in float32 and all others as they are. Raises UsageError as `read_parts`, HivetuneError
    for weights that are not finite. What it had written stays then: the caller deletes its folder.
    """
    parts, shards = read_parts(model, adapter), shard_files(model)
    shutil.copytree(model, target, ignore=shutil.ignore_patterns(*shards, MANIFEST, DESCRIPTION))
    for file in shards:
        _merge_file(model / file, target / file, parts, dtype, heartbeat)
    config = read_json(model / "config.json")
    if dtype in KIND_NAMES:
        config.pop("torch_dtype", None)  # the same setting's name in transformers 4
        config["dtype"] = dtype
    write_json(target / "config.json", config)
    if (index := target / WEIGHTS_INDEX).is_file():
        size = sum((target / file).stat().st_size for file in shards)
        write_json(index, {**read_json(index), "metadata": {"total_size": size}})
    return len(parts)


def _merge_file(source: Path, target: Path, parts: Mapping[str, Part], dtype: str, heartbeat: Heartbeat) -> None:
    """Write one file with the same tensors, merged where the adapter changes them."""
    described = {name: (stored.kind, stored.shape) for name, stored in SafetensorsFile(source).tensors.items()}
    for name, (kind, shape) in described.items():
        if dtype in KIND_NAMES and kind in TORCH_DTYPES:
            described[name] = KIND_NAMES[dtype], shape
        elif dtype == "exact" and name in parts:
            described[name] = "F32", shape

    def merged(name: str) -> memoryview:
        tensor = opened.get_tensor(name)
        target_dtype = TORCH_DTYPES.get(described[name][0], tensor.dtype)
        if name in parts:
            tensor = parts[name].add(tensor)
            if not bool(torch.isfinite(tensor).all()):
                raise HivetuneError(f"{name} has values that are not finite; nothing was exported")
        heartbeat.beat(Beat.ITEM)
        return tensor.to(target_dtype).contiguous().view(-1).view(torch.uint8).numpy().data  # type: ignore[no-any-return]

    with safetensors.safe_open(source, framework="pt") as opened:
        write_weights(target, {name: described[name] for name in opened.keys()}, merged)  # noqa: SIM118
