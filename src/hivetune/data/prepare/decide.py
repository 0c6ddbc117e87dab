"""The decisions that need all rows: duplicates, quotas, splits, balance, and the counts of the report.

The results of all chunks are read in order. About 60 bytes per row stay in memory, in flat arrays.
"""

import json
import math
import mmap
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
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
from hivetune.data.judged.lessons import judge_rows
from hivetune.data.leave_out import read_leave_out
from hivetune.data.prepare.nearest import Similar, similar_rows, similarity_report, twins
from hivetune.data.prepare.split import Ties, sides
from hivetune.data.snapshot import SPLITS, messages_from

CACHED_LESSONS, CACHED_ROW_CHARS = 500, 20_000  # a lesson takes ten times its text, so longer ones are read again


def decide_rows(
    results: Sequence[Path], data: DataConfig, frozen: Collection[int] = frozenset(), learn: LearnConfig = LearnConfig()
) -> Decisions:
    """Return the fate of every row. `results` are in input order.

    `frozen` has the hashes of questions that are never trained (data/frozen.py).
    """
    decisions = Decisions(results)
    files = _count_rows(decisions)
    hash64, read, question, session, user = _hashes(decisions, "hash64", "read64", "question64", "session64", "user64")
    ties = Ties(read, question, session, user, _times(decisions))
    for row, texts in decisions.rows("SELECT n, texts64 FROM rows WHERE texts64 IS NOT NULL ORDER BY n"):
        ties.texts.frombytes(texts)
        ties.text_rows.extend([row] * (len(texts) // 8))
    _drop_equal(decisions, hash64, ties.time)
    _drop_beginnings(decisions)
    for row, changed in decisions.rows("SELECT n, changed FROM rows WHERE changed IS NOT NULL"):
        if decisions.fate[row] == TRAIN:
            decisions.changed.update(changed.split(","))
    leaks = _drop_near(decisions, data.near_duplicates, ties, hash64) if data.near_duplicates > 0 else []
    if data.quota_per_session is not None:
        in_sessions = (row for row in _usable(decisions) if ties.session[row])
        _limit(decisions, in_sessions, ties.session, hash64, data.quota_per_session, QUOTA_SESSION)
    if data.quota_per_source is not None:
        _limit(decisions, _usable(decisions), files, hash64, data.quota_per_source, QUOTA_SOURCE)
    _cap_synthetic(decisions, hash64, data.synthetic_share)

    rows = array("I", _usable(decisions))
    split = sides(rows, ties, leaks, data)
    similar: Similar = {}
    if data.near_duplicates > 0 and any(split.side):
        similar = similar_rows(decisions, split.side, hash64)
        split = sides(rows, ties, leaks, data, twins(similar))
    decisions.tied = split.group
    for row in rows:
        is_frozen = ties.question[row] in frozen or ties.read[row] in frozen
        # A past win itself stays a test row.
        decisions.fate[row] = FROZEN_QUESTION if is_frozen and split.side[row] <= VALIDATION else split.side[row]
    judge_rows(decisions, ties, hash64, learn)
    decisions.groups = {
        "groups": split.groups,
        "largest": split.largest,
        "broken_up": split.broken_up,
        "too_large": split.too_large,
    }
    decisions.nearest = similarity_report(similar, split.side)
    if data.balance != "none":
        # Each label gets as many trained rows as the rarest has. Held-out rows stay, since they are evidence.
        numbers: dict[str, int] = {}
        values = decisions.rows(f"SELECT n, {data.balance} FROM rows ORDER BY n")
        labels = array("I", (numbers.setdefault(value or NO_VALUE, len(numbers)) for _, value in values))
        counts = Counter(labels[row] for row in _usable(decisions))
        if counts:
            _limit(decisions, _usable(decisions), labels, hash64, min(counts.values()), BALANCE)
    if data.leave_out is not None:  # as the last step, so that splits are those of all rows
        named = read_leave_out(Path(data.leave_out))
        for row, identity in decisions.rows("SELECT n, id FROM rows WHERE id IS NOT NULL"):
            if identity in named and decisions.fate[row] < len(SPLITS):
                decisions.fate[row] = FATES[named[identity]]
    return decisions


def _count_rows(decisions: Decisions) -> "array[int]":
    """Count rows by chunk, file, layout and reason, and return the number of each row's file."""
    files = array("I")
    numbers: dict[str, int] = {}
    for path in decisions.results:
        decisions.chunk_starts.append(decisions.num_rows)
        with closing(open_result(path)) as database:
            for source, layout, reason in database.execute("SELECT source, layout, reason FROM rows ORDER BY n"):
                name = source.rpartition(":")[0] or source
                files.append(numbers.setdefault(name, len(numbers)))
                decisions.files.setdefault(name, Counter())[layout or "-"] += 1
                decisions.fate.append(TRAIN if reason is None else REFUSED)
                if reason is not None:
                    decisions.reasons[reason] += 1
    decisions.stays = array("I", range(decisions.num_rows))
    return files


def _hashes(decisions: Decisions, *names: str) -> "list[array[int]]":
    """Return the 64-bit hashes of each row in these columns; 0 if it has none."""
    columns = [array("q") for _ in names]
    query = f"SELECT n, {', '.join(f'ifnull({name}, 0)' for name in names)} FROM rows ORDER BY n"
    for _, *values in decisions.rows(query):
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return [array("Q", column.tobytes()) for column in columns]  # SQLite has only signed integers


def _times(decisions: Decisions) -> "array[float]":
    rows = decisions.rows("SELECT n, time FROM rows ORDER BY n")
    return array("d", (math.inf if time is None else time for _, time in rows))


def _usable(decisions: Decisions) -> Iterable[int]:
    """Yield the rows that are still usable; before the split that is every row with the fate TRAIN."""
    return (row for row, fate in enumerate(decisions.fate) if fate == TRAIN)


def _drop_equal(decisions: Decisions, hash64: Sequence[int], time: Sequence[float]) -> None:
    """Drop exact duplicates: of equal rows the oldest one is kept, without times the first."""
    firsts = Table()
    for row in _usable(decisions):
        stays = firsts.put(hash64[row], row)
        if stays is None:
            continue
        while decisions.stays[stays] != stays:
            stays = decisions.stays[stays]
        if time[row] < time[stays]:
            decisions.drop(stays, row, DUPLICATE)
        else:
            decisions.drop(row, stays, DUPLICATE)


def _drop_beginnings(decisions: Decisions) -> None:
    """Drop rows that are the beginning of a longer row, as in a history that grows turn by turn."""
    ends = Table()
    [lessons] = _hashes(decisions, "lesson64")
    for row in _usable(decisions):
        if lessons[row]:
            ends.put(lessons[row], row)
    for longer, earlier in decisions.rows("SELECT n, earlier FROM rows WHERE earlier IS NOT NULL ORDER BY n"):
        if decisions.fate[longer] not in (TRAIN, BEGINNING):
            continue
        for lesson in array("Q", earlier):
            shorter = ends.get(lesson)
            if shorter is not None and shorter != longer and decisions.fate[shorter] == TRAIN:
                decisions.drop(shorter, longer, BEGINNING)


def _drop_near(decisions: Decisions, threshold: float, ties: Ties, hash64: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Drop near duplicates, and return the pairs of kept rows that are nearly equal."""
    rows = array("I", (row for row, fate in enumerate(decisions.fate) if fate != REFUSED))
    if not rows:
        return []
    lengths = array("I", (n for _, n in decisions.rows("SELECT n, ifnull(length, 0) FROM rows ORDER BY n")))
    joined = decisions.results[0].parent / "sketches"
    with open(joined, "wb") as out:
        for path in decisions.results:
            with open(f"{path}.sketches", "rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
    query = "SELECT messages, tools, lesson FROM bodies JOIN rows USING (n) WHERE n = ?"
    with (
        open(joined, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        closing(RowLookup(decisions, query)) as bodies,
    ):

        def read_lesson(row: int) -> Lesson:
            text, tools, kind = bodies.find(row)
            lesson = lesson_of(messages_from(text), json.loads(tools) if tools else ())
            # A bad answer is no copy of a good one.
            return replace(lesson, calls=(*lesson.calls, kind)) if kind == "failure" else lesson

        cached = lru_cache(maxsize=CACHED_LESSONS)(read_lesson)
        compared = Rows(
            lesson=lambda i: (cached if lengths[rows[i]] <= CACHED_ROW_CHARS else read_lesson)(rows[i]),
            question=lambda i: ties.question[rows[i]],
            read=lambda i: ties.read[rows[i]],
            rank=lambda i: (ties.time[rows[i]], -lengths[rows[i]], hash64[rows[i]]),
        )
        near = near_copies(view, threshold, compared, bytes(decisions.fate[row] != TRAIN for row in rows))
    joined.unlink()
    for index, copy, share in near.copies:
        decisions.drop(rows[index], rows[copy], NEAR_DUPLICATE)
        decisions.shares[rows[index]] = share
    return [(rows[first], rows[copy]) for first, copy in near.leaks]


def _limit(
    decisions: Decisions, rows: Iterable[int], group: Sequence[int], order: Sequence[int], quota: int, fate: int
) -> None:
    """Keep at most `quota` of these rows of each group, drawn by their content and not by their place."""
    counts: Counter[int] = Counter()
    for row in sorted(rows, key=order.__getitem__):
        counts[group[row]] += 1
        if counts[group[row]] > quota:
            decisions.fate[row] = fate


def _cap_synthetic(decisions: Decisions, order: Sequence[int], share: float) -> None:
    """Set aside synthetic rows above `share` of the usable rows, drawn by content. Without other rows keep all."""
    all_synthetic = [row for (row,) in decisions.rows("SELECT n FROM rows WHERE maker IS NOT NULL")]
    synthetic = [row for row in all_synthetic if decisions.fate[row] == TRAIN]
    others = decisions.count(TRAIN) - len(synthetic)
    limit = (
        len(synthetic) if not others or share >= 1 else min(len(synthetic), int(others * share / (1 - share) + 1e-9))
    )
    for row in sorted(synthetic, key=order.__getitem__)[limit:]:
        decisions.fate[row] = SYNTHETIC_SHARE
    decisions.synthetic = {"rows": limit, "others": others}
