"""The renderer of a model's folder: its tokenizer, its chat templates and the names of its special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.data.render.renderer import Renderer, token_id
from hivetune.data.render.template import RenderError
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, TEMPLATE

# What tokens and masks depend on, for the key of a snapshot.
RENDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    f"{NAMED_TEMPLATES}/tool_use.jinja",
    DESCRIPTION,
)


def load_renderer(model_folder: Path) -> Renderer:
    """The renderer of a prepared model (or of any folder with tokenizer.json and a chat template).

    Raises UsageError when the folder lacks a file, MachineNotFit when the template can't hold a conversation.
    """
    try:
        tokenizer = Tokenizer.from_str((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((model_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        known = _read_optional(model_folder / DESCRIPTION)
        variables = _special_tokens(_read_optional(model_folder / "special_tokens_map.json")) | _special_tokens(
            settings
        )
        templates = _templates(model_folder, settings.get("chat_template"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model_folder} is not a prepared model folder: {error}", hint="hivetune fetch MODEL"
        ) from None
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise UsageError(f"{model_folder}/tokenizer.json can't be read: {error}", hint="hivetune fetch MODEL") from None
    if "default" not in templates:
        raise UsageError(
            f"{model_folder} has no chat template"
            + (f" named default, only {', '.join(templates)}" if templates else ""),
            hint=f"use an instruction-tuned model, or add {TEMPLATE}",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if known.get("pad_id") is not None:
        variables["pad_token"] = tokenizer.id_to_token(known["pad_id"])
    eos_ids = known.get("eos_ids") or [token_id(tokenizer, variables.get("eos_token"))]
    eos_ids = [i for i in eos_ids if i is not None]
    if not eos_ids:
        raise UsageError(f"{model_folder} names no end token", hint="set eos_token in tokenizer_config.json")
    try:
        return Renderer(tokenizer, templates, variables, eos_ids)
    except RenderError as error:
        raise MachineNotFit(
            f"the chat template of {model_folder} can't render a question and its answer: {error.hint}",
            hint="use the template that belongs to the model",
        ) from None
    except RecursionError:
        raise MachineNotFit(
            f"the chat template of {model_folder} calls itself without end",
            hint="use the template that belongs to the model",
        ) from None


def named_templates(kept: Any) -> dict[str, str]:
    """The templates in `chat_template` of tokenizer_config.json, by name: one text, or a list of named ones."""
    if isinstance(kept, str):
        kept = [{"name": "default", "template": kept}]
    found = {}
    for entry in kept if isinstance(kept, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            found[entry["name"]] = entry["template"]
    if len(found) == 1:
        return {"default": next(iter(found.values()))}
    return found


def _templates(folder: Path, kept: Any) -> dict[str, str]:
    """By name, without empty ones; a file goes before tokenizer_config.json, as in transformers."""
    found = named_templates(kept)
    if (folder / TEMPLATE).exists():
        found["default"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return {name: text for name, text in found.items() if name in ("default", "tool_use") and text.strip()}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names such as bos_token with their text, as templates use them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key.endswith("_token") and not key.startswith("add_"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
