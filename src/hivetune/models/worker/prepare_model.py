"""The preparation of one model folder, which all other modules read, from the Hub, a folder or a package.

Weights that are safetensors already are linked, not copied. Pickles and remote code are refused. The result of the task
is the content of `hivetune.json`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes
from tokenizers import Tokenizer

from hivetune.base.disk import MANIFEST, parse_json, publish, read_json, write_json
from hivetune.base.paths import real_path
from hivetune.base.private import read_bounded
from hivetune.data.render.folder import check_vocabulary, named_templates
from hivetune.data.render.template import environment
from hivetune.errors import UsageError
from hivetune.models.prepared import (
    DESCRIPTION,
    NAMED_TEMPLATES,
    PACKAGED,
    TEMPLATE,
    WEIGHTS,
    WEIGHTS_INDEX,
    TemplateArguments,
    all_settings,
    kind_of,
    without_part,
)
from hivetune.models.worker.sources import download, packaged_file, take_gguf
from hivetune.models.worker.weights import INCOMPLETE, check_weights, open_weights
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
KERNELS = "hivetune.train.worker.model.fast.build"  # run in a process of its own: a worker below this one
# What every template is given by whoever renders it.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def main(task: PrepareModel, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    # The kernels are compiled now, where a wait is expected, and not in the first run, which reports a failure itself.
    command = [sys.executable, "-m", KERNELS]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as compiling:
        try:
            return prepare_model(
                task.model, task.target, offline=task.offline, template=task.template, plain=task.plain
            )
        except BaseException:
            compiling.kill()
            raise


def prepare_model(
    name: str,
    target: Path,
    *,
    offline: bool = False,
    template: TemplateArguments | None = None,
    plain: Path | None = None,
) -> dict[str, Any]:
    """Write the prepared folder `target`, its manifest last; return the content of its `hivetune.json`.

    `template`: values for arguments of the chat template of `plain`, the folder prepared without them.

    Raises: UsageError for a model that does not exist, has pickles or remote code, or has no chat template;
    MachineNotFit without a network or a package; DoesNotFit if the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # By process, so that of two that prepare one model neither writes into the other's copy: the last one stays.
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if plain and template:
            described = write_variant(plain, work, template)
        else:
            described = _prepare(name, target, work, offline=offline)
        write_json(work / DESCRIPTION, described)
        publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return described


def _prepare(name: str, target: Path, work: Path, *, offline: bool) -> dict[str, Any]:
    kind, whole = kind_of(name), without_part(name)
    described: dict[str, Any] = {"schema": 1, "name": name, "kind": kind, "revision": None}
    if kind == "hub":
        described["source"], described["revision"], folder = download(whole, offline=offline)
        _take_folder(folder, work, name)
    elif kind == "folder":
        described["source"] = str(real_path(whole))
        _take_folder(real_path(whole), work, name)
    else:
        file = packaged_file(*PACKAGED[whole])
        described["source"] = file.name
        take_gguf(file, work)
    if name != whole:  # what PEFT has to load the adapter on is this folder: the text part exists nowhere else
        described |= {"kind": "folder", "source": str(target), "revision": None}
    described |= _special_ids(work, name)
    _settle_template(work, name)
    write_json(work / DESCRIPTION, described)
    # transformers and torch take seconds to import: after network, files and template have had their say, so that what
    # is wrong there is said at once.
    from hivetune.models.worker.strict import check_against_config, check_kind, read_config, take_text_part

    config = read_config(work, name)
    if name != whole:
        take_text_part(work, config, name)
    else:
        check_kind(config, name)
    check_weights(work, name)
    sizes = check_against_config(work, name)
    check_vocabulary(work, sizes["vocabulary"], name)
    return {**described, "sizes": sizes}


def _take_folder(folder: Path, work: Path, name: str) -> None:
    # CVE-2026-4372: a repository named here is downloaded and imported where the package `kernels` is installed.
    for setting, value in all_settings(_read_object(folder / "config.json", name)):
        if "_implementation" in setting and "/" in str(value):
            raise UsageError(
                f"model {name} needs code of its repository ({setting}: {value}), which is never run",
                hint="use another model, or remove the field from config.json in a copy",
            )
    files = _weight_files(folder, name)
    open_weights(folder)  # a file that is cut is named as its owner knows it, and before torch is imported
    for file in files:
        link_file(folder / file, work / file)
    named = [f"{NAMED_TEMPLATES}/{path.name}" for path in (folder / NAMED_TEMPLATES).glob("*.jinja")]
    for file in (file for file in (*COPIED, *named) if (folder / file).is_file()):
        (work / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / file, work / file)
    if not (work / "tokenizer.json").exists():  # older formats: tokenizer.model, vocab.json
        raise UsageError(
            f"model {name} has no tokenizer.json",
            hint="write it into a copy: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )


def _weight_files(folder: Path, name: str) -> list[str]:
    """Return the safetensors files of a model folder, the index first. Raises UsageError; pickles are never a
    fallback."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        named = _read_object(folder / WEIGHTS_INDEX, name).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
            raise UsageError(f"model {name}: {WEIGHTS_INDEX} has no weight_map", hint=INCOMPLETE)
        shards = sorted(set(named.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors") or not (folder / shard).is_file():
                fault = f"{WEIGHTS_INDEX} names {shard}, which is missing or outside the folder"
                raise UsageError(f"model {name}: {fault}", hint=INCOMPLETE)
        return [WEIGHTS_INDEX, *shards]
    if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES):
        raise UsageError(
            f"model {name} has pickled weights ({pickles[0]}), which can run code when they are loaded",
            hint="use a model with *.safetensors, or convert it where you trust it: save_pretrained(folder)",
        )
    raise UsageError(f"model {name} has no *.safetensors", hint="use a folder that save_pretrained wrote")


def _settle_template(work: Path, name: str) -> None:
    """Write the model's chat template to its own file if it has none."""
    path = work / TEMPLATE
    if not path.is_file():
        settings = _read_object(work / "tokenizer_config.json", name, {})
        template = named_templates(settings.get("chat_template")).get("default", "")
        if not template.strip():
            raise UsageError(
                f"model {name} has no chat template, so it was not trained to chat",
                hint=f"use its -Instruct or -Chat variant, or put a {TEMPLATE} into a local copy of its folder",
            )
        path.write_text(template, encoding="utf-8")


def _special_ids(work: Path, name: str) -> dict[str, Any]:
    """Return the token ids that end an answer (from all of the model's files), and those of the padding and first
    tokens.
    """
    found: dict[str, list[int]] = {"eos": [], "pad": [], "bos": []}
    for file in ("generation_config.json", "config.json"):
        settings = _read_object(work / file, name, {})
        for kind, ids in found.items():
            value = settings.get(f"{kind}_token_id")  # a number, a list of them, or nothing
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
                raise UsageError(f"model {name}: {file}: {kind}_token_id is {value!r}, not a token id: correct it")
            ids += [number for number in numbers if number >= 0]  # Llama 1 has -1
    tokenizer = _read_object(work / "tokenizer.json", name)
    try:
        Tokenizer.from_file(str(work / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        fault = f"tokenizer.json is not a tokenizer: {str(error)[:200]}"
        raise UsageError(f"model {name}: {fault}", hint=INCOMPLETE) from None
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _read_object(work / file, name, {})
        for kind, ids in found.items():
            token = settings.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            ids += [added[token]] if isinstance(token, str) and token in added else []
    first = {f"{kind}_id": found[kind][0] if found[kind] else None for kind in ("pad", "bos")}
    return {"eos_ids": sorted(set(found["eos"])), **first}


def _read_object(path: Path, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file of the model `name`; `default`, if one is given, for a missing file."""
    if default is not None and not path.is_file():
        return default
    try:
        return parse_json(read_bounded(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"model {name}: {path.name}: {reason}", hint=INCOMPLETE) from None


# Values for the arguments of a chat template, such as `enable_thinking: false`. They become defaults in the template
# itself, in a folder of their own with the same weights. So whoever reads that folder renders alike: training,
# evaluation of the base model, export and servers. A request may still choose others.


def arguments_of(template: str) -> list[str]:
    """Return the names of the arguments that a template reads, sorted. Raises jinja2.TemplateError."""
    ours = environment()
    return sorted(meta.find_undeclared_variables(ours.parse(template)) - ours.globals.keys() - set(_GIVEN))


def with_defaults(template: str, arguments: TemplateArguments) -> str:
    """Return the template with a default for each argument that it reads."""
    read = arguments_of(template)
    chosen = [(name, json.dumps(value, ensure_ascii=False)) for name, value in arguments.items() if name in read]
    return "".join(f"{{%- set {name} = {name} | default({value}) %}}" for name, value in chosen) + template


def write_variant(folder: Path, work: Path, arguments: TemplateArguments) -> dict[str, Any]:
    """Write a copy of the prepared `folder`, with these values as defaults in its templates, into the empty folder
    `work`. Return the content of its `hivetune.json`. Raises UsageError for an argument that no template reads."""
    templates = [folder / TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]
    texts = {path: path.read_text(encoding="utf-8") for path in templates}
    read = sorted({name for text in texts.values() for name in arguments_of(text)})
    described = read_json(folder / DESCRIPTION)
    for name in arguments:
        if name not in read:
            parsed = [environment().parse(text).find_all(nodes.Name) for text in texts.values()]
            # A name that a template sets for itself is read too, and hardly meant as an argument.
            set_inside = {node.name for names in parsed for node in names if node.ctx == "store"}
            others = ", ".join(each for each in read if each not in set_inside)
            hint = f"it reads: {others}" if others else "it reads none: leave out `template`"
            raise UsageError(f"the chat template of {described['name']} does not read {name}", hint=hint)
    ignored = shutil.ignore_patterns(MANIFEST, DESCRIPTION)
    shutil.copytree(folder, work, copy_function=link_file, ignore=ignored, dirs_exist_ok=True)
    for path, text in texts.items():
        copy = work / path.relative_to(folder)
        copy.unlink()  # a second name of the plain folder's file
        copy.write_text(with_defaults(text, arguments), encoding="utf-8")
    return described


def link_file(source: str | Path, target: str | Path) -> None:
    """Link `target` to the bytes of `source` if the file system allows it, else copy them."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
