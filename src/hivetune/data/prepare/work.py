"""The rows of one preparation in one SQLite file: the findings on each row, and its fate."""

import json
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.data.prepare.examine import BODY_COLUMNS, ROW_COLUMNS
from hivetune.data.prepare.pool import Examinations
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import SPLITS
from hivetune.records import Progress

SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-16000;
CREATE TABLE rows (
  n INTEGER PRIMARY KEY,
  fate TEXT NOT NULL,                 -- a split, a kind of duplicate, or the reason why it is left out
  stays INTEGER, share REAL,          -- of a duplicate: the row that stays, and what a near one has in common with it
  group_id INTEGER,                   -- a row of its group
  pair INTEGER,                       -- the row whose answer is better than this one's worse answer, if that is learned
  source TEXT NOT NULL, layout TEXT, hint TEXT, changed TEXT,
  notes TEXT,                         -- the changes as JSON: [[reason, "GitHub token in the answer"], ...]
  missing TEXT,                       -- fields of data.columns whose column it lacks, with commas between
  late TEXT,                          -- unread columns that the first rows of its file do not have, as {name: text}
  id TEXT, agent TEXT, category TEXT, session TEXT, user TEXT, time REAL, answered_by TEXT,
  maker TEXT,                         -- of a synthetic row
  lesson TEXT, approved INTEGER,      -- 1 if a person or a checker called the answer good
  hash64 INTEGER,                     -- of the content
  read64 INTEGER, question64 INTEGER, session64 INTEGER, owner64 INTEGER,  -- shared with other rows
  lesson64 INTEGER,                   -- of its last lesson (checks/lessons.py)
  judged64 INTEGER, worse64 INTEGER,  -- of the conversation with its last answer (if it is compared), and the worse one
  length INTEGER,                     -- of its longest view
  num_tokens INTEGER, trained INTEGER -- of all its views
);
CREATE TABLE bodies (
  n INTEGER PRIMARY KEY, interaction_id TEXT, messages TEXT, tools TEXT, checker TEXT,
  tokens BLOB, mask BLOB,             -- of all its views, concatenated
  views TEXT,                         -- JSON [[tokens, skipped, messages, [answers]], ...] if there are several
  worse TEXT, worse_tokens BLOB, worse_mask BLOB  -- messages, tokens and mask with the worse answer
);
CREATE TABLE raws (n INTEGER PRIMARY KEY, raw BLOB);  -- the rows as they came, if they are asked for
CREATE TABLE near (row INTEGER, other INTEGER, share REAL);  -- pairs (near.py), by their places among all train rows
CREATE TABLE earlier (lesson64 INTEGER, n INTEGER);  -- the lessons of a row before its last one
"""
DUPLICATES = {"duplicate": "exact", "beginning": "beginning", "near-duplicate": "near"}
USABLE = "fate IN ('train', 'validation', 'test')"
NO_VALUE = "-"  # the agent or category of rows that have none


@dataclass
class Work:
    """An open file of rows. The file `sketches` (near.py) has a sketch of each row, zeros for a refused one, and
    `lessons` (checks/lessons.py) a lesson, nothing for a refused one. `lesson_ends`: the end of each lesson."""

    database: sqlite3.Connection
    sketches: Path
    lessons: Path
    lesson_ends: "array[int]" = field(default_factory=lambda: array("Q"))
    num_rows: int = 0

    def all(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yield the result rows of an SQL query."""
        yield from self.database.execute(query, values)

    def one(self, query: str, *values: object) -> Any:
        """Return the first column of the first result row of an SQL query, or None if there is none."""
        found = self.database.execute(query, values).fetchone()
        return None if found is None else found[0]

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each fate."""
        return dict(self.all("SELECT fate, count(*) FROM rows GROUP BY fate ORDER BY fate"))

    def refused(self, severity: str) -> dict[str, int]:
        """Return reason -> number of rows left out for it, for the reasons of this severity."""
        return {fate: count for fate, count in self.counts().items() if severity_of(fate) == severity}


@contextmanager
def work_in(folder: Path) -> Iterator[Work]:
    """Yield an empty file of rows in a folder."""
    path = folder / "work.sqlite"
    path.unlink(missing_ok=True)  # of a preparation that was killed
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(SCHEMA)
        database.create_function("file_of", 1, file_of, deterministic=True)
        yield Work(database, folder / "sketches", folder / "lessons")


def fill(work: Work, batches: Examinations, progress: Progress, lines: int, *, keep_raw: bool) -> None:
    """Store the results of rows. `progress` counts them; its total is at first `lines`, and grows with rows inside
    lines."""
    insert = work.database.executemany
    insert_row, insert_body = _insert("rows", ROW_COLUMNS), _insert("bodies", BODY_COLUMNS)
    work.database.execute("BEGIN")
    progress(0, lines)
    with open(work.sketches, "wb") as sketches, open(work.lessons, "wb") as lessons:
        for (first, batch), results in batches:
            insert(insert_row, results.rows)
            insert(insert_body, results.bodies)
            insert("INSERT INTO earlier VALUES (?, ?)", results.earlier)
            if keep_raw:
                insert("INSERT INTO raws VALUES (?, ?)", enumerate((raw.payload for raw in batch), first))
            start = lessons.tell()
            work.lesson_ends.extend([start + end for end in results.ends])
            sketches.write(results.sketches)
            lessons.write(results.lessons)
            work.num_rows += len(batch)
            progress(work.num_rows, max(lines, work.num_rows))
    work.database.execute("COMMIT")
    progress(work.num_rows, work.num_rows)


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} (n, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})"


def iter_dropped(work: Work, *kinds: str, limit: int = -1) -> Iterator[dict[str, Any]]:
    """Yield each duplicate in input order: its kind, both places, the kept row, the similarity and the texts.

    `share` is the lower similarity of question and answer (0 to 1), None for equal rows.
    """
    query = (
        "SELECT fate, share, stays, source, session, user, interaction_id, messages FROM rows JOIN bodies USING (n)"
        f" WHERE fate IN ({', '.join('?' * len(kinds))}) ORDER BY n LIMIT {limit}"
    )
    for fate, share, stays, source, session, user, identity, text in work.all(query, *kinds):
        while (further := work.one("SELECT stays FROM rows WHERE n = ? AND fate = ?", stays, fate)) is not None:
            stays = further
        [(original, original_text)] = work.all(
            "SELECT source, messages FROM rows JOIN bodies USING (n) WHERE n = ?", stays
        )
        yield {
            "kind": DUPLICATES[fate],
            "source": source,
            "same_as": original,
            "share": None if share is None else round(share, 3),
            "session": session,
            "user": user,
            "interaction_id": identity,
            "messages": json.loads(text),
            "same_as_messages": json.loads(original_text),
        }


def file_of(source: str) -> str:
    """Return the file or stream in the place of a row."""
    return source.rpartition(":")[0] or source


def severity_of(fate: str) -> str | None:
    """Return the severity of a reason to leave a row out; None for a split and a kind of duplicate."""
    return None if fate in SPLITS or fate in DUPLICATES else REASONS[fate].severity
