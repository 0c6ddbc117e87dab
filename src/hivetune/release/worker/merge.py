"""Adapter and base as one folder that transformers loads: W + scale * B A, added in fp32 one tensor at a time.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hivetune.base.disk import MANIFEST, publish, read_json, write_json
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.architecture import A_WEIGHT, PREFIX
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, WEIGHTS, WEIGHTS_INDEX
from hivetune.models.worker.weights import SafetensorsFile, open_weights, shard_files, write_weights
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Merge
from hivetune.train.worker.model.adapter import read_adapter, scaling

# Precisions that a merged weight may be written in: safetensors' name, torch's.
KIND_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NOT_COPIED = (WEIGHTS_INDEX, WEIGHTS, MANIFEST, DESCRIPTION)


def main(task: Merge, heartbeat: Heartbeat) -> dict[str, Any]:
    return merge(task.model, task.adapter, task.target, task.dtype, heartbeat)


class Part(NamedTuple):
    """The change of one stored weight by an adapter: scale * B A. transposed: the file stores [I, O]."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return A [R, I] and B [O, R] without the scale, of the tensor as the file stores it."""
        return (self.b.mT, self.a.mT) if self.transposed else (self.a, self.b)

    def add(self, weight: Tensor) -> Tensor:
        """Return `weight` plus scale * B A, in fp32."""
        a, b = self.halves()
        return (b @ a).mul_(self.scale) + weight.to(torch.float32)


def read_parts(model: Path, adapter: Path) -> tuple[dict[str, Part], list[str]]:
    """Return the adapter's change of each tensor of the model's files, and the weights that they lack under a known
    name."""
    lora, tensors = read_adapter(adapter)
    transposed, stored = transposed_weights(model), open_weights(model)
    parts, missing = dict[str, Part](), list[str]()
    for name, a_RI in tensors.items():
        if not name.endswith(A_WEIGHT):
            continue
        weight = name.removeprefix(PREFIX).removesuffix(A_WEIGHT) + ".weight"
        part = Part(a_RI, tensors[name.replace(".lora_A.", ".lora_B.")], scaling(lora), weight in transposed)
        # Files may leave out the model's prefix, as GPT-2's do.
        stored_as = next((each for each in (weight, weight.partition(".")[2]) if each in stored), None)
        if stored_as is None:
            missing.append(weight)
        else:
            parts[stored_as] = part
    return parts, missing


def transposed_weights(model: Path) -> set[str]:
    """Return the names of the weights that the architecture stores [I, O] (GPT-2's Conv1D)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    return {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}


def merge(model: Path, adapter: Path, target: Path, dtype: str, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the merged model to `target`, its manifest last. Needs memory for one tensor, not for the model.

    `dtype` "source" rounds each merged weight once, to the base's type; "exact" keeps merged weights in float32 and all
    others as they are. Raises UsageError when the adapter names weights that the model does not have, HivetuneError for
    weights that are not finite.
    """
    parts, missing = read_parts(model, adapter)
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if missing:
            merged = _merge_module(model, adapter, work, dtype, heartbeat)
        else:
            merged = len(parts)
            for file in shard_files(model):
                _merge_file(model / file, work / file, parts, dtype, heartbeat)
        for path in model.iterdir():
            if path.is_file() and path.name not in (*NOT_COPIED, *shard_files(model)):
                shutil.copyfile(path, work / path.name)
        if (model / NAMED_TEMPLATES).is_dir():
            shutil.copytree(model / NAMED_TEMPLATES, work / NAMED_TEMPLATES)
        config = read_json(model / "config.json")
        if dtype in KIND_NAMES:
            config = {**config, "dtype": dtype}
            config.pop("torch_dtype", None)
        write_json(work / "config.json", config)
        if (model / WEIGHTS_INDEX).is_file() and not (work / WEIGHTS_INDEX).is_file():
            size = sum((work / file).stat().st_size for file in shard_files(model))
            write_json(work / WEIGHTS_INDEX, {**read_json(model / WEIGHTS_INDEX), "metadata": {"total_size": size}})
        files = shard_files(work)
        publish(work, target, {"kind": "merged"})
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"merged_tensors": merged, "files": files}


@torch.no_grad()
def _merge_module(model: Path, adapter: Path, work: Path, dtype: str, heartbeat: Heartbeat) -> int:
    """Merge by the module, in memory: for a model whose files hold tensors under other names than modules. Return how
    many weights were merged."""
    lora, tensors = read_adapter(adapter)
    kind = {**TORCH_DTYPES, "exact": torch.float32}.get(KIND_NAMES.get(dtype, dtype), "auto")
    module = AutoModelForCausalLM.from_pretrained(model, dtype=kind, local_files_only=True, use_safetensors=True)
    weights, modules, merged = dict(module.named_parameters()), dict(module.named_modules()), 0
    for name, a_RI in tensors.items():
        if not name.endswith(A_WEIGHT):
            continue
        owner = name.removeprefix(PREFIX).removesuffix(A_WEIGHT)
        if f"{owner}.weight" not in weights:
            raise UsageError(
                f"{adapter} changes {owner}.weight, which {model} does not have",
                hint="it is an adapter of another base model",
            )
        b_OR, transposed = tensors[name.replace(".lora_A.", ".lora_B.")], isinstance(modules[owner], Conv1D)
        weight = weights[f"{owner}.weight"]
        weight.copy_(_finite(owner, Part(a_RI, b_OR, scaling(lora), transposed).add(weight)))
        merged += 1
        heartbeat.beat(Beat.ITEM)
    module.save_pretrained(work)
    return merged


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
            tensor = _finite(name, parts[name].add(tensor))
        heartbeat.beat(Beat.ITEM)
        return tensor.to(target_dtype).contiguous().view(-1).view(torch.uint8).numpy().data  # type: ignore[no-any-return]

    with safetensors.safe_open(source, framework="pt") as opened:
        write_weights(target, {name: described[name] for name in opened.keys()}, merged)  # noqa: SIM118


def _finite(name: str, weight: Tensor) -> Tensor:
    if not bool(torch.isfinite(weight).all()):
        raise HivetuneError(f"{name} has values that are not finite; nothing was exported")
    return weight
