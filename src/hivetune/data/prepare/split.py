"""The split into training and held-out rows. Rows that belong together form a group, which is not divided.

Rows belong together if they have an equal question, the same session, or nearly equal questions. The split of a group
depends on a hash of the session or question of its oldest row, so no state is stored, and the order of the input does
not matter. If a split would then miss its share of the rows by more than SHARE_FACTOR, groups are instead assigned in
the order of their hashes, until each split has its share.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hivetune.config import DataConfig
from hivetune.data.prepare.near import Groups
from hivetune.data.prepare.work import Work
from hivetune.data.snapshot import SPLITS
from hivetune.records import Split

SCALE = 1 << 64
SHARE_FACTOR = 1.5
FEW_ROWS = 30  # that a split should hold: below it the hash alone decides, since shares of few rows vary anyhow

# The held-out rows with a value that a trained row has, too: more rows have it than may be held out.
TIED_BY_VALUE = (
    "SELECT n FROM rows WHERE fate IN ('validation', 'test')"
    " AND (question64 IN (SELECT question64 FROM rows WHERE fate = 'train')"
    " OR session64 IN (SELECT session64 FROM rows WHERE fate = 'train'))"
)


def split_of(hash64: int, validation: float, test: float) -> Split:
    """Return the split of a group, by its hash: validation, test, or else train."""
    position = hash64 / SCALE
    if position < test:
        return "test"
    return "validation" if position < test + validation else "train"


def split_rows(work: Work, alike: Iterable[tuple[int, int]], data: DataConfig) -> dict[str, Any]:
    """Give each usable row its group and its split. `alike` are pairs of rows with nearly the same question.

    Return for the report the number of `groups`, the size of the `largest`, and sentences (`missed`): one for each
    split that misses its share by more than SHARE_FACTOR, and one if held-out rows have ties to trained ones.
    """
    num_rows = work.num_rows
    usable = bytearray(num_rows)
    for (row,) in work.all("SELECT n FROM rows WHERE fate = 'train'"):
        usable[row] = 1
    total = usable.count(1)
    limit = max(1, int((data.validation + data.test) * total))
    # The strongest tie first, since a group that is full takes no more.
    groups_of = Groups(num_rows, usable)
    apart = array("I")  # pairs of rows that no group could take
    for most, ties in (
        (total, _equal(work, "read64", total)),  # one text is never on both sides
        (limit, _equal(work, "question64", limit)),
        (limit, _equal(work, "session64", limit)),
        (limit, alike),  # also of dropped copies, which may connect others
    ):
        for one, other in ties:
            if not groups_of.join(one, other, most):
                apart.extend((one, other))
    root = groups_of.closed()
    # Arrays, since a dictionary of a million rows takes 100 MB.
    sizes = array("I", bytes(4 * num_rows))
    for row in range(num_rows):
        sizes[root[row]] += usable[row]
    groups = array("I", (row for row in range(num_rows) if sizes[row]))
    side = _sides(groups, _anchors(work, root), sizes, limit, total, data)
    work.database.execute("BEGIN")
    work.database.executemany(
        "UPDATE rows SET group_id = ?, fate = ? WHERE n = ?",
        ((root[row], SPLITS[side[root[row]]], row) for row in range(num_rows) if usable[row]),
    )
    work.database.execute("COMMIT")
    pairs = ((apart[at], apart[at + 1]) for at in range(0, len(apart), 2))
    sides = ((one, other, side[root[one]], side[root[other]]) for one, other in pairs if usable[one] and usable[other])
    train = SPLITS.index("train")
    tied = {one if here != train else other for one, other, here, there in sides if (here == train) != (there == train)}
    tied.update(row for (row,) in work.all(TIED_BY_VALUE))
    return {
        "groups": len(groups),
        "largest": max((sizes[group] for group in groups), default=0),
        "missed": _missed(total, _rows_of(groups, side, sizes), _wanted(total, data), len(tied)),
    }


def _missed(total: int, held: Sequence[int], wanted: Iterable[tuple[int, float]], num_tied: int) -> list[str]:
    """Return a sentence for each split that misses its share and one if held-out rows have ties to trained ones, or a
    single sentence if nothing is held out.
    """
    if held[SPLITS.index("train")] == total > 0 and any(rows for _, rows in wanted):
        return [
            f"none of {total:,} rows is held out, so nothing can be judged (a row, or a session, is on one side: "
            "add others, or give a long conversation as several rows with sessions of their own)"
        ]
    missed = [
        f"{SPLITS[split]} has {held[split]:,} of {total:,} rows ({held[split] / total:.0%}), not {rows / total:.0%}"
        for split, rows in wanted
        if total and _misses(held[split], rows)
    ]
    if num_tied:
        held_out = total - held[SPLITS.index("train")]
        missed.append(
            f"{num_tied:,} of {held_out:,} held-out rows have the session or nearly the question of a trained row, "
            "because all rows with it are more than may be held out"
        )
    return missed


def _equal(work: Work, column: str, most: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of usable rows with the same value, each with the first one that has it. A value of more than `most`
    rows ties none (one question about many documents, one greeting before many conversations).
    """
    # Filtered by SQLite, since most values have one row.
    yield from work.all(
        f"SELECT first, n FROM (SELECT n, {column} AS value, min(n) OVER same AS first, count(*) OVER same AS num_rows"
        f" FROM rows WHERE fate = 'train' AND {column} NOT NULL WINDOW same AS (PARTITION BY {column}))"
        " WHERE n != first AND num_rows <= ? ORDER BY value, n",
        most,
    )


def _anchors(work: Work, root: "array[int]") -> "array[int]":
    """Return for each group the hash that decides its side: that of its oldest row, or the smallest hash if rows have
    no times.
    """
    # Rows that come later are newer, so they join the side of the rows that were there.
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


def _wanted(total: int, data: DataConfig) -> tuple[tuple[int, float], ...]:
    """Return the held-out splits, each as (index into SPLITS, number of rows that it should have)."""
    return (SPLITS.index("validation"), data.validation * total), (SPLITS.index("test"), data.test * total)


def _sides(
    groups: Sequence[int], anchors: Sequence[int], sizes: Sequence[int], limit: int, total: int, data: DataConfig
) -> bytearray:
    """Return the side of each group, an index into SPLITS; groups of more than `limit` rows are trained."""
    side = bytearray(len(anchors))
    for group in groups:
        if sizes[group] <= limit:
            side[group] = SPLITS.index(split_of(anchors[group], data.validation, data.test))
    held, wanted = _rows_of(groups, side, sizes), _wanted(total, data)
    # A split of few rows misses its share by chance; more than twice of it comes from large groups.
    if not any(
        (rows >= FEW_ROWS and _misses(held[split], rows)) or held[split] > 2 * rows + 3 for split, rows in wanted
    ):
        return side
    # In the order of their hashes, each into the first split that has room: still no state, and nothing of the input's
    # order.
    side, held = bytearray(len(anchors)), [0] * len(SPLITS)
    for group in sorted(groups, key=lambda group: (anchors[group], group)):
        for split, rows in wanted if sizes[group] <= limit else ():
            if held[split] < rows and held[split] + sizes[group] <= SHARE_FACTOR * rows:
                side[group] = split
                held[split] += sizes[group]
                break
    return side


def _rows_of(groups: Sequence[int], side: Sequence[int], sizes: Sequence[int]) -> list[int]:
    counts = [0] * len(SPLITS)
    for group in groups:
        counts[side[group]] += sizes[group]
    return counts


def _misses(found: int, wanted: float) -> bool:
    """Return whether a split misses its share by more than SHARE_FACTOR and by more than one row."""
    return abs(found - wanted) > 1 and not wanted / SHARE_FACTOR <= found <= wanted * SHARE_FACTOR
