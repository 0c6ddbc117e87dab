"""The tokenizer of a prepared model folder as GGUF settings, so that llama.cpp makes the ids that were trained on.

Two families: byte-level BPE (`gpt2` in GGUF; the splitting rule is recognised from the tokenizer itself, never from
the model's name) and SentencePiece-like BPE with byte fallback (`llama`). Anything else is refused: a tokenizer that is
nearly right gives a model that is nearly right.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import read_json
from hivetune.data.render.template import TEMPLATE_DATE
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, TEMPLATE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

_DATE = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\)""")

# What llama.cpp calls a splitting rule, by the rule: a pattern, ("digits", singly), ("bytes", with GPT-2's pattern).
PRE_TOKENIZERS: Mapping[tuple[tuple[str, object], ...], str] = {
    (("bytes", True),): "gpt-2",
    (("digits", True), ("bytes", True)): "smollm",
    (("split", rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}"), ("bytes", False)): "llama-bpe",
    (("split", rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{_TAIL}"), ("bytes", False)): "qwen2",
    (
        ("split", rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_TAIL_SLASH}"),
        ("bytes", False),
    ): "tekken",
    (
        (
            "split",
            rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}{_TAIL_SLASH}",
        ),
        ("bytes", False),
    ): "gpt-4o",
}


@dataclass(frozen=True)
class Vocabulary:
    """Settings below `tokenizer.` by key. Lists: str, float or int elements, one kind each."""

    settings: Mapping[str, Any]


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a prepared folder, padded with unused tokens to `vocab_size` (rows of the embedding).

    Raises UsageError for a tokenizer that llama.cpp would not reproduce.
    """
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    if model.get("type") != "BPE":
        raise UsageError(f"GGUF export does not support {model.get('type')} tokenizers", hint="use --to merged")
    added = {int(token["id"]): token for token in document.get("added_tokens", [])}
    tokens, types = _tokens(model, added, vocab_size)
    byte_level = _is_byte_level(document)
    settings: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types}
    if byte_level:
        settings |= _byte_level_settings(document)
    else:
        settings |= _sentencepiece_settings(document, tokens, types)
    template = _template(folder)
    if template:
        settings["chat_template"] = template
    return Vocabulary({**settings, **_special_settings(folder, tokens, template, model)})


def _tokens(
    model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    texts: dict[int, str] = {int(number): text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= vocab_size:
        raise UsageError(f"the tokenizer has ids up to {max(texts)}, the model only {vocab_size} embeddings")
    tokens, types = [], []
    for number in range(vocab_size):
        text = texts.get(number)
        tokens.append(f"[PAD{number}]" if text is None else text)
        types.append(UNUSED if text is None else _type(text, added.get(number), model))
    return tokens, types


def _type(text: str, added: Mapping[str, Any] | None, model: Mapping[str, Any]) -> int:
    if text == model.get("unk_token") and model.get("byte_fallback"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added.get("special") else USER_DEFINED
    if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    return NORMAL


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    steps = [*_flat(document.get("pre_tokenizer"), "pretokenizers"), *_flat(document.get("decoder"), "decoders")]
    return any(step["type"] == "ByteLevel" for step in steps)


def _flat(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _byte_level_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    normalizers = {step["type"] for step in _flat(document.get("normalizer"), "normalizers")}
    if normalizers - {"NFC"}:  # llama.cpp normalizes nothing; text is NFC already but for rare rows
        raise UsageError(f"GGUF export does not support a byte-level tokenizer with {sorted(normalizers)}")
    rule = tuple(_rule(step) for step in _flat(document.get("pre_tokenizer"), "pretokenizers"))
    if rule not in PRE_TOKENIZERS:
        steps = ", ".join(f"{kind} {how}" for kind, how in rule)
        raise UsageError(
            f"llama.cpp does not know this tokenizer's splitting rule: {steps}",
            hint="use --to merged; llama.cpp's own converter may support it",
        )
    return {
        "ggml.model": "gpt2",
        "ggml.pre": PRE_TOKENIZERS[rule],
        "ggml.merges": [_merge(merge) for merge in document["model"]["merges"]],
        "ggml.add_space_prefix": False,
    }


def _rule(step: Mapping[str, Any]) -> tuple[str, object]:
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return ("bytes", bool(step.get("use_regex", True)))
    if kind == "Digits":
        return ("digits", bool(step["individual_digits"]))
    pattern = step.get("pattern", {}).get("Regex")
    # Two ways of writing one rule: keep what matches as pieces, or remove what does not match.
    if kind == "Split" and (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True)):
        return ("split", pattern)
    return (kind, json.dumps(step, sort_keys=True))


def _sentencepiece_settings(document: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """llama.cpp merges the neighbours whose joined piece has the highest score; BPE the pair with the lowest rank.

    Both are the same when a piece's score is minus the rank of the first merge that makes it.
    """
    if not document["model"].get("byte_fallback"):
        raise UsageError("GGUF export does not support this tokenizer: it has neither byte level nor byte fallback")
    merges = [_merge(merge).split(" ") for merge in document["model"]["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    last = len(merges)
    scores = [
        -float(ranks.get(text, last)) if kind == NORMAL else 0.0 for text, kind in zip(tokens, types, strict=True)
    ]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.scores": scores,
        "ggml.add_space_prefix": _adds_space_prefix(document),
    }


def _adds_space_prefix(document: Mapping[str, Any]) -> bool:
    """Whether every text segment begins with a space of its own (Llama 2's way)."""
    steps = _flat(document.get("normalizer"), "normalizers")
    if any(step["type"] == "Prepend" and step["prepend"] == SPACE for step in steps):
        return True
    # "first" prepends at the start of the text only, where a chat prompt has a special token.
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") == "always"
        for step in _flat(document.get("pre_tokenizer"), "pretokenizers")
    )


def _merge(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _template(folder: Path) -> str | None:
    """The chat template, with today's date replaced by the date that every training row was rendered with."""
    path = folder / TEMPLATE
    if path.exists():
        found: Any = path.read_text(encoding="utf-8")
    else:
        found = _optional(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(found, str):
        return None
    return _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), found)


def _special_settings(
    folder: Path, tokens: list[str], template: str | None, model: Mapping[str, Any]
) -> dict[str, Any]:
    """Ids of the special tokens. The token that ends an answer must be among them, or the model never stops."""
    own = _optional(folder / DESCRIPTION)
    config = {**read_json(folder / "config.json"), **_optional(folder / "generation_config.json")}
    ends = own.get("eos_ids") or config.get("eos_token_id")
    ends = [int(number) for number in (ends if isinstance(ends, list) else [ends]) if number is not None]
    if not ends:
        raise UsageError(f"{folder} names no end-of-sequence token: the exported model would never stop")
    # The end that the chat template writes ends a turn; it comes first, and llama.cpp takes the others as ends too.
    ends.sort(key=lambda number: template is None or tokens[number] not in template)
    settings: dict[str, Any] = dict(
        zip(("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id"), ends, strict=False)
    )
    bos = own.get("bos_id", config.get("bos_token_id"))
    pad = own.get("pad_id", config.get("pad_token_id"))
    unknown = model["vocab"].get(model.get("unk_token"))
    for key, number in (("bos", bos), ("padding", pad), ("unknown", unknown)):
        if isinstance(number, int):
            settings[f"ggml.{key}_token_id"] = number
    return {**settings, **_added_ends(folder, None if bos is None else tokens[bos], template)}


def _added_ends(folder: Path, bos: str | None, template: str | None) -> dict[str, bool]:
    """Whether llama.cpp puts a first and last token around a text.

    A chat is trained as its template writes it, so a first token is added only where the template writes it too
    (llama.cpp then keeps one of the two): Gemma would get none, or two, otherwise (ggml-org/llama.cpp#7062).
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    begins = len(whole) > len(plain) and whole[0] != plain[0]
    written = template is None or "bos_token" in template or (bos is not None and bos in template)
    return {"ggml.add_bos_token": bool(begins and written), "ggml.add_eos_token": False}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
