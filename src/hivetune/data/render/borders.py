"""The places of text spans in the tokens, found by the control tokens around them instead of character offsets.

Offsets take a fifth of the tokenizer's time (`encode` against `encode_batch_fast`, tokenizers 0.23). A control token
splits the text before any other step, so the text between two of them is encoded by itself.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

# The tokens of a text from those of its words, which are remembered, since most words of a file come again and again. A
# text is cut before each single space and after each single line break between two other characters. GPT-2's pattern
# and its successors match a space only at the start of a match or within white space, and a line break only at the end
# or within white space. So no token crosses a cut, nor does an added token without white space.
MAX_REMEMBERED = 16_000  # words, 3 MB
# A word by itself takes 15 us, a text of 500 characters 160 us, so a text with more new words is encoded whole.
CHARS_A_WORD, FEW_WORDS = 20, 5
CHARS_A_LEARNED_WORD = 128  # of such a text, so that learning takes a third of the time of encoding it
_MAX_WORD_CHARS = 80  # longer words hardly come again
_BREAK = "\0"  # marks cuts, and pieces without a cut at both ends
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_CUT_OUT = re.compile(r" ?\S(?:.*\S)?\n?", re.DOTALL)
# The patterns of Qwen 2 and 3 and of Llama 3, from their tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = frozenset(WORDS % many for many in ("", "{1,3}"))


class WordTokens:
    """The tokens of words, remembered for one tokenizer; `can_cut` says whether its texts can be cut."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._remembered: dict[str, tuple[int, ...]] = {}
        self._ids: dict[int, int] = {}  # each id once, since each answer of the tokenizer has new objects
        self.can_cut = can_be_cut(tokenizer)

    def tokens_of(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens around it."""
        if not self.can_cut or _BREAK in text:
            return self._encoded(text)
        if len(text) <= _MAX_WORD_CHARS and (ids := self._remembered.get(_BREAK + text)) is not None:
            return list(ids)  # a line break between two control tokens
        # A cut at every space and line break takes a tenth of the pattern's time. If it is wrong, a piece is empty or
        # has more white space at an end, and no such piece is known.
        pieces = text.replace("\n", f"\n{_BREAK}").replace(" ", f"{_BREAK} ").split(_BREAK)
        remembered = self._remembered
        ids_of = list(map(remembered.get, pieces))
        if None not in ids_of:
            return list(chain.from_iterable(ids_of))  # type: ignore[arg-type]
        missing = {piece for piece, ids in zip(pieces, ids_of, strict=True) if ids is None}
        if not all(map(_CUT_OUT.fullmatch, missing)):
            pieces = _CUT.split(text)
            missing = {piece for piece in pieces if piece not in remembered and _BREAK + piece not in remembered}
        return self._learned(pieces, missing, text)

    def _learned(self, pieces: Sequence[str], missing: set[str], text: str) -> list[int]:
        """Return the ids of a text that is cut into `pieces`, and learn those that are `missing`."""
        remembered = self._remembered
        if len(remembered) + len(missing) > MAX_REMEMBERED:
            remembered.clear()
            missing = set(pieces)
        whole = self._encoded(text) if len(missing) > FEW_WORDS + len(text) // CHARS_A_WORD else None
        # One by one, because a batch of short texts is spread over threads, which takes longer.
        for piece in missing if whole is None else islice(missing, 1 + len(text) // CHARS_A_LEARNED_WORD):
            ids = tuple([self._ids.setdefault(token, token) for token in self._encoded(piece)])
            remembered[piece if _CUT_OUT.fullmatch(piece) else _BREAK + piece] = ids
        tokens = whole
        if tokens is None:
            keys = [piece if piece in remembered else _BREAK + piece for piece in pieces]
            tokens = list(chain.from_iterable(map(remembered.__getitem__, keys)))
        for piece in missing:
            if len(piece) > _MAX_WORD_CHARS:
                remembered.pop(piece, None)
                remembered.pop(_BREAK + piece, None)
        return tokens

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a text are those of its words.

    That needs byte-level BPE without dropout, a known pattern, and no added token with white space.
    """
    model, splitter = tokenizer.model, tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None or splitter is None or not isinstance(model, BPE) or model.dropout:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any(
        token.lstrip or token.rstrip or token.single_word or any(c.isspace() for c in token.content) for token in added
    ):
        return False
    # Only the splitter is described: the whole tokenizer has 2 MB for 50,000 words and takes 80 ms.
    return _splits(json.loads(splitter.__getstate__()))


def _splits(step: Mapping[str, Any]) -> bool:
    """Return whether all pre-tokenization steps are known, and one splits at these places."""
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


MAX_HEAD_CHARS = 200  # between a control token and a span; a longer prompt would be encoded twice


class Borders:
    """The borders of one tokenizer. `alone` returns the tokens of a text by itself, from a cache."""

    def __init__(self, tokenizer: Tokenizer, control_tokens: Sequence[str], encode_alone: Callable[[str], list[int]]):
        self._tokenizer = tokenizer
        self._encode_alone = encode_alone
        self._ids: dict[str, int] = {token: tokenizer.token_to_id(token) for token in control_tokens}  # type: ignore[misc]
        self._controls = frozenset(self._ids.values())
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control_tokens else None
        self._pieces = WordTokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        # The tokenizer must change no byte, and control tokens must not absorb white space.
        plain = not any(token.lstrip or token.rstrip or token.single_word for token in added)
        self.can_tell = bool(
            self._pattern and plain and tokenizer.normalizer is None and isinstance(tokenizer.decoder, ByteLevel)
        )
        others = [token.content for token in added if token.content not in self._ids]
        # The tokenizer splits at added tokens first. Between control tokens that no other one overlaps are whole texts.
        self._can_part = self._pieces.can_cut and not any(
            _may_overlap(control, other) for control in self._ids for other in others
        )

    def tokens_of(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return (tokens, (first, last) token of each span), or None if control tokens are not enough.

        Each span begins at a token, after the same tokens as its prompt has by itself, and ends with a control token.
        """
        assert self._pattern is not None
        marks = list(self._pattern.finditer(text))
        ends = [mark.end() for mark in marks]
        heads = [bisect_right(ends, start) - 1 for start, _ in spans]  # the last one in front of each span
        if any(
            head < 0 or start - marks[head].start() > MAX_HEAD_CHARS
            for head, (start, _) in zip(heads, spans, strict=True)
        ):
            return None
        encoded = self._between(text, marks) if self._can_part else self._whole(text, marks)
        if encoded is None:
            return None
        tokens, indices = encoded
        index_of = dict(zip(ends, indices, strict=True))
        tokens_of_spans = []
        for head, (start, end) in zip(heads, spans, strict=True):
            before = self._encode_alone(text[marks[head].start() : start])
            first, last = indices[head] + len(before), index_of.get(end)
            if last is None or first > last or tokens[indices[head] : first] != before:
                return None
            tokens_of_spans.append((first, last))
        return tokens, tokens_of_spans

    def _between(self, text: str, marks: Sequence[re.Match[str]]) -> tuple[list[int], list[int]]:
        """Return (tokens, places of the control tokens), with the text between `marks` encoded piece by piece."""
        tokens: list[int] = []
        indices = []
        position = 0
        for mark in marks:
            if mark.start() > position:
                tokens += self._pieces.tokens_of(text[position : mark.start()])
            indices.append(len(tokens))
            tokens.append(self._ids[mark.group()])
            position = mark.end()
        if position < len(text):
            tokens += self._pieces.tokens_of(text[position:])
        return tokens, indices

    def _whole(self, text: str, marks: Sequence[re.Match[str]]) -> tuple[list[int], list[int]] | None:
        """Return the tokens from one encoding of the whole text, or None if its control tokens differ from `marks`."""
        tokens = self._pieces.tokens_of(text)
        indices = [i for i, token in enumerate(tokens) if token in self._controls]
        if [tokens[i] for i in indices] != [self._ids[mark.group()] for mark in marks]:
            return None
        return tokens, indices


def _may_overlap(a: str, b: str) -> bool:
    """Return whether two texts may overlap, or one contains the other."""
    ends = any(a[-size:] == b[:size] or b[-size:] == a[:size] for size in range(1, min(len(a), len(b))))
    return ends or a in b or b in a
