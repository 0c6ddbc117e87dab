"""The search for near duplicates, with MinHash over word triples, and a compact hash table.

The search has two steps, as in Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4. Rows that share a band of
their MinHash are candidates; each pair of candidates is then compared word by word (lessons.py). Memory stays bounded:
the sketches lie in a file, and no rows are held.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from rensa import RMinHash

from hivetune.data.checks.lessons import Lesson, Triple, compare, shared_triples, texts_of, words_of
from hivetune.records import Message

NUM_PERM = 128  # the estimate's standard error at similarity 0.85 is then 0.03
SEED = 1
BAND_VALUES = 5
# With 25 bands of 5 values, pairs with a similarity of 0.7 are candidates with probability 0.99, with 0.85 always.
NUM_BANDS = NUM_PERM // BAND_VALUES
KEY_BYTES = 4 * NUM_BANDS
SKETCH_BYTES = KEY_BYTES + 2 * NUM_PERM
LEAK_THRESHOLD = 0.7  # rows of this similarity stay on one side of the split
SLACK = 0.1  # tolerated error of the estimate: 2.5 standard errors
# More rows than this with one band share a text, such as an instruction, which doesn't count when they are compared.
CROWD_ROWS = 16
CROWD_SAMPLE = 16
CROWD_ESTIMATE = 0.5  # lower, because without the shared text few values remain and the estimate is coarse
MAX_SLOTS = 1 << 24  # 16 MB; with 1,000,000 rows one key in 17 shares its place by chance
MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Knuth, multiplicative hashing)
MASK = (1 << 64) - 1
NOBODY = 0xFFFFFFFF
LOW_BITS, HIGH_BITS = (int.from_bytes(bits * NUM_PERM, "little") for bits in (b"\xff\x7f", b"\x00\x80"))
Pair = tuple[int, int]


class Table:
    """A hash table from 64-bit keys to 32-bit numbers: 12 bytes a slot, a tenth of a dict, at most 2/3 full."""

    def __init__(self) -> None:
        self._resize(1024)

    def _resize(self, size: int) -> None:
        """Empty the table, with room for `size` keys."""
        self._size, self._used = size, 0
        self._keys = array("Q", bytes(8 * size))
        self._values = array("I", bytes(4 * size))

    def put(self, key: int, value: int) -> int | None:
        """Return the value that `key` already has; if it has none, set it to `value` and return None."""
        key = key or 1  # 0 marks a free slot
        slot = self._slot(key)
        if self._keys[slot]:
            return self._values[slot]
        self._keys[slot] = key
        self._values[slot] = value
        self._used += 1
        if self._used * 3 > self._size * 2:
            keys, values = self._keys, self._values
            self._resize(self._size * 2)
            for old, number in zip(keys, values, strict=True):
                if old:
                    self.put(old, number)
        return None

    def get(self, key: int) -> int | None:
        """Return the value of `key`, or None."""
        slot = self._slot(key or 1)
        return self._values[slot] if self._keys[slot] else None

    def _slot(self, key: int) -> int:
        """Return the slot of `key`, or the free slot where it belongs."""
        mask = self._size - 1
        slot = ((key * MIX) & MASK) >> 20 & mask
        keys = self._keys
        while (stored := keys[slot]) != 0 and stored != key:
            slot = (slot + 1) & mask
        return slot


def sketch(messages: Sequence[Message]) -> bytes:
    """Return 356 bytes: the keys of all bands (32 bits each) and 16 bits of each MinHash value."""
    question, learned, _ = texts_of(messages)
    pieces = _joined(words_of(question), "") + _joined(words_of(learned), "=")
    minhash = RMinHash(NUM_PERM, SEED)
    minhash.update(pieces)
    values = array("I", minhash.digest()).tobytes()
    size = 4 * BAND_VALUES
    keys = array("I", [crc32(values[start : start + size]) for start in range(0, size * NUM_BANDS, size)])
    return keys.tobytes() + memoryview(values).cast("H")[::2].tobytes()


def _joined(words: Sequence[str], front: str) -> list[str]:
    """Return each of `triples_of` as one text, with the prefix `front`."""
    if len(words) < 3:
        return [front + " ".join(words)] if words else []
    return [f"{front}{a} {b} {c}" for a, b, c in zip(words, words[1:], words[2:], strict=False)]


class Near(NamedTuple):
    """The result: `copies` are (row, row that is kept instead, similarity), `leaks` are pairs that stay together."""

    copies: list[tuple[int, int, float]]
    leaks: list[Pair]


@dataclass(frozen=True, slots=True)
class Rows:
    """The properties of row i of the sketches that the search needs.

    `question` is a hash without system prompts, `read` a hash of all text that is read. Of two copies the row with the
    lower `rank` is kept.
    """

    lesson: Callable[[int], Lesson]
    question: Callable[[int], int]
    rank: Callable[[int], tuple[float, ...]]
    read: Callable[[int], int] | None = None


def near_copies(sketches: memoryview, threshold: float, rows: Rows, skipped: bytes = b"") -> Near:
    """Compare all rows of `sketches` except those in `skipped`. The result depends only on the set of rows."""
    copies: list[tuple[int, int, float]] = []
    leaks: list[Pair] = []
    with closing(_Search(sketches, rows)) as search:
        for band in range(NUM_BANDS):
            for bucket in search.buckets(band, skipped):
                search.take(bucket)
        for row, other_row in search.pairs():
            similarity = compare(rows.lesson(row), rows.lesson(other_row), search.shared(row, other_row))
            if similarity.same and similarity.share >= threshold:
                copies.append((row, other_row, similarity.share))
            if similarity.share >= LEAK_THRESHOLD:
                leaks.append((row, other_row))
    return Near(_drop(copies, rows.rank), leaks)


class _Search:
    """The candidates, and the crowds: sets of many rows that share a text."""

    def __init__(self, sketches: memoryview, rows: Rows):
        self._keys, self._values = sketches.cast("I"), sketches.cast("H")
        self._rows = rows
        num_rows = len(sketches) // SKETCH_BYTES
        self._num_slots = min(MAX_SLOTS, 1 << (16 * num_rows).bit_length())
        self._pairs: set[int] = set()  # one << 32 | other
        self._crowd_of = array("I", [NOBODY]) * num_rows
        self._crowds: list[list[int]] = []  # a sample of each
        self._sizes: list[int] = []
        self._common = lru_cache(maxsize=64)(self._common_values)
        self._shared = lru_cache(maxsize=64)(lambda crowd: shared_triples(map(rows.lesson, self._crowds[crowd])))

    def close(self) -> None:
        """Release the views, so that the mapped file can be closed."""
        self._keys.release()
        self._values.release()

    def buckets(self, band: int, skipped: bytes) -> Iterator[list[int]]:
        """Yield the sets of two or more rows that have the same key in this band.

        A byte array finds the keys that may repeat, so that only they need a dict.
        """
        keys = array("I", self._keys[band :: SKETCH_BYTES // 4])
        is_used, repeated = bytearray(self._num_slots), set()
        mask = self._num_slots - 1
        for key in keys:
            if is_used[key & mask]:
                repeated.add(key)
            else:
                is_used[key & mask] = 1
        buckets: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            if key in repeated and not (skipped and skipped[row]):
                buckets.setdefault(key, []).append(row)
        yield from (bucket for bucket in buckets.values() if len(bucket) > 1)

    def take(self, bucket: list[int]) -> None:
        """Add the pairs of a bucket: each row with the best and the previous one; of a crowd only equal questions."""
        rank = self._rows.rank
        if len(bucket) <= CROWD_ROWS:
            self._add(sorted(bucket, key=rank))
            return
        self._remember_crowd(bucket)
        # Both keys, since one question may be asked about many documents.
        for key in filter(None, (self._rows.question, self._rows.read)):
            groups: dict[int, list[int]] = {}
            for row in bucket:
                groups.setdefault(key(row), []).append(row)
            for same in groups.values():
                if len(same) > 1:
                    self._add(sorted(same, key=rank))

    def pairs(self) -> Iterator[Pair]:
        """Yield the candidates whose estimate is high enough, also without the text that their crowd shares."""
        for packed in sorted(self._pairs):
            row, other_row = packed >> 32, packed & NOBODY
            if self._is_likely(row, other_row):
                yield row, other_row

    def shared(self, row: int, other_row: int) -> frozenset[Triple]:
        """Return the triples that the crowds of two rows share; none if both rows ask exactly the same."""
        if self._rows.question(row) == self._rows.question(other_row):
            return frozenset()
        crowds = {self._crowd_of[row], self._crowd_of[other_row]} - {NOBODY}
        return frozenset().union(*(self._shared(crowd) for crowd in sorted(crowds)))

    def _add(self, ordered: list[int]) -> None:
        for position, row in enumerate(ordered[1:], 1):
            for neighbour in {ordered[0], ordered[position - 1]}:
                packed = min(row, neighbour) << 32 | max(row, neighbour)
                if packed not in self._pairs and self._is_likely(row, neighbour):
                    self._pairs.add(packed)

    def _remember_crowd(self, bucket: list[int]) -> None:
        """Put the rows of a bucket into a crowd. A row belongs to its largest crowd."""
        number, size = len(self._crowds), len(bucket)
        joined = False
        for row in bucket:
            crowd = self._crowd_of[row]
            if crowd == NOBODY or self._sizes[crowd] < size:
                self._crowd_of[row] = number
                joined = True
        if joined:
            self._crowds.append(sorted(bucket, key=self._rows.rank)[:CROWD_SAMPLE])
            self._sizes.append(size)

    def _is_likely(self, row: int, other_row: int) -> bool:
        first, second = self._row_values(row), self._row_values(other_row)
        if _num_equal(first, second) < (LEAK_THRESHOLD - SLACK) * NUM_PERM:
            return False
        crowd = self._crowd_of[row]
        if crowd == NOBODY or crowd != self._crowd_of[other_row]:
            return True
        if self._rows.question(row) == self._rows.question(other_row):
            return True
        values = zip(first, second, self._common(crowd), strict=True)
        equal = [x == y for x, y, common in values if x != common or y != common]
        return sum(equal) >= CROWD_ESTIMATE * len(equal)

    def _row_values(self, row: int) -> memoryview:
        start = (row * SKETCH_BYTES + KEY_BYTES) // 2
        return self._values[start : start + NUM_PERM]

    def _common_values(self, crowd: int) -> list[int]:
        """Return for each place of a sketch the value that more than half of the crowd has, else -1."""
        rows = [self._row_values(row) for row in self._crowds[crowd]]
        most = (Counter(values).most_common(1)[0] for values in zip(*rows, strict=True))
        return [value if 2 * count > len(rows) else -1 for value, count in most]


def _num_equal(a: memoryview, b: memoryview) -> int:
    """Return how many 16-bit values of two sketches are equal.

    Comparing them as one number of 2,048 bits takes a quarter of the time (Warren: Hacker's Delight, 6-1).
    """
    differs = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return NUM_PERM - (((differs & LOW_BITS) + LOW_BITS | differs) & HIGH_BITS).bit_count()


def _drop(
    copies: list[tuple[int, int, float]], rank: Callable[[int], tuple[float, ...]]
) -> list[tuple[int, int, float]]:
    """Return the rows to remove, best rows first: a row is removed if a kept row is its copy."""
    alike: dict[int, dict[int, float]] = {}
    for first_row, second_row, share in copies:
        alike.setdefault(first_row, {})[second_row] = share
        alike.setdefault(second_row, {})[first_row] = share
    stays: set[int] = set()
    dropped = []
    for row in sorted(alike, key=rank):
        originals = stays & alike[row].keys()
        if originals:
            first = min(originals, key=rank)
            dropped.append((row, first, alike[row][first]))
        else:
            stays.add(row)
    return dropped
