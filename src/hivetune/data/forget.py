"""Forgetting a user, a session, a source or a row: out of the store, kept out, and what was already made from it named.

A tombstone holds the hash of what was forgotten, not the name itself. Files that rows came from are other people's and
stay as they are; a later collection passes these rows over.
"""

import json
import os
import sqlite3
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hivetune.base.database import transaction
from hivetune.data.intake.interactions import load_forgotten, tombstone
from hivetune.errors import Busy, UsageError

ForgetKind = Literal["user", "session", "source", "row"]
ROWS_FILE = "rows.sqlite"


@dataclass(frozen=True, slots=True)
class Taint:
    """A snapshot that holds forgotten rows (at least `rows`; its folder may be gone), the runs trained on it, and the
    releases (NAME@VERSION) made from those."""

    snapshot: str
    path: str
    rows: int
    runs: tuple[str, ...]
    releases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was removed, what is tainted, and snapshots that could not be looked into (their rows are gone)."""

    kind: ForgetKind
    value: str
    interactions: int
    refused: int
    taints: tuple[Taint, ...]
    unchecked: tuple[str, ...]


def forget(database: sqlite3.Connection, kind: ForgetKind, value: str) -> Forgotten:
    """Remove and keep out every interaction of `value`, and name what it taints; may be repeated.

    `row` takes the id of an interaction or its place (`file:line`, `stream:id`), and takes its exact copies with it.
    Raises UsageError for a row that is neither known nor was forgotten before, DoesNotFit, Busy.
    """
    database.execute("PRAGMA secure_delete = ON")  # overwrite, not only unlink
    with transaction(database):
        found = _find(database, kind, value)
        if kind == "row" and not found and tombstone(kind, value) not in load_forgotten(database):
            raise UsageError(
                f"no interaction has the id or place {value}", hint="as in the table interactions: id or source"
            )
        database.executemany("DELETE FROM interactions WHERE id = ?", [(identity,) for identity, _, _ in found])
        refused = _remove_refused(database, kind, value)
        _bury(database, kind, value, found)
    unchecked = _record_taints(database, kind, value, found)
    if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # the log still holds the old pages
        raise Busy(
            "the rows are removed, but another process still reads the pages they were on",
            hint="run this again when no other Hivetune command reads the store",
        )
    return Forgotten(kind, value, len(found), refused, _read_taints(database, kind, value), unchecked)


_Found = list[tuple[str, str, str]]  # id, content id, source


def _find(database: sqlite3.Connection, kind: ForgetKind, value: str) -> _Found:
    select = "SELECT id, content_id, source FROM interactions WHERE "
    if kind == "source":
        return [row for name in _names(value) for row in database.execute(select + OF_SOURCE, _of_source(name))]
    if kind != "row":
        return database.execute(f"{select}{kind} = ?", (value,)).fetchall()
    contents = {row[1] for row in database.execute(f"{select}id = ? OR source = ?", (value, value))}
    return [row for content in contents for row in database.execute(f"{select}content_id = ?", (content,))]


# A source is a file, a database file, one of its tables (path#table) or a stream; its rows are source:position.
OF_SOURCE = "(source = ? OR substr(source, 1, ?) IN (?, ?))"


def _of_source(name: str) -> tuple[str, int, str, str]:
    return name, len(name) + 1, f"{name}:", f"{name}#"


def _names(value: str) -> list[str]:
    """The source as it was typed, and what the path may be called in the store and in snapshots."""
    if "://" in value:
        return [value]
    return list(dict.fromkeys((value, os.path.realpath(value), os.path.relpath(value))))


def _remove_refused(database: sqlite3.Connection, kind: ForgetKind, value: str) -> int:
    """What could not be read has no columns: whose it was only shows in the text itself."""
    if kind in ("user", "session"):
        needle = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return database.execute("DELETE FROM refused WHERE instr(raw, ?) > 0", (needle,)).rowcount
    removed = 0
    for name in _names(value):
        removed += database.execute(f"DELETE FROM refused WHERE {OF_SOURCE}", _of_source(name)).rowcount
    return removed


def _bury(database: sqlite3.Connection, kind: ForgetKind, value: str, found: _Found) -> None:
    stones = {tombstone(kind, name) for name in (_names(value) if kind == "source" else [value])}
    if kind == "row":
        for identity, content, _ in found:
            stones |= {tombstone("row", identity), tombstone("content", content)}
    now = time.time()
    database.executemany("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", [(*stone, now) for stone in stones])


def _record_taints(database: sqlite3.Connection, kind: ForgetKind, value: str, found: _Found) -> tuple[str, ...]:
    """Look into every snapshot and remember the tainted ones: once forgotten, the ids are nowhere else."""
    unchecked = []
    for snapshot, path in database.execute("SELECT hash, path FROM snapshots ORDER BY created").fetchall():
        rows_file = Path(path) / ROWS_FILE
        if not rows_file.is_file():
            unchecked.append(path)
            continue
        count = _count_rows(rows_file, kind, value, found)
        if count:
            with transaction(database):
                database.execute(
                    "INSERT INTO tainted VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET rows = max(rows, excluded.rows)",
                    (snapshot, *tombstone(kind, value), count, time.time()),
                )
    return tuple(unchecked)


def _count_rows(rows_file: Path, kind: ForgetKind, value: str, found: _Found) -> int:
    """Rows of a snapshot that come from what is forgotten, by interaction id and by what the snapshot itself says."""
    snapshot = sqlite3.connect(f"file:{urllib.parse.quote(str(rows_file))}?mode=ro&immutable=1", uri=True)
    try:
        snapshot.execute("PRAGMA temp_store = MEMORY")
        snapshot.execute("CREATE TEMP TABLE gone (id TEXT PRIMARY KEY)")
        snapshot.executemany("INSERT OR IGNORE INTO gone VALUES (?)", [(identity,) for identity, _, _ in found])
        condition = "interaction_id IN (SELECT id FROM gone)"
        values: list[object] = []
        if kind in ("user", "session"):
            condition += f" OR {kind} = ?"
            values.append(value)
        else:
            names = _names(value) if kind == "source" else [value]
            condition += f" OR {OF_SOURCE}" * len(names)
            values += [part for name in names for part in _of_source(name)]
        return int(snapshot.execute(f"SELECT count(*) FROM rows WHERE {condition}", values).fetchone()[0])
    finally:
        snapshot.close()


def _read_taints(database: sqlite3.Connection, kind: ForgetKind, value: str) -> tuple[Taint, ...]:
    query = (
        "SELECT snapshot, coalesce(path, ''), rows FROM tainted LEFT JOIN snapshots ON hash = snapshot"
        " WHERE kind = ? AND value = ? ORDER BY time"
    )
    taints = []
    for snapshot, path, rows in database.execute(query, tombstone(kind, value)).fetchall():
        runs = database.execute("SELECT path FROM runs WHERE snapshot = ? ORDER BY created", (snapshot,))
        releases = database.execute(
            "SELECT name || '@' || version FROM releases WHERE snapshot = ? AND NOT pruned ORDER BY name, version",
            (snapshot,),
        )
        taints.append(Taint(snapshot, path, rows, tuple(r for (r,) in runs), tuple(r for (r,) in releases)))
    return tuple(taints)
