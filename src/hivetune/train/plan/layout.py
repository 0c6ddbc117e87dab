"""Documents as one flat sequence of tokens: no padding, a shared prefix once, and what each position must predict.

Everything in a decoder but attention works on single positions, so a prefix that several documents share needs to be
computed once: each document's own tokens attend to prefix ++ own, and the gradients of the copies are summed in the
prefix. Exact as long as weights and tokens are the same (docs/engine.md); the technique is that of prefix trees in
serving (Hydragen, arXiv 2402.05099; RadixAttention, arXiv 2312.07104), with a backward pass. The engine computes these
layouts, the plan predicts what they cost.

    three documents        one layout of 9 tokens instead of 17
    S S S a a b            tokens:     S S S  a a  b  c c  d
    S S S a a c c          positions:  0 1 2  3 4  5  5 6  3
    S S S d                segments:   [S S S] -> [a a] -> [b], [c c];  [S S S] -> [d]
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Below this many shared tokens one more segment costs more in small attention calls than it saves (docs/log.md).
MIN_SHARED_TOKENS = 16
# New token counts are not free: a card searches for its fastest kernel, and on some cards the remaining crashes are in
# rare shapes.
TOKEN_MULTIPLE = 64
# On a CPU, oneDNN compiles products for each token count (15 ms, 5 MB kept). 473 tokens take as long as 512, and 480
# take 7 % less (docs/log.md).
COMPILED_MULTIPLE = 32
# Our own product computes 8 rows at a time.
NATIVE_MULTIPLE = 8

# Packs of a usual step: two to four for each of a few workers, so that nobody waits long for the last one.
PACKS_A_STEP = 8
# Smaller micro-batches cost more than dividing them gains. The key is whether it is a CPU: a card needs more to be
# busy.
MIN_PACK_TOKENS = {True: 256, False: 1024}
# A prefix is computed again for another worker if that is at most a quarter of the pack's work.
WORTH_SHARING = 4


Padding = Callable[[int], int]
"""Maps a number of rows to the number that it is padded to."""


def unpadded(size: int) -> int:
    """Return `size` itself: the padding function for layouts without padding."""
    return size


def rounded_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def multiples_of(multiple: int) -> Padding:
    """Return the function that rounds a size up to a multiple of `multiple`."""
    return lambda size: rounded_up(size, multiple)


def token_multiple(device: str, dtype: str, products: str | None = None) -> int:
    """Return the number to a multiple of which the token count of a micro-batch is padded.

    `device` as in torch.device.type, `products` as in the run's choices.
    """
    if device != "cpu":
        return TOKEN_MULTIPLE
    if compiles_products(dtype, products):
        return COMPILED_MULTIPLE
    return NATIVE_MULTIPLE if products == "native" else 1


def compiles_products(dtype: str, products: str | None) -> bool:
    """Return whether a CPU's products are oneDNN's, which keeps compiled code for each number of rows in memory."""
    return products == "onednn" if dtype == "float32" else dtype == "bfloat16" and products != "native"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + size) of the flat sequence, which one or several documents contain.

    parents: the earlier segments of these documents, outermost first. Its queries attend to the parents' keys and to
    its own keys before them. depth: position of its first token in its documents. tree: number of its tree; segments of
    different trees share no document.
    """

    start: int
    size: int
    depth: int
    parents: tuple[int, ...]
    tree: int


@dataclass(frozen=True)
class Layout:
    """The tokens of one micro-batch as a flat sequence. T tokens; E loss entries (a position and the token to predict).

    tokens, positions [T]: token ids, and the position of each in its document (for the rotation). rows, targets, counts
    [E], sorted by row: the flat position, the token to predict, and the weights of the documents in which it is
    trained; its loss is multiplied by their sum (0 for padding). owners: for each document, the numbers of its entries.
    """

    tokens: list[int]
    positions: list[int]
    segments: list[Segment]
    rows: list[int]
    targets: list[int]
    counts: list[float]
    owners: list[list[int]]

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TrimmedDocument:
    """A document without the tokens on which no loss depends, and its (position, token to predict) pairs.

    `weight`: the factor of its loss; below 0 for a bad answer.
    """

    tokens: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    weight: float = 1.0


def trim_document(tokens: Sequence[int], trained: Sequence[int] | memoryview, weight: float = 1.0) -> TrimmedDocument:
    """Return a document without its last trained token and all after it: in a causal model no loss depends on them.

    Position i predicts token i + 1. `trained[i]`: token i counts in the loss; the first one never does.
    """
    pairs = tuple((index - 1, tokens[index]) for index in range(1, len(tokens)) if trained[index])
    last = pairs[-1][0] + 1 if pairs else 0
    return TrimmedDocument(tuple(tokens[:last]), pairs, weight)


def make_layout(documents: Sequence[TrimmedDocument], *, share: bool = True, pad: Padding = unpadded) -> Layout:
    """Return the layout of documents, which may be in any order. `share`: compute common prefixes once.

    Documents without a trained token are left out. Tokens are padded with a document of zeros at the end, loss entries
    with some whose loss is multiplied by 0.
    """
    order = _by_content(documents)
    builder = _Builder(documents)
    if share and order:
        builder.grow(order, _shared_lengths(documents, order)[1], 0, ())
    else:
        for index in order:
            builder.leaf(index, 0, ())
    if missing := pad(len(builder.tokens)) - len(builder.tokens):
        builder.segment((0,) * missing, 0, ())
    return builder.finish(pad)


def pack_tokens(tokens: int, rows: int, batch_size: int, device: str) -> int:
    """Return the number of tokens that a micro-batch should have if several workers share a step."""
    # Not by the number of workers, because the result must not depend on it.
    aim = tokens * batch_size // max(1, rows) // PACKS_A_STEP
    return max(MIN_PACK_TOKENS[device == "cpu"], rounded_up(aim, TOKEN_MULTIPLE))


def split_documents(
    documents: Sequence[TrimmedDocument], budget_tokens: int, *, aim_tokens: int | None = None
) -> list[list[int]]:
    """Return the document numbers of each micro-batch. Documents are sorted by content, so that neighbours share
    prefixes; the order of the input does not matter.

    A micro-batch has at most `budget_tokens` tokens (a shared prefix counts once), or one longer document. It also ends
    above `aim_tokens`, if the prefix that is then computed twice is short compared with the micro-batch.
    """
    order = _by_content(documents)
    lengths, common = _shared_lengths(documents, order)
    batches: list[list[int]] = []
    start = 0
    while start < len(order):

        def computed(stop: int, start: int = start) -> int:
            return _tree_tokens(lengths[start:stop], common[start:stop], 0)

        def fitting(tokens: int, start: int = start) -> int:
            """Return the end of the longest micro-batch from `start` that has at most `tokens` tokens, or one
            document."""
            stops = range(start + 2, len(order) + 1)
            return start + 1 + bisect_right(stops, tokens, key=computed)

        stop = fitting(budget_tokens)
        if aim_tokens is not None:
            above = range(fitting(aim_tokens), stop)
            stop = next((place for place in above if WORTH_SHARING * common[place] <= computed(place)), stop)
        batches.append(order[start:stop])
        start = stop
    return batches


def _shared_lengths(documents: Sequence[TrimmedDocument], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the length of each document of `order`, and how many tokens it shares with the one before it."""
    tokens = [documents[index].tokens for index in order]
    common = [_common(before, after) for before, after in itertools.pairwise(tokens)]
    return [len(each) for each in tokens], [0, *common][: len(tokens)]


def _tree_tokens(lengths: Sequence[int], common: Sequence[int], depth: int) -> int:
    """Return the tokens of the tree that `_Builder.grow` makes of documents like these, without making it."""
    if len(lengths) == 1:
        return lengths[0] - depth
    shared, grown = min(common[1:]), 0
    if shared - depth >= MIN_SHARED_TOKENS:
        grown, depth = shared - depth, shared
    parts = itertools.pairwise([0, *_branches(common, shared), len(lengths)])
    return grown + sum(_tree_tokens(lengths[start:stop], common[start:stop], depth) for start, stop in parts)


def _branches(common: Sequence[int], shared: int) -> list[int]:
    """Return the indices at which a branch begins: there a document shares no more with its neighbour than all
    share."""
    return [index for index in range(1, len(common)) if common[index] == shared]


def _by_content(documents: Sequence[TrimmedDocument]) -> list[int]:
    """Return the documents that have tokens, sorted by them."""
    # Neighbours share prefixes, whatever order they came in.
    taking_part = (index for index, document in enumerate(documents) if document.tokens)
    return sorted(taking_part, key=lambda index: documents[index].tokens)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    # By bisection, as slices are compared in C.
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Builder:
    """A builder that grows the tree of shared prefixes over sorted documents, depth first.

    Each tree is one range of tokens. flat: for each document the flat rows of its tokens, in its order.
    """

    def __init__(self, documents: Sequence[TrimmedDocument]):
        self.documents = documents
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.flat: dict[int, list[int]] = {}
        self.trees = 0

    def grow(self, order: list[int], common: list[int], depth: int, path: tuple[int, ...]) -> None:
        """Add the documents of `order`.

        `common[i]`: tokens that order[i] shares with order[i - 1]; all share at least `depth`.
        """
        if len(order) == 1:
            self.leaf(order[0], depth, path)
            return
        shared = min(common[1:])
        if shared - depth >= MIN_SHARED_TOKENS:
            path = (*path, self.segment(self.documents[order[0]].tokens[depth:shared], depth, path))
            depth = shared
        for start, stop in itertools.pairwise([0, *_branches(common, shared), len(order)]):
            self.grow(order[start:stop], common[start:stop], depth, path)

    def leaf(self, index: int, depth: int, path: tuple[int, ...]) -> None:
        tokens = self.documents[index].tokens[depth:]
        if tokens:
            path = (*path, self.segment(tokens, depth, path))
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

    def finish(self, pad: Padding) -> Layout:
        counts: dict[tuple[int, int], float] = {}
        owned: list[list[tuple[int, int]]] = [
            [(self.flat[index][position], token) for position, token in document.pairs] if document.tokens else []
            for index, document in enumerate(self.documents)
        ]
        for document, entries in zip(self.documents, owned, strict=True):
            for entry in entries:
                counts[entry] = counts.get(entry, 0.0) + document.weight
        # Padding goes to rows without an entry first, so that no row has to be gathered twice.
        counted, size = {row for row, _ in counts}, pad(len(counts))
        free = (row for row in range(len(self.tokens)) if row not in counted)
        counts |= {(row, 0): 0 for row in itertools.islice(free, size - len(counts))}
        counts = dict(sorted(counts.items()))  # by row: where each predicts one token, nothing is gathered
        number = {entry: entry_number for entry_number, entry in enumerate(counts)}
        last, num_padded = len(self.tokens) - 1, size - len(counts)
        return Layout(
            tokens=self.tokens,
            positions=self.positions,
            segments=self.segments,
            rows=[*(row for row, _ in counts), *[last] * num_padded],
            targets=[*(token for _, token in counts), *[0] * num_padded],
            counts=[*counts.values(), *[0] * num_padded],
            owners=[[number[entry] for entry in entries] for entries in owned],
        )
