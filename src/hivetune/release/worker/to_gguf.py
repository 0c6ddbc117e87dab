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
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import modeling_utils  # noqa: F401  a configuration imports it: 1.8 s that forks of one server share
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hivetune.base.disk import DISK, read_json, scratch_folder, sha256_bytes, write_json
from hivetune.base.paths import install_command
from hivetune.data.render.template import TEMPLATE_DATE
from hivetune.data.render.thinking import served_template
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import DESCRIPTION, TEMPLATE, spoken_name
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, WriteGguf
from hivetune.release.worker.merge import Part, merge, read_parts

OWN_TYPES = ("f32", "f16", "bf16", "q8_0")  # the converter writes these itself; the others are made from F16
# In a model whose name has this, llama.cpp strips what follows special tokens, as in Phi-3. It can't load one that
# lacks these (llama-vocab.cpp).
KEYED_NAME = re.compile("phi-?3", re.IGNORECASE)
KEYED_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
_ENDS = ("eos", "eot", "eom", "bos", "padding", "seperator", "cls", "mask")
TOKENIZER = "tokenizer.json"  # of the prepared folder, which training read too
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
    """Make a folder with the model's files for the converter, which is importable meanwhile and writes into `parent`.

    The converter's failures become UsageError, MachineNotFit for a missing package, or OSError.
    """
    sys.path.insert(0, str(converter))
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with scratch_folder() as scratch:  # links, which a run's folder may not hold: who is killed leaves them
            folder = scratch / ".staged"
            shutil.copytree(model.resolve(), folder, copy_function=os.symlink)
            settings = folder / "tokenizer_config.json"
            named = read_json(settings.resolve()) if settings.is_file() else {}
            write_json(settings, {"tokenizer_class": "PreTrainedTokenizerFast", **named})
            if is_sentencepiece(read_json(model / TOKENIZER)):
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


def write(task: WriteGguf, folder: Path, heartbeat: Heartbeat) -> None:
    """Write `task.file` from the staged folder. Raises UsageError for a model or an adapter that the converter can't
    write, or not whole."""
    parts, missing = read_parts(task.model, task.adapter) if task.adapter else ({}, [])
    if task.quant is None and missing:
        raise UsageError(
            f"the adapter changes {missing[0]}, which the model's files do not have under this name", hint=_MERGE_HINT
        )
    if task.adapter and missing:
        # The files hold the modules under other names: merged aside, in float32, nothing is left to add.
        aside = task.file.with_name("merged")
        merge(task.model, task.adapter, aside, "float32", heartbeat)
        with stage(aside, task.file.parent, task.converter) as merged:
            return write(replace(task, adapter=None), merged, heartbeat)
    import conversion

    settings = _settings(conversion, folder)
    base = conversion.get_model_class(settings["architectures"][0])
    if settings["model_type"] == "ministral3":
        base = base.Ministral3Model  # to which the registered class forwards, past any override
    quant = task.quant or "f32"
    kind = file_type(quant if quant in OWN_TYPES else "f16")
    bases = (_ModelWriter if task.quant else _AdapterWriter, base)
    derived: Any = type("Writer", bases, {"model_arch": base.model_arch})
    model = derived(folder, kind, task.file, hparams=settings, model_name=_model_name(task.model))
    model.task, model.parts, model.heartbeat = task, parts, heartbeat
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
    task: WriteGguf
    parts: dict[str, list[Part]]
    heartbeat: Heartbeat

    def get_tensors(self) -> Iterator[tuple[str, Any]]:
        from conversion import LazyTorchTensor

        changed = {_converter_name(self, name): parts for name, parts in self.parts.items()}
        is_f16 = self.ftype == file_type("f16")

        def finish(tensor: torch.Tensor, name: str) -> torch.Tensor:
            for part in changed.get(name, []):
                tensor = part.add(tensor)
            _check_numbers(name, tensor, is_f16)
            self.heartbeat.beat(Beat.ITEM)
            return tensor

        for name, tensor in super().get_tensors():  # each is computed when its turn to be written comes
            kind = torch.float32 if name in changed else tensor.dtype
            meta = LazyTorchTensor.meta_with_dtype_and_shape(kind, tuple(tensor.shape))
            yield name, LazyTorchTensor(meta=meta, args=(tensor, name), func=finish)

    def prepare_tensors(self) -> None:
        """Turn what the converter leaves in F16 into the number types that it does not write."""
        super().prepare_tensors()
        quant = str(self.task.quant)
        for name, info in self.gguf_writer.tensors[0].items() if quant not in OWN_TYPES else ():
            if info.dtype.name == "F16":
                kind = tensor_type(name, info.shape, quant, self.block_count)
                info.tensor = encode(info.tensor, kind)
                info.dtype, info.nbytes = type(info.dtype)[kind], info.tensor.nbytes

    def get_vocab_base_pre(self, tokenizer: Any) -> str:
        try:
            return str(super().get_vocab_base_pre(tokenizer))
        except NotImplementedError:
            return splitting_rule(read_json(self.task.model / TOKENIZER))

    def _create_vocab_sentencepiece(self) -> Any:
        return sentencepiece_pieces(read_json(self.task.model / TOKENIZER), self.hparams["vocab_size"])

    def set_vocab(self) -> None:
        document, keys = read_json(self.task.model / TOKENIZER), self.gguf_writer.kv_data[0]
        name = str(self.gguf_writer.arch)
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
        settings = {f"tokenizer.{key}": value for key, value in special_settings(self.task.model).items()}
        settings["general.file_type"] = int(file_type(str(self.task.quant)))
        if is_sentencepiece(document):
            settings["tokenizer.ggml.add_space_prefix"] = adds_space_prefix(document)
        # llama.cpp caps Gemma 4's logits at 30 where the file names no cap (llama-hparams.h); 0 caps nothing.
        cap = f"{name}.final_logit_softcapping"
        if self.hparams.get("final_logit_softcapping", 0) is None and cap not in keys:
            settings[cap] = 0.0
        # Where llama.cpp would attend beyond the window of attention, the context ends with it. Of Phi-3 it reads the
        # window and does not use it (its src/models/phi3.cpp: "currently disabled").
        window, kinds = self.hparams.get("sliding_window"), self.hparams.get("layer_types")
        slides = any("sliding" in str(kind) for kind in kinds) if kinds else window is not None
        used = f"{name}.attention.sliding_window" in keys and name != "phi3"
        if window and slides and not used and keys[f"{name}.context_length"].value > window:
            settings[f"{name}.context_length"] = int(window)
        add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
        for key, value in settings.items():
            getattr(self.gguf_writer, add[type(value)])(key, value)


class _AdapterWriter(_Base):  # type: ignore[misc]
    """Overrides of the converter's class: it writes A and B of each tensor instead of the tensor.

    Its script for adapters has the same, but reads no scale of rsLoRA: llama.cpp divides the file's alpha by the rank.
    """

    no_mtp = True

    def generate_extra_tensors(self) -> tuple[()]:
        return ()

    set_vocab = generate_extra_tensors  # an adapter has no vocabulary either

    def set_gguf_parameters(self) -> None:
        self.gguf_writer.add_type("adapter")
        self.gguf_writer.add_string("adapter.type", "lora")
        (first, *_), *_ = self.parts.values()
        self.gguf_writer.add_float32("adapter.lora.alpha", first.delta.scale * first.rank)
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
                yield _converter_name(self, name), Pair(*part.halves())

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


def _model_name(model: Path) -> str:
    """Return the base model's name, changed if llama.cpp would derive special tokens from it."""
    added = read_json(model / TOKENIZER).get("added_tokens") or []
    name, tokens = spoken_name(model), {token["content"]: token for token in added}
    strips = any(token.get("special") and token.get("rstrip") for token in tokens.values())
    if not (strips and tokens.keys() >= KEYED_TOKENS):
        return KEYED_NAME.sub("phi", name)
    return name if KEYED_NAME.search(name) else f"{name} (phi-3)"


# Number types that the converter does not write.


def file_type(quant: str) -> Any:
    """Return llama.cpp's member for a file in a number type: MOSTLY_Q4_K_M for q4_k_m."""
    import gguf

    return next(kind for kind in gguf.LlamaFileType if kind.name.endswith(f"_{quant.upper()}"))


def tensor_type(name: str, shape: tuple[int, ...], quant: str, blocks: int) -> str:
    """Return the type of one matrix (its GGUF name). Rows whose length is not a multiple of the type's block size fall
    back to Q8_0 (32 numbers), then to F16."""
    wanted = quant.upper().removesuffix("_M")
    if name in ("token_embd.weight", "output.weight"):
        # Embeddings of a small model are a large part of it and the first thing to suffer.
        wanted = "Q6_K" if wanted.endswith("_K") else "Q8_0"
    elif quant.endswith("_m") and name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
        layer = int(name.split(".")[1])
        # The layers that llama.cpp's "_M" mixtures spend more on: first and last eighth, every third between.
        if layer < blocks // 8 or layer >= 7 * blocks // 8 or (layer - blocks // 8) % 3 == 2:
            wanted = "Q6_K"
    import gguf

    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] for kind in (wanted, "Q8_0")}
    return next((kind for kind, size in sizes.items() if shape[-1] % size == 0), "F16")


def encode(array: Any, kind: str) -> Any:
    """Return `array` (floats [..., row], the converter's lazy ones too) as raw bytes, K-quants by `libgguf`."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):  # which gguf reads and does not write
        getattr(gguf.quants, kind).quantize_blocks = partial(import_module("libgguf").quantize_rows, qtype=number)
    return gguf.quants.quantize(array, number)


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
            hint="export it with --to merged",
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
    merged = ["".join(pair).replace(" ", "") for pair in model["merges"]]
    ranks = {piece: rank for rank, piece in reversed(list(enumerate(merged)))}

    def piece(number: int) -> tuple[bytes, float, int]:
        text = texts.get(number, f"[PAD{number}]")
        if number not in texts:
            return text.encode(), 0.0, TokenType.UNUSED
        if text == model.get("unk_token"):
            return text.encode(), 0.0, TokenType.UNKNOWN
        if number in added and not added[number].get("special"):
            return text.replace("\u2581", " ").encode(), 0.0, TokenType.USER_DEFINED
        if number in added:
            return text.encode(), 0.0, TokenType.CONTROL
        if re.fullmatch("<0x[0-9A-F]{2}>", text):
            return text.encode(), 0.0, TokenType.BYTE
        return text.encode(), -float(ranks.get(text, len(ranks))), TokenType.NORMAL

    pieces, scores, types = zip(*map(piece, range(size)), strict=True)
    return list(pieces), list(scores), list(types)


def special_settings(folder: Path) -> dict[str, Any]:
    """Return the keys below `tokenizer.`: the template, the ids that begin, end and fill a text, and whether llama.cpp
    puts a first and a last token around it.

    Raises UsageError for a folder that names no end: the exported model would never stop.
    """
    facts, written = read_json(folder / DESCRIPTION), (folder / TEMPLATE).read_text(encoding="utf-8")
    # Each training row was rendered with this date in place of today's.
    template = _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), served_template(written))
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
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
