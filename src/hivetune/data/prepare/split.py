"""The split into training and held-out rows. Rows that belong together are a group, and a group is one draw.

Rows are tied by an equal question, by their session and by nearly equal questions. A group's side is a function of the
hash of its oldest row's session or question: no state is kept, and the order of the input does not matter. Where that
misses a share of the rows by more than SHARE_FACTOR, the groups are taken in the order of their hashes instead, until
each split has its share.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hivetune.records import Split

if TYPE_CHECKING:  # pydantic would take 0.3 s at the start of each worker
    from hivetune.config import DataConfig
    from hivetune.data.prepare.work import Work

SCALE = 1 << 64
SHARE_FACTOR = 1.5
FEW_ROWS = 30  # that a split should hold: below it the hash alone decides, since shares of few rows vary anyhow


def split_of(hash64: int, validation: float, test: float) -> Split:
    """Return the split of a group by its hash. The rest is trained."""
    position = hash64 / SCALE
    if position < test:
        return "test"
    return "validation" if position < test + validation else "train"


class Groups(NamedTuple):
    """What the split did: how many groups there are, the size of the largest, the rows whose ties were not all kept
    because the group would be larger than all that may be held out, and the rows that are trained because theirs is.

    `missed`: a sentence for each split that misses its share of the rows by more than SHARE_FACTOR.
    """

    groups: int
    largest: int
    broken_up: int
    too_large: int
    missed: tuple[str, ...]


def split_rows(work: "Work", alike: Iterable[tuple[int, int]], data: "DataConfig") -> Groups:
    """Give each row with the fate train its group and its split. `alike` are pairs of rows that ask nearly the same."""
    num_rows = work.num_rows
    usable = bytearray(num_rows)
    for (row,) in work.all("SELECT n FROM rows WHERE fate = 'train'"):
        usable[row] = 1
    total = usable.count(1)
    limit = max(1, int((data.validation + data.test) * total))
    ties = _Ties(num_rows, limit)
    ties.join(_equal(work, "read64", total, ties.broken), always=True)  # one text is never on both sides
    ties.join(_equal(work, "question64", limit, ties.broken))
    ties.join(_equal(work, "session64", limit, ties.broken))
    ties.join(pair for pair in alike if usable[pair[0]] and usable[pair[1]])
    root = ties.closed()
    sizes = array("I", bytes(4 * num_rows))
    for row in range(num_rows):
        sizes[root[row]] += usable[row]
    anchors = _anchors(work, root)
    held_out = {
        one: anchors[one] for one in range(num_rows) if usable[one] and root[one] == one and sizes[one] <= limit
    }
    sides, missed = _sides(held_out, sizes, total, data)
    work.database.execute("BEGIN")
    work.database.executemany(
        "UPDATE rows SET tied = ?, fate = ? WHERE n = ?",
        ((root[row], sides.get(root[row], "train"), row) for row in range(num_rows) if usable[row]),
    )
    work.database.execute("COMMIT")
    in_groups = [sizes[row] for row in range(num_rows) if usable[row] and root[row] == row]
    too_large = sum(size for size in in_groups if size > limit)
    return Groups(len(in_groups), max(in_groups, default=0), len(ties.broken), too_large, missed)


def _equal(work: "Work", column: str, most: int, broken: set[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of usable rows with the same value, each with the first one that has it. A value of more than `most`
    rows ties none (one question about many documents, one greeting before many conversations): they go to `broken`.
    """
    query = (
        f"SELECT {column}, n, count(*) OVER (PARTITION BY {column}) FROM rows"
        f" WHERE fate = 'train' AND {column} != 0 ORDER BY {column}, n"
    )
    first = last = None
    for value, row, count in work.all(query):
        if count > most:
            broken.add(row)
        elif value != last:
            first, last = row, value
        else:
            assert first is not None
            yield first, row


class _Ties:
    """Sets of rows that belong together (union-find), each named by its first row, its root. No set grows beyond
    `limit` rows; `broken` has the rows whose ties were not kept for that.
    """

    def __init__(self, num_rows: int, limit: int):
        self._roots = array("I", range(num_rows))
        self._sizes = array("I", [1]) * num_rows
        self._limit = limit
        self.broken: set[int] = set()

    def join(self, pairs: Iterable[tuple[int, int]], *, always: bool = False) -> None:
        """Join the sets of the rows of each pair; `always`: however large they become."""
        for pair in pairs:
            one, other = sorted(map(self._root, pair))
            if one == other:
                continue
            size = self._sizes[one] + self._sizes[other]
            if size > self._limit and not always:
                self.broken.add(pair[1])
                continue
            self._roots[other], self._sizes[one] = one, size

    def closed(self) -> "array[int]":
        """Return the root of each row."""
        for row in range(len(self._roots)):
            self._roots[row] = self._root(row)
        return self._roots

    def _root(self, row: int) -> int:
        roots = self._roots
        while (above := roots[row]) != row:
            roots[row] = row = roots[above]
        return row


def _anchors(work: "Work", root: "array[int]") -> "array[int]":
    """Return for each group the hash that decides its side: of its oldest row, without times the smallest hash."""
    times = array("d", [float("inf")]) * len(root)
    anchors = array("Q", [SCALE - 1]) * len(root)
    for row, time, session, question in work.all(
        "SELECT n, time, session64, question64 FROM rows WHERE fate = 'train'"
    ):
        key = (session or question) % SCALE  # SQLite has signed integers
        at = float("inf") if time is None else time
        if (at, key) < (times[root[row]], anchors[root[row]]):
            times[root[row]], anchors[root[row]] = at, key
    return anchors


def _sides(
    groups: Mapping[int, int], sizes: Sequence[int], total: int, data: "DataConfig"
) -> tuple[dict[int, Split], tuple[str, ...]]:
    """Return the side of each group that is held out, and a sentence for each split that misses its share.

    `groups` are those that may be held out, each with its anchor.
    """
    shares: dict[Split, float] = {"test": data.test, "validation": data.validation}
    sides = {group: split_of(anchor, data.validation, data.test) for group, anchor in groups.items()}
    wanted: dict[Split, float] = {split: share * total for split, share in shares.items()}
    if any(rows >= FEW_ROWS and _misses(_rows_of(sides, sizes, split), rows) for split, rows in wanted.items()):
        sides = _in_order(groups, sizes, wanted)
    missed = []
    for split, rows in wanted.items():
        found = _rows_of(sides, sizes, split)
        if total and _misses(found, rows):
            missed.append(f"{split} holds {found:,} of {total:,} rows ({found / total:.0%}), not {shares[split]:.0%}")
    return {group: side for group, side in sides.items() if side != "train"}, tuple(missed)


def _rows_of(sides: Mapping[int, Split], sizes: Sequence[int], split: Split) -> int:
    return sum(sizes[group] for group, side in sides.items() if side == split)


def _misses(found: int, wanted: float) -> bool:
    """Return whether a split misses its share by more than SHARE_FACTOR, and by more than one row."""
    return abs(found - wanted) > 1 and not wanted / SHARE_FACTOR <= found <= wanted * SHARE_FACTOR


def _in_order(groups: Mapping[int, int], sizes: Sequence[int], wanted: Mapping[Split, float]) -> dict[int, Split]:
    """Return sides by taking the groups in the order of their hashes, each into the first split that has room."""
    held: dict[Split, int] = dict.fromkeys(wanted, 0)
    sides: dict[int, Split] = {}
    for group in sorted(groups, key=lambda one: (groups[one], one)):
        size = sizes[group]
        side: Split | None = next(
            (s for s, rows in wanted.items() if held[s] < rows and held[s] + size <= SHARE_FACTOR * rows), None
        )
        sides[group] = side or "train"
        if side is not None:
            held[side] += size
    return sides
