"""Which rows are there already: exactly (64 bits of the content's hash) or nearly (MinHash over word triples).

Nothing here holds rows: exact duplicates cost 16 bytes a row, near ones a file of signatures that is read band by
band through one table of 64-bit keys, so memory does not grow with the number of bands (Leskovec, Rajaraman, Ullman:
Mining of Massive Datasets, 3.4).
"""

from array import array
from collections.abc import Callable, Sequence
from operator import eq

from rensa import RMinHash

from hivetune.records import Message

NUM_PERM = 128  # the estimate's standard error at similarity 0.85 is then 0.03
SIGNATURE_BYTES = NUM_PERM * 4
LONGEST_WORDS = 20  # characters a word on average, above which text has no spaces
SEED = 1
MISSED = 0.01  # bands are chosen so that at most this share of pairs at the threshold is never compared
MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Knuth, multiplicative hashing)
MASK = (1 << 64) - 1
Progress = Callable[[int, int | None], None]


class Table:
    """From 64-bit keys to 32-bit numbers, 12 bytes a slot, at most 2/3 full: a dict would take ten times that."""

    def __init__(self, num_keys: int = 1024):
        size = 1024
        while size * 2 < num_keys * 3:
            size *= 2
        self._resize(size)

    def _resize(self, size: int) -> None:
        self._size, self._used = size, 0
        self._keys = array("Q", bytes(8 * size))
        self._values = array("I", bytes(4 * size))

    def put(self, key: int, value: int) -> int | None:
        """The value that `key` has already; None when it was free and now has `value`."""
        key = key or 1  # 0 marks a free slot
        mask = self._size - 1
        slot = ((key * MIX) & MASK) >> 20 & mask
        keys = self._keys
        while (found := keys[slot]) != 0:
            if found == key:
                return self._values[slot]
            slot = (slot + 1) & mask
        keys[slot] = key
        self._values[slot] = value
        self._used += 1
        if self._used * 3 > self._size * 2:
            self._grow()
        return None

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._resize(self._size * 2)
        for key, value in zip(keys, values, strict=True):
            if key:
                self.put(key, value)


def signature(messages: Sequence[Message]) -> bytes:
    """MinHash of what was asked and answered (not of the system prompt, which rows share), 512 bytes."""
    text = " ".join(m.content for m in messages if m.role != "system").lower()
    words = text.split()
    if len(words) * LONGEST_WORDS < len(text):  # Chinese or Japanese: no spaces, so characters stand in for words
        words = list(text)
    triples = zip(words, words[1:], words[2:], strict=False)
    shingles = [" ".join(triple) for triple in triples] or [" ".join(words)]
    sketch = RMinHash(NUM_PERM, SEED)
    sketch.update(shingles)
    return array("I", sketch.digest()).tobytes()


def bands_for(threshold: float) -> int:
    """How many values make one band: as many as still let at most MISSED of the pairs at the threshold slip."""
    for rows in (32, 16, 8, 4, 2):
        if (1 - threshold**rows) ** (NUM_PERM // rows) <= MISSED:
            return rows
    return 1


def near_duplicates(
    signatures: memoryview, threshold: float, skipped: bytes = b"", progress: Progress = lambda _done, _total: None
) -> array:  # type: ignore[type-arg]
    """For each of the consecutive signatures (512 bytes) the earlier row that it nearly equals, else its own number.

    Rows with a 1 in `skipped` take no part. A row that is a duplicate itself is nobody's original.
    """
    num_rows = len(signatures) // SIGNATURE_BYTES
    words = signatures.cast("B").cast("I")
    pairs = words.cast("B").cast("Q")
    rows_per_band = bands_for(threshold)
    num_bands = NUM_PERM // rows_per_band
    needed = threshold * NUM_PERM
    original = array("I", range(num_rows))
    for band in range(num_bands):
        table = Table(num_rows)
        for row in range(num_rows):
            if original[row] != row or (skipped and skipped[row]):
                continue
            other = table.put(_band_key(words, pairs, row, band, rows_per_band), row)
            if other is None:
                continue
            while original[other] != other:
                other = original[other]
            if _equal_values(words, row, other) >= needed:
                original[row] = other
        progress(band + 1, num_bands)
    return original


def _band_key(words: memoryview, pairs: memoryview, row: int, band: int, rows_per_band: int) -> int:
    if rows_per_band == 1:
        return words[row * NUM_PERM + band]
    first = (row * NUM_PERM + band * rows_per_band) // 2
    key = 0
    for value in pairs[first : first + rows_per_band // 2]:
        key = ((key ^ value) * MIX) & MASK
    return key


def _equal_values(words: memoryview, one: int, other: int) -> int:
    a, b = one * NUM_PERM, other * NUM_PERM
    return sum(map(eq, words[a : a + NUM_PERM], words[b : b + NUM_PERM]))
