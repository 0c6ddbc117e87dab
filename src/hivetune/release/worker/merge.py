"""Adapter and base as one folder that transformers loads: W + scale * B A, added in fp32 one tensor at a time.

Shapes: R rank, I inputs and O outputs of a linear module, E experts.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hivetune.base.disk import MANIFEST, publish, read_json, write_json
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.architecture import A_WEIGHT, PREFIX, expert_tensors
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, WEIGHTS, WEIGHTS_INDEX
from hivetune.models.worker.linears import is_fused
from hivetune.models.worker.weights import SafetensorsFile, open_weights, shard_files, write_weights
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Merge
from hivetune.train.worker.model.adapter import read_adapter, scaling, tensor_shapes

# Precisions that a merged weight may be written in: safetensors' name, torch's.
KIND_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Experts one by one in the files, and the module's one tensor of them.
_EXPERT = re.compile(r"(?P<layer>.*\.layers\.\d+\.).*experts\.(?P<expert>\d+)\.(?P<tensor>\w+)\.weight")
_FUSED = re.compile(r"(?P<layer>.*\.layers\.\d+\.).*experts\.(?P<tensor>gate_up_proj|up_proj|down_proj)")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_HALVES: Mapping[str, tuple[tuple[int | None, tuple[str, ...]], ...]] = {
    "gate_up_proj": ((0, _GATE), (1, _UP)),
    "up_proj": ((None, _UP),),
    "down_proj": ((None, _DOWN),),
}
NOT_COPIED = (WEIGHTS_INDEX, WEIGHTS, MANIFEST, DESCRIPTION)


def main(task: Merge, heartbeat: Heartbeat) -> dict[str, Any]:
    return merge(task.model, task.adapter, task.target, task.dtype, heartbeat)


def merge(model: Path, adapter: Path, target: Path, dtype: str, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the merged model to `target`, its manifest last. Needs memory for one tensor, not for the model.

    `dtype` "source" rounds each merged weight once, to the base's type. Raises UsageError when the adapter names
    weights that the model does not have.
    """
    parts, missing = read_parts(model, adapter)
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if missing:
            merged = _merge_module(model, adapter, work, dtype, heartbeat)
        else:
            merged = sum(len(of_tensor) for of_tensor in parts.values())
            for file in shard_files(model):
                _merge_file(model / file, work / file, parts, dtype, heartbeat)
        for path in model.iterdir():
            if path.is_file() and path.name not in (*NOT_COPIED, *shard_files(model)):
                shutil.copyfile(path, work / path.name)
        if (model / NAMED_TEMPLATES).is_dir():
            shutil.copytree(model / NAMED_TEMPLATES, work / NAMED_TEMPLATES)
        config = read_json(model / "config.json")
        if dtype != "source":
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


class Delta(NamedTuple):
    """The change of a weight by an adapter: scale * B A. Of E experts in one tensor a is [E * R, I] and b [O, R *
    E].
    """

    a: Tensor
    b: Tensor
    scale: float
    experts: int = 1


class Part(NamedTuple):
    """The part of a delta for one tensor of the model's files.

    expert: its number where each expert has a tensor of its own in the files. half: 0 gate, 1 up, where the module has
    one tensor of both. transposed: the file stores [I, O].
    """

    delta: Delta
    expert: int | None = None
    half: int | None = None
    transposed: bool = False

    @property
    def rank(self) -> int:
        return len(self.delta.a) // self.delta.experts

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return A [R, I] and B [O, R] without the scale, of the tensor as the file stores it; both have experts in
        front where the tensor holds all of them."""
        a = self.delta.a.unflatten(0, (self.delta.experts, -1))
        b = self.delta.b.unflatten(1, (-1, self.delta.experts)).permute(2, 0, 1)
        if self.half is not None:
            b = b.chunk(2, 1)[self.half]
        if self.transposed:
            a, b = b.mT, a.mT
        if self.expert is not None:
            return a[self.expert], b[self.expert]
        return (a, b) if self.delta.experts > 1 else (a[0], b[0])

    def add(self, weight: Tensor) -> Tensor:
        """Return `weight` plus scale * B A, in fp32."""
        a, b = self.halves()
        return (b @ a).mul_(self.delta.scale) + weight.to(torch.float32)


def read_parts(model: Path, adapter: Path) -> tuple[dict[str, list[Part]], list[str]]:
    """Return the adapter's change of each tensor, and the weights that the files lack under a known name."""
    lora, tensors = read_adapter(adapter)
    transposed = transposed_weights(model)
    stored = open_weights(model)
    experts = {
        (match["layer"], int(match["expert"]), match["tensor"]): name
        for name in stored
        if (match := _EXPERT.fullmatch(name))
    }
    parts: dict[str, list[Part]] = {}
    missing = []
    for name, delta in pair_up(tensors, lora).items():
        # Files may leave out the model's prefix, as GPT-2's do, or name experts as older versions did, as Granite's do.
        older = name.replace(".experts.gate_up_proj", ".input_linear.weight")
        older = older.replace(".experts.down_proj", ".output_linear.weight")
        stored_as = next(
            (candidate for candidate in (name, name.partition(".")[2], older) if candidate in stored), None
        )
        if stored_as is not None:
            parts.setdefault(stored_as, []).append(Part(delta, transposed=name in transposed))
            continue
        match = _FUSED.fullmatch(name)
        of_experts = [
            (experts[key], Part(delta, expert, half))
            for half, names in (_HALVES[match["tensor"]] if match else ())
            for expert in range(delta.experts)
            for n in names
            if match and (key := (match["layer"], expert, n)) in experts
        ]
        for file_name, part in of_experts:
            parts.setdefault(file_name, []).append(part)
        if not of_experts:
            missing.append(name)
    return parts, missing


def pair_up(tensors: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Delta]:
    """Return the deltas by the weight's name in the base."""
    paired, experts = {}, expert_tensors(tensor_shapes(tensors), lora.r, lora.target_modules)
    for name, a_RI in tensors.items():
        if name.endswith(A_WEIGHT):
            module = name.removeprefix(PREFIX).removesuffix(A_WEIGHT)
            b_OR = tensors[name.replace(".lora_A.", ".lora_B.")]
            many = len(a_RI) // lora.r if module in experts else 1
            paired[experts.get(module, f"{module}.weight")] = Delta(a_RI, b_OR, scaling(lora), many)
    return paired


def add_delta(weight: Tensor, delta: Delta, *, transposed: bool = False) -> Tensor:
    """Return `weight` [O, I] ([I, O] where `transposed`; with experts in front of both) plus scale * B A, in fp32."""
    on_device = delta._replace(a=delta.a.to(weight.device), b=delta.b.to(weight.device))
    return Part(on_device, transposed=transposed).add(weight)


def is_transposed(owner: nn.Module) -> bool:
    """Return whether a module stores its weights [I, O]."""
    return isinstance(owner, Conv1D) or (is_fused(owner) and bool(owner.is_transposed))


def transposed_weights(model: Path) -> set[str]:
    """Return the names of the weights that the architecture stores [I, O] (Conv1D, and experts of some families)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    weights = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}
    fused = [(name, child) for name, child in module.named_modules() if is_fused(child) and is_transposed(child)]
    return weights | {f"{name}.{part}" for name, child in fused for part, _ in child.named_parameters(recurse=False)}


@torch.no_grad()
def _merge_module(model: Path, adapter: Path, work: Path, dtype: str, heartbeat: Heartbeat) -> int:
    """Merge by the module, in memory: for a model whose files hold tensors under other names than modules. Return how
    many weights were merged."""
    lora, tensors = read_adapter(adapter)
    kind = {name: TORCH_DTYPES[kind] for name, kind in KIND_NAMES.items()}.get(dtype, "auto")
    module = AutoModelForCausalLM.from_pretrained(model, dtype=kind, local_files_only=True, use_safetensors=True)
    weights, deltas = dict(module.named_parameters()), pair_up(tensors, lora)
    for name, delta in deltas.items():
        if name not in weights:
            raise UsageError(
                f"{adapter} changes {name}, which {model} does not have", hint="it is an adapter of another base model"
            )
        owner = module.get_submodule(name.rpartition(".")[0])
        weights[name].copy_(add_delta(weights[name], delta, transposed=is_transposed(owner)))
        heartbeat.beat(Beat.ITEM)
    module.save_pretrained(work)
    return len(deltas)


def _merge_file(source: Path, target: Path, parts: Mapping[str, list[Part]], dtype: str, heartbeat: Heartbeat) -> None:
    """Write one file with the same tensors, merged where the adapter changes them."""
    described = {name: (stored.kind, stored.shape) for name, stored in SafetensorsFile(source).tensors.items()}
    if dtype != "source":
        described |= {
            name: (KIND_NAMES[dtype], shape) for name, (kind, shape) in described.items() if kind in TORCH_DTYPES
        }

    def merged(name: str) -> memoryview:
        tensor = opened.get_tensor(name)
        target_dtype = TORCH_DTYPES.get(described[name][0], tensor.dtype)
        for part in parts.get(name, ()):
            tensor = part.add(tensor)
        heartbeat.beat(Beat.ITEM)
        return tensor.to(target_dtype).contiguous().view(-1).view(torch.uint8).numpy().data  # type: ignore[no-any-return]

    with safetensors.safe_open(source, framework="pt") as opened:
        write_weights(target, {name: described[name] for name in opened.keys()}, merged)  # noqa: SIM118


if __name__ == "__main__":
    run_child(main, Merge)
