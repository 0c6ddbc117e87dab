"""The snapshot: an immutable folder of tokenised rows, memory-mapped and addressed by its content.

    tokens.u32     token ids of all rows, in order
    trained.u8     1 where a token is trained, in the same places
    offsets.u64    row i is tokens[offsets[i]:offsets[i + 1]]
    rows.sqlite    the messages of each row, its source and split
    duplicates.jsonl  rows that were left out as duplicates, each with the row that stays
    report.json    the distribution, and what was left out or changed
    manifest.json  names, sizes and hashes, written last

The hash covers tokens, masks, ids and splits, but not the sources: rows that moved to another file are the same rows.
"""

import contextlib
import json
import mmap
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hivetune.base.database import open_to_read
from hivetune.base.disk import MANIFEST, read_json
from hivetune.errors import UsageError
from hivetune.records import LessonKind, Message, Split

ROWS_FILE, REPORT = "rows.sqlite", "report.json"
ROWS_SCHEMA = """
CREATE TABLE rows (
  row INTEGER PRIMARY KEY,        -- number in tokens.u32
  id TEXT NOT NULL,               -- hash of the content
  interaction_id TEXT,            -- id in hive.db, when the row came from there
  source TEXT NOT NULL,           -- file:line
  split TEXT NOT NULL, agent TEXT, category TEXT, session TEXT, user TEXT, time REAL,
  length INTEGER NOT NULL, trained INTEGER NOT NULL,
  messages TEXT NOT NULL, tools TEXT, checker TEXT,
  group_id INTEGER NOT NULL DEFAULT 0,  -- equal for the rows of one group, which has one side
  answered_by TEXT,               -- the release whose own, unedited answer it holds
  view INTEGER NOT NULL DEFAULT 0,  -- 0, 1, ... of one row of the input; most have one (data/render/renderer.py)
  approved INTEGER NOT NULL DEFAULT 0,  -- 1: somebody or something called the answer good
  lesson TEXT,                    -- of a bad answer, whose split is 'bad': failure, pair or correction
  better INTEGER                  -- the row of the good answer that it is compared with, if there is one
);
"""
DAMAGED_SNAPSHOT = "delete this folder; hivetune train CONFIG makes it again from the rows"
_encode = json.JSONEncoder(ensure_ascii=False, default=dict).encode
_DEFAULTS = tuple((field.name, field.default) for field in fields(Message))
DROPPED_FILE = "duplicates.jsonl"
BAD = "bad"  # the split of bad answers, which only lessons read
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class RowInfo:
    """One row of a snapshot, for display and evaluation."""

    row: int
    id: str
    interaction_id: str | None
    source: str
    split: Split
    agent: str | None
    category: str | None
    session: str | None
    time: float | None
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    checker: Mapping[str, Any] | None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class BadAnswer:
    """A bad answer of the train split. `own`: it is the answer of a row; otherwise it is the worse answer of the row
    `better`."""

    row: int
    content_id: str
    length: int
    trained: int
    lesson: LessonKind
    better: int | None

    @property
    def own(self) -> bool:
        return self.lesson == "failure"


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One row of the input, for the choice among rows.

    Rows of one group have the same `group_id`. `length` and `trained` are numbers of tokens, summed over the row's
    views, which have the `numbers` in the snapshot.
    """

    id: str
    source: str
    split: Split
    group_id: int
    agent: str | None
    category: str | None
    user: str | None
    time: float | None
    answered_by: str | None
    length: int
    trained: int
    numbers: tuple[int, ...]


class Snapshot:
    """An open snapshot, made by `open_snapshot`. Its memory views stay valid while it exists."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.hash: str = manifest["hash"]
        self.num_rows: int = manifest["num_rows"]
        self.num_bad: int = manifest["num_bad"]
        # Mapped, so that ranks on one machine share the pages.
        self._offsets = _mapped(folder / "offsets.u64").cast("Q")
        self._tokens = _mapped(folder / "tokens.u32").cast("I")
        self._trained = _mapped(folder / "trained.u8")

    def length(self, row: int) -> int:
        """Return the number of tokens of a row."""
        return int(self._offsets[row + 1] - self._offsets[row])

    def num_trained(self, row: int) -> int:
        return bytes(self.trained(row)).count(1)

    def tokens(self, row: int) -> memoryview:
        """Return the ids of a row, format "I", [length(row)]."""
        return self._tokens[self._offsets[row] : self._offsets[row + 1]]

    def trained(self, row: int) -> memoryview:
        """Return 0 or 1 a token, format "B", [length(row)]."""
        return self._trained[self._offsets[row] : self._offsets[row + 1]]

    def rows(self, split: Split) -> list[int]:
        """Return the row numbers of one split, ascending."""
        # Its index answers this: without a look at the rows, whose texts lie between.
        return [row for (row,) in self._select("SELECT row FROM rows WHERE split = ? ORDER BY row", split)]

    def plan_rows(self, split: Split) -> Iterator[tuple[int, str, int, int]]:
        """Yield (row, id, length, trained tokens) of one split, ascending."""
        # 20 times faster than `info`, which parses the messages of each row.
        yield from self._select("SELECT row, id, length, trained FROM rows WHERE split = ? ORDER BY row", split)

    def first_views(self) -> dict[int, int]:
        """Return the number of each later view of a row -> the number of the row's first view."""
        if self.num_rows == self.manifest["accounting"]["usable"]:
            return {}
        return {row: row - view for row, view in self._select("SELECT row, view FROM rows WHERE view > 0")}

    def good_rows(self, split: Split, least: int) -> list[int]:
        """Return, ascending, the numbers of the rows of a split whose answers were rated good; all rows of the split if
        there are fewer than `least` of them."""
        query = "SELECT row FROM rows WHERE split = ? AND approved ORDER BY row"
        approved = [row for (row,) in self._select(query, split)]
        return approved if len(approved) >= least else self.rows(split)

    def bad_rows(self) -> list[BadAnswer]:
        """Return the bad answers of the train split, ascending; none if the config does not learn from them."""
        query = "SELECT row, id, length, trained, lesson, better FROM rows WHERE split = ? ORDER BY row"
        return [BadAnswer(*values) for values in self._select(query, BAD)]

    def pool(self) -> Iterator[PoolRow]:
        """Yield every row of the input once, of all splits."""
        query = (
            "SELECT id, source, split, group_id, agent, category, user, time, answered_by, sum(length), sum(trained),"
            " group_concat(row) FROM rows WHERE split != ? GROUP BY row - view ORDER BY row - view"
        )
        for *values, numbers in self._select(query, BAD):
            yield PoolRow(*(*values, tuple(sorted(map(int, numbers.split(","))))))

    def info(self, row: int) -> RowInfo:
        """Return the metadata and messages of one row. Raises IndexError if there is no such row."""
        with self._reported_damage():
            found = next(select_rows(self._database, "WHERE row = ?", row), None)
        if found is None:
            raise IndexError(f"{self.folder} has {self.num_rows} rows, not a row {row}")
        return found

    def _select(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with self._reported_damage():
            yield from self._database.execute(query, values)

    @contextlib.contextmanager
    def _reported_damage(self) -> Iterator[None]:
        """Raise what a damaged rows.sqlite gives as UsageError."""
        # Opening compares sizes only, since each command opens it; hashes are compared where a snapshot is found again.
        try:
            yield
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError, AttributeError) as error:
            where = self.folder / ROWS_FILE
            raise UsageError(f"{where} is damaged: {error}", hint=DAMAGED_SNAPSHOT) from None

    @cached_property
    def _database(self) -> sqlite3.Connection:
        return open_to_read(self.folder / ROWS_FILE, finished=True)


def select_rows(database: sqlite3.Connection, condition: str, *values: object) -> Iterator[RowInfo]:
    """Yield the rows of rows.sqlite that meet an SQL condition."""
    names = ", ".join(field.name for field in fields(RowInfo))
    for row in database.execute(f"SELECT {names} FROM rows {condition}", values):
        *plain, messages, tools, checker, user = row
        plain += [messages_from(messages), tuple(json.loads(tools)) if tools else ()]
        yield RowInfo(*(*plain, json.loads(checker) if checker else None, user))


def open_snapshot(folder: Path) -> Snapshot:
    """Open the snapshot in a folder. Raises UsageError if it is not a complete snapshot of this version."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        hint = "make it from the same rows: hivetune train CONFIG"
        raise UsageError(f"{folder} is not a snapshot", hint=hint) from None
    if manifest.get("schema") != 1 or manifest.get("kind") != "snapshot":
        raise UsageError(f"{folder} was written by another version of Hivetune", hint=DAMAGED_SNAPSHOT)
    # Sizes only: a snapshot that was cut off by a full disk is found, without reading it.
    try:
        for name, entry in manifest["files"].items():
            if (folder / name).stat().st_size != entry["size_bytes"]:
                raise ValueError(f"{name} has the wrong size")
        return Snapshot(folder, manifest)
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"the snapshot {folder} is damaged: {error}", hint=DAMAGED_SNAPSHOT) from None


def messages_from(text: str) -> tuple[Message, ...]:
    """Return messages from the JSON in rows.sqlite."""
    return tuple(Message(**turn | {"tool_calls": tuple(turn.get("tool_calls", ()))}) for turn in json.loads(text))


def messages_json(messages: Sequence[Message]) -> str:
    """Return messages as JSON without fields at their default. `messages_from` reads it back."""
    # The weight and the calls of most turns are the defaults, which would double the column of short turns.
    return _encode(
        [
            {name: value for name, default in _DEFAULTS if (value := getattr(message, name)) != default}
            for message in messages
        ]
    )


def _mapped(path: Path) -> memoryview:
    if path.stat().st_size == 0:  # mmap refuses it
        return memoryview(b"")
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
