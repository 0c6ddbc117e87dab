"""The writing of a whole model or a LoRA adapter as a GGUF file by llama.cpp's own scripts, which run unmodified.

They read a staged folder, whose files match the training: the weights (merged in float32 if there is an adapter), the
config with the names and limits that llama.cpp uses, the chat template as training rendered it, the end tokens of an
answer and the first token. A model that the scripts can't read is refused; a written file is proven (release/prove.py).
"""

import errno
import json
import logging
import math
import os
import re
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hivetune.base.disk import read_json, scratch_folder, sync, write_json
from hivetune.base.paths import install_command
from hivetune.data.render.template import fixed_date, served_template
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.architecture import PREFIX
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, TEMPLATE, display_name
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, WriteGguf
from hivetune.release.worker.merge import merge, read_parts
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG

MODEL_SCRIPT, ADAPTER_SCRIPT = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
# In a model whose name has this, llama.cpp strips what follows special tokens, as in Phi-3. It can't load one that
# lacks these (llama-vocab.cpp).
KEYED_NAME = re.compile("phi-?3", re.IGNORECASE)
KEYED_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE = "tokenizer.model"
# llama.cpp caps Gemma 4's logits at 30 where the file names no cap (llama-hparams.h). With this one a logit of 30
# changes by 1e-8.
NO_CAP = 1e6
# Without its kind in config.json the scripts read that file alone. transformers' config of GPT-NeoX drops rotary_pct.
# By the other kinds it takes a tokenizer class that replaces the word splitting of tokenizer.json with its own
# (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS): other token ids would be served than were trained.
KINDS_LEFT_OUT = ("gpt_neox", "qwen2", "qwen3_5_moe_text")


def main(task: WriteGguf, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    try:
        write(task, heartbeat)
    except ModuleNotFoundError as error:
        raise MachineNotFit(f"the package {error.name} is not installed", hint=install_command("export")) from None
    sync(task.file)
    return {"tensors": len(read_header(task.file).tensors)}


def write(task: WriteGguf, heartbeat: Heartbeat) -> None:
    """Write `task.file`. Raises UsageError for a model or an adapter that the scripts can't write completely,
    ModuleNotFoundError for a missing package, OSError for a full disk.
    """
    task.file.parent.mkdir(parents=True, exist_ok=True)
    # Links, which a run's folder may not hold, lie in the scratch folder. The merged copy is large: it lies beside.
    weights, merged = task.model, task.file.with_name(".merged")
    with scratch_folder() as scratch:
        staged = scratch / Path(display_name(task.model)).name  # the scripts derive names from the folder's
        try:
            if task.adapter is not None and task.quant is not None:
                merge(task.model, task.adapter, merged, heartbeat, exact=True)
                weights = merged
            stage(task.model, weights, staged)
            if task.quant is None:
                assert task.adapter is not None
                _write_adapter(task, task.adapter, staged, scratch / "adapter", heartbeat)
                return
            arguments = [str(staged), "--outfile", str(task.file), "--outtype", task.quant]
            _run_script(task, MODEL_SCRIPT, [*arguments, "--model-name", model_name(task.model)], staged, heartbeat)
            _end_context_with_window(task.file, read_json(staged / "config.json"))
        finally:
            shutil.rmtree(merged, ignore_errors=True)


# The staged folder.


def stage(model: Path, weights: Path, folder: Path) -> None:
    """Write the folder that llama.cpp's scripts read, from a prepared model with its own or merged weights. Raises
    UsageError for a model without an end token, because its export would never stop."""
    shutil.copytree(weights.resolve(), folder, copy_function=os.symlink, ignore=shutil.ignore_patterns(NAMED_TEMPLATES))
    document, template = read_json(model / TOKENIZER), (model / TEMPLATE).read_text(encoding="utf-8")
    files = {
        "config.json": json.dumps(staged_config(read_json(weights / "config.json"))).encode(),
        TOKENIZER_SETTINGS: json.dumps(tokenizer_settings(model, document)).encode(),
        TEMPLATE: fixed_date(served_template(template)).encode(),
    }
    if is_sentencepiece(document):
        files[SENTENCEPIECE] = sentencepiece_model(document)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)  # a link to the model's own
        (folder / name).write_bytes(content)


def staged_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the names that the scripts read and transformers 5 no longer writes."""
    staged, kind = dict(config), config.get("model_type")
    if kind in KINDS_LEFT_OUT:
        staged.pop("model_type")
    if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind)):
        staged["architectures"] = [architecture]
    rope = config.get("rope_parameters") or {}
    staged.setdefault("rotary_pct", rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if kind == "gpt2":
        staged.setdefault("n_ctx", config["n_positions"])
    elif kind == "falcon" and config["multi_query"] and not config["new_decoder_architecture"]:
        staged["num_kv_heads"] = 1  # transformers writes the number of heads there
    elif kind == "granitemoehybrid":
        staged["layer_types"] = [each.replace("full_attention", "attention") for each in config["layer_types"]]
    if "final_logit_softcapping" in config and config["final_logit_softcapping"] is None:
        staged["final_logit_softcapping"] = NO_CAP
    return staged


def tokenizer_settings(model: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with the end tokens, the first token and the kinds of tokens that training used.

    Raises UsageError for a folder that names no end token.
    """
    path, settings = model / TOKENIZER_SETTINGS, dict[str, Any](tokenizer_class="PreTrainedTokenizerFast")
    settings |= read_json(path) if path.is_file() else {}
    settings.pop("chat_template", None)  # its file has it
    facts, template = read_json(model / DESCRIPTION), (model / TEMPLATE).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(model / TOKENIZER))
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    ends = [texts[number] for number in facts["eos_ids"] if number in texts]
    if not ends:
        raise UsageError(f"{model} has no end-of-sequence token, so an export would never stop: train it again")
    # The end that the chat template writes ends a turn. llama.cpp knows the others by their text.
    settings["eos_token"] = min(ends, key=lambda end: end not in template)
    for name, number in (("bos_token", facts["bos_id"]), ("pad_token", facts["pad_id"])):
        settings.pop(name, None)
        if number in texts:
            settings[name] = texts[number]
    begins = tokenizer.encode("a").ids[:1] != tokenizer.encode("a", add_special_tokens=False).ids[:1]
    # A chat is trained as its template writes it, so a first token is added only where the template writes it too
    # (llama.cpp then keeps one of the two). Otherwise Gemma would get none, or two (ggml-org/llama.cpp#7062).
    begins &= "bos_token" in template or settings.get("bos_token", "\0") in template
    settings |= {"add_bos_token": begins, "add_eos_token": False}
    added = document.get("added_tokens") or []
    settings["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
    }
    settings["additional_special_tokens"] = [token["content"] for token in added if token.get("special")]
    if is_sentencepiece(document):
        # Whether a space is put before every text segment, as by Llama 2's. Metaspace's "first" puts it at the start of
        # the text only, where a chat prompt has a special token.
        steps = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
        settings["add_prefix_space"] = '"Prepend"' in steps or '"prepend_scheme": "always"' in steps
    return settings


def is_sentencepiece(document: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json was converted from SentencePiece: BPE with a fallback to bytes."""
    return document["model"].get("type") == "BPE" and bool(document["model"].get("byte_fallback"))


def sentencepiece_model(document: Mapping[str, Any]) -> bytes:
    """Return `tokenizer.model`, from which the scripts read pieces and scores, made of a tokenizer.json of
    SentencePiece's kind. Raises ModuleNotFoundError without the packages of the scripts.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    model, added = document["model"], {token["id"]: token for token in document.get("added_tokens") or []}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    merged = ["".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model["merges"]]
    # llama.cpp merges the neighbours whose joined piece has the highest score, BPE the pair with the lowest rank. Both
    # are the same when a piece's score is minus the rank of the first merge that makes it.
    ranks = {piece: rank for rank, piece in reversed(list(enumerate(merged)))}
    written = proto.ModelProto(trainer_spec={"model_type": proto.TrainerSpec.BPE, "byte_fallback": True})
    for number in range(max(texts) + 1):
        piece = written.pieces.add(piece=texts.get(number, f"[PAD{number}]"), score=0.0)
        if piece.piece == model.get("unk_token"):
            piece.type = piece.UNKNOWN
        elif number in added and not added[number].get("special"):
            piece.type = piece.USER_DEFINED
        elif number in added or number not in texts:
            piece.type = piece.CONTROL
        elif re.fullmatch("<0x[0-9A-F]{2}>", piece.piece):
            piece.type = piece.BYTE
        else:
            piece.type, piece.score = piece.NORMAL, -float(ranks.get(piece.piece, len(ranks)))
    serialized: bytes = written.SerializeToString()
    return serialized


def model_name(model: Path) -> str:
    """Return the base model's name, changed if llama.cpp would infer wrong special tokens from it."""
    added = read_json(model / TOKENIZER).get("added_tokens") or []
    name, tokens = display_name(model), {token["content"]: token for token in added}
    strips = any(token.get("special") and token.get("rstrip") for token in tokens.values())
    if not (strips and tokens.keys() >= KEYED_TOKENS):
        return KEYED_NAME.sub("phi", name)
    return name if KEYED_NAME.search(name) else f"{name} (phi-3)"


def _write_adapter(task: WriteGguf, adapter: Path, staged: Path, folder: Path, heartbeat: Heartbeat) -> None:
    """Write an adapter for a staged base. Raises UsageError if the script leaves a part of it out."""
    trained = stage_adapter(task.model, adapter, folder)
    arguments = ["--base", str(staged), "--outfile", str(task.file), str(folder)]
    _run_script(task, ADAPTER_SCRIPT, arguments, staged, heartbeat)
    shapes = read_header(task.file).tensors
    written = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".lora_b"))
    if written != trained:
        raise UsageError(
            f"llama.cpp's converter wrote {written:,} of the adapter's {trained:,} output weights",
            hint="use --to gguf, which merges the adapter",
        )


def stage_adapter(model: Path, adapter: Path, folder: Path) -> int:
    """Write the adapter to `folder` with the tensor names of the model's files; return the number of weights in its
    B's."""
    parts = read_parts(model, adapter)
    tensors = dict[str, Tensor]()
    for name, part in parts.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": part.a.contiguous(), f"{module}.lora_B.weight": part.b.contiguous()}
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / ADAPTER)
    # llama.cpp divides `lora_alpha` by the rank and knows no rank-stabilised scale.
    rank, scale = next((len(part.a), part.scale) for part in parts.values())
    write_json(folder / ADAPTER_CONFIG, {"r": rank, "lora_alpha": scale * rank})
    # The script turns what is stored transposed back, and may write A once for each part of a fused matrix.
    return sum((part.a if part.transposed else part.b).numel() for part in parts.values())


# The scripts.


class _Log(logging.Handler):
    """A handler of the script's log: each line counts as a heartbeat; errors are collected as reasons."""

    def __init__(self, heartbeat: Heartbeat):
        super().__init__()
        self.heartbeat, self.errors = heartbeat, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.heartbeat.beat(Beat.ITEM)
        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())


def _run_script(task: WriteGguf, script: str, arguments: list[str], staged: Path, heartbeat: Heartbeat) -> None:
    """Run one of llama.cpp's scripts in this process. Raises UsageError with the script's reason, ModuleNotFoundError,
    MemoryError, and OSError for the disk.
    """
    log, root = _Log(heartbeat), logging.getLogger()
    root.addHandler(log)
    root.setLevel(logging.INFO)
    sys.path[:0] = [str(task.converter), str(task.converter / "gguf-py")]
    try:
        if script == MODEL_SCRIPT:
            from conversion import get_model_class

            architecture = read_json(staged / "config.json")["architectures"][0]
            if get_model_class(architecture).supports_mtp_export:
                arguments = [*arguments, "--no-mtp"]  # heads that draft are not trained
        sys.argv = [script, *arguments]
        runpy.run_path(str(task.converter / script), run_name="__main__")
    except (MemoryError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            if error.errno is not None:
                raise
            # numpy's tofile reports a short write without its cause: "57920 requested and 7424 written".
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(task.file.parent)) from error
        reason = log.errors[-1] if log.errors else f"{type(error).__name__}: {error}"
        raise UsageError(f"llama.cpp's converter can't write this model: {reason}".splitlines()[0]) from error


def _end_context_with_window(file: Path, config: Mapping[str, Any]) -> None:
    """Limit the context to the attention window for models in which llama.cpp would attend beyond it.

    llama.cpp reads Phi-3's window but does not use it (its src/models/phi3.cpp: "currently disabled").
    """
    settings = read_header(file).settings
    name, window, kinds = settings["general.architecture"], config.get("sliding_window"), config.get("layer_types")
    slides = any("sliding" in str(kind) for kind in kinds) if kinds else config.get("use_sliding_window", True)
    used = f"{name}.attention.sliding_window" in settings and name != "phi3"
    context = f"{name}.context_length"
    if window and slides and not used and settings[context] > window:
        import gguf

        reader = gguf.GGUFReader(file, "r+")  # as llama.cpp's gguf_set_metadata.py does
        field = reader.fields[context]
        field.parts[field.data[0]][0] = window
        reader.data.flush()
