"""Whether a model folder's tokenizer, chat template and end tokens belong to its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.template import RenderError
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, TEMPLATE
from hivetune.records import Example, Message

# Embeddings are padded: by at most 2.4 % in published models (DeepSeek Coder: 102,400 rows, 100,016 tokens), and to a
# multiple of 64 in small ones. More means another model's tokenizer.
MOST_ROWS_A_TOKEN = 1.25
MOST_PADDING = 64


def check_vocabulary(folder: Path, rows: int, name: str) -> None:
    """`rows`: of the input embedding. Raises UsageError for a tokenizer of another model, and for a chat template that
    ends an answer with another token than those that end generation."""
    described = read_json(folder / DESCRIPTION)
    _check_tokens(folder, rows, described, name)
    _check_end(folder, described["eos_ids"], name)


def _check_tokens(folder: Path, rows: int, described: Mapping[str, Any], name: str) -> None:
    tokenizer = read_json(folder / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    learned = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    hint = "tokenizer.json and *.safetensors have to be of one model"
    if learned >= rows:
        raise UsageError(f"model {name}: its tokenizer has token {learned}, its embedding only {rows} rows", hint=hint)
    # Gemma 3's text models keep a token for images that has no row: nothing writes it. A token that is written has one.
    template = (folder / TEMPLATE).read_text(encoding="utf-8")
    ends = [*described["eos_ids"], described["pad_id"], described["bos_id"]]
    for token, number in added.items():
        if number >= rows and (number in ends or token in template):
            raise UsageError(
                f"model {name}: token {token} is number {number}, its embedding has {rows} rows", hint=hint
            )
    lost = [number for number in described["eos_ids"] if not 0 <= number < rows]
    if lost:
        raise UsageError(f"model {name}: end token {lost[0]} is outside of its {rows} tokens", hint=hint)
    tokens = 1 + max(learned, *added.values(), 0)
    if rows > MOST_ROWS_A_TOKEN * tokens + MOST_PADDING:
        raise UsageError(f"model {name}: its embedding has {rows} rows, its tokenizer only {tokens} tokens", hint=hint)


def _check_end(folder: Path, eos_ids: list[int], name: str) -> None:
    """A model that learns to end its answers with a token that no server stops at never stops."""
    renderer = load_renderer(folder)
    said = Example("end", "end", (Message("user", "Is it so?"), Message("assistant", "It is.")))
    try:
        rendered = renderer.render(said)[-1]
    except RenderError as error:
        raise UsageError(
            f"model {name}: its chat template can't write a question and its answer: {error.hint or error.reason}",
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
