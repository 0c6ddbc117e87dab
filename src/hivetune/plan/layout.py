"""Documents as one flat row of tokens: no padding, shared beginnings once, and what each position must predict.

Everything in a decoder but attention works on single positions, so a prefix that several documents share needs to be
computed once: each document's own tokens attend to prefix ++ own, and the gradients of the copies meet in the prefix.
Exact as long as weights and tokens are the same (docs/engine.md). The engine computes these layouts, the plan predicts
what they cost.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Below this many shared tokens a split costs more in small attention calls than it saves.
MIN_SHARED_TOKENS = 16
# New token counts are not free: a card searches for its fastest kernel, and on some the only crashes that are left are
# in rare shapes; on a CPU, bfloat16 products are compiled for each and keep 5 MB of it (docs/log.md).
TOKEN_MULTIPLE = 64


def token_multiple(device: str, dtype: str) -> int:
    """What the token count of a micro-batch is filled up to a multiple of."""
    return 1 if device == "cpu" and dtype != "bfloat16" else TOKEN_MULTIPLE


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + size) of the flat row. `parents`: the segments before it on its path, outermost first.

    depth: position of its first token in its documents. tree: segments of different trees share nothing.
    """

    start: int
    size: int
    depth: int
    parents: tuple[int, ...]
    tree: int


@dataclass(frozen=True)
class Layout:
    """Shapes: T tokens; E entries (a flat position and the token it must predict).

    counts: how many documents have that entry trained. owners: for each document, its entries.
    """

    tokens: list[int]
    positions: list[int]
    segments: list[Segment]
    rows: list[int]
    targets: list[int]
    counts: list[int]
    owners: list[list[int]]

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """A document as it is computed: its tokens up to the last that predicts something, and (position, target) pairs."""

    tokens: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


def to_row(tokens: Sequence[int], trained: Sequence[int] | memoryview) -> Row:
    """Position i predicts token i + 1. The last trained token and all after it feed nothing and are left out."""
    pairs = tuple((index - 1, tokens[index]) for index in range(1, len(tokens)) if trained[index])
    last = pairs[-1][0] + 1 if pairs else 0
    return Row(tuple(tokens[:last]), pairs)


def make_layout(rows: Sequence[Row], *, share: bool, multiple: int = 1) -> Layout:
    """Rows in any order; documents without a trained token take no place. `share`: compute common prefixes once.

    Tokens and entries are filled up to a `multiple`, so that products come in few shapes: a document of zeros at the
    end, and entries that count for nothing.
    """
    order = sorted((index for index, row in enumerate(rows) if row.tokens), key=lambda index: rows[index].tokens)
    builder = _Builder(rows)
    if share and order:
        common = [0] + [_common(rows[a].tokens, rows[b].tokens) for a, b in itertools.pairwise(order)]
        builder.grow(order, common, 0, ())
    else:
        for index in order:
            builder.leaf(index, 0, ())
    if multiple > 1 and len(builder.tokens) % multiple:
        builder.segment((0,) * (-len(builder.tokens) % multiple), 0, ())
    return builder.finish(multiple)


def split_rows(rows: Sequence[Row], budget_tokens: int, *, share: bool) -> list[list[int]]:
    """Indices of rows for each micro-batch, by content: neighbours share prefixes, and no order of the input matters.

    A micro-batch holds at most `budget_tokens` tokens as computed, or one row.
    """
    order = sorted((index for index, row in enumerate(rows) if row.tokens), key=lambda index: rows[index].tokens)
    batches: list[list[int]] = []
    used = 0
    before: tuple[int, ...] = ()
    for index in order:
        tokens = rows[index].tokens
        common = _common(before, tokens) if share and batches else 0
        fresh = len(tokens) - (common if common >= MIN_SHARED_TOKENS else 0)
        if not batches or used + fresh > budget_tokens:
            batches.append([])
            used, fresh = 0, len(tokens)
        batches[-1].append(index)
        used += fresh
        before = tokens
    return batches


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, by halving: comparing slices is done in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Builder:
    """Grows the tree of shared beginnings over sorted rows, depth first, so that each tree is one range of tokens."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.flat: dict[int, list[int]] = {}
        self.trees = 0

    def grow(self, order: list[int], common: list[int], depth: int, path: tuple[int, ...]) -> None:
        """`common[i]`: tokens that order[i] shares with order[i - 1]; all of them share at least `depth`."""
        if len(order) == 1:
            self.leaf(order[0], depth, path)
            return
        shared = min(common[1:])
        if shared - depth >= MIN_SHARED_TOKENS:
            path = (*path, self.segment(self.rows[order[0]].tokens[depth:shared], depth, path))
            depth = shared
        cuts = [place for place in range(1, len(order)) if common[place] == shared]
        for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True):
            self.grow(order[start:stop], common[start:stop], depth, path)

    def leaf(self, index: int, depth: int, path: tuple[int, ...]) -> None:
        own = self.rows[index].tokens[depth:]
        if own:
            path = (*path, self.segment(own, depth, path))
        self.flat[index] = [
            token
            for number in path
            for token in range(self.segments[number].start, self.segments[number].start + self.segments[number].size)
        ]

    def segment(self, tokens: Sequence[int], depth: int, path: tuple[int, ...]) -> int:
        if not path:
            self.trees += 1
        self.segments.append(Segment(len(self.tokens), len(tokens), depth, path, self.trees - 1))
        self.tokens += tokens
        self.positions += range(depth, depth + len(tokens))
        return len(self.segments) - 1

    def finish(self, multiple: int) -> Layout:
        found: dict[tuple[int, int], int] = {}
        owned: list[list[tuple[int, int]]] = [
            [(self.flat[index][position], target) for position, target in row.pairs] if row.tokens else []
            for index, row in enumerate(self.rows)
        ]
        for key in (key for keys in owned for key in keys):
            found[key] = found.get(key, 0) + 1
        taken = {row for row, _ in found}
        free = (row for row in range(len(self.tokens)) if row not in taken)
        found |= {(row, 0): 0 for row in itertools.islice(free, -len(found) % multiple)}
        found = dict(sorted(found.items()))  # by row: where each predicts one token, nothing is gathered
        number = {key: place for place, key in enumerate(found)}
        return Layout(
            tokens=self.tokens,
            positions=self.positions,
            segments=self.segments,
            rows=[row for row, _ in found],
            targets=[target for _, target in found],
            counts=list(found.values()),
            owners=[[number[key] for key in keys] for keys in owned],
        )
