"""The search for near copies, with MinHash over word triples.

The search has two steps, as in Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4. Rows that share a band of
their MinHash, of all words or of the question's, are candidates; each pair of candidates is then compared word by word
(checks/lessons.py). Memory stays bounded: the sketches lie in a file, and no rows are held.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from rensa import RMinHash

from hivetune.data.checks.lessons import Lesson, Triple, asked_alike, taught_alike

SEED = 1
NUM_PERM = 128
# (bands, values of each) of all words and of the question's: rows with a similarity of 0.85 are candidates with
# probability 0.99 by 16 bands of 8 values, and rows with 0.7 by 25 bands of 5.
WORDS, QUESTION = (16, 8), (25, 5)
NUM_KEYS = WORDS[0] + QUESTION[0]
ALIKE = 0.7  # rows whose questions are so similar stay on one side of the split
# Rows behind one band; more share a text, such as an instruction, and comparing them all would take hours.
MAX_BUCKET = 1000
MAX_SLOTS = 1 << 24  # 16 MB; with 1,000,000 rows one key in 17 shares its place by chance
RECENT = 256  # rows of a bucket are compared with its first and its last one
Pair = tuple[int, int]


class Near(NamedTuple):
    """The result: `copies` are (row, row that stays instead, similarity), `alike` pairs ask nearly the same."""

    copies: list[tuple[int, int, float]]
    alike: list[Pair]


def sketch(lesson: Lesson) -> bytes:
    """Return the keys of all bands of a row, 4 * NUM_KEYS bytes."""
    keys = _keys([*lesson.question, *lesson.learned], *WORDS)
    keys += _keys(lesson.question, *QUESTION) if lesson.question else [0] * QUESTION[0]  # 0: nothing is asked
    return array("I", keys).tobytes()


def _keys(triples: Sequence[Triple], num_bands: int, band_values: int) -> list[int]:
    minhash = RMinHash(NUM_PERM, SEED)
    minhash.update(triples)
    values = array("I", minhash.digest()).tobytes()
    size = 4 * band_values
    return [crc32(values[start : start + size]) or 1 for start in range(0, size * num_bands, size)]


def near_copies(
    sketches: memoryview, threshold: float, lesson: Callable[[int], Lesson], rank: Sequence[int], skipped: bytes = b""
) -> Near:
    """Compare all rows of `sketches` except those in `skipped`. Of two copies the row with the lower rank stays.

    `lesson` returns what row i asks and teaches, `rank` its place in an order that depends on the rows' content alone.
    """
    copies: list[tuple[int, int, float]] = []
    alike: list[Pair] = []
    compared: set[int] = set()  # one << 32 | other
    least = min(ALIKE, threshold)

    @lru_cache(RECENT)
    def recent(row: int) -> tuple[Lesson, frozenset[Triple]]:
        found = lesson(row)
        return found, frozenset(found.question)

    with sketches.cast("I") as keys:
        for band in range(NUM_KEYS):
            for bucket in _buckets(array("I", keys[band::NUM_KEYS]), skipped):
                for row, other in _pairs(sorted(bucket, key=rank.__getitem__)):
                    packed = min(row, other) << 32 | max(row, other)
                    if packed in compared:
                        continue
                    compared.add(packed)
                    (a, asked), (b, other_asked) = recent(row), recent(other)
                    # Most candidates end here, so the rest of their texts is not compared.
                    common = len(asked & other_asked)
                    union = len(asked) + len(other_asked) - common
                    if union and common / union < least:
                        continue
                    same_asked = asked_alike(a, b)
                    if same_asked is None or same_asked < least:
                        continue
                    alike.append((min(row, other), max(row, other)))
                    same_taught = taught_alike(a, b)
                    if same_taught is not None and min(same_asked, same_taught) >= threshold:
                        copies.append((row, other, min(same_asked, same_taught)))
    return Near(_drop(copies, rank), sorted(alike))


def _buckets(keys: "array[int]", skipped: bytes) -> Iterator[list[int]]:
    """Yield the sets of two or more rows that have the same key, unless it is 0.

    A byte array finds the keys that may repeat, so that only they need a dict.
    """
    is_used, repeated = bytearray(min(MAX_SLOTS, 1 << (16 * len(keys)).bit_length())), set()
    mask = len(is_used) - 1
    for key in keys:
        if is_used[key & mask]:
            repeated.add(key)
        else:
            is_used[key & mask] = 1
    repeated.discard(0)
    buckets: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        if key in repeated and not (skipped and skipped[row]):
            buckets.setdefault(key, []).append(row)
    yield from (bucket for bucket in buckets.values() if 1 < len(bucket) <= MAX_BUCKET)


def _pairs(ordered: Sequence[int]) -> Iterator[Pair]:
    """Yield each row with the best and the previous one."""
    for position, row in enumerate(ordered[1:], 1):
        yield row, ordered[0]
        if position > 1:
            yield row, ordered[position - 1]


def _drop(copies: list[tuple[int, int, float]], rank: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return the rows to remove, best rows first: a row is removed if a row that stays is its copy."""
    alike: dict[int, dict[int, float]] = {}
    for one, other, share in copies:
        alike.setdefault(one, {})[other] = share
        alike.setdefault(other, {})[one] = share
    stays: set[int] = set()
    dropped = []
    for row in sorted(alike, key=rank.__getitem__):
        originals = stays & alike[row].keys()
        if originals:
            first = min(originals, key=rank.__getitem__)
            dropped.append((row, first, alike[row][first]))
        else:
            stays.add(row)
    return dropped
