"""The plan of a run: the rows of each optimizer step, and the number of trained tokens by which its loss is divided.

The plan is the whole state of the loader. It is a pure function of the snapshot, the settings and the seed; resuming is
`plan.steps[i]`. An amendment records what a run learns later (a quarantined row, skipped steps): it removes rows from
the steps that it names, and the trained tokens of these steps are summed again. Other steps do not change.
"""

from __future__ import annotations  # array[int] can't be evaluated before Python 3.12

import hashlib
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

from hivetune.base.disk import sha256_bytes, write_atomic, write_json
from hivetune.base.documents import HINT, read_document
from hivetune.base.journal import Journal, read_journal
from hivetune.base.private import read_bounded
from hivetune.base.typed import from_plain, to_plain
from hivetune.data.snapshot import BadAnswer
from hivetune.errors import UsageError
from hivetune.records import Step
from hivetune.run.folder import AMENDMENTS, PLAN, PLAN_ROWS

PLAN_MAGIC = b"HTPLAN1\n"
HEADER = struct.Struct("<8sQQ")  # magic, steps, entries
# So many bad rows are always tolerated, whatever share of a small data set they are.
ALWAYS_TOLERATED = 16


class PlanRow(NamedTuple):
    """A row that may be trained: its number in the snapshot, its content id, its numbers of tokens and trained
    tokens."""

    row: int
    content_id: str
    length: int
    trained: int


@dataclass(frozen=True, slots=True)
class Amendment:
    """Rows that are left out of steps `from_step` <= i < `until_step` (None: of all later ones), and the `reason`."""

    from_step: int
    rows: tuple[int, ...]
    reason: str
    until_step: int | None = None

    def covers(self, step: int) -> bool:
        return step >= self.from_step and (self.until_step is None or step < self.until_step)


@dataclass(frozen=True)
class Plan:
    """A plan. `entry_*` list the rows of all steps in order; the entries of step i end before `step_ends[i]`."""

    snapshot_hash: str
    settings_hash: str
    seed: int
    batch_size: int
    epochs: float
    max_steps: int | None
    num_rows: int
    entry_rows: array[int] = field(repr=False)
    entry_trained: array[int] = field(repr=False)
    step_ends: array[int] = field(repr=False)
    amendments: tuple[Amendment, ...] = ()
    chunk_ends: tuple[int, ...] = ()
    """Numbers of steps after which all epochs on a chunk of rows are finished; empty: the run is not in chunks."""
    lessons_from: int | None = None
    """The first of the last steps, which have bad answers beside good ones; None where there are none."""

    @property
    def steps(self) -> Sequence[Step]:
        """Return all steps, amendments applied. A step without rows has 0 trained tokens: the optimizer skips it."""
        return _Steps(self)

    @property
    def sha256(self) -> str:
        """Return the hash of plan.bin, without amendments, so that earlier checkpoints still belong to the plan."""
        return sha256_bytes(_encode(self))

    @property
    def trained_tokens(self) -> int:
        """Return the trained tokens of all steps, amendments applied."""
        return sum(step.trained_tokens for step in self.steps)

    def amended(self, *more: Amendment) -> Plan:
        return replace(self, amendments=self.amendments + more)

    def rows_reached(self, steps_done: int | None = None) -> tuple[set[int], set[int]]:
        """Return the numbers of (rows trained in the first `steps_done` steps, quarantined rows); None: all steps."""
        steps = self.steps
        count = len(steps) if steps_done is None else min(steps_done, len(steps))
        quarantined = {row for a in self.amendments if a.until_step is None for row in a.rows}
        return {row for i in range(count) for row in steps[i].rows} - quarantined, quarantined


class _Steps(Sequence[Step]):
    """The steps of a plan, each made when it is asked for: a plan may have millions of rows."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._taken: dict[int, list[Amendment]] = {}
        for amendment in plan.amendments:
            for row in amendment.rows:
                self._taken.setdefault(row, []).append(amendment)

    def __len__(self) -> int:
        return len(self._plan.step_ends)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        numbers = range(len(self))[index]  # raises IndexError
        if not isinstance(numbers, int):
            return [self[number] for number in numbers]
        plan = self._plan
        entries = range(plan.step_ends[numbers - 1] if numbers else 0, plan.step_ends[numbers])
        remaining = [i for i in entries if not any(a.covers(numbers) for a in self._taken.get(plan.entry_rows[i], ()))]
        return Step(tuple(plan.entry_rows[i] for i in remaining), sum(plan.entry_trained[i] for i in remaining))


def make_plan(
    rows: Sequence[PlanRow],
    *,
    snapshot_hash: str,
    settings_hash: str,
    seed: int,
    batch_size: int,
    epochs: float,
    max_steps: int | None = None,
    chunk_rows: int | None = None,
    good: Collection[int] = (),
    bad: Sequence[BadAnswer] = (),
) -> Plan:
    """Return a plan in which each epoch visits every row once, in an order of its own; its last, smaller batch is kept.

    In a fraction of an epoch, that share of its rows is visited, rounded up. `chunk_rows`: all epochs are trained on
    this many rows before the next rows are begun; learning rate schedule and optimizer state continue from chunk to
    chunk. Bad answers are used in LESSON_STEPS additional steps at the end, with rows of `good`.

    Raises ValueError for a row without a trained token, and for settings that are not positive.
    """
    if batch_size < 1 or epochs <= 0 or (max_steps is not None and max_steps < 1):
        raise ValueError(f"batch_size {batch_size}, epochs {epochs} and max_steps {max_steps} must be positive")
    for row in rows:
        if not 0 < row.trained < row.length:
            raise ValueError(f"row {row.row} has {row.trained} trained tokens of {row.length}")

    entry_rows, entry_trained, step_ends = array("I"), array("I"), array("Q")
    chunk_ends: set[int] = set()

    def batches() -> Iterator[list[PlanRow]]:
        size = chunk_rows or max(1, len(rows))
        for chunk in (rows[first : first + size] for first in range(0, len(rows), size)):
            for epoch in range(math.ceil(epochs)):
                share = min(1.0, epochs - epoch)
                ordered = epoch_order(chunk, seed, epoch)[: math.ceil(round(share * len(chunk), 9))]
                yield from (ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size))
            chunk_ends.add(len(step_ends))  # it goes on here once its last batch is a step

    def add_steps(entries: Iterable[Sequence[PlanRow]]) -> None:
        for step in entries:
            entry_rows.extend(row.row for row in step)
            entry_trained.extend(row.trained for row in step)
            step_ends.append(len(entry_rows))

    add_steps(itertools.islice(batches(), max_steps))
    chunk_ends.add(len(step_ends))  # the step limit may end the plan inside a chunk
    lessons_from = len(step_ends) if bad else None
    if bad:
        add_steps(_lesson_steps(rows, good, bad, seed, batch_size))
    return Plan(
        snapshot_hash=snapshot_hash,
        settings_hash=settings_hash,
        seed=seed,
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
        num_rows=len(rows),
        entry_rows=entry_rows,
        entry_trained=entry_trained,
        step_ends=step_ends,
        chunk_ends=tuple(sorted(chunk_ends)) if chunk_rows else (),
        lessons_from=lessons_from,
    )


LESSON_STEPS = 40
# Bad rows in a step for each good one. Together they push half as hard as the good rows pull (train/worker/lessons.py).
BAD_SHARE = 0.5
# With fewer rows that people called good, all rows keep the model where it is.
MIN_VOUCHED = 32


def _lesson_steps(
    rows: Sequence[PlanRow], good: Collection[int], bad: Sequence[BadAnswer], seed: int, batch_size: int
) -> Iterator[list[PlanRow]]:
    """Yield the steps with bad answers: `batch_size` good rows each, half as many bad ones, and the good answers that
    these are compared with.

    `good`: the rows that keep the model where it is. Both are taken in turn, each in the order of an epoch, as often as
    the steps need.
    """
    # What nobody called good may have the very fault that the bad answers are about.
    row_of = {row.row: row for row in rows}
    better_answers = {answer.row: answer.better for answer in bad}
    # A bad row counts nothing in a step's divisor.
    wrong = [PlanRow(answer.row, answer.content_id, answer.length, 0) for answer in bad]

    def in_turn(kind: str, some: Sequence[PlanRow]) -> Iterator[PlanRow]:
        return itertools.chain.from_iterable(epoch_order(some, seed, f"{kind} {turn}") for turn in itertools.count())

    next_bad, next_good = in_turn("bad", wrong), in_turn("good", [row_of[row] for row in good])
    num_good, num_bad = min(batch_size, len(good)), min(len(wrong), max(1, int(BAD_SHARE * batch_size)))
    for _ in range(LESSON_STEPS):
        pushed = _distinct(next_bad, num_bad, {})
        compared = {better: row_of[better] for row in pushed if (better := better_answers[row]) in row_of}
        yield [*_distinct(next_good, num_good, compared).values(), *pushed.values()]


def _distinct(rows: Iterator[PlanRow], count: int, first: Mapping[int, PlanRow]) -> dict[int, PlanRow]:
    """Return `first`, filled up to `count` with the next rows that are not yet among them."""
    chosen = dict(first)
    while len(chosen) < count:
        row = next(rows)
        chosen.setdefault(row.row, row)
    return chosen


def count_steps(rows: int, batch_size: int, epochs: float) -> int:
    """Return the steps of a plan without a limit: each epoch's last batch is kept, however small it is."""
    sizes = (math.ceil(round(min(1.0, epochs - epoch) * rows, 9)) for epoch in range(math.ceil(epochs)))
    return sum(-(-size // batch_size) for size in sizes)


def max_quarantined(num_rows: int, max_rejected: float) -> int:
    """Return the maximum number of rows that may be quarantined during a run."""
    # More is a fault of the machine, not of the rows.
    return max(ALWAYS_TOLERATED, int(max_rejected * num_rows))


# The keys of plan.json and the fields of a plan that they hold.
DESCRIBED = {
    "snapshot": "snapshot_hash",
    "settings": "settings_hash",
    **{name: name for name in ("seed", "batch_size", "epochs", "max_steps", "chunk_ends", "lessons_from")},
    "rows": "num_rows",
}


def write_plan(run: Path, plan: Plan) -> None:
    """Write plan.bin, then plan.json with its hash. Amendments are appended by `append_amendment`, never here."""
    binary = _encode(plan)
    write_atomic(run / PLAN_ROWS, binary)
    description = {
        "schema": 1,
        **{key: getattr(plan, name) for key, name in DESCRIBED.items()},
        "rows_not_reached": plan.num_rows - len(set(plan.entry_rows)),
        "steps": len(plan.step_ends),
        "trained_tokens": sum(plan.entry_trained),
        "sha256": sha256_bytes(binary),
    }
    write_json(run / PLAN, description)


def read_plan(run: Path) -> Plan:
    """Read the plan and apply its amendments. Raises UsageError when it is missing or damaged."""
    description = read_document(run / PLAN)
    try:
        # Steps with bad answers have more entries than the batch: those, and what they are compared with.
        most = HEADER.size + 8 * description["steps"] * (1 + 2 * description["batch_size"])
        binary = read_bounded(run / PLAN_ROWS, most, links=False)
        if sha256_bytes(binary) != description["sha256"]:
            raise ValueError("its hash is not the recorded one")
        step_ends, entry_rows, entry_trained = _decode(binary)
        plan = Plan(
            **{name: description[key] for key, name in DESCRIBED.items()},
            entry_rows=entry_rows,
            entry_trained=entry_trained,
            step_ends=step_ends,
        )
        amendments = tuple(read_amendments(run, set(entry_rows)))
        return replace(plan, amendments=amendments, chunk_ends=tuple(plan.chunk_ends))
    except OSError as error:
        raise UsageError(f"cannot read {run / PLAN_ROWS}: {error.strerror}", hint=HINT) from None
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{run / PLAN_ROWS} is damaged: {error!s}", hint=HINT) from None


def append_amendment(run: Path, amendment: Amendment) -> None:
    """Append a line to amendments.jsonl, and return when it is on the disk.

    Only one process may call it at a time: the worker while it is alive, else its supervisor.
    """
    with Journal(run / AMENDMENTS) as journal:
        journal.append("amendment", **to_plain(amendment))
        journal.sync()


def read_amendments(run: Path, known_rows: Collection[int] | None = None) -> list[Amendment]:
    """Return the amendments in order. `known_rows`: the rows of the plan; None: not checked.

    Raises UsageError that names a line which is not an amendment, or whose row is not in the plan: if such a line were
    ignored, rows that were removed would be trained again.
    """
    path = run / AMENDMENTS
    amendments = []
    for line, entry in enumerate(read_journal(path), 1):
        try:
            fields = {name: value for name, value in entry.items() if name not in ("event", "time")}
            amendment = from_plain(Amendment, fields)
        except ValueError as error:
            raise UsageError(f"{path}:{line}: this is not an amendment: {error}", hint=HINT) from None
        unknown = [row for row in amendment.rows if known_rows is not None and row not in known_rows]
        if unknown:
            raise UsageError(f"{path}:{line}: the plan has no row {unknown[0]}", hint=HINT)
        amendments.append(amendment)
    return amendments


def epoch_order(rows: Sequence[PlanRow], seed: int, epoch: int | str) -> list[PlanRow]:
    """Return the rows in an order that depends only on the seed, the epoch and the rows' content."""

    def key(row: PlanRow) -> tuple[bytes, int]:
        return hashlib.blake2b(f"{seed}/{epoch}/{row.content_id}".encode(), digest_size=16).digest(), row.row

    # A hash of ours, which no Python version, platform or row number changes.
    return sorted(rows, key=key)


def _encode(plan: Plan) -> bytes:
    header = HEADER.pack(PLAN_MAGIC, len(plan.step_ends), len(plan.entry_rows))
    return header + b"".join(column.tobytes() for column in (plan.step_ends, plan.entry_rows, plan.entry_trained))


def _decode(binary: bytes) -> tuple[array[int], array[int], array[int]]:
    if len(binary) < HEADER.size:
        raise ValueError("it is shorter than its header")
    magic, steps, entries = HEADER.unpack_from(binary)
    if magic != PLAN_MAGIC:
        raise ValueError("it is not a plan of this version of Hivetune")
    if len(binary) != HEADER.size + 8 * steps + 8 * entries:
        raise ValueError(f"it has {len(binary)} bytes, which is not the size of {steps} steps with {entries} rows")
    ends, rows = HEADER.size + 8 * steps, HEADER.size + 8 * steps + 4 * entries
    return array("Q", binary[HEADER.size : ends]), array("I", binary[ends:rows]), array("I", binary[rows:])


def stratified_sample(rows: Sequence[int], most: int, kind: Callable[[int], Any]) -> list[int]:
    """Return at most `most` of `rows`, at equal distances after sorting by `kind`, so that each kind has its share.

    A run uses these held-out rows at each validation, in place of all of them.
    """
    # A systematic sample from an ordered list is a stratified one (Cochran, Sampling Techniques, 1977, chapter 8):
    # each kind's share is right to within a row.
    if len(rows) <= most:
        return list(rows)
    ordered = sorted(rows, key=lambda row: (kind(row), row))
    return [ordered[(2 * number + 1) * len(ordered) // (2 * most)] for number in range(most)]
