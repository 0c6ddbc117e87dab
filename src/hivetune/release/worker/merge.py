"""The merge of adapter and base into one folder that transformers loads: W + scale * B A, added in fp32 one tensor at a
time.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

import shutil
from collections.abc import Callable, Mapping
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

# Types that weights are computed in, by safetensors' names.
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# A merged model has its base's type, unless less than this share of the adapter's change would be left when the weights
# are rounded to it: bfloat16 has steps of 1/256 of a weight, and of a lightly trained adapter 0.61 arrived. The proof
# of an export allows a tenth.
KEPT_SHARE = 0.95


def main(task: Merge, heartbeat: Heartbeat) -> dict[str, str]:
    return {"dtype": merge(task.model, task.adapter, task.target, heartbeat)}


class Part(NamedTuple):
    """The change of one stored weight by an adapter: scale * B A, with A [R, I] and B [O, R].

    transposed: the file stores the weight as [I, O], so A and B are exchanged.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    def change(self) -> Tensor:
        """Return scale * B A in fp32."""
        return (self.b @ self.a).mul_(self.scale)


def read_parts(model: Path, adapter: Path) -> dict[str, Part]:
    """Return name of a tensor in the model's files -> the adapter's change of it.

    Raises UsageError if the files have no tensor of a name that the adapter changes.
    """
    lora, tensors = read_adapter(adapter)
    transposed, stored = _transposed_weights(model), open_weights(model)
    parts = dict[str, Part]()
    for name, a_RI in tensors.items():
        if not name.endswith(A_WEIGHT):
            continue
        b_OR = tensors[name.replace(".lora_A.", ".lora_B.")]
        weight = name.removeprefix(PREFIX).removesuffix(A_WEIGHT) + ".weight"
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


def _transposed_weights(model: Path) -> set[str]:
    """Return the names of the weights that the architecture stores [I, O] (GPT-2's Conv1D)."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    return {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, Conv1D)}


def kept_share(model: Path, parts: Mapping[str, Part], heartbeat: Heartbeat) -> float:
    """Return the share of the adapter's change that remains when merged weights are rounded to the base's
    type: the slope of the rounded change over the exact one. 1 for an adapter that changes nothing.
    """
    kept = squares = 0.0
    for file in shard_files(model):
        with safetensors.safe_open(model / file, framework="pt") as opened:
            names = set(opened.keys())
            for name in (name for name in parts if name in names):
                weight, change = opened.get_tensor(name), parts[name].change()
                rounded = (weight.float() + change).to(weight.dtype).float() - weight.float()
                kept += float((rounded * change).sum())
                squares += float(change.square().sum())
                heartbeat.beat(Beat.ITEM)
    return kept / squares if squares else 1.0


def merge(model: Path, adapter: Path, target: Path, heartbeat: Heartbeat, *, exact: bool = False) -> str:
    """Write the merged model to the new folder `target`. Returns the type of its weights: "source" (each merged weight
    is rounded once to the base's type), or "float32" if rounding would lose too much of the adapter.

    `exact`: merged weights are float32, all others unchanged. Needs memory for one tensor, not for the model. Raises
    UsageError as `read_parts`, HivetuneError for weights that are not finite; the caller then deletes the incomplete
    folder.
    """
    parts, shards = read_parts(model, adapter), shard_files(model)
    in_float32 = not exact and kept_share(model, parts, heartbeat) < KEPT_SHARE
    shutil.copytree(model, target, ignore=shutil.ignore_patterns(*shards, MANIFEST, DESCRIPTION))
    for file in shards:
        _merge_file(model / file, target / file, parts, lambda name: in_float32 or (exact and name in parts), heartbeat)
    if in_float32:
        config = read_json(target / "config.json")
        config.pop("torch_dtype", None)  # the same setting's name in transformers 4
        write_json(target / "config.json", {**config, "dtype": "float32"})
    if (index := target / WEIGHTS_INDEX).is_file():
        size = sum((target / file).stat().st_size for file in shards)
        write_json(index, {**read_json(index), "metadata": {"total_size": size}})
    return "float32" if in_float32 else "source"


def _merge_file(
    source: Path, target: Path, parts: Mapping[str, Part], widens: Callable[[str], bool], heartbeat: Heartbeat
) -> None:
    """Write one file with the same tensors: those that the adapter changes are merged, those in `widens` are
    float32.
    """
    described = {
        name: ("F32" if stored.kind in TORCH_DTYPES and widens(name) else stored.kind, stored.shape)
        for name, stored in SafetensorsFile(source).tensors.items()
    }

    def merged(name: str) -> memoryview:
        tensor = opened.get_tensor(name)
        dtype = TORCH_DTYPES.get(described[name][0], tensor.dtype)
        if name in parts:
            tensor = parts[name].change() + tensor.to(torch.float32)
            if not bool(torch.isfinite(tensor).all()):
                raise HivetuneError(f"the merged tensor {name} has values that are not finite; nothing was exported")
        heartbeat.beat(Beat.ITEM)
        return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data  # type: ignore[no-any-return]

    with safetensors.safe_open(source, framework="pt") as opened:
        write_weights(target, described, merged)
