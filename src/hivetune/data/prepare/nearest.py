"""The similarity of held-out rows to training rows by their words, in any order.

Two rows are twins if most of their words are equal, where rare words count more: for example names were changed, or a
third of the words was replaced. Such pairs share few word triples, by which checks/dedupe.py finds near duplicates.
"""

import heapq
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

from hivetune.data.checks.lessons import texts_of, words_of
from hivetune.data.fates import TRAIN, Decisions, open_result
from hivetune.data.snapshot import SPLITS, messages_from

# If a third of the words is replaced, two rows share half of all their words. Unrelated rows about one subject share
# less than 0.2.
TWIN = 0.4
MIN_WORDS = 8  # shorter rows share their words by chance
# Rows that are compared, drawn by their content. Measured on Python's documentation: 118 bytes a row of 219 characters,
# 440 of 2,000, 1,300 of 8,000 and 4,000 of 32,000, so 200,000 training rows take 24 MB to 800 MB.
MAX_HELD_OUT, MAX_TRAINING = 2000, 200_000
RAREST, MAX_ROWS, CANDIDATES = 24, 500, 8  # words to search a row by, rows per word, rows that are compared
WORDS_MASK = (1 << 20) - 1
TEST = SPLITS.index("test")


class Nearest:
    """The words of held-out rows and of training rows, and the most similar rows of the two kinds."""

    def __init__(self) -> None:
        self._held_out: dict[int, array[int]] = {}
        self._rows, self._starts, self._words = array("I"), array("Q", [0]), array("I")
        self._similar: dict[int, list[tuple[float, int]]] = {}

    def read(self, results: Sequence[Path], decisions: Decisions, side: bytearray, hash64: Sequence[int]) -> None:
        """Read the words of the held-out rows (by `side`) and of the training rows, and compare them."""
        usable = [row for row, fate in enumerate(decisions.fate) if fate == TRAIN]
        held_out = set(heapq.nsmallest(MAX_HELD_OUT, (row for row in usable if side[row]), key=hash64.__getitem__))
        training = [row for row in usable if not side[row]]
        if len(training) > MAX_TRAINING:
            training = heapq.nsmallest(MAX_TRAINING, training, key=hash64.__getitem__)
        counts = array("I", bytes(4 * (WORDS_MASK + 1)))
        for row, words in _words(results, decisions, held_out.union(training)):
            for word in words:
                counts[word] += 1
            if len(words) < MIN_WORDS:
                continue
            if row in held_out:
                self._held_out[row] = words
            else:
                self._rows.append(row)
                self._words.extend(words)
                self._starts.append(len(self._words))
        self._compare(counts, len(held_out) + len(training), hash64)

    def _compare(self, counts: Sequence[int], num_rows: int, hash64: Sequence[int]) -> None:
        rarest = {
            row: heapq.nsmallest(RAREST, (w for w in words if 1 < counts[w] <= MAX_ROWS), key=lambda w: (counts[w], w))
            for row, words in self._held_out.items()
        }
        postings: dict[int, list[int]] = {word: [] for words in rarest.values() for word in words}
        for place in range(len(self._rows)):
            for word in self._of(place):
                if word in postings:
                    postings[word].append(place)
        for row, words in self._held_out.items():
            shared = Counter(place for word in rarest[row] for place in postings[word])
            mine = set(words)
            likeliest = heapq.nsmallest(
                CANDIDATES,
                shared,
                key=lambda place, shared=shared: (-shared[place], hash64[self._rows[place]]),  # type: ignore[misc]
            )
            weighed = [
                (_similarity(mine, set(self._of(place)), counts, num_rows), self._rows[place]) for place in likeliest
            ]
            self._similar[row] = sorted(weighed, reverse=True)

    def _of(self, place: int) -> "array[int]":
        return self._words[self._starts[place] : self._starts[place + 1]]

    def twins(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a held-out row and a training row that share most of their words."""
        for row, similar in self._similar.items():
            yield from ((row, other) for share, other in similar if share >= TWIN)

    def report(self, side: bytearray) -> dict[str, Any] | None:
        """Return the number of `test_rows`, those `above` the `bound`, and the `median` of their best similarity.

        Return None without test rows.
        """
        best = [
            max((share for share, other in similar if not side[other]), default=0.0)
            for row, similar in self._similar.items()
            if side[row] == TEST
        ]
        if not best:
            return None
        above = sum(share >= TWIN for share in best)
        return {"test_rows": len(best), "above": above, "bound": TWIN, "median": round(statistics.median(best), 3)}


def _words(results: Sequence[Path], decisions: Decisions, wanted: set[int]) -> Iterator[tuple[int, "array[int]"]]:
    """Yield (row, its distinct words as numbers), in lower case and without punctuation."""
    for number, path in enumerate(results):
        start = decisions.chunk_starts[number]
        with closing(open_result(path)) as database:
            for n, messages in database.execute("SELECT n, messages FROM bodies ORDER BY n"):
                if start + n in wanted:
                    asked, learned, _ = texts_of(messages_from(messages))
                    yield start + n, _numbers(f"{asked}\n{learned}")


def _numbers(text: str) -> "array[int]":
    words = words_of(text)
    if isinstance(words, str):  # a script without spaces
        words = [text[i : i + 3] for i in range(len(text) - 2)]
    plain = {word.strip(".,;:!?()\"'") for word in words} - {""}
    return array("I", sorted({crc32(word.encode("utf-8", "surrogatepass")) & WORDS_MASK for word in plain}))


def _similarity(one: set[int], other: set[int], counts: Sequence[int], num_rows: int) -> float:
    """Return the weighted Jaccard similarity; a word's weight is its inverse document frequency."""
    shared = sum(math.log(num_rows / counts[word]) for word in one & other)
    either = sum(math.log(num_rows / counts[word]) for word in one | other)
    return shared / either if either else 0.0
