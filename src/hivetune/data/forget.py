"""Removes a user, a session, a source or a row from the store, keeps it out, and names the releases made from it.

A tombstone holds the hash of what was forgotten, not the name itself. The input files belong to others and are not
changed; a later collection skips these rows.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hivetune.base.database import open_to_read, transaction
from hivetune.base.disk import stored_path
from hivetune.data.checks.redact import redacted_name
from hivetune.data.frozen import drop_win, names_with_wins, wins_of
from hivetune.data.intake.interactions import load_forgotten, names_in, raw_hash, tombstone
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

    `row` is the id of an interaction, or its source as the store has it; exact copies are removed too.
    Raises UsageError for a row that is neither known nor was forgotten before, DoesNotFit, Busy.
    """
    database.execute("PRAGMA secure_delete = ON")  # overwrite, not only unlink
    with transaction(database):
        rows = _find(database, kind, value)
        raws = _remove_refused(database, kind, value)
        if kind == "row" and not (rows or raws or tombstone(_REQUEST, value) in load_forgotten(database)):
            raise UsageError(
                f"no row has the id or source {value}",
                hint="give one of the table interactions; see it on the dashboard",
            )
        for table, column in (("interactions", "id"), ("feedback", "answer"), ("acts", "interaction")):
            database.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(identity,) for identity, _ in rows])
        _add_tombstones(database, kind, value, rows, raws)
    is_forgotten, wins = _forgotten_test(kind, value, {identity for identity, _ in rows}), 0
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
    return Forgotten(kind, value, len(rows), len(raws), _read_taints(database, kind, value), unchecked, wins)


def set_aside(database: sqlite3.Connection, kind: ForgetKind, value: str, by: str) -> int:
    """Keep the stored rows of `value` out of later trainings, by content; return how many. They stay in the store, and
    the dashboard's Review page takes them back. Raises UsageError where there is none."""
    with transaction(database):
        rows = _find(database, kind, value)
        if not rows:
            raise UsageError(f"no stored row is of the {kind} {value}", hint="collect it first")
        now = time.time()
        aside = {(content, by, now) for _, content in rows}
        database.executemany("INSERT OR IGNORE INTO set_aside VALUES (?, ?, ?)", sorted(aside))
    return len(rows)


_Rows = list[tuple[str, str]]  # id, content id
_IsForgotten = Callable[[str, str | None, str | None, str | None], bool]
# A source is a file, a database file, one of its tables (path#table) or a stream; its rows are source:position.
_OF_SOURCE = (
    "(source IN (:typed, :real) OR substr(source, 1, length(:typed) + 1) IN (:typed || ':', :typed || '#')"
    " OR substr(source, 1, length(:real) + 1) IN (:real || ':', :real || '#'))"
)


def _find(database: sqlite3.Connection, kind: ForgetKind, value: str) -> _Rows:
    condition = {
        "source": _OF_SOURCE,
        "row": "content_id IN (SELECT content_id FROM interactions WHERE id = :typed OR source = :typed)",
    }.get(kind, f"{kind} IN (:typed, :stored)")
    query = f"SELECT id, content_id FROM interactions WHERE {condition}"
    return database.execute(query, _names(value)).fetchall()


def _names(value: str) -> dict[str, str]:
    """Return the name as it was typed, as the store keeps that of a user or session, and the real path of a file."""
    return {"typed": value, "stored": redacted_name(value), "real": real_source(value)}


def _remove_refused(database: sqlite3.Connection, kind: ForgetKind, value: str) -> list[str]:
    """Remove refused rows and return the hashes of their content. Users and sessions are searched in their text."""
    if kind in ("user", "session"):
        refused = database.execute("SELECT id, raw FROM refused").fetchall()
        removed = [(identity, raw) for identity, raw in refused if value in names_in(raw)]
    else:
        condition = _OF_SOURCE if kind == "source" else "source = :typed"
        removed = database.execute(f"SELECT id, raw FROM refused WHERE {condition}", _names(value)).fetchall()
    database.executemany("DELETE FROM refused WHERE id = ?", [(identity,) for identity, _ in removed])
    return [raw_hash(raw) for _, raw in removed]


def _add_tombstones(
    database: sqlite3.Connection, kind: ForgetKind, value: str, rows: _Rows, raws: Sequence[str]
) -> None:
    names = _names(value)
    if kind == "row":  # by content, since another row may come to that place
        stones = {tombstone(_REQUEST, value), *(tombstone("row", identity) for identity, _ in rows)}
        stones |= {tombstone("content", content) for _, content in rows}
    else:
        stones = {tombstone(kind, names[name]) for name in ("typed", "real" if kind == "source" else "stored")}
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


def _forgotten_test(kind: ForgetKind, value: str, ids: Collection[str]) -> _IsForgotten:
    """Return the test of a row's source, session, user and interaction id."""
    sought = real_source(value)

    def is_forgotten(source: str, session: str | None, user: str | None, identity: str | None) -> bool:
        if kind == "source":
            place = real_source(source.rpartition(":")[0] or source)
            return identity in ids or sought in (place, place.partition("#")[0])
        named = {"user": user, "session": session, "row": source}[kind]
        return identity in ids or named == value

    return is_forgotten


@lru_cache(1024)
def real_source(name: str) -> str:
    """Return a source with the real path of its file; a stream or server as it is."""
    file, mark, table = name.partition("#")
    return name if "://" in name else f"{os.path.realpath(file)}{mark}{table}"


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
