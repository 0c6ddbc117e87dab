"""Is a row there already: equal in its words, or nearly so (Jaccard of word triples of question and answer, 0.8)."""

import hashlib
from array import array
from collections.abc import Callable
from zlib import crc32

from rensa import RMinHash

from hivetune.data.checks.dedupe import Table
from hivetune.synth.sources.page import words_in

NEAR_SHARE = 0.8
_NUM_PERM = 64
_BAND_VALUES = 4
_SEED = 1
# 16 bands of 4: a pair with 0.8 of its triples in common shares one with probability 0.9998.
_MASK = (1 << 64) - 1


class SeenRows:
    """Rows by their words. `text_of(number)` gives the text of a row again; about 300 bytes a row are kept here."""

    def __init__(self, text_of: Callable[[int], str]):
        self._text_of = text_of
        self._exact, self._bands = Table(), Table()

    def look(self, text: str) -> tuple[str | None, list[int]]:
        """(reason or None, keys to give to `add`)."""
        words = words_in(text)
        exact = int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest())
        if self._exact.get(exact) is not None:
            return "duplicate", []
        triples = _triples(words)
        bands = _band_keys(triples)
        for number in {found for key in bands if (found := self._bands.get(key)) is not None}:
            other = _triples(words_in(self._text_of(number)))
            if len(triples & other) >= NEAR_SHARE * len(triples | other):
                return "near-duplicate", []
        return None, [exact, *bands]

    def add(self, number: int, keys: list[int]) -> None:
        exact, *bands = keys
        self._exact.put(exact, number)
        for key in bands:
            self._bands.put(key, number)


def _triples(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}


def _band_keys(triples: set[tuple[str, ...]]) -> list[int]:
    minhash = RMinHash(_NUM_PERM, _SEED)
    minhash.update(sorted(" ".join(triple) for triple in triples))
    values = array("I", minhash.digest()).tobytes()
    size = 4 * _BAND_VALUES
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [(crc32(part) << 32 | crc32(part, 1) ^ band * 0x9E3779B9) & _MASK for band, part in enumerate(parts)]
