"""The decisions that need all rows: duplicates, quotas, splits, balance, and the counts of the report.

The results of all chunks are read in order. About 60 bytes per row stay in memory, in flat arrays.
"""

import json
import math
import mmap
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from hivetune.config import DataConfig, LearnConfig
from hivetune.data.checks.dedupe import Rows, Table, near_copies
from hivetune.data.checks.lessons import Lesson, lesson_of
from hivetune.data.fates import (
    BALANCE,
    BEGINNING,
    DUPLICATE,
    FATES,
    FROZEN_QUESTION,
    NEAR_DUPLICATE,
    NO_VALUE,
    QUOTA_SESSION,
    QUOTA_SOURCE,
    REFUSED,
    SYNTHETIC_SHARE,
    TRAIN,
    VALIDATION,
    Decisions,
    RowLookup,
    open_result,
)
from hivetune.data.judged.pick import judge_rows
from hivetune.data.leave_out import read_leave_out
from hivetune.data.prepare.nearest import Nearest
from hivetune.data.prepare.split import Ties, sides
from hivetune.data.snapshot import SPLITS, messages_from
from hivetune.records import Progress

CACHED_LESSONS, CACHED_ROW_CHARS = 500, 20_000  # a lesson takes ten times its text, so longer ones are read again
ADDRESS_SPACE = 1 << 64
_QUERY = (
    "SELECT source, layout, reason, hash64, read64, question64, session64, user64, texts64, lesson64, time, length,"
    " agent, category FROM rows ORDER BY n"
)
_BODY = "SELECT messages, tools, lesson FROM bodies JOIN rows USING (n) WHERE n = ?"


@dataclass
class _Columns:
    """The values that later passes need, in flat arrays with one entry per input row.

    `label` and `source` stay empty unless a setting needs them.
    """

    hash64: array = field(default_factory=lambda: array("Q"))  # type: ignore[type-arg]
    lesson64: array = field(default_factory=lambda: array("Q"))  # type: ignore[type-arg]
    length: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    label: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    source: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]
    ties: Ties = field(default_factory=lambda: Ties(array("Q"), array("Q"), array("Q"), array("Q"), array("d")))


def decide_rows(
    results: Sequence[Path],
    data: DataConfig,
    progress: Progress,
    frozen: Collection[int] = frozenset(),
    learn: LearnConfig = LearnConfig(),
) -> Decisions:
    """Return the fate of every row. `results` are in input order. `progress` counts bands of the near search.

    `frozen` has the hashes of questions that are never trained (data/frozen.py).
    """
    decisions, columns = Decisions(), _Columns()
    _first_pass(results, data, decisions, columns)
    _drop_beginnings(results, decisions, columns.lesson64)
    columns.lesson64 = array("Q")  # frees 8 bytes per row
    _count_changed(results, decisions)
    alike = _drop_near(results, data.near_duplicates, decisions, columns, progress) if data.near_duplicates > 0 else []
    if data.quota_per_session is not None:
        _limit(decisions, columns.ties.session, columns.hash64, data.quota_per_session, QUOTA_SESSION)
    if data.quota_per_source is not None:
        _limit(decisions, columns.source, columns.hash64, data.quota_per_source, QUOTA_SOURCE)
    _cap_synthetic(results, decisions, columns.hash64, data.synthetic_share)
    rows = array("I", (row for row, fate in enumerate(decisions.fate) if fate == TRAIN))
    found = sides(rows, columns.ties, alike, data)
    nearest = Nearest()
    if data.near_duplicates > 0 and any(found.side):
        nearest.read(results, decisions, found.side, columns.hash64)
        found = sides(rows, columns.ties, alike, data, nearest.twins())
    decisions.tied = found.group
    for row in rows:
        decisions.fate[row] = found.side[row]
    _keep_out(decisions, columns.ties, frozen)
    judge_rows(results, decisions, columns.ties, columns.hash64, learn)
    decisions.groups = {
        "groups": found.groups,
        "largest": found.largest,
        "broken_up": found.broken_up,
        "too_large": found.too_large,
    }
    decisions.nearest = nearest.report(found.side)
    if data.balance != "none":
        _balance(decisions, columns.label, columns.hash64)
    if data.leave_out is not None:
        _leave_out(results, decisions, read_leave_out(Path(data.leave_out)))
    return decisions


def _first_pass(results: Sequence[Path], data: DataConfig, decisions: Decisions, columns: _Columns) -> None:
    """Count rows and drop exact duplicates: of equal rows the oldest one is kept, without times the first."""
    seen = Table()
    labels: dict[str, int] = {}
    sources: dict[str, int] = {}
    for path in results:
        decisions.chunk_starts.append(decisions.num_rows)
        with closing(open_result(path)) as database:
            for source, layout, reason, hash64, *ties, texts, lesson, time, length, agent, category in database.execute(
                _QUERY
            ):
                row = decisions.num_rows
                name = source.rpartition(":")[0] or source
                decisions.files.setdefault(name, Counter())[layout or "-"] += 1
                if data.quota_per_source is not None:
                    columns.source.append(sources.setdefault(name, len(sources)))
                if data.balance != "none":
                    label = (agent if data.balance == "agent" else category) or NO_VALUE
                    columns.label.append(labels.setdefault(label, len(labels)))
                _append(columns, hash64, length, ties, lesson, time)
                if texts is not None:
                    columns.ties.texts.frombytes(texts)
                    columns.ties.text_rows.extend([row] * (len(texts) // 8))
                decisions.stays.append(row)
                decisions.fate.append(TRAIN if reason is None else REFUSED)
                if reason is not None:
                    decisions.reasons[reason] += 1
                elif (first := seen.put(hash64 % ADDRESS_SPACE, row)) is not None:
                    _drop_exact(decisions, columns.ties, row, first)


def _append(
    columns: _Columns,
    hash64: int | None,
    length: int | None,
    ties: Sequence[int | None],
    lesson: int | None,
    time: float | None,
) -> None:
    columns.hash64.append((hash64 or 0) % ADDRESS_SPACE)
    columns.lesson64.append((lesson or 0) % ADDRESS_SPACE)
    columns.length.append(length or 0)
    flat = columns.ties
    for column, value in zip((flat.read, flat.question, flat.session, flat.user), ties, strict=True):
        column.append((value or 0) % ADDRESS_SPACE)
    flat.time.append(math.inf if time is None else time)


def _drop_exact(decisions: Decisions, ties: Ties, row: int, first: int) -> None:
    """Drop the newer one of a row and the kept row with the same content; `first` is the first of them."""
    stays = first
    while decisions.stays[stays] != stays:
        stays = decisions.stays[stays]
    if ties.time[row] < ties.time[stays]:
        decisions.drop(stays, row, DUPLICATE)
    else:
        decisions.drop(row, stays, DUPLICATE)


def _drop_beginnings(results: Sequence[Path], decisions: Decisions, lesson64: Sequence[int]) -> None:
    """Drop rows that are the beginning of a longer row, as in a history that grows turn by turn."""
    ends = Table()
    for row, fate in enumerate(decisions.fate):
        if fate == TRAIN and lesson64[row]:
            ends.put(lesson64[row], row)
    for number, path in enumerate(results):
        with closing(open_result(path)) as database:
            for n, earlier in database.execute("SELECT n, earlier FROM rows WHERE earlier IS NOT NULL ORDER BY n"):
                longer = decisions.chunk_starts[number] + n
                if decisions.fate[longer] not in (TRAIN, BEGINNING):
                    continue
                for lesson in array("Q", earlier):
                    shorter = ends.get(lesson)
                    if shorter is not None and shorter != longer and decisions.fate[shorter] == TRAIN:
                        decisions.drop(shorter, longer, BEGINNING)


def _count_changed(results: Sequence[Path], decisions: Decisions) -> None:
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            for n, changed in database.execute("SELECT n, changed FROM rows WHERE changed IS NOT NULL"):
                if decisions.fate[start + n] == TRAIN:
                    decisions.changed.update(changed.split(","))


def _drop_near(
    results: Sequence[Path], threshold: float, decisions: Decisions, columns: _Columns, progress: Progress
) -> list[tuple[int, int]]:
    """Drop near duplicates, and return the pairs of kept rows that are nearly equal."""
    rows = array("I", (row for row, fate in enumerate(decisions.fate) if fate != REFUSED))
    if not rows:
        return []
    joined = results[0].parent / "sketches"
    with open(joined, "wb") as out:
        for path in results:
            with open(f"{path}.sketches", "rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
    ties = columns.ties
    with (
        open(joined, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        closing(RowLookup(results, decisions, _BODY)) as bodies,
    ):
        cached = lru_cache(maxsize=CACHED_LESSONS)(partial(_lesson, bodies))

        def lesson(row: int) -> Lesson:
            return cached(row) if columns.length[row] <= CACHED_ROW_CHARS else _lesson(bodies, row)

        about = Rows(
            lesson=lambda i: lesson(rows[i]),
            question=lambda i: ties.question[rows[i]],
            read=lambda i: ties.read[rows[i]],
            rank=lambda i: (ties.time[rows[i]], -columns.length[rows[i]], columns.hash64[rows[i]]),
        )
        skipped = bytes(decisions.fate[row] != TRAIN for row in rows)
        found = near_copies(view, threshold, about, skipped, progress)
    joined.unlink()
    for place, other, share in found.copies:
        decisions.drop(rows[place], rows[other], NEAR_DUPLICATE)
        decisions.shares[rows[place]] = share
    return [(rows[one], rows[other]) for one, other in found.leaks]


def _lesson(bodies: RowLookup, row: int) -> Lesson:
    text, tools, kind = bodies.find(row)
    lesson = lesson_of(messages_from(text), json.loads(tools) if tools else ())
    # A bad answer is no copy of a good one.
    return replace(lesson, calls=(*lesson.calls, kind)) if kind == "failure" else lesson


def _limit(decisions: Decisions, group: Sequence[int], order: Sequence[int], quota: int, fate: int) -> None:
    """Keep at most `quota` rows of each group, drawn by their content and not by their place."""
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


def _keep_out(decisions: Decisions, ties: Ties, frozen: Collection[int]) -> None:
    """Set rows that ask a frozen question aside; a past win itself stays a test row."""
    for row, fate in enumerate(decisions.fate):
        if fate in (TRAIN, VALIDATION) and (ties.question[row] in frozen or ties.read[row] in frozen):
            decisions.fate[row] = FROZEN_QUESTION


def _balance(decisions: Decisions, label: Sequence[int], order: Sequence[int]) -> None:
    """Keep as many trained rows of each label as the rarest has. Held-out rows stay, since they are evidence."""
    counts = Counter(g for g, f in zip(label, decisions.fate, strict=True) if f == TRAIN)
    if counts:
        _limit(decisions, label, order, min(counts.values()), BALANCE)


def _leave_out(results: Sequence[Path], decisions: Decisions, named: Mapping[str, str]) -> None:
    """Set the named rows aside, as the last step, so that splits are those of all rows."""
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            for n, identity in database.execute("SELECT n, id FROM rows WHERE id IS NOT NULL"):
                if identity in named and decisions.fate[start + n] < len(SPLITS):
                    decisions.fate[start + n] = FATES[named[identity]]


def _cap_synthetic(results: Sequence[Path], decisions: Decisions, order: Sequence[int], share: float) -> None:
    """Set aside synthetic rows above `share` of the usable rows, drawn by content. Without other rows keep all."""
    synthetic = []
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            rows = (start + n for (n,) in database.execute("SELECT n FROM rows WHERE maker IS NOT NULL"))
            synthetic += [row for row in rows if decisions.fate[row] == TRAIN]
    others = decisions.count(TRAIN) - len(synthetic)
    most = len(synthetic) if not others or share >= 1 else min(len(synthetic), int(others * share / (1 - share) + 1e-9))
    for row in sorted(synthetic, key=order.__getitem__)[most:]:
        decisions.fate[row] = SYNTHETIC_SHARE
    decisions.synthetic = {"rows": most, "others": others}
