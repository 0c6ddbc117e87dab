"""The renderer of a model's folder, from its tokenizer, chat templates and special tokens, and its checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import read_json
from hivetune.data.render.renderer import Renderer, token_id
from hivetune.data.render.template import RenderError
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, NAMED_TEMPLATES, TEMPLATE
from hivetune.records import Example, Message

# The files that tokens and masks depend on, for the key of a snapshot.
RENDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    f"{NAMED_TEMPLATES}/tool_use.jinja",
    DESCRIPTION,
)


def load_renderer(model_folder: Path, name: str = "") -> Renderer:
    """Return the renderer of a prepared model, or of any folder with tokenizer.json and a chat template.

    `name` is the model's own while the folder is still being prepared. Raise UsageError if a file is missing, or if the
    template can't render a conversation.
    """
    model = f"model {name}" if name else str(model_folder)
    whole = "get the model again" if name else "get the model again: hivetune fetch MODEL"
    try:
        tokenizer = Tokenizer.from_str((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((model_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        description = _read_optional(model_folder / DESCRIPTION)
        variables = _special_tokens(_read_optional(model_folder / "special_tokens_map.json")) | _special_tokens(
            settings
        )
        templates = _templates(model_folder, settings.get("chat_template"))
    except (OSError, ValueError) as error:
        reason = f"{Path(error.filename).name} is missing" if isinstance(error, FileNotFoundError) else error
        raise UsageError(f"{model} is incomplete: {reason}", hint=whole) from None
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise UsageError(f"{model}: tokenizer.json can't be read: {error}", hint=whole) from None
    if "default" not in templates:
        raise UsageError(
            f"{model} has no chat template" + (f" named default, only {', '.join(templates)}" if templates else ""),
            hint=f"use an instruction-tuned model, or add {TEMPLATE}",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if description.get("pad_id") is not None:
        variables["pad_token"] = tokenizer.id_to_token(description["pad_id"])
    eos_ids = description.get("eos_ids") or [token_id(tokenizer, variables.get("eos_token"))]
    eos_ids = [i for i in eos_ids if i is not None]
    if not eos_ids:
        raise UsageError(f"{model} has no end token", hint="set eos_token in its tokenizer_config.json")
    try:
        return Renderer(tokenizer, templates, variables, eos_ids)
    except (RenderError, RecursionError) as error:
        reason = error.hint if isinstance(error, RenderError) else "it calls itself without end"
        raise UsageError(
            f"{model}: its chat template can't render a question and its answer: {reason}",
            hint="use the template that belongs to the model",
        ) from None


def named_templates(entries: Any) -> dict[str, str]:
    """Return the templates in `chat_template` of tokenizer_config.json by name: one text, or a named list."""
    if isinstance(entries, str):
        entries = [{"name": "default", "template": entries}]
    templates = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            templates[entry["name"]] = entry["template"]
    if len(templates) == 1:
        return {"default": next(iter(templates.values()))}
    return templates


def _templates(folder: Path, entries: Any) -> dict[str, str]:
    """Return the templates by name; a file has precedence over tokenizer_config.json, as in transformers."""
    templates = named_templates(entries)
    if (folder / TEMPLATE).exists():
        templates["default"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return {name: text for name, text in templates.items() if name in ("default", "tool_use") and text.strip()}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return names such as bos_token with their text, as templates use them."""
    tokens: dict[str, Any] = {}
    for key, value in settings.items():
        if key.endswith("_token") and not key.startswith("add_"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _read_optional(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return value if isinstance(value, dict) else {}


# Embeddings are padded by at most 2.4 % in published models (DeepSeek Coder: 102,400 rows, 100,016 tokens), in small
# ones to a multiple of 64. More padding means that the tokenizer belongs to another model.
MAX_ROWS_PER_TOKEN = 1.25
MAX_PADDING = 64


def check_vocabulary(folder: Path, rows: int, name: str) -> None:
    """Raise UsageError if tokenizer, template and end tokens do not belong to weights with `rows` embeddings.

    Examples are the tokenizer of another model, or a template whose answers do not end with a token that ends
    generation.
    """
    described = read_json(folder / DESCRIPTION)
    tokenizer = read_json(folder / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    learned = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    hint = "tokenizer.json and *.safetensors have to be of one model"
    if learned >= rows:
        raise UsageError(
            f"model {name}: its tokenizer has the token id {learned}, but its embedding has only {rows} rows", hint=hint
        )
    # Gemma 3's text models have a token for images without a row, which nothing writes. Written tokens need a row.
    template = (folder / TEMPLATE).read_text(encoding="utf-8")
    ends = [*described["eos_ids"], described["pad_id"], described["bos_id"]]
    for token, number in added.items():
        if number >= rows and (number in ends or token in template):
            raise UsageError(
                f"model {name}: token {token} is number {number}, its embedding has {rows} rows", hint=hint
            )
    lost = [number for number in described["eos_ids"] if not 0 <= number < rows]
    if lost:
        raise UsageError(
            f"model {name}: its end token has the id {lost[0]}, but its embedding has only {rows} rows", hint=hint
        )
    tokens = 1 + max(learned, *added.values(), 0)
    if rows > MAX_ROWS_PER_TOKEN * tokens + MAX_PADDING:
        raise UsageError(
            f"model {name}: its embedding has {rows} rows, but its tokenizer has only {tokens} tokens", hint=hint
        )
    _check_end(folder, described["eos_ids"], name)


def _check_end(folder: Path, eos_ids: list[int], name: str) -> None:
    """Check the last token of an answer: if no server stops at it, the model never stops."""
    renderer = load_renderer(folder, name)
    sample = Example("end", "end", (Message("user", "Is it so?"), Message("assistant", "It is.")))
    try:
        rendered = renderer.render(sample)[-1]
    except RenderError as error:
        raise UsageError(
            f"model {name}: its chat template can't render a question and its answer: {error.hint or error.reason}",
            hint=f"use the {TEMPLATE} and the tokenizer of the model's publisher",
        ) from None
    written = rendered.tokens[rendered.trained.rindex(1)]
    if written not in eos_ids:
        named = ", ".join(repr(renderer.decode([number])) for number in eos_ids) or "none"
        raise UsageError(
            f"model {name}: its chat template ends an answer with {renderer.decode([written])!r}, "
            f"which is not among its end tokens ({named})",
            hint="use its -Instruct variant, or name that token as eos_token in tokenizer_config.json of a local copy",
        )
