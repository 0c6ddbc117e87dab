"""The search for near copies, with MinHash over word triples.

The search has two steps, as in Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4. Rows that share a band of
their MinHash (of all words, or of the question's words) are candidates; candidates are then compared word by word
(checks/lessons.py). Memory is bounded: the sketches are in a file, and only a few integers per row are in memory.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import compress
from operator import ne
from typing import BinaryIO, NamedTuple
from zlib import crc32

from rensa import RMinHash

from hivetune.data.checks.lessons import Lesson, Triple, asked_alike, taught_alike

SEED = 1
NUM_PERM = 128
FOUND = 0.989  # share of the pairs at the similarity that is looked for which have a band in common
ALIKE = 0.7  # rows whose questions are so similar stay on one side of the split
RECENT = 256  # lessons that are kept: a row is compared with the first and the last one of each of its buckets
# Places for compared pairs, 8 bytes each. A pair whose place another one took is compared again: 1 in 20 at 100,000
# rows.
REMEMBERED = 1 << 20
BLOCK_ROWS = 4096
PART_ROWS = 1 << 18  # whose keys are in one dictionary


class Pair(NamedTuple):
    """Two rows with nearly the same question, by their positions in an order: `other` comes first. `share`: the lower
    one of the similarities of question and answer (0 to 1); None if one of them is below the threshold."""

    row: int
    other: int
    share: float | None


@cache
def bands_for(similarity: float) -> tuple[int, int]:
    """Return (number of bands, values in each band), with as many values as possible so that rows of this similarity
    share a band with probability FOUND. Bands with more values have fewer chance matches."""
    for values in range(NUM_PERM, 0, -1):
        for bands in range(1, NUM_PERM // values + 1):
            if 1 - (1 - similarity**values) ** bands >= FOUND:
                return bands, values
    return NUM_PERM, 1


def sketch_bytes(threshold: float) -> int:
    """Return the size of a sketch."""
    return 4 * (bands_for(threshold)[0] + bands_for(ALIKE)[0])


def sketch(lesson: Lesson, threshold: float) -> bytes:
    """Return the keys of all bands of a row, 4 bytes each, for `near_pairs` with the same threshold."""
    keys = _keys([*lesson.question, *lesson.learned], *bands_for(threshold))
    asked = bands_for(ALIKE)
    keys += _keys(lesson.question, *asked) if lesson.question else [0] * asked[0]  # 0: nothing is asked
    return array("I", keys).tobytes()


def _keys(triples: Sequence[Triple], bands: int, values: int) -> list[int]:
    minhash = RMinHash(bands * values, SEED)
    minhash.update(triples)
    digest = array("I", minhash.digest()).tobytes()
    size = 4 * values
    return [crc32(digest[start : start + size]) or 1 for start in range(0, size * bands, size)]


class Groups:
    """Sets of rows that belong together, each named by its first row, its root. `weights`: what each row adds to the
    size of its set, 1 by default.
    """

    # Union-find with halved paths: almost linear, and two integers a row.

    def __init__(self, num_rows: int, weights: Sequence[int] | None = None):
        self._roots = array("I", range(num_rows))
        self._sizes = array("I", iter(weights)) if weights is not None else array("I", [1]) * num_rows

    def join(self, one: int, other: int, most: int | None = None) -> bool:
        """Join the sets of two rows; return False if the joined set would be larger than `most`."""
        one, other = sorted((self.root(one), self.root(other)))
        if one == other:
            return True
        size = self._sizes[one] + self._sizes[other]
        if most is not None and size > most:
            return False
        self._roots[other], self._sizes[one] = one, size
        return True

    def closed(self) -> "array[int]":
        """Return the root of each row's set, by row."""
        # Each round halves the paths; a call of `root` for each row takes three times as long.
        while (nearer := array("I", map(self._roots.__getitem__, self._roots))) != self._roots:
            self._roots = nearer
        return self._roots

    def root(self, row: int) -> int:
        roots = self._roots
        while (above := roots[row]) != row:
            roots[row] = row = roots[above]
        return row


def near_pairs(
    sketches: BinaryIO, threshold: float, order: Sequence[int], lesson: Callable[[int], Lesson]
) -> Iterator[Pair]:
    """Yield all pairs of near copies. Of the other pairs with nearly the same question, yield enough to connect all
    rows that belong together.

    `sketches` is the file of all rows' sketches, `order` has the indices of the rows to compare, and `lesson` returns
    the word triples of one of them.
    """
    least = min(ALIKE, threshold)
    num_words, num_asked = bands_for(threshold)[0], bands_for(ALIKE)[0]
    compared = array("Q", bytes(8 * REMEMBERED))
    connected = Groups(len(order))

    recent = lru_cache(RECENT)(lesson)
    num_keys = num_words + num_asked
    for band in range(num_keys):
        of_copies = band < num_words
        of_band = _of_band(sketches, band, num_keys)
        keys = array("I", map(of_band.__getitem__, order))
        # Copies are found by the bands of all words; those of questions only have to connect.
        for row, other in _candidates(keys, range(len(keys)) if of_copies else connected.closed()):
            is_new = connected.root(row) != connected.root(other)
            if not is_new and not of_copies:
                continue
            packed = row << 32 | other
            place = (row * 0x9E3779B1 + other) % REMEMBERED
            if compared[place] == packed:
                continue
            compared[place] = packed
            a, b = recent(order[row]), recent(order[other])
            asked = asked_alike(a, b, least)
            if asked is None:
                continue
            connected.join(row, other)
            taught = taught_alike(a, b, threshold) if asked >= threshold else None
            if taught is not None:
                yield Pair(row, other, min(asked, taught))
            elif is_new:
                yield Pair(row, other, None)


def _of_band(sketches: BinaryIO, band: int, num_keys: int) -> "array[int]":
    # Read in blocks: mapped, the file would count as memory of this process, 136 MB of a million rows.
    keys = array("I")
    sketches.seek(0)
    while block := sketches.read(4 * num_keys * BLOCK_ROWS):
        keys += array("I", block)[band::num_keys]
    return keys


def dropped(copies: Iterable[Pair]) -> Iterator[Pair]:
    """Yield for each row to drop the pair with the row that is kept instead. `copies`: pairs with a share, in order."""
    gone: set[int] = set()
    for pair in copies:  # the better row of a pair was decided before it
        if pair.row not in gone and pair.other not in gone:
            gone.add(pair.row)
            yield pair


def _candidates(keys: "array[int]", sets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each position with the first and the last earlier position of the same key, if they are in other `sets`.
    Keys of 0 are skipped.
    """
    # In parts by one byte of the keys: a dictionary of a million keys takes 110 MB, its parts 30 MB, in the same time.
    num_parts = 1 + len(keys) // PART_ROWS
    part_of = bytes(memoryview(keys).cast("B")[:: keys.itemsize])
    for part in range(num_parts):
        chosen = part_of.translate(bytes(byte % num_parts == part for byte in range(256)))
        rows = array("I", compress(range(len(keys)), chosen))
        first: dict[int, int] = {}
        firsts = array("I", map(first.setdefault, compress(keys, chosen), rows))
        # Most keys have one row, or are of rows in one set: they are passed over without a step of Python for each row.
        divided = set(compress(firsts, map(ne, map(sets.__getitem__, rows), map(sets.__getitem__, firsts))))
        divided.discard(first.get(0, -1))
        last: dict[int, int] = {}
        repeated = list(map(divided.__contains__, firsts))
        for row, earliest in zip(compress(rows, repeated), compress(firsts, repeated), strict=True):
            latest = last.get(earliest, earliest)
            last[earliest] = row
            if sets[row] != sets[earliest]:
                yield row, earliest
            if latest != earliest and sets[row] != sets[latest]:
                yield row, latest
