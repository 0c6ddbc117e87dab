"""Few shapes: how attention's segments are batched and padded, and which shapes come often enough for a graph. Pure."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hivetune.train.plan.layout import bucketed

# Segments are batched by sizes rounded up to this: few shapes, and little padding. Fused kernels want lengths that are
# multiples of 8 at least, and their own blocks are 64 or 128.
SIZE_STEP = 64
# All segments are one class, though the scores are then so many times as many, or no more than this a head: scores are
# a twentieth of a step's operations at 150 tokens a row, and each class is a handful of launches a layer.
MOST_PADDED, CHEAP_SCORES = 2, 1 << 19
# A graph costs about as much as three steps without one: one to record it, two to make it ready. A shape that came so
# often pays for its graph if it comes as often again, and nobody knows better (rent or buy).
USES_BEFORE = 3
# Each holds its tables, a few MB, and its nodes.
MOST_GRAPHS = 48


@dataclass(frozen=True)
class SegmentClass:
    """Segments `numbers`, computed as `count` of `queries` and `keys` each; `places`: of their queries, padded."""

    numbers: tuple[int, ...]
    count: int
    queries: int
    keys: int
    places: int


def classes_of(sizes: Sequence[tuple[int, int]], *, few: bool) -> list[SegmentClass]:
    """`sizes`: queries and keys of each segment. `few`: sizes are powers of two, one class for all where that is cheap,
    and counts are padded too."""

    def rounded(size: int) -> int:
        return max(SIZE_STEP, _power(size)) if few else -(-size // SIZE_STEP) * SIZE_STEP

    found: dict[tuple[int, int], list[int]] = {}
    for number, (queries, keys) in enumerate(sizes):
        found.setdefault((rounded(queries), rounded(keys)), []).append(number)
    if few and found:
        most = (max(queries for queries, _ in found), max(keys for _, keys in found))
        scores = sum(len(numbers) * queries * keys for (queries, keys), numbers in found.items())
        if len(sizes) * most[0] * most[1] <= max(MOST_PADDED * scores, CHEAP_SCORES):
            found = {most: list(range(len(sizes)))}
    classes = []
    for (queries, keys), numbers in sorted(found.items()):
        places = sum(sizes[number][0] for number in numbers)
        count = few_of(len(numbers)) if few else len(numbers)
        places = min(bucketed(places), count * queries) if few else places
        classes.append(SegmentClass(tuple(numbers), count, queries, keys, places))
    return classes


def few_of(count: int) -> int:
    """The least of few counts that holds `count`: powers of two up to 8, then multiples of 8."""
    return _power(count) if count <= 8 else -(-count // 8) * 8


class Uses:
    """How often each shape came, and which ones are worth a graph."""

    def __init__(self, before: int = USES_BEFORE, most: int = MOST_GRAPHS):
        self._before, self._most = before, most
        self._counts: Counter[Hashable] = Counter()
        self._taken: set[Hashable] = set()

    def is_often(self, shape: Hashable) -> bool:
        """Whether this use, which is counted, is one of a graph."""
        self._counts[shape] += 1
        if self._counts[shape] > self._before and len(self._taken) < self._most:
            self._taken.add(shape)
        return shape in self._taken

    @property
    def taken(self) -> int:
        """Shapes that have a graph."""
        return len(self._taken)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
