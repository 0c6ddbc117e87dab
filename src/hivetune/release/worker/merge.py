"""Adapter and base as one: W + scale * B A, added in fp32 one tensor at a time, as a folder that transformers loads.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hivetune.base.disk import MANIFEST, read_json, write_json, write_manifest
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.peft_names import A_WEIGHT, PREFIX, expert_tensors
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, WEIGHTS, WEIGHTS_INDEX
from hivetune.models.worker.linears import is_fused
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Merge
from hivetune.train.worker.model.adapter import read_adapter, scaling, tensor_shapes

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
        deltas=pair_up(tensors, lora),
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
        if any(delta.experts > 1 for delta in plan.deltas.values()) or not plan.deltas.keys() <= plan.stored(
            model, files
        ):
            merged |= _merge_module(model, work, plan, heartbeat)
            files = shard_files(work)
        else:
            for file in files:
                merged |= _merge_file(model / file, work / file, plan, heartbeat)
        missing = sorted(plan.deltas.keys() - merged)
        if missing:
            raise UsageError(
                f"{adapter} changes {missing[0]}, which {model} does not have",
                hint="it is an adapter of another base model",
            )
        for path in model.iterdir():
            if path.is_file() and path.name not in (*NOT_COPIED, *shard_files(model)):
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


class Delta(NamedTuple):
    """What an adapter adds to a weight: scale * B A, of each expert where there are several."""

    a: Tensor
    b: Tensor
    scale: float
    experts: int = 1


def pair_up(tensors: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Delta]:
    """By the weight's name in the base."""
    paired, experts = {}, expert_tensors(tensor_shapes(tensors), lora.r, lora.target_modules)
    for name, a_RI in tensors.items():
        if name.endswith(A_WEIGHT):
            module = name.removeprefix(PREFIX).removesuffix(A_WEIGHT)
            b_OR = tensors[name.replace(".lora_A.", ".lora_B.")]
            many = len(a_RI) // lora.r if module in experts else 1
            paired[experts.get(module, f"{module}.weight")] = Delta(a_RI, b_OR, scaling(lora), many)
    return paired


def add_delta(weight: Tensor, delta: Delta, *, transposed: bool = False) -> Tensor:
    """`weight` [O, I] ([I, O] where `transposed`; with experts in front of both) plus scale * B A, in fp32."""
    a, b = delta.a.to(weight.device), delta.b.to(weight.device)
    if delta.experts == 1:
        change = b @ a
    else:
        a_ERI, b_ORE = a.unflatten(0, (delta.experts, -1)), b.unflatten(1, (-1, delta.experts))
        change = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
    change.mul_(delta.scale)
    return (change.mT if transposed else change) + weight.to(torch.float32)


def is_transposed(owner: nn.Module) -> bool:
    """Whether a module stores its weights [I, O]."""
    return isinstance(owner, Conv1D) or (is_fused(owner) and bool(owner.is_transposed))


def transposed_weights(model: Path) -> set[str]:
    """Names of the weights that the architecture stores [I, O] (Conv1D, and experts of some families)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    found = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}
    fused = [(name, child) for name, child in module.named_modules() if is_fused(child) and is_transposed(child)]
    return found | {f"{name}.{part}" for name, child in fused for part, _ in child.named_parameters(recurse=False)}


@torch.no_grad()
def _merge_module(model: Path, work: Path, plan: "MergePlan", heartbeat: Heartbeat) -> set[str]:
    """As `_merge_file` for models whose files hold tensors under other names than modules, or one by one what is one
    in a module (experts): by the module, in memory. The names that were merged."""
    dtype = {name: TORCH_DTYPES[kind] for name, kind in KIND_NAMES.items()}.get(plan.dtype, "auto")
    module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True, use_safetensors=True)
    weights = dict(module.named_parameters())
    for name, delta in plan.deltas.items():
        if name in weights:
            owner = module.get_submodule(name.rpartition(".")[0])
            weights[name].copy_(add_delta(weights[name], delta, transposed=is_transposed(owner)))
            heartbeat.beat(Beat.ITEM)
    module.save_pretrained(work)
    return plan.deltas.keys() & weights.keys()


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

    deltas: Mapping[str, Delta]
    transposed: frozenset[str]
    prefix: str
    dtype: str

    def module_weight(self, name: str) -> str:
        return name if name in self.deltas else f"{self.prefix}.{name}"

    def stored(self, model: Path, files: Sequence[str]) -> set[str]:
        """Weights of modules that the files hold under their own names."""
        found: set[str] = set()
        for file in files:
            with safetensors.safe_open(model / file, framework="pt") as opened:
                found.update(map(self.module_weight, opened.keys()))
        return found

    def delta(self, name: str) -> Delta | None:
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
    if (model / WEIGHTS_INDEX).is_file() and not (work / WEIGHTS_INDEX).is_file():
        index = read_json(model / WEIGHTS_INDEX)
        size = sum((work / file).stat().st_size for file in shard_files(model))
        write_json(work / WEIGHTS_INDEX, {**index, "metadata": {"total_size": size}})


if __name__ == "__main__":
    run_child(main, Merge)
