"""The tokenizer's part of a GGUF file, from the prepared folder, which training read too.

llama.cpp's converter knows published vocabularies only, by a hash of sample ids (ggml-org/llama.cpp#6920). The rule by
which another one splits text is recognised here by what it does. The tokens that begin and end an answer, and the
template, are always those of the prepared folder.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import read_json, sha256_bytes
from hivetune.data.render.template import TEMPLATE_DATE
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, TEMPLATE

_DATE = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\)""")
# Every rule splits this text differently, and a normalizer other than NFC changes it.
_SAMPLE = (
    "I'M sure they'LL don't; ABCdef iOS 1234567 x=3.14 //a/\r\n\n\tif  _x:\n"
    "  Ünïcode 你好 हिन्दी ½ №7 \U0001f600!?\u00a0end  "
)
# llama.cpp's name of a splitting rule, by a hash of the sample's pieces.
_RULES = {
    "1e30bd98fe539c4a": "gpt-2",
    "0c99405e813497b4": "smollm",
    "193ad5710b2dc5f0": "llama-bpe",
    "d8770093a70d4211": "qwen2",
    "4e73a1f9bd6ccb04": "tekken",
    "1e1f3d7a85e079d5": "gpt-4o",
}
# llama.cpp's numbers of what a token is (gguf.TokenType).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def splitting_rule(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the splitting rule in a tokenizer.json. Raises UsageError for a rule without one."""
    tokenizer = Tokenizer.from_str(json.dumps(document))
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = normalizer.normalize_str(_SAMPLE) if normalizer else _SAMPLE
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter else []
    rule = _RULES.get(sha256_bytes(json.dumps(pieces).encode())[:16])
    if rule is None:
        steps = [json.dumps(document.get(key), ensure_ascii=False) for key in ("normalizer", "pre_tokenizer")]
        raise UsageError(
            f"llama.cpp does not know this tokenizer's splitting rule: {', then '.join(steps)[:500]}",
            hint="use --to merged",
        )
    return rule


def adds_space_prefix(document: Mapping[str, Any]) -> bool:
    """Return whether every text segment begins with a space of its own (Llama 2's way)."""
    # Metaspace's "first" prepends at the start of the text only, where a chat prompt has a special token.
    steps = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
    return '"Prepend"' in steps or '"prepend_scheme": "always"' in steps


def is_sentencepiece(document: Mapping[str, Any]) -> bool:
    return document["model"].get("type") == "BPE" and bool(document["model"].get("byte_fallback"))


def sentencepiece_pieces(document: Mapping[str, Any], size: int) -> tuple[list[bytes], list[float], list[int]]:
    """Return text, score and type of each token of a SentencePiece-like tokenizer.json.

    llama.cpp merges the neighbours whose joined piece has the highest score, BPE the pair with the lowest rank. Both
    are the same when a piece's score is minus the rank of the first merge that makes it. The converter's own reader of
    tokenizer.json gives each piece the score 0 (gguf.LlamaHfVocab).
    """
    model, texts = document["model"], token_texts(document)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    special = {int(token["id"]): bool(token.get("special")) for token in document.get("added_tokens") or []}
    pieces, scores, types = list[bytes](), list[float](), list[int]()
    for number in range(size):
        text, score, kind = texts.get(number, f"[PAD{number}]"), 0.0, _NORMAL
        if number not in texts:
            kind = _UNUSED
        elif text == model.get("unk_token"):
            kind = _UNKNOWN
        elif number in special:
            kind = _CONTROL if special[number] else _USER_DEFINED
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = _BYTE
        else:
            score = -float(ranks.get(text, len(ranks)))
        pieces.append((text.replace("\u2581", " ") if kind == _USER_DEFINED else text).encode())
        scores.append(score)
        types.append(kind)
    return pieces, scores, types


def special_settings(folder: Path, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return the keys below `tokenizer.`: the template, the ids that begin, end and fill a text, and whether llama.cpp
    puts a first and a last token around it. `texts`: as `token_texts`.

    Raises UsageError for a folder that names no end: the exported model would never stop.
    """
    facts, written = read_json(folder / DESCRIPTION), (folder / TEMPLATE).read_text(encoding="utf-8")
    # Each training row was rendered with this date in place of today's.
    template = _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), written)
    # The end that the chat template writes ends a turn; it comes first, and llama.cpp takes the others as ends too.
    ends = sorted(facts["eos_ids"], key=lambda number: texts.get(number, "\0") not in template)
    if not ends:
        raise UsageError(f"{folder} names no end-of-sequence token: the exported model would never stop")
    ids = {**dict(zip(("eos", "eot", "eom"), ends, strict=False)), "bos": facts["bos_id"], "padding": facts["pad_id"]}
    settings: dict[str, Any] = {f"ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begins = tokenizer.encode("a").ids[:1] != tokenizer.encode("a", add_special_tokens=False).ids[:1]
    # A chat is trained as its template writes it, so a first token is added only where the template writes it too
    # (llama.cpp then keeps one of the two). Otherwise Gemma would get none, or two (ggml-org/llama.cpp#7062).
    begins &= "bos_token" in template or texts.get(facts["bos_id"], "\0") in template
    return settings | {"chat_template": template, "ggml.add_bos_token": begins, "ggml.add_eos_token": False}


def token_texts(document: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each id of a tokenizer.json."""
    vocabulary = document["model"].get("vocab")
    texts = {int(number): text for text, number in vocabulary.items()} if isinstance(vocabulary, Mapping) else {}
    return texts | {int(token["id"]): token["content"] for token in document.get("added_tokens") or []}
