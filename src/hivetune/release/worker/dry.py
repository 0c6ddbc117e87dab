"""The dry export's child: converts a random model of the same architecture with few layers, and a random adapter of it.

It also scores passages with both, which release/dry_export.py compares with llama.cpp's scores. Vocabulary, tokenizer,
heads and every kind of layer are the real ones; the rest is narrow where the config allows it.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.errors import HivetuneError
from hivetune.models.prepared import spoken_name
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, DryGguf, WriteGguf
from hivetune.release.worker.score_passages import score_all
from hivetune.release.worker.to_gguf import stage, write
from hivetune.run.choices import NO_CHOICES
from hivetune.train.worker.model.adapter import write_adapter as write_peft
from hivetune.train.worker.model.general import GeneralModel

# Multiples of every block of numbers that is quantized together.
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
_COPIED = ("*.jinja", "tokenizer*.json", "special_tokens_map.json", "generation_config.json", "hivetune.json")
# Large enough that a wrong rotation, norm or order of heads changes log-probabilities by whole nats.
_SPREAD, _ADAPTER_SPREAD = 1.5, 0.3


def main(task: DryGguf, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write `file` and `adapter_file`; return {"base", "tuned" -> scores of the passages}."""
    heartbeat.beat(Beat.PREPARING)
    torch.manual_seed(0)
    work = task.file.parent / "dry"
    problem: Exception | None = None
    for kind, values in _smaller(AutoConfig.from_pretrained(task.model, local_files_only=True)):
        shutil.rmtree(work, ignore_errors=True)
        try:
            config = AutoConfig.for_model(kind, **values)
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            return _convert(task, module, work, heartbeat)
        except (StrictDataclassError, ValueError, TypeError, RuntimeError, AssertionError, HivetuneError) as error:
            problem = error  # a wider one may be possible
    assert problem is not None
    raise problem


def _convert(task: DryGguf, module: nn.Module, work: Path, heartbeat: Heartbeat) -> dict[str, Any]:
    draw(module)
    module.save_pretrained(work / "model")  # type: ignore[operator]
    for pattern in _COPIED:
        for path in task.model.glob(pattern):
            shutil.copyfile(path, work / "model" / path.name)
    lora = LoraConfig(r=task.rank, alpha=2 * task.rank, target_modules=list(task.targets))
    model = GeneralModel(module, lora, NO_CHOICES, "")
    with torch.no_grad():
        for name, view in model.adapter.items():
            view.normal_(std=_ADAPTER_SPREAD / math.sqrt(view.shape[1] if ".lora_A." in name else task.rank))
    (work / "adapter").mkdir()
    write_peft(work / "adapter", model.adapter, lora, spoken_name(task.model), None)
    tuned = score_all(module, task.passages, task.top, heartbeat)
    model.switch.on = False
    base = score_all(module, task.passages, task.top, heartbeat)
    with stage(work / "model", work, task.converter) as folder:
        write(WriteGguf(work / "model", None, task.file, "f32", task.converter), folder, heartbeat)
        write(WriteGguf(work / "model", work / "adapter", task.adapter_file, None, task.converter), folder, heartbeat)
    return {"base": base, "tuned": tuned}


def _smaller(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield type and settings of the same architecture with few layers of each kind: narrow, then in its own width."""
    values = config.to_dict()
    layers = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    total = int(values[layers])
    count = _layer_count(values, total)
    values = {key: value[:count] if _per_layer(value, total) else value for key, value in values.items()}
    values[layers] = count
    if int(values.get("num_kv_shared_layers") or 0) >= count:
        values["num_kv_shared_layers"] = 0
    narrow = {key: width for key, width in WIDTHS.items() if isinstance(values.get(key), int) and values[key] > width}
    kind = values.pop("model_type")
    if values.get("head_dim") and "hidden_size" in narrow:
        heads = int(values.get("num_attention_heads") or 1)
        block = math.lcm(heads, 32)  # of q8_0; and transformers wants a multiple of the heads
        narrow["hidden_size"] = block * -(-narrow["hidden_size"] // block)
        if narrow["hidden_size"] < values["hidden_size"]:
            yield kind, {**values, **narrow}
    yield kind, values


def _per_layer(value: Any, total: int) -> bool:
    return isinstance(value, list) and len(value) == total and total > 1


def _layer_count(values: dict[str, Any], total: int) -> int:
    """Return how many of the first layers contain the whole pattern of layers."""
    counts = [1, int(values.get("first_k_dense_replace") or 0) + 1]
    counts += [int(value) + 1 for key, value in values.items() if key.endswith("_offset") and isinstance(value, int)]
    for value in values.values():
        if _per_layer(value, total):
            counts.append(_until_repeated([json.dumps(kind) for kind in value]))
    return min(total, max(counts))


def _until_repeated(kinds: Sequence[str]) -> int:
    """Return the length of the shortest beginning after which the kinds repeat: [dense, moe, moe, moe] -> 2."""
    total = len(kinds)
    for count in range(1, total):
        for period in range(1, count + 1):
            if all(kinds[i] == kinds[i - period] for i in range(count, total)):
                return count
    return total


@torch.no_grad()
def draw(module: nn.Module, spread: float = _SPREAD) -> None:
    """Draw weights, norms and biases; `spread` of the outputs of a matrix whose inputs are 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=spread / math.sqrt(parameter.shape[-1]))
        elif "norm" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.add_(0.1 * torch.randn_like(parameter))


if __name__ == "__main__":
    run_child(main, DryGguf)
