"""Makes one prepared folder, which every other part reads, of a model from the Hub, a folder, a GGUF file or a package.

Weights are linked, not copied, where they are safetensors already. Pickles and remote code are refused. This module
imports torch only for GGUF files and old tokenizers, so that a missing network is reported at once. The result of the
task is the content of `hivetune.json`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import publish, write_json
from hivetune.base.paths import real_path
from hivetune.base.private import read_bounded
from hivetune.data.render.folder import check_vocabulary, named_templates
from hivetune.errors import UsageError
from hivetune.models.prepared import (
    DESCRIPTION,
    NAMED_TEMPLATES,
    PACKAGED,
    SCHEMA,
    TEMPLATE,
    WEIGHTS,
    WEIGHTS_INDEX,
    all_settings,
    kind_of,
    without_part,
)
from hivetune.models.worker.hub import download
from hivetune.models.worker.template import write_variant
from hivetune.models.worker.weights import NOT_WHOLE, check_tied, check_weights, open_weights
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, PrepareModel

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
)
MAX_JSON_BYTES = 64 << 20  # the index of a model of 1,000 shards has 10 MB
KERNELS = "hivetune.train.worker.model.fast.kernels.build"  # run in a process of its own: a worker below this one
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def main(task: PrepareModel, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    if task.template:
        return write_variant(task.plain, task.target, task.template)
    compiling = list[subprocess.Popen[bytes]]()

    def compile_kernels() -> None:
        """Compile the kernels now, where a wait is expected, and not in the first run. Each run reports a failure by
        itself."""
        command = [sys.executable, "-m", KERNELS]
        compiling.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    try:
        return prepare_model(task.model, task.target, offline=task.offline, on_slow=compile_kernels)
    finally:
        for process in compiling:
            process.wait()


def prepare_model(
    name: str, target: Path, *, offline: bool = False, on_slow: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write the prepared folder `target`, its manifest last; the content of its `hivetune.json`.

    `on_slow` is called when what could be wrong at first sight is not, and seconds of one core are left to do.

    Raises: UsageError for a model that is not there, holds pickles or remote code, or has no chat template;
    MachineNotFit without a network or a package; DoesNotFit when the disk has no room.
    """
    kind, whole = kind_of(name), without_part(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        revision = None
        if kind == "hub":
            source, revision, folder = download(whole, offline=offline)
            _take_folder(folder, work, name)
        elif kind == "folder":
            folder = real_path(whole)
            source = str(folder)
            _take_folder(folder, work, name)
        else:
            from hivetune.models.worker.gguf_model import packaged_file, take_gguf

            file = packaged_file(*PACKAGED[whole]) if kind == "package" else real_path(whole)
            source = file.name if kind == "package" else str(file)
            on_slow()
            take_gguf(file, work)
        described = {"schema": SCHEMA, "name": name, "kind": kind, "source": source, "revision": revision}
        if name != whole:  # what PEFT has to load the adapter on is this folder: the text part exists nowhere else
            described |= {"kind": "folder", "source": str(target), "revision": None}
        described |= _special_ids(work, name) | {"template_sha256": _settle_template(work, name)}
        write_json(work / DESCRIPTION, described)
        if kind in ("hub", "folder"):
            on_slow()
        described["sizes"] = _check(work, name, text_part=name != whole)
        write_json(work / DESCRIPTION, described)
        publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return described


def _check(work: Path, name: str, *, text_part: bool) -> dict[str, Any]:
    """Return the model's sizes. Raises UsageError where tensors, vocabulary or template are not what the folder
    claims."""
    # transformers and torch take seconds: after the network and the template have had their say.
    from hivetune.models.worker.strict import check_against_config, check_kind, read_config, take_text_part

    config = read_config(work, name)
    if text_part:
        take_text_part(work, config, name)
    else:
        check_kind(config, name)
    check_weights(work, name)
    tied, sizes = check_against_config(work, name)
    check_tied(work, tied, name)
    check_vocabulary(work, sizes["vocabulary"], name)
    return sizes


def _take_folder(folder: Path, work: Path, name: str) -> None:
    """Link the weights and copy the small files of a transformers folder."""
    check_no_remote_code(folder, _read_object(folder / "config.json", name), name)
    files = weight_files(folder, name)
    open_weights(folder)  # a file that is cut is named as its owner knows it, and before torch is imported
    for file in files:
        try:  # the same bytes get a second name where the file system allows it
            os.link((folder / file).resolve(), work / file)
        except OSError:
            shutil.copyfile(folder / file, work / file)
    for file in COPIED:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, work / file)
    for named in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        (work / NAMED_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(named, work / NAMED_TEMPLATES / named.name)
    if not (work / "tokenizer.json").exists():
        _convert_tokenizer(folder, work, name)


def weight_files(folder: Path, name: str) -> list[str]:
    """Return the safetensors files of a model folder, the index first. Raises UsageError; pickles are never a
    fallback."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        index = _read_object(folder / WEIGHTS_INDEX, name)
        named = index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
            raise UsageError(f"model {name}: {WEIGHTS_INDEX} has no weight_map", hint=NOT_WHOLE)
        shards = sorted(set(named.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        unsafe = [shard for shard in shards if Path(shard).name != shard or not shard.endswith(".safetensors")]
        if missing or unsafe:
            raise UsageError(
                f"model {name}: {WEIGHTS_INDEX} names {(unsafe or missing)[0]}, which is missing or outside the folder",
                hint=NOT_WHOLE,
            )
        if not isinstance(index.get("metadata"), dict):  # transformers reads no index without
            raise UsageError(f"model {name}: {WEIGHTS_INDEX} has no metadata", hint='add "metadata": {} to a copy')
        return [WEIGHTS_INDEX, *shards]
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise UsageError(
            f"model {name} has pickled weights ({pickles[0]}), which can run code when they are loaded",
            hint="use a model with *.safetensors, or convert it where you trust it: save_pretrained(folder)",
        )
    raise UsageError(f"model {name} has no *.safetensors", hint="use a folder that save_pretrained wrote")


def check_no_remote_code(folder: Path, config: dict[str, Any], name: str) -> None:
    """Raise UsageError for a model that needs its own Python code."""
    if any("auto_map" in some for some in (config, _read_settings(folder / "tokenizer_config.json", name))):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise UsageError(
                f"model {name} needs its own Python code (auto_map), which is never run",
                hint="use a model whose architecture transformers knows",
            )
    # CVE-2026-4372: a repository named here is downloaded and imported where the package `kernels` is installed.
    kernels = [f"{key}: {v}" for key, v in all_settings(config) if "_implementation" in key and "/" in str(v)]
    if kernels:
        raise UsageError(
            f"model {name} names code of a repository ({kernels[0]}), which is never run",
            hint="remove the field from a copy of its config.json",
        )


def _convert_tokenizer(folder: Path, work: Path, name: str) -> None:
    """Write a tokenizer of an older format (tokenizer.model, vocab.json) as tokenizer.json."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model {name}: cannot read its tokenizer: {reason}", hint=NOT_WHOLE) from None
    if not tokenizer.is_fast:
        raise UsageError(f"model {name} has no tokenizer.json, and its tokenizer can't be converted into one")
    tokenizer.save_pretrained(work)


def _settle_template(work: Path, name: str) -> str:
    """Write the model's chat template to its own file; return its SHA-256."""
    path = work / TEMPLATE
    if not path.is_file():
        settings = _read_settings(work / "tokenizer_config.json", name)
        template = named_templates(settings.get("chat_template")).get("default", "")
        if not template.strip():
            raise UsageError(
                f"model {name} has no chat template, so it was not trained to chat",
                hint=f"use its -Instruct or -Chat variant, or put a {TEMPLATE} into a local copy of its folder",
            )
        path.write_text(template, encoding="utf-8")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _special_ids(work: Path, name: str) -> dict[str, Any]:
    """Return the ids that end an answer (all that any of the model's files names), and those of the padding and
    first tokens."""
    ids_by_kind: dict[str, list[int]] = {"eos": [], "pad": [], "bos": []}
    for file in ("generation_config.json", "config.json"):
        settings = _read_settings(work / file, name)
        for kind, ids in ids_by_kind.items():
            value = settings.get(f"{kind}_token_id")  # a number, a list of them, or nothing
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
                raise UsageError(f"model {name}: {file}: {kind}_token_id is {value!r}, not a token id")
            ids += [number for number in numbers if number >= 0]  # Llama 1 has -1
    added = _added_tokens(work, name)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        names = _read_settings(work / file, name)
        for kind, ids in ids_by_kind.items():
            token = names.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            ids += [added[token]] if isinstance(token, str) and token in added else []
    return {
        "eos_ids": sorted(set(ids_by_kind["eos"])),
        "pad_id": ids_by_kind["pad"][0] if ids_by_kind["pad"] else None,
        "bos_id": ids_by_kind["bos"][0] if ids_by_kind["bos"] else None,
    }


def _added_tokens(work: Path, name: str) -> dict[str, int]:
    """Return the control tokens by their text, from a valid tokenizer.json. Raises UsageError."""
    tokenizer = _read_object(work / "tokenizer.json", name)
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise UsageError(
            f"model {name}: tokenizer.json is not a tokenizer: {str(error)[:200]}", hint=NOT_WHOLE
        ) from None
    return {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []}


def _read_settings(path: Path, name: str) -> dict[str, Any]:
    """Return the object of a file that a model may lack."""
    return _read_object(path, name) if path.is_file() else {}


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read_bounded(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UsageError(f"model {name}: {path.name}: {error.strerror}", hint="is it a model folder?") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {name}: {path.name} is not JSON: {error}", hint=NOT_WHOLE) from None
    if not isinstance(value, dict):
        raise UsageError(f"model {name}: {path.name} is not a JSON object", hint=NOT_WHOLE)
    return value
