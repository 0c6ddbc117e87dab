"""The writing of a snapshot from the results of all chunks, row by row in input order."""

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.base.disk import write_manifest
from hivetune.data.fates import TRAIN, Decisions, fates, open_result
from hivetune.data.judged.lessons import Lessons
from hivetune.data.snapshot import BAD, ROWS_FILE, ROWS_SCHEMA, SPLITS
from hivetune.records import LessonKind

BATCH_BYTES = 1 << 20  # of tokens and masks, about the size of the rows that wait to be written
READ = (
    "SELECT n, vouched, lesson, worse, worse_tokens, worse_mask, answered_by, id, interaction_id, source, agent,"
    " category, session, user, time, messages, tools, checker, tokens, mask, views"
    " FROM rows JOIN bodies USING (n) ORDER BY n"
)
INSERT = (
    "INSERT INTO rows (row, view, vouched, lesson, tied, answered_by, id, interaction_id, source, split, agent,"
    f" category, session, user, time, messages, tools, checker, length, trained) VALUES ({','.join('?' * 20)})"
)


def write_snapshot(
    folder: Path, results: Sequence[Path], decisions: Decisions, *, key: str, report: dict[str, Any]
) -> str:
    """Fill `folder`, the manifest last, and return the snapshot's hash.

    The hash covers tokens, masks, ids and splits, so it does not depend on where the rows came from.
    """
    digest = hashlib.sha256()
    offsets, num_bad = array("Q", [0]), 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / ROWS_FILE, isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        batch: list[tuple[Any, ...]] = []
        size_bytes = 0
        compared = _Compared(decisions.lessons)
        for row in _rows(results, decisions):
            tokens_file.write(row.tokens)
            trained_file.write(row.mask)
            digest.update(f"{row.identity} {row.fate} {len(row.mask)}\n".encode())
            digest.update(row.tokens)
            digest.update(row.mask)
            offsets.append(offsets[-1] + len(row.mask))
            compared.note(len(offsets) - 2, row)
            num_bad += row.lesson is not None
            batch.append((len(offsets) - 2, *row.columns, len(row.mask), row.mask.count(1)))
            size_bytes += len(row.tokens) + len(row.mask)
            if size_bytes >= BATCH_BYTES:
                _insert(database, batch)
                size_bytes = 0
        _insert(database, batch)
        for pair in compared.pairs():
            digest.update(f"{pair}\n".encode())
            database.execute("UPDATE rows SET better = ? WHERE row = ?", pair)
        database.execute("CREATE INDEX rows_split ON rows(split)")
    with open(folder / "offsets.u64", "wb") as file:
        offsets.tofile(file)
    counts = {name: report[name] for name in ("rows_in", "usable", "duplicates", "rejected", "set_aside")}
    extra = {
        "kind": "snapshot",
        "hash": digest.hexdigest(),
        "key": key,
        "num_rows": len(offsets) - 1,  # views: a row has several where its template rewrites earlier turns
        "num_bad": num_bad,
        "num_tokens": offsets[-1],
        "num_trained": report["trained_tokens"],
        "accounting": {
            **counts,
            "trained": report["splits"]["train"],
            "held_out": report["splits"]["validation"] + report["splits"]["test"],
        },
        "model": report["model"],
        "max_length": report["max_length"],
        "nearest": report["nearest"],
    }
    write_manifest(folder, extra)
    return digest.hexdigest()


class _Row(NamedTuple):
    """One row of the snapshot.

    `columns` are those of INSERT between the row's number and its sizes. `number` is the input row. `lesson` is set for
    a bad answer.
    """

    number: int
    identity: str
    fate: int
    lesson: LessonKind | None
    columns: tuple[Any, ...]
    tokens: bytes
    mask: bytes


def _rows(results: Sequence[Path], decisions: Decisions) -> Iterator[_Row]:
    """Yield every row of the snapshot in input order, a worse answer after the better one."""
    lessons = decisions.lessons
    for chunk, path in enumerate(results):
        with closing(open_result(path)) as source:
            fate_of = (fate for _, fate in fates(decisions, chunk))
            rows = zip(source.execute(READ), fate_of, strict=True)
            for (n, vouched, kind, worse, worse_tokens, worse_mask, answered_by, identity, *about), fate in rows:
                number = decisions.chunk_starts[chunk] + n
                *about, tokens, mask, views = about
                group = decisions.tied[number], answered_by, identity
                if fate < len(SPLITS):
                    for view, (row, ids, trained) in enumerate(_views(about, tokens, mask, views)):
                        columns = (view, vouched, None, *group, *row[:2], SPLITS[fate], *row[2:])
                        yield _Row(number, identity, fate, None, columns, ids, trained)
                elif number in lessons.bad:
                    lesson: LessonKind = "failure" if lessons.bad[number] is None else "retry"
                    columns = (0, 0, lesson, *group, *about[:2], BAD, *about[2:])
                    yield _Row(number, identity, fate, lesson, columns, tokens, mask)
                if number in lessons.worse and decisions.fate[lessons.worse[number]] == TRAIN:
                    columns = (0, 0, kind, *group, *about[:2], BAD, *about[2:7], worse, *about[8:])
                    yield _Row(number, identity, fate, kind, columns, worse_tokens, worse_mask)


class _Compared:
    """The pairs of bad and better answers, complete when all rows have their numbers."""

    def __init__(self, lessons: Lessons):
        self._better_of = {
            **lessons.worse,
            **{row: better for row, better in lessons.bad.items() if better is not None},
        }
        self._wanted = set(self._better_of.values())
        self._good: dict[int, int] = {}
        self._bad: list[tuple[int, int]] = []

    def note(self, row: int, about: _Row) -> None:
        if about.lesson is None and about.number in self._wanted:
            self._good[about.number] = row  # of several views the last one, whose answer was judged
        elif about.lesson is not None and about.number in self._better_of:
            self._bad.append((row, self._better_of[about.number]))

    def pairs(self) -> list[tuple[int, int]]:
        """Return (row of the better answer, row of the bad one), without pairs whose better answer was left out."""
        return [(self._good[better], row) for row, better in self._bad if better in self._good]


def _views(about: list[Any], tokens: bytes, mask: bytes, views: str | None) -> Iterator[tuple[list[Any], bytes, bytes]]:
    """Yield (columns, tokens, mask) of each view: messages up to its last answer, with weights only for its answers."""
    if views is None:
        yield about, tokens, mask
        return
    *before, messages, tools, checker = about
    start = 0
    for length, num_messages, answers in json.loads(views):
        turns = json.loads(messages)[:num_messages]
        for i, message in enumerate(turns):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        columns = [*before, json.dumps(turns, ensure_ascii=False), tools, checker]
        yield columns, tokens[4 * start : 4 * (start + length)], mask[start : start + length]
        start += length


def _insert(database: sqlite3.Connection, batch: list[tuple[Any, ...]]) -> None:
    database.execute("BEGIN")
    database.executemany(INSERT, batch)
    database.execute("COMMIT")
    batch.clear()
