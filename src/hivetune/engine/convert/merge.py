"""Adapter and base as one: W + scale * B A, added in fp32 one tensor at a time, as a folder that transformers loads.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hivetune.base.disk import MANIFEST, read_json, write_json, write_manifest
from hivetune.engine.model.adapter import PREFIX, read_adapter, scaling
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, WEIGHTS, WEIGHTS_INDEX
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Merge

# Precisions that a merged weight may be written in: safetensors' name, size in bytes, torch's.
KIND_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SIZES = {"F32": 4, "BF16": 2, "F16": 2}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NOT_COPIED = (WEIGHTS_INDEX, WEIGHTS, MANIFEST, DESCRIPTION)


def main(task: Merge, heartbeat: Heartbeat) -> dict[str, Any]:
    return merge(task.model, task.adapter, task.target, task.dtype, heartbeat)


def merge(model: Path, adapter: Path, target: Path, dtype: str, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the merged model to `target`, its manifest last. Needs memory for one tensor, not for the model.

    `dtype` "source" rounds each merged weight once, to what the base has. Raises UsageError when the adapter names
    weights that the model does not have.
    """
    lora, tensors = read_adapter(adapter)
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    plan = MergePlan(
        deltas=pair_up(tensors, scaling(lora)),
        transposed=frozenset(transposed_weights(model)),
        prefix=MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix,
        dtype=dtype,
    )
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        merged: set[str] = set()
        files = shard_files(model)
        for file in files:
            merged |= _merge_file(model / file, work / file, plan, heartbeat)
        missing = sorted(plan.deltas.keys() - merged)
        if missing:
            raise UsageError(
                f"{adapter} changes {missing[0]}, which {model} does not have",
                hint="it is an adapter of another base model",
            )
        for path in model.iterdir():
            if path.is_file() and path.name not in (*NOT_COPIED, *files):
                shutil.copyfile(path, work / path.name)
        if (model / NAMED_TEMPLATES).is_dir():
            shutil.copytree(model / NAMED_TEMPLATES, work / NAMED_TEMPLATES)
        _rewrite_config(model, work, plan)
        write_manifest(work, {"kind": "merged"})
        if target.exists():
            shutil.rmtree(target)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"merged_tensors": len(merged), "files": files}


def pair_up(tensors: Mapping[str, Tensor], scale: float) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Weight name in the base -> (A [R, I], B [O, R], scale)."""
    paired = {}
    for name, a_RI in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            paired[f"{module}.weight"] = (a_RI, tensors[name.replace(".lora_A.", ".lora_B.")], scale)
    return paired


def add_delta(weight: Tensor, delta: tuple[Tensor, Tensor, float], *, transposed: bool = False) -> Tensor:
    """`weight` [O, I] ([I, O] where `transposed`) plus scale * B A, in fp32."""
    a_RI, b_OR, scale = delta
    change_OI = (b_OR.to(weight.device) @ a_RI.to(weight.device)).mul_(scale)
    return (change_OI.T if transposed else change_OI) + weight.to(torch.float32)


def transposed_weights(model: Path) -> set[str]:
    """Names of the weights that the architecture stores [I, O] (Conv1D)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    return {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}


def shard_files(model: Path) -> list[str]:
    if (model / WEIGHTS_INDEX).is_file():
        return sorted(set(read_json(model / WEIGHTS_INDEX)["weight_map"].values()))
    return [WEIGHTS]


def _merge_file(source: Path, target: Path, plan: "MergePlan", heartbeat: Heartbeat) -> set[str]:
    """One file with the same tensors, merged where the adapter has a say; the names that were merged."""
    merged = set()
    with safetensors.safe_open(source, framework="pt") as opened:
        names = list(opened.keys())
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            part = opened.get_slice(name)
            kind, shape = plan.stored_kind(part.get_dtype()), list(part.get_shape())
            size = math.prod(shape) * SIZES.get(kind, 0) if kind in SIZES else opened.get_tensor(name).nbytes
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
        with open(target, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                tensor = opened.get_tensor(name)
                wanted = TORCH_DTYPES.get(header[name]["dtype"], tensor.dtype)
                delta = plan.delta(name)
                if delta is not None:
                    tensor = add_delta(tensor, delta, transposed=plan.is_transposed(name))
                    merged.add(plan.module_weight(name))
                file.write(tensor.to(wanted).contiguous().view(-1).view(torch.uint8).numpy().data)
                heartbeat.beat(Beat.ITEM)
    return merged


@dataclass(frozen=True)
class MergePlan:
    """What happens to each tensor. Files may leave out the model's prefix, as GPT-2's do."""

    deltas: Mapping[str, tuple[Tensor, Tensor, float]]
    transposed: frozenset[str]
    prefix: str
    dtype: str

    def module_weight(self, name: str) -> str:
        return name if name in self.deltas else f"{self.prefix}.{name}"

    def delta(self, name: str) -> tuple[Tensor, Tensor, float] | None:
        return self.deltas.get(self.module_weight(name))

    def is_transposed(self, name: str) -> bool:
        return self.module_weight(name) in self.transposed

    def stored_kind(self, kind: str) -> str:
        return kind if self.dtype == "source" or kind not in SIZES else KIND_NAMES[self.dtype]


def _rewrite_config(model: Path, work: Path, plan: MergePlan) -> None:
    """config.json names the precision; the index, if there is one, the new size."""
    config = read_json(model / "config.json")
    if plan.dtype != "source":
        config["dtype"] = plan.dtype
        config.pop("torch_dtype", None)
    write_json(work / "config.json", config)
    if (model / WEIGHTS_INDEX).is_file():
        index = read_json(model / WEIGHTS_INDEX)
        size = sum((work / file).stat().st_size for file in shard_files(model))
        write_json(work / WEIGHTS_INDEX, {**index, "metadata": {"total_size": size}})


if __name__ == "__main__":
    run_child(main, Merge)
