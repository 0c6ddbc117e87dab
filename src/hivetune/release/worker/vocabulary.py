"""The tokenizer's part of a GGUF file, from the prepared folder, which training read too.

llama.cpp's converter names a splitting rule by a hash of sample ids, so it knows published vocabularies only. The rule
of another vocabulary is recognised here from tokenizer.json. The tokens that begin and end an answer, and the template,
are always those of the prepared folder.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import read_json
from hivetune.data.render.template import TEMPLATE_DATE
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, TEMPLATE

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


def splitting_rule(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the splitting rule in a tokenizer.json. Raises UsageError for a rule without one."""
    normalizers = {step["type"] for step in _flat(document.get("normalizer"), "normalizers")}
    if normalizers - {"NFC"}:  # llama.cpp normalizes nothing; text is NFC already but for rare rows
        raise UsageError(f"llama.cpp does not know a byte-level tokenizer with {sorted(normalizers)}")
    rule = tuple(_rule(step) for step in _flat(document.get("pre_tokenizer"), "pretokenizers"))
    if rule not in PRE_TOKENIZERS:
        steps = ", ".join(f"{kind} {how}" for kind, how in rule)
        raise UsageError(f"llama.cpp does not know this tokenizer's splitting rule: {steps}", hint="use --to merged")
    return PRE_TOKENIZERS[rule]


def _flat(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


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


def adds_space_prefix(document: Mapping[str, Any]) -> bool:
    """Return whether every text segment begins with a space of its own (Llama 2's way)."""
    steps = _flat(document.get("normalizer"), "normalizers")
    if any(step["type"] == "Prepend" and step["prepend"] == SPACE for step in steps):
        return True
    # "first" prepends at the start of the text only, where a chat prompt has a special token.
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") == "always"
        for step in _flat(document.get("pre_tokenizer"), "pretokenizers")
    )


def is_sentencepiece(document: Mapping[str, Any]) -> bool:
    return document["model"].get("type") == "BPE" and bool(document["model"].get("byte_fallback"))


def sentencepiece_file(document: Mapping[str, Any]) -> bytes:
    """Return a tokenizer.model with the pieces of a SentencePiece-like tokenizer.json, for the converter.

    llama.cpp merges the neighbours whose joined piece has the highest score, BPE the pair with the lowest rank. Both
    are the same when a piece's score is minus the rank of the first merge that makes it. Needs sentencepiece.
    """
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = document["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    added = {int(token["id"]): token for token in document.get("added_tokens") or []}
    texts = {int(number): text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    proto = pb.ModelProto()
    proto.trainer_spec.model_type = pb.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    kinds = pb.ModelProto.SentencePiece
    for number in range(max(texts) + 1):
        text, token = texts.get(number), added.get(number)
        piece = proto.pieces.add(piece=f"[PAD{number}]" if text is None else text, score=0.0, type=kinds.NORMAL)
        if text is None:
            piece.type = kinds.UNUSED
        elif text == model.get("unk_token"):
            piece.type = kinds.UNKNOWN
        elif token is not None:
            piece.type = kinds.CONTROL if token.get("special") else kinds.USER_DEFINED
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            piece.type = kinds.BYTE
        else:
            piece.score = -float(ranks.get(text, len(merges)))
    return bytes(proto.SerializeToString())


def special_settings(folder: Path, tokens: Mapping[int, str]) -> dict[str, Any]:
    """Return the keys below `tokenizer.`: the template, and the ids that begin, end and fill a text.

    Raises UsageError for a folder that names no end: the exported model would never stop.
    """
    template = _template(folder)
    own = _optional(folder / DESCRIPTION)
    config = {**read_json(folder / "config.json"), **_optional(folder / "generation_config.json")}
    ends = own.get("eos_ids") or config.get("eos_token_id")
    ends = [int(number) for number in (ends if isinstance(ends, list) else [ends]) if number is not None]
    if not ends:
        raise UsageError(f"{folder} names no end-of-sequence token: the exported model would never stop")
    # The end that the chat template writes ends a turn; it comes first, and llama.cpp takes the others as ends too.
    ends.sort(key=lambda number: template is None or tokens.get(number, "\0") not in template)
    found: dict[str, Any] = dict(
        zip(("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id"), ends, strict=False)
    )
    bos = own.get("bos_id", config.get("bos_token_id"))
    pad = own.get("pad_id", config.get("pad_token_id"))
    for key, number in (("bos", bos), ("padding", pad)):
        if isinstance(number, int):
            found[f"ggml.{key}_token_id"] = number
    if template is not None:
        found["chat_template"] = template
    return {**found, **_added_ends(folder, None if bos is None else tokens.get(bos), template)}


def token_texts(document: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each id of a tokenizer.json."""
    vocabulary = document["model"].get("vocab")
    texts = {int(number): text for text, number in vocabulary.items()} if isinstance(vocabulary, Mapping) else {}
    return texts | {int(token["id"]): token["content"] for token in document.get("added_tokens") or []}


def strips_after_specials(document: Mapping[str, Any]) -> bool:
    """Return whether special tokens take the white space after them, as Phi-3's do."""
    return any(token.get("special") and token.get("rstrip") for token in document.get("added_tokens") or [])


def _template(folder: Path) -> str | None:
    """Return the chat template, with the date that every training row was rendered with in place of today's."""
    path = folder / TEMPLATE
    if path.exists():
        found: Any = path.read_text(encoding="utf-8")
    else:
        found = _optional(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(found, str):
        return None
    return _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), found)


def _added_ends(folder: Path, bos: str | None, template: str | None) -> dict[str, bool]:
    """Return whether llama.cpp puts a first and a last token around a text.

    A chat is trained as its template writes it, so a first token is added only where the template writes it too
    (llama.cpp then keeps one of the two). Otherwise Gemma would get none, or two (ggml-org/llama.cpp#7062).
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    begins = len(whole) > len(plain) and whole[0] != plain[0]
    written = template is None or "bos_token" in template or (bos is not None and bos in template)
    return {"ggml.add_bos_token": bool(begins and written), "ggml.add_eos_token": False}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
