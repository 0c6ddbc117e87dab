"""Writes a whole model or a LoRA adapter as a GGUF file by llama.cpp's own converter (release/gguf.py).

The converter reads a staged folder: the prepared model's files. An adapter of a whole model is merged on the way,
W + scale * B A in float32, tensor by tensor. What the converter derives from names is taken from what training read:
the model's name, the tokens, the ends of an answer, the first token, the template, the length of the context.
"""

import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hivetune.base.disk import DISK, read_json, sha256_bytes, write_json
from hivetune.base.paths import install_command
from hivetune.data.render.template import TEMPLATE_DATE
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import DESCRIPTION, TEMPLATE, spoken_name
from hivetune.models.worker.weights import Array
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, WriteGguf
from hivetune.release.gguf import RECIPES, Recipe
from hivetune.release.worker.merge import Part, merge, read_parts

CHUNK_NUMBERS = 1 << 24  # that are encoded at a time: 64 MB of float32
OWN_TYPES = ("f32", "f16", "bf16", "q8_0")  # the converter writes these itself; the others are made from F16
# In a model whose name has this, llama.cpp strips what follows special tokens, as in Phi-3. It can't load one that
# lacks these (llama-vocab.cpp).
KEYED_NAME = re.compile("phi-?3", re.IGNORECASE)
KEYED_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
_ENDS = ("eos", "eot", "eom", "bos", "padding", "seperator", "cls", "mask")
_MERGE_HINT = "use --to gguf, which merges the adapter"
_DATE = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\)""")
# Every rule splits this text differently, and a normalizer other than NFC changes it.
_SAMPLE = (
    "I'M sure they'LL don't; ABCdef iOS 1234567 x=3.14 //a/\r\n\n\tif  _x:\n"
    "  Ünïcode 你好 हिन्दी ½ №7 \U0001f600!?\u00a0end  "
)
# llama.cpp's name of a splitting rule, by a hash of the sample's pieces.
_RULES = {
    "1e30bd98fe539c4a": "gpt-2",
    "0c99405e813497b4": "smollm",
    "193ad5710b2dc5f0": "llama-bpe",
    "d8770093a70d4211": "qwen2",
    "4e73a1f9bd6ccb04": "tekken",
    "1e1f3d7a85e079d5": "gpt-4o",
}
_Base: Any = object  # the converter's class of an architecture, known when its folder is


def main(task: WriteGguf, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    with stage(task.model, task.file.parent, task.converter) as folder:
        write(task, folder, heartbeat)
    DISK.sync(task.file)
    return {"tensors": len(read_header(task.file).tensors)}


@contextmanager
def stage(model: Path, parent: Path, converter: Path) -> Iterator[Path]:
    """Make a folder with the model's files for the converter, which is importable meanwhile.

    The converter's failures become UsageError, MachineNotFit for a missing package, or OSError.
    """
    sys.path.insert(0, str(converter))
    folder = parent / ".staged"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(model.resolve(), folder, copy_function=os.symlink)
        settings = folder / "tokenizer_config.json"
        named = read_json(settings.resolve()) if settings.is_file() else {}
        write_json(settings, {"tokenizer_class": "PreTrainedTokenizerFast", **named})
        if is_sentencepiece(_tokenizer(model)):
            (folder / "tokenizer.model").touch()  # where it lies, Gemma 3's class asks for the pieces
        yield folder
    except (HivetuneError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise MachineNotFit(f"the package {error.name} is not installed", hint=install_command("export")) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            if error.errno is not None:
                raise
            # numpy's tofile reports a short write without its cause: "57920 requested and 7424 written".
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(parent)) from error
        words = f"llama.cpp's converter can't write this model: {type(error).__name__}: {error}"
        raise UsageError(words.splitlines()[0].rstrip(": ")) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(task: WriteGguf, folder: Path, heartbeat: Heartbeat) -> None:
    """Write `task.file` from the staged folder. Raises UsageError for a model or an adapter that the converter can't
    write, or not whole."""
    lora, parts, missing = read_parts(task.model, task.adapter) if task.adapter else (None, {}, [])
    if task.quant is None and missing:
        raise UsageError(
            f"the adapter changes {missing[0]}, which the model's files do not have under this name", hint=_MERGE_HINT
        )
    if task.adapter and missing:
        # The files hold the modules under other names: merged aside, in float32, nothing is left to add.
        merge(task.model, task.adapter, folder / "merged", "float32", heartbeat)
        with stage(folder / "merged", folder, task.converter) as merged:
            return write(replace(task, adapter=None), merged, heartbeat)
    import conversion
    import gguf

    settings = _settings(conversion, folder)
    base = conversion.get_model_class(settings["architectures"][0])
    if settings["model_type"] == "ministral3":
        base = base.Ministral3Model  # to which the registered class forwards, past any override
    recipe = RECIPES[task.quant or "f32"]
    kind = gguf.LlamaFileType(recipe.file_type if recipe.name in OWN_TYPES else RECIPES["f16"].file_type)
    bases = (_ModelWriter if task.quant else _AdapterWriter, base)
    derived: Any = type("Writer", bases, {"model_arch": base.model_arch})
    model = derived(folder, kind, task.file, hparams=settings, model_name=_model_name(task.model))
    model.folder, model.parts, model.heartbeat, model.file_type = task.model, parts, heartbeat, recipe.file_type
    model.alpha = float(lora.alpha) if lora else 0.0
    if recipe.name not in OWN_TYPES:
        _write_in(recipe, model.gguf_writer, model.block_count)
    with torch.inference_mode():
        model.write()
    if task.quant is None:
        tensors = read_header(task.file).tensors
        written = sum(math.prod(shape) for name, shape in tensors.items() if name.endswith(".lora_b"))
        trained = sum(part.halves()[0 if part.transposed else 1].numel() for some in parts.values() for part in some)
        if written != trained:
            raise UsageError(
                f"llama.cpp's converter wrote {written:,} of the adapter's {trained:,} output weights", hint=_MERGE_HINT
            )


def _settings(conversion: Any, folder: Path) -> dict[str, Any]:
    """Return the model's settings as the converter reads them, with the old names that transformers 5 drops."""
    config: dict[str, Any] = conversion.ModelBase.load_hparams(folder, False)
    if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"]):
        config["architectures"] = [architecture]
    rope = config.get("rope_parameters") or {}
    config.setdefault("rotary_pct", rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if config["model_type"] == "gpt2":
        config.setdefault("n_ctx", config["n_positions"])
    elif config["model_type"] == "falcon" and config["multi_query"] and not config["new_decoder_architecture"]:
        config["num_kv_heads"] = 1  # transformers keeps the number of heads there
    elif config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [each.replace("full_attention", "attention") for each in config["layer_types"]]
    return config


class _ModelWriter(_Base):  # type: ignore[misc]
    """Overrides of the converter's class: what was trained replaces what it would derive from names."""

    no_mtp = True  # heads that draft are not trained
    folder: Path
    parts: dict[str, list[Part]]
    heartbeat: Heartbeat
    file_type: int

    def get_tensors(self) -> Iterator[tuple[str, Any]]:
        from conversion import LazyTorchTensor

        left = {_converter_name(self, name): parts for name, parts in self.parts.items()}
        for name, tensor in super().get_tensors():
            parts = left.pop(name, [])

            def finish(tensor: torch.Tensor, name: str = name, parts: list[Part] = parts) -> torch.Tensor:
                for part in parts:
                    tensor = part.add(tensor)
                _check_numbers(name, tensor, self.ftype.name == "MOSTLY_F16")
                self.heartbeat.beat(Beat.ITEM)
                return tensor

            # Computed when its turn to be written comes.
            kind = torch.float32 if parts else tensor.dtype
            meta = LazyTorchTensor.meta_with_dtype_and_shape(kind, tuple(tensor.shape))
            yield name, LazyTorchTensor(meta=meta, args=(tensor,), func=finish)
        if left:
            raise UsageError(f"the adapter changes {min(left)}, which the model does not have")

    def get_vocab_base_pre(self, tokenizer: Any) -> str:
        try:
            return str(super().get_vocab_base_pre(tokenizer))
        except NotImplementedError:
            return splitting_rule(_tokenizer(self.folder))

    def _create_vocab_sentencepiece(self) -> Any:
        return sentencepiece_pieces(_tokenizer(self.folder), self.hparams["vocab_size"])

    def set_vocab(self) -> None:
        document, keys, name = _tokenizer(self.folder), self.gguf_writer.kv_data[0], str(self.gguf_writer.arch)
        # By what the tokenizer is, not by files and classes that architectures had. Gemma 4 has a kind of its own.
        if document["model"].get("type") != "BPE" or name == "gemma4":
            super().set_vocab()
        elif is_sentencepiece(document):
            self._set_vocab_sentencepiece()
        else:
            self._set_vocab_gpt2()
        types = keys["tokenizer.ggml.token_type"].value
        for token in document.get("added_tokens") or []:
            if types[token["id"]] == 1:  # normal, where the tokenizer's own settings do not name the token
                types[token["id"]] = 3 if token.get("special") else 4
        for key in (*(f"tokenizer.ggml.{end}_token_id" for end in _ENDS), "general.finetune"):  # a folder's name
            keys.pop(key, None)
        for key, value in special_settings(self.folder).items():
            _put(self.gguf_writer, f"tokenizer.{key}", value)
        if is_sentencepiece(document):
            _put(self.gguf_writer, "tokenizer.ggml.add_space_prefix", adds_space_prefix(document))
        _put(self.gguf_writer, "general.file_type", self.file_type)
        # llama.cpp caps Gemma 4's logits at 30 where the file names no cap (llama-hparams.h); 0 caps nothing.
        cap = f"{name}.final_logit_softcapping"
        if self.hparams.get("final_logit_softcapping", 0) is None and cap not in keys:
            _put(self.gguf_writer, cap, 0.0)
        # Where llama.cpp would attend beyond the window of attention, the context ends with it. Of Phi-3 it reads the
        # window and does not use it (its src/models/phi3.cpp: "currently disabled").
        window, kinds = self.hparams.get("sliding_window"), self.hparams.get("layer_types")
        slides = any("sliding" in str(kind) for kind in kinds) if kinds else window is not None
        used = f"{name}.attention.sliding_window" in keys and name != "phi3"
        if window and slides and not used and keys[f"{name}.context_length"].value > window:
            _put(self.gguf_writer, f"{name}.context_length", int(window))


class _AdapterWriter(_Base):  # type: ignore[misc]
    """Overrides of the converter's class: it writes A and B of each tensor instead of the tensor.

    Its script for adapters has the same, but reads no scale of rsLoRA. llama.cpp divides the file's alpha by each
    module's rank; the rest of another scale goes into B.
    """

    no_mtp = True
    parts: dict[str, list[Part]]
    alpha: float

    def set_vocab(self) -> None:
        """Write nothing: an adapter has no vocabulary."""

    def generate_extra_tensors(self) -> tuple[()]:
        return ()

    def set_gguf_parameters(self) -> None:
        for key, value in (("general.type", "adapter"), ("adapter.type", "lora"), ("adapter.lora.alpha", self.alpha)):
            _put(self.gguf_writer, key, value)
        self.gguf_writer.kv_data[0].pop("general.finetune", None)  # the name of the staged folder

    def get_tensors(self) -> Iterator[tuple[str, Any]]:
        from convert_lora_to_gguf import LoraTorchTensor

        class Pair(LoraTorchTensor):  # type: ignore[misc]
            """The product B A of a LoRA pair; `permute` also transposes several experts, which its base class can't."""

            def permute(self, *dims: int) -> Any:
                if [dim % 3 for dim in dims] == [0, 2, 1] and len(self.shape) == 3:
                    a, b = self.get_lora_A_B()
                    return Pair(b.mT, a.mT)
                return super().permute(*dims)

        for name, of_tensor in self.parts.items():
            for part in of_tensor:
                a, b = (half.contiguous() for half in part.halves())
                yield _converter_name(self, name), Pair(a, b * (part.delta.scale / (self.alpha / part.rank)))

    def modify_tensors(self, data_torch: Any, name: str, bid: int | None) -> Iterator[tuple[str, Any]]:
        for target, pair in super().modify_tensors(data_torch, name, bid):
            for half, tensor in zip("ab", pair.get_lora_A_B(), strict=True):
                yield f"{target}.lora_{half}", tensor.contiguous()


def _converter_name(model: Any, name: str) -> str:
    """Return the converter's name of a tensor of the files. Raises UsageError for one that it leaves out."""
    converted = model.filter_tensors((name, None))
    if converted is None:
        raise UsageError(f"llama.cpp's converter leaves out {name}, which the adapter changes")
    return str(converted[0])


def _put(writer: Any, key: str, value: bool | int | float | str) -> None:
    import gguf

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    writer.remove_key(key)
    writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def _model_name(model: Path) -> str:
    """Return the base model's name, changed if llama.cpp would derive special tokens from it."""
    name, tokens = spoken_name(model), {t["content"]: t for t in _tokenizer(model).get("added_tokens") or []}
    strips = any(token.get("special") and token.get("rstrip") for token in tokens.values())
    if not (strips and tokens.keys() >= KEYED_TOKENS):
        return KEYED_NAME.sub("phi", name)
    return name if KEYED_NAME.search(name) else f"{name} (phi-3)"


# Number types that the converter does not write.


def _write_in(recipe: Recipe, writer: Any, blocks: int) -> None:
    """Make the writer turn the converter's F16 tensors into the recipe's types; F32 ones stay."""
    import gguf

    add = writer.add_tensor

    def add_tensor(name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Any = None) -> None:
        kind = tensor_type(name, tuple(tensor.shape), recipe, blocks)
        if raw_dtype is gguf.GGMLQuantizationType.F16 and kind not in ("F16", "F32"):
            raw_dtype = gguf.GGMLQuantizationType[kind]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, raw_dtype)
            meta = gguf.LazyNumpyTensor.meta_with_dtype_and_shape("uint8", shape)
            tensor = gguf.LazyNumpyTensor(meta=meta, args=(tensor,), func=lambda array: encode(array, kind))
        add(name, tensor, raw_shape, raw_dtype)

    writer.add_tensor = add_tensor


def tensor_type(name: str, shape: tuple[int, ...], recipe: Recipe, blocks: int) -> str:
    """Return the type of one tensor (its GGUF name). Rows whose length is not a multiple of the type's block size fall
    back to Q8_0 (32 numbers), then to F16."""
    if len(shape) < 2:
        return "F32"
    wanted = recipe.default
    if name in ("token_embd.weight", "output.weight"):
        wanted = recipe.embedding
    elif recipe.important and name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
        layer = int(name.split(".")[1])
        # The layers that llama.cpp's "_M" mixtures spend more on: first and last eighth, every third between.
        if layer < blocks // 8 or layer >= 7 * blocks // 8 or (layer - blocks // 8) % 3 == 2:
            wanted = recipe.important
    import gguf

    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] for kind in (wanted, "Q8_0")}
    return next((kind for kind, size in sizes.items() if shape[-1] % size == 0), "F16")


def encode(array: Array, kind: str) -> Array:
    """Return `array` (floats [..., row]) as raw bytes uint8 [..., row bytes], K-quants by `libgguf`."""
    import gguf

    quantize = import_module("libgguf").quantize_rows if kind.endswith("_K") else gguf.quants.quantize
    pieces = np.array_split(array.reshape(-1, array.shape[-1]), math.ceil(array.size / CHUNK_NUMBERS))
    encoded: Array = np.concatenate([quantize(piece, gguf.GGMLQuantizationType[kind]) for piece in pieces])
    return encoded.reshape(*array.shape[:-1], -1)


def _check_numbers(name: str, tensor: torch.Tensor, is_f16: bool) -> None:
    """Raise HivetuneError for numbers that are not finite (law 5) or that F16 can't hold."""
    largest = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
    if not largest < math.inf:
        raise HivetuneError(f"{name} has values that are not finite; nothing was exported")
    if is_f16 and tensor.dim() > 1 and largest > torch.finfo(torch.float16).max:
        raise HivetuneError(
            f"{name} has the value {largest:.3g}, above F16's largest, 65504", hint="export with --quant bf16"
        )


# The tokenizer, from the prepared folder, which training read too.


def _tokenizer(model: Path) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return document


def splitting_rule(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the splitting rule in a tokenizer.json, recognised by what it does.

    The converter knows published vocabularies only, by a hash of sample ids (ggml-org/llama.cpp#6920). Raises
    UsageError for a rule that llama.cpp has no name for.
    """
    tokenizer = Tokenizer.from_str(json.dumps(document))
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = normalizer.normalize_str(_SAMPLE) if normalizer else _SAMPLE
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter else []
    rule = _RULES.get(sha256_bytes(json.dumps(pieces).encode())[:16])
    if rule is None:
        steps = [json.dumps(document.get(key), ensure_ascii=False) for key in ("normalizer", "pre_tokenizer")]
        raise UsageError(
            f"llama.cpp does not know this tokenizer's splitting rule: {', then '.join(steps)[:500]}",
            hint="use --to merged",
        )
    return rule


def adds_space_prefix(document: Mapping[str, Any]) -> bool:
    """Return whether every text segment begins with a space of its own (Llama 2's way)."""
    # Metaspace's "first" prepends at the start of the text only, where a chat prompt has a special token.
    steps = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
    return '"Prepend"' in steps or '"prepend_scheme": "always"' in steps


def is_sentencepiece(document: Mapping[str, Any]) -> bool:
    return document["model"].get("type") == "BPE" and bool(document["model"].get("byte_fallback"))


def sentencepiece_pieces(document: Mapping[str, Any], size: int) -> tuple[list[bytes], list[float], list[int]]:
    """Return text, score and type of each token of a SentencePiece-like tokenizer.json.

    llama.cpp merges the neighbours whose joined piece has the highest score, BPE the pair with the lowest rank. Both
    are the same when a piece's score is minus the rank of the first merge that makes it. The converter's own reader of
    tokenizer.json gives each piece the same score (gguf.LlamaHfVocab).
    """
    from gguf import TokenType

    model, added = document["model"], {int(token["id"]): token for token in document.get("added_tokens") or []}
    texts = {int(number): text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    pieces, scores, types = list[bytes](), list[float](), list[int]()
    for number in range(size):
        text, score, kind = texts.get(number, f"[PAD{number}]"), 0.0, TokenType.NORMAL
        if number not in texts:
            kind = TokenType.UNUSED
        elif text == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        elif number in added:
            kind = TokenType.CONTROL if added[number].get("special") else TokenType.USER_DEFINED
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = TokenType.BYTE
        else:
            score = -float(ranks.get(text, len(ranks)))
        pieces.append((text.replace("\u2581", " ") if kind == TokenType.USER_DEFINED else text).encode())
        scores.append(score)
        types.append(kind)
    return pieces, scores, types


def special_settings(folder: Path) -> dict[str, Any]:
    """Return the keys below `tokenizer.`: the template, the ids that begin, end and fill a text, and whether llama.cpp
    puts a first and a last token around it.

    Raises UsageError for a folder that names no end: the exported model would never stop.
    """
    facts, written = read_json(folder / DESCRIPTION), (folder / TEMPLATE).read_text(encoding="utf-8")
    # Each training row was rendered with this date in place of today's.
    template = _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), written)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    # The end that the chat template writes ends a turn; it comes first, and llama.cpp takes the others as ends too.
    ends = sorted(facts["eos_ids"], key=lambda number: texts.get(number, "\0") not in template)
    if not ends:
        raise UsageError(f"{folder} names no end-of-sequence token: the exported model would never stop")
    ids = {**dict(zip(("eos", "eot", "eom"), ends, strict=False)), "bos": facts["bos_id"], "padding": facts["pad_id"]}
    settings: dict[str, Any] = {f"ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    begins = tokenizer.encode("a").ids[:1] != tokenizer.encode("a", add_special_tokens=False).ids[:1]
    # A chat is trained as its template writes it, so a first token is added only where the template writes it too
    # (llama.cpp then keeps one of the two). Otherwise Gemma would get none, or two (ggml-org/llama.cpp#7062).
    begins &= "bos_token" in template or texts.get(facts["bos_id"], "\0") in template
    return settings | {"chat_template": template, "ggml.add_bos_token": begins, "ggml.add_eos_token": False}


if __name__ == "__main__":
    run_child(main, WriteGguf)
