"""Removes a user, a session, a source or a row from the store, keeps it out, and names the releases made from it.

A tombstone holds the hash of what was forgotten, not the name itself. The input files belong to others and are not
changed; a later collection skips these rows.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hivetune.base.database import open_to_read, transaction
from hivetune.base.disk import stored_path
from hivetune.data.checks.redact.apply import redacted_name
from hivetune.data.frozen import drop_win, names_with_wins, wins_of
from hivetune.data.intake.interactions import load_forgotten, names_in, raw_hash, row_hash, tombstone
from hivetune.data.pieces.fields import extract
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import DROPPED_FILE, ROWS_FILE
from hivetune.errors import Busy, UsageError

ForgetKind = Literal["user", "session", "source", "row"]
_REQUEST = "asked"  # a tombstone that records a request and keeps nothing out


@dataclass(frozen=True, slots=True)
class Taint:
    """A snapshot with forgotten rows (at least `rows`), its runs, and the releases (NAME@VERSION) of those.

    The snapshot's folder may be gone.
    """

    snapshot: str
    path: str
    rows: int
    runs: tuple[str, ...]
    releases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The result: counts of removed rows, the tainted snapshots, and missing snapshots (`unchecked`).

    `past_wins`: removed frozen questions.
    """

    kind: ForgetKind
    value: str
    interactions: int
    refused: int
    taints: tuple[Taint, ...]
    unchecked: tuple[str, ...]
    past_wins: int = 0


def forget(database: sqlite3.Connection, kind: ForgetKind, value: str) -> Forgotten:
    """Remove every interaction of `value`, exclude it from later collections, and return the tainted snapshots. It may
    be repeated.

    `row` is the id of an interaction or its place (`file:line` under any name of the file, `stream:id`). Exact copies
    are removed too, and the row at that place in the file is kept out of later preparations.
    Raises UsageError for a row that is neither known nor was forgotten before, DoesNotFit, Busy.
    """
    database.execute("PRAGMA secure_delete = ON")  # overwrite, not only unlink
    contents = _contents_at(value) if kind == "row" else set()
    with transaction(database):
        rows = _find(database, kind, value, contents)
        refused, raws = _remove_refused(database, kind, value)
        if kind == "row" and not (rows or raws or contents or tombstone(_REQUEST, value) in load_forgotten(database)):
            raise UsageError(
                f"no row has the id or place {value}",
                hint="give an id or a source of the table interactions, or FILE:LINE as data check prints it",
            )
        for table, column in (("interactions", "id"), ("feedback", "answer"), ("acts", "interaction")):
            database.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(identity,) for identity, _, _ in rows])
        _bury(database, kind, value, rows, contents, raws)
    is_forgotten, wins = _forgotten_test(kind, value, rows), 0
    unchecked = _record_taints(database, kind, value, is_forgotten)
    for name in names_with_wins():
        for win in wins_of(name):
            if is_forgotten(win.source, win.session, win.user, win.interaction_id):
                drop_win(name, win.key)
                wins += 1
    if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # the log still holds the old pages
        raise Busy(
            "the rows are removed, but another process still reads their database pages",
            hint="run this again when no other Hivetune command reads the store",
        )
    return Forgotten(kind, value, len(rows), refused, _read_taints(database, kind, value), unchecked, wins)


_Rows = list[tuple[str, str, str]]  # id, content id, source
_IsForgotten = Callable[[str, str | None, str | None, str | None], bool]


def _contents_at(source: str) -> set[str]:
    """Return the content ids of the rows at FILE:LINE now, if it is a file; copies may be elsewhere."""
    name = source.rpartition(":")[0]
    if not os.path.isfile(name):
        return set()
    contents = set()
    for raw in rows_of_files(name):
        if raw.source == source and raw.problem is None:
            with contextlib.suppress(RowRefused):  # an unreadable row has no content id; its place is stored
                contents.add(row_hash(parse_row(raw.payload)))
    return contents


def _find(database: sqlite3.Connection, kind: ForgetKind, value: str, contents: set[str]) -> _Rows:
    select = "SELECT id, content_id, source FROM interactions WHERE "
    if kind == "source":
        return [row for name in _names(value) for row in database.execute(select + OF_SOURCE, _of_source(name))]
    if kind == "row":
        for source in [*_source_forms(value), value]:
            contents |= {row[1] for row in database.execute(f"{select}id = ? OR source = ?", (source, source))}
        return [row for content in contents for row in database.execute(f"{select}content_id = ?", (content,))]
    rows = database.execute(f"{select}{kind} IN (?, ?)", (value, redacted_name(value))).fetchall()
    # Rows that were stored by a version that did not know their column.
    unnamed = database.execute(f"SELECT id, content_id, source, row FROM interactions WHERE {kind} IS NULL")
    rows += [tuple(names) for *names, row in unnamed if _is_of(row, kind, value)]
    return rows


def _is_of(text: str, kind: str, value: str) -> bool:
    """Return whether a stored row has `value` as its `kind`; a damaged one, whether it has it anywhere."""
    try:
        return bool(getattr(extract(json.loads(text)), kind) == value)
    except ValueError:
        return value in names_in(str(text).encode("utf-8", "surrogatepass"))


# A source is a file, a database file, one of its tables (path#table) or a stream; its rows are source:position.
OF_SOURCE = "(source = ? OR substr(source, 1, ?) IN (?, ?))"


def _of_source(name: str) -> tuple[str, int, str, str]:
    return name, len(name) + 1, f"{name}:", f"{name}#"


def _names(value: str) -> list[str]:
    """Return the source as typed, and the forms of its path in the store and in snapshots."""
    if "://" in value:
        return [value]
    return list(dict.fromkeys((value, os.path.realpath(value), os.path.relpath(value))))


def _source_forms(value: str) -> list[str]:
    """Return FILE:LINE under all forms of the path; a place outside a file as it is."""
    name, colon, number = value.rpartition(":")
    return [f"{path}:{number}" for path in _names(name)] if colon and name else [value]


def _remove_refused(database: sqlite3.Connection, kind: ForgetKind, value: str) -> tuple[int, set[str]]:
    """Remove refused rows and return their number and content hashes. They are searched by text."""
    if kind in ("user", "session"):
        refused = database.execute("SELECT id, raw FROM refused").fetchall()
        removed = [(identity, raw) for identity, raw in refused if value in names_in(raw)]
    elif kind == "source":
        where = (_of_source(name) for name in _names(value))
        removed = [row for b in where for row in database.execute(f"SELECT id, raw FROM refused WHERE {OF_SOURCE}", b)]
    else:
        at = _source_forms(value)
        marks = ",".join("?" * len(at))
        removed = database.execute(f"SELECT id, raw FROM refused WHERE source IN ({marks})", at).fetchall()
    database.executemany("DELETE FROM refused WHERE id = ?", [(identity,) for identity, _ in removed])
    return len(removed), {raw_hash(raw) for _, raw in removed}


def _bury(
    database: sqlite3.Connection, kind: ForgetKind, value: str, rows: _Rows, contents: set[str], raws: set[str]
) -> None:
    names = _names(value) if kind == "source" else [value, redacted_name(value)]  # as the gateway stores a user
    stones = {tombstone(kind, name) for name in names}
    if kind == "row":
        # By content if it is known, since another row may come to that place.
        stones = {tombstone(_REQUEST, value), *(tombstone("row", identity) for identity, _, _ in rows)}
        stones |= {tombstone("content", content) for content in contents}
        if not contents:
            stones |= {tombstone("row", source) for source in _source_forms(value)}
    if kind != "source":  # the same broken row may come from another place
        stones |= {tombstone("raw", raw) for raw in raws}
    now = time.time()
    database.executemany("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", [(*stone, now) for stone in stones])


def _record_taints(
    database: sqlite3.Connection, kind: ForgetKind, value: str, is_forgotten: _IsForgotten
) -> tuple[str, ...]:
    """Record the tainted snapshots, since the ids exist nowhere else afterwards. Return the missing ones."""
    unchecked = []
    for snapshot, path in database.execute("SELECT hash, path FROM snapshots ORDER BY created").fetchall():
        rows_file = stored_path(path) / ROWS_FILE
        if not rows_file.is_file():
            unchecked.append(str(rows_file.parent))
            continue
        count = _count_rows(rows_file, is_forgotten)
        if count:
            with transaction(database):
                database.execute(
                    "INSERT INTO tainted VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET rows = max(rows, excluded.rows)",
                    (snapshot, *tombstone(kind, value), count, time.time()),
                )
    return tuple(unchecked)


def _count_rows(rows_file: Path, is_forgotten: _IsForgotten) -> int:
    """Return the number of a snapshot's forgotten rows, by interaction id and by the snapshot's own columns.

    Rows that were left out as duplicates count too, since their text is in the snapshot's folder.
    """
    snapshot = open_to_read(rows_file, finished=True)
    with contextlib.closing(snapshot):
        rows = snapshot.execute("SELECT source, session, user, interaction_id FROM rows")
        count = sum(1 for row in rows if is_forgotten(*row))
    dropped = rows_file.with_name(DROPPED_FILE)
    if dropped.is_file():
        with open(dropped, encoding="utf-8") as file:
            lines = (json.loads(line) for line in file)
            count += sum(
                1 for e in lines if is_forgotten(*(e[k] for k in ("source", "session", "user", "interaction_id")))
            )
    return count


def _forgotten_test(kind: ForgetKind, value: str, rows: _Rows) -> _IsForgotten:
    """Return the test of a row's source, session, user and interaction id."""
    ids = {identity for identity, _, _ in rows}
    names = {"source": _names, "row": _source_forms}.get(kind, lambda _value: [])(value)
    sources = {os.path.realpath(name) if "://" not in name else name for name in names} | set(names)

    def is_forgotten(source: str, session: str | None, user: str | None, identity: str | None) -> bool:
        if identity in ids or (kind == "user" and user == value) or (kind == "session" and session == value):
            return True
        return kind in ("source", "row") and not sources.isdisjoint(_all_names(source, kind))

    return is_forgotten


def _all_names(source: str, kind: ForgetKind) -> list[str]:
    """Return the forms of a row's source: its place, or for a source the file, the table and the database."""
    name, colon, number = source.rpartition(":")
    if not colon:
        name, number = source, ""
    file = name.partition("#")[0]
    real = _real_path(file) + name[len(file) :]
    if kind == "row":
        return [source, f"{real}:{number}"]
    return [source, name, file, real, _real_path(file)]


@lru_cache(1024)
def _real_path(name: str) -> str:
    return name if "://" in name else os.path.realpath(name)


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
        folder, runs_there = str(stored_path(path)) if path else "", tuple(str(stored_path(run)) for (run,) in runs)
        taints.append(Taint(snapshot, folder, rows, runs_there, tuple(r for (r,) in releases)))
    return tuple(taints)
