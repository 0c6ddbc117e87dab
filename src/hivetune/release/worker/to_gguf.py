"""Writes a whole model or a LoRA adapter as a GGUF file by llama.cpp's own converter (release/converter.py).

The converter reads a staged folder: the prepared model's files, with the tokenizer in the form that it looks for. An
adapter of a whole model is merged on the way, W + scale * B A in float32, tensor by tensor. What the converter derives
from names is taken from what training read: the model's name, the ends of an answer, the first token, the template, the
length of the context.
"""

import errno
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hivetune.base.disk import DISK, MANIFEST, read_json, write_json
from hivetune.base.paths import install_command
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import DESCRIPTION, spoken_name
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, WriteGguf, WriteGgufAdapter
from hivetune.release.worker.gguf_quantize import encode, tensor_type
from hivetune.release.worker.merge import Part, merge, read_parts
from hivetune.release.worker.vocabulary import (
    adds_space_prefix,
    is_sentencepiece,
    sentencepiece_file,
    special_settings,
    splitting_rule,
    strips_after_specials,
    token_texts,
)

LARGEST_F16 = 65504.0
# Number types that the converter writes itself, as its --outtype names them; the others are made from F16.
OWN_TYPES = ("f32", "f16", "bf16", "q8_0")
# In a model whose name has this, llama.cpp looks for Phi-3's special tokens and strips what follows them. One that
# lacks such a token then can't be loaded (llama-vocab.cpp).
KEYED_NAME = re.compile("phi-?3", re.IGNORECASE)
# Architectures whose window llama.cpp reads and does not use (its llama.cpp/src/models/phi3.cpp: "currently disabled").
NO_WINDOW = ("phi3",)
_FAILURES = (
    *(NotImplementedError, KeyError, ValueError, AssertionError, TypeError, AttributeError, IndexError, RuntimeError),
    *(FileNotFoundError, SystemExit),
)


def main(task: WriteGguf | WriteGgufAdapter, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    with stage(task.model, task.file.parent, task.converter) as folder:
        try:
            if isinstance(task, WriteGguf):
                write_model(task, folder, heartbeat)
            else:
                write_adapter(task, folder)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy's tofile reports a short write without its cause: "57920 requested and 7424 written".
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(task.file)) from error
    DISK.sync(task.file)
    return {"tensors": len(read_header(task.file).tensors)}


@contextmanager
def stage(model: Path, parent: Path, converter: Path) -> Iterator[Path]:
    """Make a folder with the model's files for the converter, which is importable meanwhile."""
    for path in (converter / "gguf-py", converter):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    os.environ.setdefault("TQDM_DISABLE", "1")
    folder = parent / ".staged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for path in model.iterdir():
            if path.name not in (MANIFEST, DESCRIPTION, "config.json", "tokenizer_config.json"):
                (folder / path.name).symlink_to(path.resolve())
        config = read_json(model / "config.json")
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
        write_json(folder / "config.json", {**config, "architectures": [architecture or config["architectures"][0]]})
        document = _tokenizer(model)
        settings = read_json(model / "tokenizer_config.json") if (model / "tokenizer_config.json").is_file() else {}
        if is_sentencepiece(document):
            (folder / "tokenizer.model").write_bytes(sentencepiece_file(document))
        elif config["model_type"] == "phi3":
            settings["tokenizer_class"] = "GPT2Tokenizer"  # by which its converter knows Phi-4's byte-level tokenizer
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
        yield folder
    except ModuleNotFoundError as error:
        raise MachineNotFit(f"the package {error.name} is not installed", hint=install_command("export")) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the model's settings as the converter reads them, with the old names that transformers 5 drops."""
    from conversion import ModelBase

    config: dict[str, Any] = ModelBase.load_hparams(folder, False)
    kind, added = config["model_type"], dict[str, Any]()
    if kind in ("gpt2", "openai-gpt"):
        added["n_ctx"] = config.get("n_positions")
    elif kind in ("gpt_neox", "cohere2"):
        rope = config.get("rope_parameters") or {}
        added["rotary_pct"] = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    elif kind == "falcon" and not config.get("new_decoder_architecture"):
        added["num_kv_heads"] = 1 if config.get("multi_query", True) else config.get("num_attention_heads")
        return {**config, **added}
    return {**added, **config}


def write_model(task: WriteGguf, folder: Path, heartbeat: Heartbeat) -> None:
    """Write `task.file`. Raises UsageError for a model or an adapter that the converter can't write."""
    kind = str(task.recipe["name"])
    try:
        base_class = _model_class(folder)
        adapter = _parts(task, folder, heartbeat)
        import gguf

        types = gguf.LlamaFileType
        file_type = {"f32": types.ALL_F32, "bf16": types.MOSTLY_BF16, "q8_0": types.MOSTLY_Q8_0}.get(kind)
        model = _model_writer(base_class)(
            folder,
            types.MOSTLY_F16 if file_type is None else file_type,
            task.file,
            hparams=_settings(folder),
            task=task,
            parts=adapter,
            heartbeat=heartbeat,
            model_name=_model_name(task.model, task.base_name),
        )
        with torch.inference_mode():
            model.write()
    except _FAILURES as error:
        raise _conversion_error(error) from error


def write_adapter(task: WriteGgufAdapter, folder: Path) -> None:
    """Write the adapter alone. Raises UsageError for one that the converter can't write, or not whole."""
    lora, parts, missing = read_parts(task.model, task.adapter)
    if missing:
        raise UsageError(
            f"the adapter changes {missing[0]}, which the model's files do not have under this name",
            hint="use --to gguf, which merges the adapter",
        )
    try:
        base_class = _model_class(folder)
        import gguf

        adapting = _adapter_writer(base_class, spoken_name(task.model), float(lora.alpha), parts)
        model = adapting(folder, gguf.LlamaFileType.ALL_F32, task.file, hparams=_settings(folder))
        with torch.inference_mode():
            model.write()
    except _FAILURES as error:
        raise _conversion_error(error) from error
    written = read_header(task.file).tensors
    count = sum(math.prod(shape) for name, shape in written.items() if name.endswith(".lora_b"))
    trained = sum(
        part.halves()[0 if part.transposed else 1].numel() for of_tensor in parts.values() for part in of_tensor
    )
    if count != trained:
        raise UsageError(
            f"llama.cpp's converter wrote {count:,} of the adapter's {trained:,} output weights",
            hint="use --to gguf, which merges the adapter",
        )


def _model_class(folder: Path) -> Any:
    """Return the converter's class for the staged model. Raises UsageError for an unknown architecture."""
    logging.basicConfig(level=logging.WARNING)
    import conversion

    architecture = read_json(folder / "config.json")["architectures"][0]
    try:
        found = conversion.get_model_class(architecture)
        # That class only forwards to the one inside it, which is not registered under a name.
        return found.Ministral3Model if architecture == "Ministral3ForCausalLM" else found
    except NotImplementedError:
        raise UsageError(f"llama.cpp's converter does not know the architecture {architecture}") from None


def _parts(task: WriteGguf, folder: Path, heartbeat: Heartbeat) -> dict[str, list[Part]]:
    """Return what the adapter adds to each tensor. A model whose files hold its modules under other names is merged
    aside first, in float32, and then nothing is left to add."""
    if task.adapter is None:
        return {}
    _, parts, missing = read_parts(task.model, task.adapter)
    if not missing:
        return parts
    merged = folder / "merged"
    merge(task.model, task.adapter, merged, "float32", heartbeat)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    for path in merged.glob("*.safetensors*"):
        os.rename(path, folder / path.name)
    return {}


def _model_writer(base_class: Any) -> Any:
    """Return the converter's class with overrides: what was trained replaces what it would derive from names."""
    import gguf
    from conversion import LazyTorchTensor

    class ModelWriter(base_class):  # type: ignore[misc]
        model_arch = base_class.model_arch
        no_mtp = True  # heads that draft are not trained
        gguf_writer: Any

        def __init__(self, *args: Any, task: WriteGguf, parts: Any, heartbeat: Heartbeat, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.task, self.parts, self.heartbeat = task, parts, heartbeat
            if task.recipe["name"] not in OWN_TYPES:
                self.gguf_writer = _quantizing_writer(self.gguf_writer, task.recipe, self.block_count)

        def get_tensors(self) -> Iterator[tuple[str, Any]]:
            left = {_converter_name(self, name): parts for name, parts in self.parts.items()}
            for name, tensor in super().get_tensors():
                parts = left.pop(name, [])
                # Computed when its turn to be written comes.
                kind = torch.float32 if parts else tensor.dtype
                meta = LazyTorchTensor.meta_with_dtype_and_shape(kind, tuple(tensor.shape))
                yield name, LazyTorchTensor(meta=meta, args=(tensor,), func=self._finish(name, parts))
            if left:
                raise UsageError(f"the adapter changes {min(left)}, which the model does not have")

        def _finish(self, name: str, parts: list[Part]) -> Callable[[Any], Any]:
            def finish(tensor: torch.Tensor) -> torch.Tensor:
                for part in parts:
                    tensor = part.add(tensor)
                _check_numbers(name, tensor, self.ftype == gguf.LlamaFileType.MOSTLY_F16)
                self.heartbeat.beat(Beat.ITEM)
                return tensor

            return finish

        def set_gguf_parameters(self) -> None:
            super().set_gguf_parameters()
            # llama.cpp caps Gemma 4's logits at 30 where the file names no cap (llama-hparams.h); 0 caps nothing.
            key = f"{gguf.MODEL_ARCH_NAMES[self.model_arch]}.final_logit_softcapping"
            if self.hparams.get("final_logit_softcapping", 0) is None and key not in self.gguf_writer.kv_data[0]:
                self.gguf_writer.add_float32(key, 0.0)

        def get_vocab_base_pre(self, tokenizer: Any) -> str:
            try:
                return str(super().get_vocab_base_pre(tokenizer))
            except NotImplementedError:
                return splitting_rule(_tokenizer(self.task.model))

        def set_vocab(self) -> None:
            super().set_vocab()
            writer, document = self.gguf_writer, _tokenizer(self.task.model)
            settings = special_settings(self.task.model, token_texts(document))
            for name in ("eos", "eot", "eom", "bos", "padding", "seperator", "cls", "mask"):
                writer.kv_data[0].pop(f"tokenizer.ggml.{name}_token_id", None)
            for key, value in settings.items():
                _put(writer, f"tokenizer.{key}", value)
            types = list(writer.kv_data[0].pop("tokenizer.ggml.token_type").value)
            for token in document.get("added_tokens") or []:
                if token["id"] < len(types) and types[token["id"]] == gguf.TokenType.NORMAL:
                    kind = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
                    types[token["id"]] = int(kind)
            writer.add_token_types(types)
            if is_sentencepiece(document):
                _put(writer, "tokenizer.ggml.add_space_prefix", adds_space_prefix(document))
            self._cut_context()
            writer.kv_data[0].pop("general.finetune", None)  # the name of the staged folder
            _put(writer, "general.file_type", int(self.task.recipe["file_type"]))

        def _cut_context(self) -> None:
            """Cut the context to the window of attention where llama.cpp would attend beyond it."""
            window, kinds = self.hparams.get("sliding_window"), self.hparams.get("layer_types")
            slides = any("sliding" in str(kind) for kind in kinds) if kinds else window is not None
            name = gguf.MODEL_ARCH_NAMES[self.model_arch]
            used = f"{name}.attention.sliding_window" in self.gguf_writer.kv_data[0] and name not in NO_WINDOW
            key = f"{name}.context_length"
            if window and slides and not used and self.gguf_writer.kv_data[0][key].value > window:
                _put(self.gguf_writer, key, int(window))

    return ModelWriter


def _adapter_writer(base_class: Any, base_name: str, alpha: float, parts: Mapping[str, list[Part]]) -> Any:
    """Return the converter's class with overrides: it writes A and B of each tensor instead of the tensor.

    llama.cpp divides the file's alpha by each module's rank; the rest of another scale (rsLoRA) goes into B.
    """
    import gguf
    from convert_lora_to_gguf import LoraTorchTensor

    class Pair(LoraTorchTensor):  # type: ignore[misc]
        """The product B A, with the operations that the converter does on a weight; here also of several experts."""

        def permute(self, *dims: int) -> Any:
            if [dim % 3 for dim in dims] == [0, 2, 1] and len(self.shape) == 3:
                a, b = self.get_lora_A_B()
                return Pair(b.transpose(1, 2), a.transpose(1, 2))
            return super().permute(*dims)

    class AdapterWriter(base_class):  # type: ignore[misc]
        model_arch = base_class.model_arch
        no_mtp = True

        def set_vocab(self) -> None:
            """Write nothing: an adapter has no vocabulary."""

        def set_type(self) -> None:
            self.gguf_writer.add_type(gguf.GGUFType.ADAPTER)
            self.gguf_writer.add_string("adapter.type", "lora")

        def set_gguf_parameters(self) -> None:
            _put(self.gguf_writer, "general.name", base_name)
            self.gguf_writer.kv_data[0].pop("general.finetune", None)  # the name of the staged folder
            self.gguf_writer.add_float32("adapter.lora.alpha", alpha)

        def generate_extra_tensors(self) -> tuple[()]:
            return ()

        def get_tensors(self) -> Iterator[tuple[str, Any]]:
            for name, of_tensor in parts.items():
                for part in of_tensor:
                    a, b = (half.contiguous() for half in part.halves())
                    yield _converter_name(self, name), Pair(a, b * (part.delta.scale / (alpha / part.rank)))

        def modify_tensors(self, data_torch: Any, name: str, bid: int | None) -> Iterator[tuple[str, Any]]:
            for target, pair in super().modify_tensors(data_torch, name, bid):
                for half, tensor in zip("ab", pair.get_lora_A_B(), strict=True):
                    yield f"{target}.lora_{half}", tensor.contiguous()

    return AdapterWriter


def _converter_name(model: Any, name: str) -> str:
    """Return the converter's name of a tensor of the files. Raises UsageError for one that it leaves out."""
    converted = model.filter_tensors((name, None))
    if converted is None:
        raise UsageError(f"llama.cpp's converter leaves out {name}, which the adapter changes")
    return str(converted[0])


def _put(writer: Any, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)


def _quantizing_writer(writer: Any, recipe: Mapping[str, Any], blocks: int) -> Any:
    """Return a writer that turns the converter's F16 tensors into the recipe's types; F32 ones stay."""
    import gguf

    class QuantizingWriter(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Any = None) -> None:
            shape = tuple(tensor.shape)
            kind = tensor_type(name, shape, recipe, blocks)
            if raw_dtype is not gguf.GGMLQuantizationType.F16 or kind in ("F16", "F32"):
                super().add_tensor(name, tensor, raw_shape, raw_dtype)
                return
            member = gguf.GGMLQuantizationType[kind]
            meta = gguf.LazyNumpyTensor.meta_with_dtype_and_shape(
                "uint8", gguf.quant_shape_to_byte_shape(shape, member)
            )
            lazy = gguf.LazyNumpyTensor(meta=meta, args=(tensor,), func=lambda array: encode(array, kind))
            super().add_tensor(name, lazy, None, member)

    return QuantizingWriter(path=None, arch=writer.arch)


def _check_numbers(name: str, tensor: torch.Tensor, is_f16: bool) -> None:
    """Raise HivetuneError for numbers that are not finite (law 5) or that F16 can't hold."""
    largest = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
    if not largest < math.inf:
        raise HivetuneError(f"{name} has values that are not finite; nothing was exported")
    if is_f16 and tensor.dim() > 1 and largest > LARGEST_F16:
        raise HivetuneError(
            f"{name} has the value {largest:.3g}, above F16's largest, 65504", hint="export with --quant bf16"
        )


def _model_name(model: Path, base_name: str) -> str:
    """Return the base model's name, changed where llama.cpp would read special tokens otherwise because of it."""
    keyed = KEYED_NAME.search(base_name) is not None
    strips = strips_after_specials(_tokenizer(model))
    if keyed and not strips:
        return KEYED_NAME.sub("phi", base_name)
    if strips and not keyed and read_json(model / "config.json")["model_type"] == "phi3":
        return f"{base_name} (phi-3)"
    return base_name


def _tokenizer(model: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return document


def _conversion_error(error: BaseException) -> UsageError:
    reason = str(error).splitlines()[0] if str(error) else ""
    return UsageError(f"llama.cpp's converter can't write this model: {type(error).__name__}: {reason}".rstrip(": "))


if __name__ == "__main__":
    run_child(main, WriteGguf, WriteGgufAdapter)
