"""The rows that are kept: new, not frozen, and written as lines of the file; the same for every maker.

A row is there already when it is equal in its words, or nearly so: Jaccard similarity of the word triples of question
and answer at least 0.8.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from zlib import crc32

from rensa import RMinHash

from hivetune.data.checks.dedupe import Table
from hivetune.data.prepare.split import group_hash, question
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.records import Message
from hivetune.synth.make.draft import Draft
from hivetune.synth.pool import Pool, draw_key
from hivetune.synth.sources.page import words_in

CHECKS_PASSED = ("length", "language", "options", "paths", "units", "parses", "supported", "duplicates", "frozen")


class KeptRows:
    """Rows in the order in which they came, in the pool's file. `frozen`: hashes of questions that no row may ask."""

    def __init__(self, pool: Pool, frozen: Collection[int], maker: str, seed: int):
        self._pool, self._frozen, self._maker, self._seed = pool, frozen, maker, seed
        self._seen = SeenRows(pool.text)
        self._number = 0
        self.number_kept = 0

    def remember(self, against: Iterator[tuple[str, str]]) -> None:
        """Remember rows of the user as (source, text), so that none is made again."""
        for source, text in against:
            _, keys = self._seen.look(text)
            if keys:
                self._pool.keep(self._number, 0, source, "", text, None)
                self._seen.add(self._number, keys)
                self._number += 1

    def keep(self, category: str, page: str, path: str, draft: Draft) -> str | None:
        """Keep a draft; return the reason why it can't be kept, or None."""
        text = "\n".join(part for turn in draft.turns for part in turn)
        reason, keys = self._seen.look(text)
        if reason is None and self._is_frozen(draft):
            reason = "frozen-question"
        if reason is not None:
            return reason
        row = _row(category, page, path, draft, maker=self._maker, seed=self._seed)
        key = draw_key(self._seed, draft)
        self._pool.keep(self._number, key, category, draft.kind, text, json.dumps(row, ensure_ascii=False))
        self._seen.add(self._number, keys)
        self._number += 1
        self.number_kept += 1
        return None

    def _is_frozen(self, draft: Draft) -> bool:
        messages = [Message("user", draft.turns[0][0])]
        return group_hash(f"question:{question(messages)}") in self._frozen


def _row(category: str, page: str, path: str, draft: Draft, *, maker: str, seed: int) -> dict[str, Any]:
    """Return one line of the file.

    `session` is the page, so that a split keeps all questions on one page together.
    """
    messages = []
    for asked, answered in draft.turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    row: dict[str, Any] = {"messages": messages, "category": category, "session": f"synth {page}"}
    if draft.checker is not None:
        row["checker"] = dict(draft.checker)
    sources = ((page, draft.section, path),)
    row["synth"] = {
        "kind": draft.kind,
        "sources": [dict(zip(("page", "section", "file"), one, strict=True)) for one in sources],
        "passage_sha256": hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "maker": maker,
        "seed": seed,
        "checks": list(CHECKS_PASSED),
    }
    if draft.absent:
        row["synth"]["absent"] = list(draft.absent)
    return row


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
        """Return (reason or None, keys to give to `add`)."""
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


class Against:
    """Reads the rows once; `unreadable` counts those that say nothing that could be compared."""

    def __init__(self, sources: Sequence[str]):
        self._sources = sources
        self.rows = self.unreadable = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (place, question and answer). Raises UsageError for a file that is not there."""
        if not self._sources:
            return
        for raw in rows_of_files(self._sources):
            try:
                example = example_of(raw)
            except RowRefused:
                self.unreadable += 1
                continue
            self.rows += 1
            turns = [message.content for message in example.messages if message.role != "system"]
            yield example.source, "\n".join(turns)
