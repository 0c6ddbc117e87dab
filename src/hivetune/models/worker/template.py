"""A prepared model with values for the arguments of its chat template, such as `enable_thinking: false`.

The values become defaults in the template itself, in a folder of their own with the same weights. So whoever reads that
folder renders alike: training, evaluation of the base model, export and servers. A request may still choose others.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes

from hivetune.base.disk import MANIFEST, read_json
from hivetune.data.render.template import environment
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, TEMPLATE, TemplateArguments

# What every template is given by whoever renders it.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")


def arguments_of(template: str) -> list[str]:
    """Return the names of the arguments that a template reads, sorted. Raises jinja2.TemplateError."""
    ours = environment()
    return sorted(meta.find_undeclared_variables(ours.parse(template)) - ours.globals.keys() - set(_GIVEN))


def _names(template: str) -> Iterator[nodes.Name]:
    return environment().parse(template).find_all(nodes.Name)


def with_defaults(template: str, arguments: TemplateArguments) -> str:
    """Return the template with a default for each argument that it reads."""
    read = arguments_of(template)
    chosen = [(name, json.dumps(value, ensure_ascii=False)) for name, value in arguments.items() if name in read]
    return "".join(f"{{%- set {name} = {name} | default({value}) %}}" for name, value in chosen) + template


def write_variant(folder: Path, work: Path, arguments: TemplateArguments) -> dict[str, Any]:
    """Write into the empty `work` the prepared `folder` with these values in its templates. Return the content of its
    `hivetune.json`. Raises UsageError for an argument that none of them reads."""
    templates = [folder / TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]
    texts = {path: path.read_text(encoding="utf-8") for path in templates}
    read = sorted({name for text in texts.values() for name in arguments_of(text)})
    described = read_json(folder / DESCRIPTION)
    for name in arguments:
        if name not in read:
            set_inside = {node.name for text in texts.values() for node in _names(text) if node.ctx == "store"}
            others = ", ".join(each for each in read if each not in set_inside)
            hint = f"it reads: {others}" if others else "it reads none: leave out `template`"
            raise UsageError(f"the chat template of {described['name']} does not read {name}", hint=hint)
    ignored = shutil.ignore_patterns(MANIFEST, DESCRIPTION)
    shutil.copytree(folder, work, copy_function=link_file, ignore=ignored, dirs_exist_ok=True)
    for path, text in texts.items():
        copy = work / path.relative_to(folder)
        copy.unlink()
        copy.write_text(with_defaults(text, arguments), encoding="utf-8")
    described["template_sha256"] = hashlib.sha256((work / TEMPLATE).read_bytes()).hexdigest()
    return described


def link_file(source: str | Path, target: str | Path) -> None:
    """Give the same bytes a second name where the file system allows it, else copy them."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
