"""Writes a GGUF file, of a whole model or of a LoRA adapter, from safetensors. Needs numpy and gguf, not torch.

An adapter of a whole model is merged on the way: W + scale * B A in float32, then rounded once, to the file's type.
Tensors go through one at a time: memory is that of the largest one.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

try:
    import gguf
    import numpy as np
except ModuleNotFoundError as error:
    from hivetune.errors import MachineNotFit

    raise MachineNotFit(f"the package {error.name} is not installed", hint="pip install 'hivetune[export]'") from None

from hivetune.base.disk import DISK, read_json
from hivetune.engine.convert.gguf_arch import (
    ModelConfig,
    expert_count,
    find_gguf,
    head_dim,
    reordered_heads,
    rope_factors,
    settings,
)
from hivetune.engine.convert.gguf_experts import ExpertTensor, expert_tensors_of
from hivetune.engine.convert.gguf_quantize import encode, row_bytes, tensor_type
from hivetune.engine.convert.gguf_vocab import read_vocabulary
from hivetune.engine.convert.lora_file import Lora, Module, read_lora
from hivetune.engine.convert.weights import Array, Stored, open_weights
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.families import FAMILIES, Gguf
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, DryGguf, WriteGguf, WriteGgufAdapter

UNUSED_TENSORS = ("rotary_emb.inv_freq", ".rotary_emb.", ".masked_bias")


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: its GGUF name and type, and how to get its float32 numbers when its turn comes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


def main(task: WriteGguf | WriteGgufAdapter | DryGguf, heartbeat: Heartbeat) -> dict[str, Any]:
    config = read_json(task.model / "config.json")
    family = find_gguf(config)
    adapter = read_lora(task.adapter) if task.adapter else None
    if isinstance(task, DryGguf):
        # The whole model with the adapter merged: an adapter that names other modules is refused here.
        model = WriteGguf(task.model, task.adapter, task.file, task.recipe)
        _write_holes(*_model(model, config, family, adapter))
        assert adapter is not None
        beside = WriteGgufAdapter(task.model, task.adapter, task.adapter_file, task.model.name)
        _write_holes(*_adapter(beside, config, family, adapter))
        return {}
    if isinstance(task, WriteGguf):
        writer, entries = _model(task, config, family, adapter)
    else:
        assert adapter is not None
        writer, entries = _adapter(task, config, family, adapter)
    _write(writer, task.file, entries, heartbeat)
    counts = Counter(entry.kind for entry in entries)
    size_bytes = task.file.stat().st_size
    return {"file": str(task.file), "size_bytes": size_bytes, "tensors": len(entries), "types": dict(counts)}


def _model(
    task: WriteGguf, config: ModelConfig, family: Gguf, adapter: Lora | None
) -> tuple[gguf.GGUFWriter, list[Entry]]:
    writer = gguf.GGUFWriter(task.file, family.architecture)
    entries = list(_model_entries(task.model, config, family, task.recipe, adapter))
    _write_model_settings(writer, task, config, family)
    return writer, entries


def _adapter(
    task: WriteGgufAdapter, config: ModelConfig, family: Gguf, adapter: Lora
) -> tuple[gguf.GGUFWriter, list[Entry]]:
    writer = gguf.GGUFWriter(task.file, family.architecture)
    entries = _adapter_entries(adapter, config, family)
    writer.add_type("adapter")
    writer.add_name(task.file.stem)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", adapter.alpha)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, task.base_name)
    return writer, entries


def _write(writer: gguf.GGUFWriter, file: Path, entries: list[Entry], heartbeat: Heartbeat) -> None:
    _write_header(writer, entries)
    for entry in entries:
        numbers = entry.read()
        if numbers.shape != entry.shape:
            raise HivetuneError(f"{entry.name} has the shape {numbers.shape} instead of {entry.shape}")
        writer.write_tensor_data(encode(entry.name, numbers, entry.kind))
        heartbeat.beat(Beat.ITEM)
    writer.flush()
    writer.close()
    DISK.sync(file)


def _write_holes(writer: gguf.GGUFWriter, entries: list[Entry]) -> None:
    """The file at its full length, without a byte behind its header: a file system keeps no blocks for that."""
    assert writer.path is not None
    _write_header(writer, entries)
    padded = [gguf.GGUFWriter.ggml_pad(_size_bytes(entry), writer.data_alignment) for entry in entries]
    writer.flush()
    writer.close()
    begin = gguf.GGUFWriter.ggml_pad(writer.path.stat().st_size, writer.data_alignment)
    os.truncate(writer.path, begin + sum(padded))


def _size_bytes(entry: Entry) -> int:
    return math.prod(entry.shape[:-1]) * row_bytes(entry.kind, entry.shape[-1])


def _write_header(writer: gguf.GGUFWriter, entries: list[Entry]) -> None:
    for entry in entries:
        rows = math.prod(entry.shape[:-1])
        shape = (*entry.shape[:-1], row_bytes(entry.kind, entry.shape[-1]))
        member = gguf.GGMLQuantizationType[entry.kind]
        writer.add_tensor_info(entry.name, shape, np.dtype("|u1"), rows * shape[-1], raw_dtype=member)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_model_settings(writer: gguf.GGUFWriter, task: WriteGguf, config: ModelConfig, family: Gguf) -> None:
    recipe = task.recipe
    writer.add_type("model")
    writer.add_name(task.file.stem)
    writer.add_file_type(int(recipe["file_type"]))
    if recipe["name"] not in ("f32", "f16", "bf16"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in dict(settings(config, family)).items():
        _add(writer, f"{family.architecture}.{key}", value)
    vocabulary = read_vocabulary(task.model, int(config["vocab_size"]))
    for key, value in vocabulary.settings.items():
        _add(writer, f"tokenizer.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _model_entries(
    model: Path,
    config: ModelConfig,
    family: Gguf,
    recipe: Mapping[str, Any],
    adapter: Lora | None,
) -> Iterator[Entry]:
    """Every tensor of the folder under its GGUF name, in the order of the layers.

    Raises UsageError for a tensor or an adapted module that has no name there.
    """
    blocks = int(config["num_hidden_layers"])
    names = _names(family, blocks)
    factors = rope_factors(config)
    if factors is not None:
        array = np.asarray(factors, dtype=np.float32)
        yield Entry("rope_freqs.weight", "F32", array.shape, lambda: array)
    weights = open_weights(model)
    experts = list(expert_tensors_of(config, weights))
    found = dict(_expert_entries(experts, weights, names, (config, recipe), adapter))
    of_experts = {source for tensor in experts for source in tensor.sources}
    for source, stored in weights.items():
        if source in of_experts:
            continue
        if any(part in source for part in UNUSED_TENSORS) or (
            source == "lm_head.weight" and config.get("tie_word_embeddings")
        ):
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UsageError(f"{family.architecture} in GGUF has no name for the tensor {source}")
        change = adapter.modules.get(source.removesuffix(".weight")) if adapter else None
        kind = tensor_type(name, stored.shape, recipe, blocks)
        found[name] = Entry(name, kind, stored.shape, _reader(source, stored, change, (config, family)))
    known = {tensor.module for tensor in experts} | {source.removesuffix(".weight") for source in weights}
    unmatched = [name for name in (adapter.modules if adapter else ()) if name not in known]
    if unmatched:
        raise UsageError(
            f"the adapter changes {unmatched[0]}, which {model} does not have",
            hint="is it an adapter of another base model?",
        )
    if "token_embd.weight" not in found:
        raise UsageError(f"{model} has no token embedding")
    for name in sorted(found, key=_order):
        yield found[name]


def _expert_entries(
    experts: Sequence[ExpertTensor],
    weights: Mapping[str, Stored],
    names: gguf.TensorNameMap,
    about: tuple[ModelConfig, Mapping[str, Any]],
    adapter: Lora | None,
) -> Iterator[tuple[str, Entry]]:
    """(GGUF name, entry) of the tensors that hold all experts of a layer."""
    config, recipe = about
    blocks, count = int(config["num_hidden_layers"]), expert_count(config)
    for tensor in experts:
        missing = [source for source in tensor.sources if source not in weights]
        name = names.get_name(tensor.source)
        if name is None or missing:
            raise UsageError(f"the experts of {tensor.source} are not as {config['model_type']} names them")
        change = adapter.modules.get(tensor.module) if adapter else None
        shape = tensor.shape(weights, count)
        kind = tensor_type(f"{name}.weight", shape, recipe, blocks)
        yield f"{name}.weight", Entry(f"{name}.weight", kind, shape, functools.partial(tensor.read, weights, change))


def _reader(source: str, stored: Stored, change: Module | None, where: tuple[ModelConfig, Gguf]) -> Callable[[], Array]:
    """Reads a tensor when its turn comes: merged, in llama.cpp's order, float32."""
    config, family = where
    heads = reordered_heads(source, config, family)

    def read() -> Array:
        array: Array = stored.read()
        if change is not None:
            array = np.add(array, change.product())
        if FAMILIES[config["model_type"]].norm_plus_one and source.endswith("norm.weight"):
            array = np.add(array, np.float32(1))
        return array if heads is None else interleave(array, heads, head_dim(config))

    return read


def interleave(array: Array, heads: int, size: int) -> Array:
    """Rows [heads * size, ...] from half-split (i with i + size/2) to interleaved (2i with 2i + 1), head by head."""
    if array.shape[0] != heads * size:
        raise UsageError(f"a q or k projection has {array.shape[0]} rows instead of {heads} heads of {size}")
    halves = array.reshape(heads, 2, size // 2, *array.shape[1:])
    reordered: Array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    return reordered


def _adapter_entries(adapter: Lora, config: ModelConfig, family: Gguf) -> list[Entry]:
    """A and B of each module in float32.

    llama.cpp knows one alpha for the file and divides it by each module's rank; where modules differ (rank or alpha
    patterns, rsLoRA) the rest of the scale goes into B.
    """
    names = _names(family, int(config["num_hidden_layers"]))
    found: dict[str, Entry] = {}
    experts = list(expert_tensors_of(config))
    for tensor in experts:
        if module := adapter.modules.get(tensor.module):
            found |= _expert_halves(tensor, module, names, adapter.alpha)
    for source, module in adapter.modules.items():
        if source in {tensor.module for tensor in experts}:
            continue
        name = names.get_name(source)
        if name is None or name in ("token_embd", "output"):
            raise UsageError(f"a GGUF adapter can't change {source}", hint="use --to gguf, which merges the adapter")
        rest = module.scale / (adapter.alpha / module.rank)
        heads = reordered_heads(f"{source}.", config, family)
        found[f"{name}.weight.lora_a"] = _half(name, module.a, 1.0, None)
        found[f"{name}.weight.lora_b"] = _half(
            name, module.b, rest, None if heads is None else (heads, head_dim(config))
        )
    return [replace(found[name], name=name) for name in sorted(found, key=_order)]


def _expert_halves(tensor: ExpertTensor, module: Module, names: gguf.TensorNameMap, alpha: float) -> dict[str, Entry]:
    """A and B of one tensor of all experts, by GGUF name. A is the same for gate and up, which one adapter changes."""
    name = names.get_name(tensor.source)
    if name is None:
        raise UsageError(f"a GGUF adapter can't change {tensor.source}", hint="use --to gguf, which merges the adapter")
    outputs = module.b.shape[0] // (1 if tensor.half is None else 2)
    rest = np.float32(module.scale / (alpha / module.rank))
    a_shape = (module.experts, module.rank, module.a.shape[1])
    return {
        f"{name}.weight.lora_a": Entry(name, "F32", a_shape, lambda: tensor.adapter_halves(module)[0]),
        f"{name}.weight.lora_b": Entry(
            name,
            "F32",
            (module.experts, outputs, module.rank),
            lambda: np.multiply(tensor.adapter_halves(module)[1], rest),
        ),
    }


def _half(name: str, stored: Stored, scale: float, reorder: tuple[int, int] | None) -> Entry:
    def read() -> Array:
        array: Array = np.multiply(stored.read(), np.float32(scale))
        return array if reorder is None else interleave(array, *reorder)

    return Entry(name, "F32", stored.shape, read)


def _names(family: Gguf, blocks: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.member], blocks)


def _order(name: str) -> tuple[int, int, str]:
    """Embedding, then layer by layer, then the rest: the order in which a reader needs them."""
    parts = name.split(".")
    if parts[0] == "blk":
        return (1, int(parts[1]), name)
    return (0 if parts[0] == "token_embd" else 2, 0, name)


if __name__ == "__main__":
    run_child(main, WriteGguf, WriteGgufAdapter, DryGguf)
