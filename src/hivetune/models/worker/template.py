"""A prepared model with values for the arguments of its chat template, such as `enable_thinking: false`.

The values become defaults in the template itself, in a folder of their own with the same weights. So whoever reads that
folder renders alike: training, evaluation of the base model, export and servers. A request may still choose others.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes

from hivetune.base.disk import MANIFEST, publish, read_json, write_json
from hivetune.data.render.template import environment
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, TEMPLATE, TemplateArguments

# What every template is given by whoever renders it.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")


def arguments_of(template: str) -> list[str]:
    """Return the names of the arguments that a template reads, sorted. Raises jinja2.TemplateError."""
    ours = environment()
    return sorted(meta.find_undeclared_variables(ours.parse(template)) - ours.globals.keys() - set(_GIVEN))


def _set_in(template: str) -> set[str]:
    """Return the names that a template sets itself somewhere, which are hardly meant as arguments."""
    names = environment().parse(template).find_all(nodes.Name)
    return {name.name for name in names if name.ctx == "store"}


def with_defaults(template: str, arguments: TemplateArguments) -> str:
    """Return the template with a default for each argument that it reads."""
    read = arguments_of(template)
    chosen = [(name, json.dumps(value, ensure_ascii=False)) for name, value in arguments.items() if name in read]
    return "".join(f"{{%- set {name} = {name} | default({value}) %}}" for name, value in chosen) + template


def write_variant(folder: Path, target: Path, arguments: TemplateArguments) -> dict[str, Any]:
    """Write `target`: the prepared `folder` with these values in its templates; the content of its `hivetune.json`.
    Raises UsageError for an argument that none of them reads."""
    templates = [folder / TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]
    texts = {path: path.read_text(encoding="utf-8") for path in templates}
    read = sorted({name for text in texts.values() for name in arguments_of(text)})
    described = read_json(folder / DESCRIPTION)
    for name in arguments:
        if name not in read:
            others = ", ".join(sorted(set(read) - set().union(*map(_set_in, texts.values()))))
            hint = f"it reads: {others}" if others else "it reads none: leave out `template`"
            raise UsageError(f"the chat template of {described['name']} does not read {name}", hint=hint)
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(folder, work, copy_function=_link, ignore=shutil.ignore_patterns(MANIFEST, DESCRIPTION))
        for path, text in texts.items():
            copy = work / path.relative_to(folder)
            copy.unlink()
            copy.write_text(with_defaults(text, arguments), encoding="utf-8")
        digest = hashlib.sha256((work / TEMPLATE).read_bytes()).hexdigest()
        described = {**described, "template_sha256": digest}
        write_json(work / DESCRIPTION, described)
        publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return described


def _link(source: str, target: str) -> None:
    """Give the same bytes a second name where the file system allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
