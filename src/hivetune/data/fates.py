"""The decision on each row, one byte a row, made in prepare/decide.py. Everything else about a row is in the result
of its chunk. The file behind `data.leave_out` has decisions of others: hashes of rows to set aside, with reasons.
"""

import json
import sqlite3
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.database import open_to_read
from hivetune.base.disk import write_atomic
from hivetune.data.reasons import REASONS
from hivetune.errors import UsageError

# The reasons that the file may name; each has its entry in REASONS.
LEAVE_OUT = ("own-evidence", "next-cycle", "not-replayed")
assert set(LEAVE_OUT) <= REASONS.keys()


def write_leave_out(path: Path, named: Mapping[str, str]) -> None:
    """Write a file from `named`, id of a row -> reason. It is sorted, so that equal choices are equal bytes."""
    lines = [json.dumps({"id": identity, "reason": reason}) + "\n" for identity, reason in sorted(named.items())]
    write_atomic(path, "".join(lines).encode())


def read_leave_out(path: Path) -> dict[str, str]:
    """Return id of a row -> reason. Raises UsageError naming the first line of another form."""
    named = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.leave_out: {path} can't be read: {error}", hint="correct the setting") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            named[str(entry["id"])] = LEAVE_OUT[LEAVE_OUT.index(entry["reason"])]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f'{path}:{number}: not a line of the form {{"id": ..., "reason": ...}}',
                hint=f"reasons: {', '.join(LEAVE_OUT)}",
            ) from None
    return named


# The decisions; the first three are the splits in the order of SPLITS.
TRAIN, VALIDATION, TEST, DUPLICATE, BEGINNING, NEAR_DUPLICATE, REFUSED = range(7)
DUPLICATES = {DUPLICATE: "exact", BEGINNING: "beginning", NEAR_DUPLICATE: "near"}
# All other decisions set a row aside, each for a reason. Their numbers are part of a snapshot's hash.
_REASONS = (
    *("balance", "frozen-question", "for-stage-2", "bad-held-out", "contradictory"),
    *("quota-user", "not-learned", "synthetic-share", *LEAVE_OUT),
)
SET_ASIDE = dict(enumerate(_REASONS, REFUSED + 1))
FATES = {reason: fate for fate, reason in SET_ASIDE.items()}
NO_VALUE = "-"  # the agent or category of rows that have none


@dataclass
class Lessons:
    """The bad answers that stage 2 learns from, chosen by judged/lessons.py.

    `bad`: bad rows on the train side, each with the row of the retry that worked. `worse`: rows whose worse answer is
    learned, each with the row of the better one. `set_aside`: why a row is not learned from. `left_out`: worse answers
    that are not used, by reason; their rows are trained all the same.
    """

    bad: dict[int, int | None] = field(default_factory=dict)
    worse: dict[int, int] = field(default_factory=dict)
    set_aside: dict[int, str] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass
class Decisions:
    """The results of all chunks, and the decision on each row in input order, with all counts."""

    results: Sequence[Path] = ()
    fate: array = field(default_factory=lambda: array("B"))  # type: ignore[type-arg]
    stays: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]  # the row that a row equals, or itself
    shares: dict[int, float] = field(default_factory=dict)  # near duplicate: what it has in common with that row
    chunk_starts: list[int] = field(default_factory=list)  # row number at which each chunk begins
    reasons: Counter[str] = field(default_factory=Counter)  # of refused rows, rejected or set aside
    changed: Counter[str] = field(default_factory=Counter)
    files: dict[str, Counter[str]] = field(default_factory=dict)  # file: rows of each layout
    synthetic: dict[str, int] = field(default_factory=dict)  # usable rows that a maker made, and the others
    groups: dict[str, int] = field(default_factory=dict)  # what was kept together, see split.Sides
    nearest: dict[str, Any] | None = None  # how near test rows are to training rows, see nearest.Nearest
    tied: Sequence[int] = ()  # a row of each row's group
    lessons: Lessons = field(default_factory=Lessons)
    corrections: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.fate)

    def count(self, *fates: int) -> int:
        return sum(self.fate.count(fate) for fate in fates)

    def drop(self, row: int, stays: int, fate: int) -> None:
        self.fate[row], self.stays[row] = fate, stays

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield (row, *columns) of each line of a query. Its first column is the row's number within its chunk."""
        for start, path in zip(self.chunk_starts, self.results, strict=True):
            with closing(open_result(path)) as database:
                for number, *columns in database.execute(query):
                    yield start + number, *columns

    def original(self, row: int) -> int:
        """Return the row that is kept for a duplicate, following chains of near duplicates."""
        kind = self.fate[row]
        row = self.stays[row]
        while self.stays[row] != row and self.fate[row] == kind:
            row = self.stays[row]
        return row


def open_result(path: Path) -> sqlite3.Connection:
    """Open the result of one chunk, read-only."""
    return open_to_read(path, finished=True)


class RowLookup:
    """Reads columns of single rows on demand; the database of the last chunk stays open."""

    def __init__(self, decisions: Decisions, query: str):
        self._decisions, self._query = decisions, query
        self._chunk = -1
        self._database: sqlite3.Connection | None = None

    def find(self, row: int) -> Any:
        """Return the query's result for a row. The query's parameter is the row's number within its chunk."""
        chunk = bisect_right(self._decisions.chunk_starts, row) - 1
        if self._database is None or chunk != self._chunk:
            self.close()
            self._chunk, self._database = chunk, open_result(self._decisions.results[chunk])
        return self._database.execute(self._query, (row - self._decisions.chunk_starts[chunk],)).fetchone()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
