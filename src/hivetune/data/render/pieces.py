"""Tokens of a text from those of its words, which are remembered: most words of a file come again and again.

A text is cut in front of each single space, and behind each single line break, between two other characters. GPT-2's
pattern, and those that follow it, match a space only at the beginning of a match or within white space, and a line
break only at the end of one or within white space, so no token crosses such a place; the same is true of an added token
without white space in it. Where a tokenizer has another pattern, the text is encoded in one piece.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

MAX_REMEMBERED = 16_000  # words; 3 MB
# A word by itself costs 15 us, a text of 500 characters 160: text of which more is new is encoded whole.
CHARS_A_WORD, FEW_WORDS = 20, 5
CHARS_A_LEARNED_WORD = 128  # of such a text: learning costs a third of encoding it
_LONGEST_CHARS = 80  # longer ones do not come again
_BREAK = "\0"  # marks cuts, and pieces that begin or end as no cut does
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_CUT_OUT = re.compile(r" ?\S(?:.*\S)?\n?", re.DOTALL)
# Of Qwen 2 and 3, and of Llama 3, as their tokenizer.json have them.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = frozenset(_SPLIT % many for many in ("", "{1,3}"))


class WordTokens:
    """Of one tokenizer. `can_cut`: whether it is one whose texts can be cut."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}
        self._ids: dict[int, int] = {}  # each id once: every answer of the tokenizer brings objects of its own
        self.can_cut = can_be_cut(tokenizer)

    def tokens_of(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        if not self.can_cut or _BREAK in text:
            return self._encoded(text)
        if len(text) <= _LONGEST_CHARS and (ids := self._known.get(_BREAK + text)) is not None:
            return list(ids)  # a line break between two control tokens
        # Cut at every space and line break, which takes a tenth of the pattern's time. Where that is wrong, one of the
        # pieces is empty or has more white space at an end, and no such piece is known.
        pieces = text.replace("\n", f"\n{_BREAK}").replace(" ", f"{_BREAK} ").split(_BREAK)
        known = self._known
        found = list(map(known.get, pieces))
        if None not in found:
            return list(chain.from_iterable(found))  # type: ignore[arg-type]
        missing = {piece for piece, ids in zip(pieces, found, strict=True) if ids is None}
        if not all(map(_CUT_OUT.fullmatch, missing)):
            pieces = _CUT.split(text)
            missing = {piece for piece in pieces if piece not in known and _BREAK + piece not in known}
        return self._learned(pieces, missing, text)

    def _learned(self, pieces: Sequence[str], missing: set[str], text: str) -> list[int]:
        """The ids of a text that is cut into `pieces`, of which `missing` are not known."""
        known = self._known
        if len(known) + len(missing) > MAX_REMEMBERED:
            known.clear()
            missing = set(pieces)
        whole = self._encoded(text) if len(missing) > FEW_WORDS + len(text) // CHARS_A_WORD else None
        # One by one: a batch of short texts is spread over threads, which costs more.
        for piece in missing if whole is None else islice(missing, 1 + len(text) // CHARS_A_LEARNED_WORD):
            ids = tuple([self._ids.setdefault(one, one) for one in self._encoded(piece)])
            known[piece if _CUT_OUT.fullmatch(piece) else _BREAK + piece] = ids
        tokens = whole
        if tokens is None:
            keys = [piece if piece in known else _BREAK + piece for piece in pieces]
            tokens = list(chain.from_iterable(map(known.__getitem__, keys)))
        for piece in missing:
            if len(piece) > _LONGEST_CHARS:
                known.pop(piece, None)
                known.pop(_BREAK + piece, None)
        return tokens

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a text are those of its words in a row: byte-level BPE without chance, split by a known
    pattern, and no added token with white space in it.
    """
    model, splitter = tokenizer.model, tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None or splitter is None or not isinstance(model, BPE) or model.dropout:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any(
        token.lstrip or token.rstrip or token.single_word or any(c.isspace() for c in token.content) for token in added
    ):
        return False
    # Only of the splitter: describing all of the tokenizer writes and reads 2 MB for 50,000 words, 80 ms.
    return _splits(json.loads(splitter.__getstate__()))


def _splits(step: Mapping[str, Any]) -> bool:
    """Whether the steps in front of the model are known, and one of them splits the text at such places."""
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return bool(steps) and all(map(_is_known, steps)) and any(map(_cuts, steps))


def _is_known(step: Mapping[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] == "Digits" or _cuts(step)


def _cuts(step: Mapping[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    pattern = step.get("pattern") if step["type"] == "Split" else None
    return isinstance(pattern, dict) and pattern.get("Regex") in _PATTERNS and step["behavior"] == "Isolated"
