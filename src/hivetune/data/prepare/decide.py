"""What can only be known from all rows together: duplicates, quotas, splits, balance; and the counts of the report.

Reads the results of all chunks in order and keeps 8 to 40 bytes a row in flat arrays, never rows.
"""

import mmap
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.config import DataConfig
from hivetune.data.checks.dedupe import Table, near_duplicates
from hivetune.data.prepare.split import split_of
from hivetune.data.snapshot import SPLITS

Progress = Callable[[int, int | None], None]

# What became of a row; the first three are the splits in the order of SPLITS.
TRAIN, VALIDATION, TEST, DUPLICATE, NEAR_DUPLICATE, REFUSED, QUOTA_SOURCE, QUOTA_SESSION, BALANCE = range(9)
SET_ASIDE = {QUOTA_SOURCE: "quota-source", QUOTA_SESSION: "quota-session", BALANCE: "balance"}
NO_VALUE = "-"  # the agent or category of rows that have none
MAX_EXAMPLES = 20  # of each kind of duplicate
ADDRESS_SPACE = 1 << 64
QUERY = "SELECT source, reason, changed, hash64, group64, length, trained, agent, category, session, layout FROM rows"


@dataclass
class Decisions:
    """One byte a row in input order, and everything that was counted on the way."""

    fate: array = field(default_factory=lambda: array("B"))  # type: ignore[type-arg]
    examples: list[tuple[int, int]] = field(default_factory=list)  # (duplicate, the row it equals), the first few
    near_examples: list[tuple[int, int]] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)  # row number at which each chunk begins
    reasons: Counter[str] = field(default_factory=Counter)  # of refused rows, rejected or set aside
    changed: Counter[str] = field(default_factory=Counter)
    files: dict[str, Counter[str]] = field(default_factory=dict)  # file: rows of each layout

    @property
    def num_rows(self) -> int:
        return len(self.fate)

    def keep_example(self, row: int, original: int, *, near: bool = False) -> None:
        kind = self.near_examples if near else self.examples
        if len(kind) < MAX_EXAMPLES:
            kind.append((row, original))

    def count(self, *fates: int) -> int:
        return sum(self.fate.count(one) for one in fates)


@dataclass
class _Columns:
    """What later passes need of each usable row, in flat arrays of one entry a row of the input."""

    hash64: array = field(default_factory=lambda: array("Q"))  # type: ignore[type-arg]
    group64: array = field(default_factory=lambda: array("Q"))  # type: ignore[type-arg]
    label: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    source: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    session: array = field(default_factory=lambda: array("Q"))  # type: ignore[type-arg]


def decide(results: Sequence[Path], data: DataConfig, progress: Progress) -> Decisions:
    """The fate of every row. `results`: chunk results in input order. `progress` counts steps of the near search."""
    decisions = Decisions()
    columns = _Columns()
    _first_pass(results, data, decisions, columns)
    if data.near_duplicates > 0:
        _drop_near(results, data.near_duplicates, decisions, progress)
    if data.quota_per_session is not None:
        _limit(decisions, columns.session, columns.hash64, data.quota_per_session, QUOTA_SESSION)
    if data.quota_per_source is not None:
        _limit(decisions, columns.source, columns.hash64, data.quota_per_source, QUOTA_SOURCE)
    for row, fate in enumerate(decisions.fate):
        if fate == TRAIN:
            decisions.fate[row] = SPLITS.index(split_of(columns.group64[row], data.validation, data.test))
    if data.balance != "none":
        _balance(decisions, columns.label, columns.hash64)
    return decisions


def _first_pass(results: Sequence[Path], data: DataConfig, decisions: Decisions, columns: _Columns) -> None:
    """Counts, and exact duplicates: of rows with equal content the first one stays."""
    seen = Table()
    labels: dict[str, int] = {}
    sources: dict[str, int] = {}
    fate = decisions.fate
    for path in results:
        decisions.chunk_starts.append(len(fate))
        with closing(open_result(path)) as database:
            for source, reason, changed, hash64, group64, _, _, agent, category, session, layout in database.execute(
                QUERY + " ORDER BY n"
            ):
                row = len(fate)
                name = source.rpartition(":")[0] or source
                decisions.files.setdefault(name, Counter())[layout or "-"] += 1
                columns.source.append(sources.setdefault(name, len(sources)))
                if reason is not None:
                    decisions.reasons[reason] += 1
                    fate.append(REFUSED)
                    for flat in (columns.hash64, columns.group64, columns.label, columns.session):
                        flat.append(0)
                    continue
                columns.hash64.append(hash64 % ADDRESS_SPACE)
                columns.group64.append(group64 % ADDRESS_SPACE)
                label = (agent if data.balance == "agent" else category) or NO_VALUE
                columns.label.append(labels.setdefault(label, len(labels)))
                columns.session.append(hash(session) % ADDRESS_SPACE if session else 0)
                first = seen.put(hash64 % ADDRESS_SPACE, row)
                if first is not None:
                    decisions.keep_example(row, first)
                elif changed:
                    decisions.changed.update(changed.split(","))
                fate.append(TRAIN if first is None else DUPLICATE)


def _drop_near(results: Sequence[Path], threshold: float, decisions: Decisions, progress: Progress) -> None:
    """Signatures lie in one file per chunk, for usable rows only; exact duplicates among them are left out."""
    rows = array("I", (row for row, fate in enumerate(decisions.fate) if fate != REFUSED))
    joined = results[0].parent / "signatures.u32" if results else None
    if joined is None or not rows:
        return
    with open(joined, "wb") as out:
        for path in results:
            with open(f"{path}.signatures", "rb") as part:
                while block := part.read(1 << 20):
                    out.write(block)
    with open(joined, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        skipped = bytes(1 if decisions.fate[row] == DUPLICATE else 0 for row in rows)
        view = memoryview(mapped)
        try:
            found = near_duplicates(view, threshold, skipped, progress)
        finally:
            view.release()
    joined.unlink()
    for place, other in enumerate(found):
        if other != place:
            decisions.fate[rows[place]] = NEAR_DUPLICATE
            decisions.keep_example(rows[place], rows[other], near=True)


def _limit(decisions: Decisions, group: Sequence[int], order: Sequence[int], quota: int, fate: int) -> None:
    """At most `quota` usable rows of each group; which ones is drawn by their content, not by their place."""
    rows = [row for row, f in enumerate(decisions.fate) if f == TRAIN and (fate != QUOTA_SESSION or group[row])]
    rows.sort(key=order.__getitem__)
    rows.sort(key=group.__getitem__)  # stable: within a group still by content
    taken, current = 0, -1
    for row in rows:
        if group[row] != current:
            taken, current = 0, group[row]
        taken += 1
        if taken > quota:
            decisions.fate[row] = fate


def _balance(decisions: Decisions, label: Sequence[int], order: Sequence[int]) -> None:
    """As many trained rows of each label as the rarest has. Held-out rows stay: they are evidence."""
    counts = Counter(g for g, f in zip(label, decisions.fate, strict=True) if f == TRAIN)
    if counts:
        _limit(decisions, label, order, min(counts.values()), BALANCE)


def open_result(path: Path) -> sqlite3.Connection:
    """The result of one chunk, read-only."""
    return sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)


def fates(decisions: Decisions, chunk: int) -> Iterator[tuple[int, int]]:
    """(row number within the chunk, fate) of one chunk."""
    start = decisions.chunk_starts[chunk]
    last = chunk + 1 == len(decisions.chunk_starts)
    end = decisions.num_rows if last else decisions.chunk_starts[chunk + 1]
    return enumerate(decisions.fate[start:end])
