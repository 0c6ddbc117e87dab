"""The encoding of text as token ids, piece by piece: a table keeps the ids of words that came before.

A tokenizer cuts a text into pieces before it looks for tokens, and no token crosses a cut. Two kinds of cuts are known
here: in front of a control token, and in front of a lone space with the tokenizers that split words as GPT-2, Llama 3
or Qwen do. With any other one only the table of words is missing.
"""

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from tokenizers import Tokenizer

ID_BYTES = 4
MAX_WORDS, MAX_WORD_CHARS = 1 << 15, 40  # about 200 bytes a word
# In no match of these (Llama 3; Qwen 2 and 3) a space follows another character.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = (_PIECES, _PIECES.replace("{1,3}", ""))
CUT = "\0"
LONE_SPACE = re.compile(r"(?<=\S) ")
NO_LONE_SPACE = re.compile(r"\s ")


class Encoded(NamedTuple):
    """The token ids of a text, ID_BYTES bytes each. Its segment i begins after `places[i]` characters and `counts[i]`
    tokens; the last entries of both are the totals."""

    text: str
    ids: bytes
    places: Sequence[int]
    counts: Sequence[int]


class TextEncoder:
    """The encoder of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        added = list(tokenizer.get_added_tokens_decoder().values())
        # Such a token reads what stands in front of it: text must not be cut there.
        looks_back = any(token.lstrip or token.single_word for token in added)
        names = sorted((t.content for t in added if t.content and not t.normalized), key=len, reverse=True)
        named = "" if looks_back else "|".join(map(re.escape, names))
        self._control = re.compile(f"({named})" if named else r"(?!)")
        reads_spaces = looks_back or any(token.rstrip or LONE_SPACE.search(token.content) for token in added)
        self._has_words = not reads_spaces and _splits_words(tokenizer)
        self._words = _Words(tokenizer)

    def encode(self, text: str) -> Encoded:
        """Return the ids of a text and where control tokens cut it."""
        first, *found = self._control.split(text)
        # A control token stays with the text after it, whose white space it may take.
        segments = [first, *map(add, found[::2], found[1::2])]
        ids = [self._of_segment(segment) for segment in segments]
        places = list(accumulate(map(len, segments), initial=0))
        counts = list(accumulate((len(one) // ID_BYTES for one in ids), initial=0))
        return Encoded(text, b"".join(ids), places, counts)

    def tokens_before(self, encoded: Encoded, place: int) -> int | None:
        """Return the number of tokens before an offset in the text; None if they differ from the tokens of the text
        before it alone."""
        segment = bisect_right(encoded.places, place) - 1
        before = encoded.counts[segment]
        head = self._of_segment(encoded.text[encoded.places[segment] : place])
        return before + len(head) // ID_BYTES if encoded.ids.startswith(head, before * ID_BYTES) else None

    def _of_segment(self, text: str) -> bytes:
        if not self._has_words or CUT in text:
            return self._words[text]
        # The replacement takes 2 us for 500 characters, the substitution 14 us.
        parted = LONE_SPACE.sub(CUT + " ", text) if NO_LONE_SPACE.search(text) else text.replace(" ", CUT + " ")
        return b"".join(map(self._words.__getitem__, parted.split(CUT)))


class _Words(dict[str, bytes]):
    """The token ids of texts; those of short texts come from a table once they were seen."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, text: str) -> bytes:
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        if len(text) <= MAX_WORD_CHARS and len(self) < MAX_WORDS:
            self[text] = ids
        return ids


def as_ids(encoded: bytes) -> tuple[int, ...]:
    """Return encoded token ids as integers."""
    return tuple(memoryview(encoded).cast("I"))


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Return whether a space after another character always begins a piece."""
    # No letter composes with a space in NFC.
    if _settings(tokenizer.normalizer).get("type", "NFC") != "NFC":
        return False
    splitter, splits = _settings(tokenizer.pre_tokenizer), False
    for step in splitter.get("pretokenizers", [splitter]):
        if step.get("type") == "Split":
            is_known = step["pattern"].get("Regex") in SPLITTERS and step["behavior"] == "Isolated"
            if not is_known or step["invert"]:
                return False
            splits = True
        elif step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            splits = splits or bool(step["use_regex"])
        elif step.get("type") != "Digits":
            return False
    return splits


def _settings(part: Any) -> Mapping[str, Any]:
    """Return a component of a tokenizer as tokenizer.json has it, or {} if the tokenizer lacks it."""
    settings: Mapping[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return settings
