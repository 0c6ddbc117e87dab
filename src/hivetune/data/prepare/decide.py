"""The decisions that need all rows: duplicates, quotas, splits, balance, and the counts of the report.

The results of all chunks are read in order. About 60 bytes per row stay in memory, in flat arrays.
"""

import heapq
import json
import math
import mmap
import shutil
import statistics
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from hivetune.config import DataConfig, LearnConfig
from hivetune.data.checks.dedupe import Rows, Table, near_copies
from hivetune.data.checks.lessons import Lesson, lesson_of, texts_of, words_of
from hivetune.data.fates import (
    BEGINNING,
    DUPLICATE,
    FATES,
    NEAR_DUPLICATE,
    NO_VALUE,
    REFUSED,
    TRAIN,
    VALIDATION,
    Decisions,
    RowLookup,
    open_result,
    read_leave_out,
)
from hivetune.data.judged.lessons import judge_rows
from hivetune.data.prepare.split import Ties, sides
from hivetune.data.snapshot import SPLITS, messages_from

HASHES = ("hash64", "lesson64", "read64", "question64", "session64", "user64")  # of a row, see RESULT_SCHEMA
SYNTHETIC_SHARE = 0.5  # the most that synthetic rows may be of the usable ones
CACHED_LESSONS, CACHED_ROW_CHARS = 500, 20_000  # a lesson takes ten times its text, so longer ones are read again


def decide_rows(
    results: Sequence[Path], data: DataConfig, frozen: Collection[int] = frozenset(), learn: LearnConfig = LearnConfig()
) -> Decisions:
    """Return the fate of every row. `results` are in input order.

    `frozen` has the hashes of questions that are never trained (data/frozen.py).
    """
    decisions = Decisions(results)
    _, times, (hash64, lesson64, read, question, session, user) = _read_rows(decisions)
    ties = Ties(read, question, session, user, times)
    for row, texts in decisions.rows("SELECT n, texts64 FROM rows WHERE texts64 IS NOT NULL ORDER BY n"):
        ties.texts.frombytes(texts)
        ties.text_rows.extend([row] * (len(texts) // 8))
    _drop_equal(decisions, hash64, ties.time)
    _drop_beginnings(decisions, lesson64)
    for row, changed in decisions.rows("SELECT n, changed FROM rows WHERE changed IS NOT NULL"):
        if decisions.fate[row] == TRAIN:
            decisions.changed.update(changed.split(","))
    leaks = _drop_near(decisions, data.near_duplicates, ties, hash64) if data.near_duplicates > 0 else []
    _cap_synthetic(decisions, hash64, SYNTHETIC_SHARE)

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
        is_frozen = is_frozen and split.side[row] <= VALIDATION
        decisions.fate[row] = FATES["frozen-question"] if is_frozen else split.side[row]
    judge_rows(decisions, ties, hash64, learn)
    decisions.groups = split.counts
    decisions.nearest = similarity_report(similar, split.side)
    if data.balance != "none":
        # Each label gets as many trained rows as the rarest has. Held-out rows stay, since they are evidence.
        numbers: dict[str, int] = {}
        values = decisions.rows(f"SELECT n, {data.balance} FROM rows ORDER BY n")
        labels = array("I", (numbers.setdefault(value or NO_VALUE, len(numbers)) for _, value in values))
        counts = Counter(labels[row] for row in _usable(decisions))
        # Rows that name none are limited as the others, and set no limit: one of them would leave one row of each.
        limits = [count for label, count in counts.items() if label != numbers.get(NO_VALUE)]
        if limits:
            _limit(decisions, _usable(decisions), labels, hash64, min(limits), "balance")
    if data.leave_out is not None:  # as the last step, so that splits are those of all rows
        named = read_leave_out(Path(data.leave_out))
        for row, identity in decisions.rows("SELECT n, id FROM rows WHERE id IS NOT NULL"):
            if identity in named and decisions.fate[row] < len(SPLITS):
                decisions.fate[row] = FATES[named[identity]]
    return decisions


def _read_rows(decisions: Decisions) -> "tuple[array[int], array[float], list[array[int]]]":
    """Count rows by chunk, file, layout and reason. Return the number of each row's file, its time, and its HASHES, 0
    if it has none.
    """
    files, times, columns = array("I"), array("d"), [array("q") for _ in HASHES]
    numbers: dict[str, int] = {}
    hashes = ", ".join(f"ifnull({name}, 0)" for name in HASHES)
    for path in decisions.results:
        decisions.chunk_starts.append(decisions.num_rows)
        with closing(open_result(path)) as database:
            rows = database.execute(f"SELECT source, layout, reason, time, {hashes} FROM rows ORDER BY n")
            for source, layout, reason, time, *values in rows:
                name = source.rpartition(":")[0] or source
                times.append(math.inf if time is None else time)
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
                files.append(numbers.setdefault(name, len(numbers)))
                decisions.files.setdefault(name, Counter())[layout or "-"] += 1
                decisions.fate.append(TRAIN if reason is None else REFUSED)
                if reason is not None:
                    decisions.reasons[reason] += 1
    decisions.stays = array("I", range(decisions.num_rows))
    return files, times, [array("Q", column.tobytes()) for column in columns]  # SQLite has only signed integers


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


def _drop_beginnings(decisions: Decisions, lessons: Sequence[int]) -> None:
    """Drop rows that are the beginning of a longer row, as in a history that grows turn by turn."""
    ends = Table()
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
    decisions: Decisions, rows: Iterable[int], group: Sequence[int], order: Sequence[int], quota: int, reason: str
) -> None:
    """Keep at most `quota` of these rows of each group, drawn by their content and not by their place."""
    counts: Counter[int] = Counter()
    for row in sorted(rows, key=order.__getitem__):
        counts[group[row]] += 1
        if counts[group[row]] > quota:
            decisions.fate[row] = FATES[reason]


def _cap_synthetic(decisions: Decisions, order: Sequence[int], share: float) -> None:
    """Set aside synthetic rows above `share` of the usable rows, drawn by content. Without other rows keep all."""
    all_synthetic = [row for (row,) in decisions.rows("SELECT n FROM rows WHERE maker IS NOT NULL")]
    synthetic = [row for row in all_synthetic if decisions.fate[row] == TRAIN]
    others = decisions.count(TRAIN) - len(synthetic)
    limit = (
        len(synthetic) if not others or share >= 1 else min(len(synthetic), int(others * share / (1 - share) + 1e-9))
    )
    for row in sorted(synthetic, key=order.__getitem__)[limit:]:
        decisions.fate[row] = FATES["synthetic-share"]
    decisions.synthetic = {"rows": limit, "others": others}


# The similarity of held-out rows to training rows by their words, in any order. Two rows are twins if most of their
# words are equal, where rare words count more: for example names were changed, or a third of the words was replaced.
# Such pairs share few word triples, by which checks/dedupe.py finds near duplicates.

# If a third of the words is replaced, two rows share half of all their words. Unrelated rows about one subject share
# less than 0.2.
TWIN = 0.4
MIN_WORDS = 8  # shorter rows share their words by chance
# Rows that are compared, drawn by their content. Measured on Python's documentation: 118 bytes a row of 219 characters,
# 440 of 2,000, 1,300 of 8,000 and 4,000 of 32,000, so 200,000 training rows take 24 MB to 800 MB.
MAX_HELD_OUT, MAX_TRAINING = 2000, 200_000
RAREST, MAX_ROWS, CANDIDATES = 24, 500, 8  # words to search a row by, rows per word, rows that are compared
WORDS_MASK = (1 << 20) - 1
TEST = SPLITS.index("test")
Similar = dict[int, list[tuple[float, int]]]  # held-out row: (similarity, training row), the most similar first


def similar_rows(decisions: Decisions, side: bytearray, hash64: Sequence[int]) -> Similar:
    """Return the most similar training rows of each held-out row (by `side`)."""
    usable = [row for row, fate in enumerate(decisions.fate) if fate == TRAIN]
    chosen = set(heapq.nsmallest(MAX_HELD_OUT, (row for row in usable if side[row]), key=hash64.__getitem__))
    training = [row for row in usable if not side[row]]
    if len(training) > MAX_TRAINING:
        training = heapq.nsmallest(MAX_TRAINING, training, key=hash64.__getitem__)
    chosen.update(training)

    held_out: dict[int, array[int]] = {}
    rows, starts, all_words = array("I"), array("Q", [0]), array("I")  # of the training rows
    counts = array("I", bytes(4 * (WORDS_MASK + 1)))  # of rows with a word
    for row, messages in decisions.rows("SELECT n, messages FROM bodies ORDER BY n"):
        if row not in chosen:
            continue
        question, learned, _ = texts_of(messages_from(messages))
        words = _numbers(f"{question}\n{learned}")
        for word in words:
            counts[word] += 1
        if len(words) < MIN_WORDS:
            continue
        if side[row]:
            held_out[row] = words
        else:
            rows.append(row)
            all_words.extend(words)
            starts.append(len(all_words))

    def words_at(index: int) -> "array[int]":
        return all_words[starts[index] : starts[index + 1]]

    rarest = {
        row: heapq.nsmallest(RAREST, (w for w in words if 1 < counts[w] <= MAX_ROWS), key=lambda w: (counts[w], w))
        for row, words in held_out.items()
    }
    postings: dict[int, list[int]] = {word: [] for words in rarest.values() for word in words}
    for index in range(len(rows)):
        for word in words_at(index):
            if word in postings:
                postings[word].append(index)
    similar = {}
    for row, words in held_out.items():
        shared = Counter(index for word in rarest[row] for index in postings[word])
        likeliest = sorted(shared, key=lambda index: hash64[rows[index]])
        likeliest.sort(key=shared.__getitem__, reverse=True)  # stable: of equal counts still by content
        similar[row] = sorted(
            (
                (_similarity(set(words), set(words_at(index)), counts, len(chosen)), rows[index])
                for index in likeliest[:CANDIDATES]
            ),
            reverse=True,
        )
    return similar


def twins(similar: Similar) -> list[tuple[int, int]]:
    """Return the pairs of a held-out row and a training row that share most of their words."""
    return [(row, twin) for row, others in similar.items() for share, twin in others if share >= TWIN]


def similarity_report(similar: Similar, side: bytearray) -> dict[str, Any] | None:
    """Return the number of `test_rows`, those `above` the `bound`, and the `median` of their best similarity.

    Return None without test rows.
    """
    best = [
        max((share for share, similar_row in others if not side[similar_row]), default=0.0)
        for row, others in similar.items()
        if side[row] == TEST
    ]
    if not best:
        return None
    above = sum(share >= TWIN for share in best)
    return {"test_rows": len(best), "above": above, "bound": TWIN, "median": round(statistics.median(best), 3)}


def _numbers(text: str) -> "array[int]":
    words = words_of(text)
    if isinstance(words, str):  # a script without spaces
        words = [text[i : i + 3] for i in range(len(text) - 2)]
    plain = {word.strip(".,;:!?()\"'") for word in words} - {""}
    return array("I", sorted({crc32(word.encode("utf-8", "surrogatepass")) & WORDS_MASK for word in plain}))


def _similarity(a: set[int], b: set[int], counts: Sequence[int], num_rows: int) -> float:
    """Return the weighted Jaccard similarity; a word's weight is its inverse document frequency."""
    shared = sum(math.log(num_rows / counts[word]) for word in a & b)
    either = sum(math.log(num_rows / counts[word]) for word in a | b)
    return shared / either if either else 0.0
