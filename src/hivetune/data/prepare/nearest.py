"""The similarity of held-out rows to training rows by their words, in any order.

Two rows are twins if most of their words are equal, where rare words count more: for example names were changed, or a
third of the words was replaced. Such pairs share few word triples, by which checks/dedupe.py finds near duplicates.
"""

import heapq
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from hivetune.data.checks.lessons import texts_of, words_of
from hivetune.data.fates import TRAIN, Decisions
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
Similar = dict[int, list[tuple[float, int]]]  # held-out row: (similarity, training row), the most similar first


def similar_rows(decisions: Decisions, side: bytearray, hash64: Sequence[int]) -> Similar:
    """Return the most similar training rows of each held-out row (by `side`)."""
    usable = [row for row, fate in enumerate(decisions.fate) if fate == TRAIN]
    chosen = set(heapq.nsmallest(MAX_HELD_OUT, (row for row in usable if side[row]), key=hash64.__getitem__))
    training = [row for row in usable if not side[row]]
    if len(training) > MAX_TRAINING:
        training = heapq.nsmallest(MAX_TRAINING, training, key=hash64.__getitem__)
    chosen.update(training)

    held_out: dict[int, array[int]] = {}
    rows, starts, all_words = array("I"), array("Q", [0]), array("I")  # of the training rows
    counts = array("I", bytes(4 * (WORDS_MASK + 1)))  # of rows with a word
    for row, messages in decisions.rows("SELECT n, messages FROM bodies ORDER BY n"):
        if row not in chosen:
            continue
        question, learned, _ = texts_of(messages_from(messages))
        words = _numbers(f"{question}\n{learned}")
        for word in words:
            counts[word] += 1
        if len(words) < MIN_WORDS:
            continue
        if side[row]:
            held_out[row] = words
        else:
            rows.append(row)
            all_words.extend(words)
            starts.append(len(all_words))

    def words_at(index: int) -> "array[int]":
        return all_words[starts[index] : starts[index + 1]]

    rarest = {
        row: heapq.nsmallest(RAREST, (w for w in words if 1 < counts[w] <= MAX_ROWS), key=lambda w: (counts[w], w))
        for row, words in held_out.items()
    }
    postings: dict[int, list[int]] = {word: [] for words in rarest.values() for word in words}
    for index in range(len(rows)):
        for word in words_at(index):
            if word in postings:
                postings[word].append(index)
    similar = {}
    for row, words in held_out.items():
        shared = Counter(index for word in rarest[row] for index in postings[word])
        likeliest = sorted(shared, key=lambda index: hash64[rows[index]])
        likeliest.sort(key=shared.__getitem__, reverse=True)  # stable: of equal counts still by content
        similar[row] = sorted(
            (
                (_similarity(set(words), set(words_at(index)), counts, len(chosen)), rows[index])
                for index in likeliest[:CANDIDATES]
            ),
            reverse=True,
        )
    return similar


def twins(similar: Similar) -> list[tuple[int, int]]:
    """Return the pairs of a held-out row and a training row that share most of their words."""
    return [(row, twin) for row, others in similar.items() for share, twin in others if share >= TWIN]


def similarity_report(similar: Similar, side: bytearray) -> dict[str, Any] | None:
    """Return the number of `test_rows`, those `above` the `bound`, and the `median` of their best similarity.

    Return None without test rows.
    """
    best = [
        max((share for share, similar_row in others if not side[similar_row]), default=0.0)
        for row, others in similar.items()
        if side[row] == TEST
    ]
    if not best:
        return None
    above = sum(share >= TWIN for share in best)
    return {"test_rows": len(best), "above": above, "bound": TWIN, "median": round(statistics.median(best), 3)}


def _numbers(text: str) -> "array[int]":
    words = words_of(text)
    if isinstance(words, str):  # a script without spaces
        words = [text[i : i + 3] for i in range(len(text) - 2)]
    plain = {word.strip(".,;:!?()\"'") for word in words} - {""}
    return array("I", sorted({crc32(word.encode("utf-8", "surrogatepass")) & WORDS_MASK for word in plain}))


def _similarity(a: set[int], b: set[int], counts: Sequence[int], num_rows: int) -> float:
    """Return the weighted Jaccard similarity; a word's weight is its inverse document frequency."""
    shared = sum(math.log(num_rows / counts[word]) for word in a & b)
    either = sum(math.log(num_rows / counts[word]) for word in a | b)
    return shared / either if either else 0.0
