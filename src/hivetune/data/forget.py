"""Removes a user, a session, a source or a row from the store, keeps it out, and names the releases made from it.

The input files belong to others and are not changed; a later collection skips these rows.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

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


class _Sought(NamedTuple):
    """The request to forget, with the ids of its interactions, which are known only while these are in the store."""

    kind: ForgetKind
    value: str
    ids: Collection[str] = ()

    def holds(self, source: str, session: str | None, user: str | None, identity: str | None) -> bool:
        """Return whether a row with these facts is to be forgotten."""
        if identity in self.ids:
            return True
        if self.kind == "source":
            place = real_source(source.rpartition(":")[0] or source)
            facts: tuple[str | None, ...] = (source, place, place.partition("#")[0])
        else:
            facts = {"user": (user,), "session": (session,), "row": (source, identity)}[self.kind]
        return not _names(self.kind, self.value).isdisjoint(facts)


def forget(database: sqlite3.Connection, kind: ForgetKind, value: str) -> Forgotten:
    """Remove every interaction of `value`, exclude it from later collections, and return the tainted snapshots. It may
    be repeated.

    `row` is the id of an interaction, or its source as stored; exact copies are removed too.
    Raises UsageError for a row that is neither known nor was forgotten before, DoesNotFit, Busy.
    """
    database.execute("PRAGMA secure_delete = ON")  # overwrite, not only unlink
    with transaction(database):
        rows, refused = _find(database, kind, value), _find_refused(database, kind, value)
        if kind == "row" and not (rows or refused or tombstone(_REQUEST, value) in load_forgotten(database)):
            hint = "give one of the table interactions; see it on the dashboard"
            raise UsageError(f"no stored row has the id or the source {value}", hint=hint)
        for table, column in (("interactions", "id"), ("feedback", "answer"), ("acts", "interaction")):
            database.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(identity,) for identity in rows])
        database.executemany("DELETE FROM refused WHERE id = ?", [(identity,) for identity in refused])
        now = time.time()
        stones = _tombstones(kind, value, rows, refused)
        database.executemany("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", [(*stone, now) for stone in stones])
    sought = _Sought(kind, value, rows.keys())
    unchecked = _record_taints(database, sought)
    wins = [(name, win) for name in names_with_wins() for win in wins_of(name)]
    wins = [(name, w) for name, w in wins if sought.holds(w.source, w.session, w.user, w.interaction_id)]
    for name, win in wins:
        drop_win(name, win)
    if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # the log still holds the old pages
        raise Busy(
            "the rows are removed, but another process still reads their database pages",
            hint="run this again when no other Hivetune command reads the store",
        )
    taints = tuple(_read_taints(database, kind, value))
    return Forgotten(kind, value, len(rows), len(refused), taints, unchecked, len(wins))


def set_aside(database: sqlite3.Connection, kind: ForgetKind, value: str, by: str) -> int:
    """Keep the stored rows of `value` out of later trainings, by their content; return their number. They stay in the
    store, and can be taken back on the dashboard's Review page. Raises UsageError if there is no such row."""
    with transaction(database):
        rows = _find(database, kind, value)
        if not rows:
            raise UsageError(f"no stored row has the {kind} {value}", hint="check the spelling, or collect it first")
        now = time.time()
        aside = {(content, by, now) for content in rows.values()}
        database.executemany("INSERT OR IGNORE INTO set_aside VALUES (?, ?, ?)", sorted(aside))
    return len(rows)


@lru_cache(1024)
def real_source(name: str) -> str:
    """Return a source with the real path of its file; a stream or server as it is."""
    file, mark, table = name.partition("#")
    return name if "://" in name else f"{os.path.realpath(file)}{mark}{table}"


@lru_cache(16)
def _names(kind: ForgetKind, value: str) -> frozenset[str | None]:
    """Return the name as it was typed, and as the store has that of a file, a user or a session."""
    # The store's rows have file:line, path#table:rowid or stream:entry, and those of the gateway gateway:RELEASE.
    return frozenset((value, real_source(value) if kind == "source" else redacted_name(value)))


def _find(database: sqlite3.Connection, kind: ForgetKind, value: str) -> dict[str, str]:
    """Return id -> content id of the interactions that are to be forgotten, and of the copies of a row."""
    sought = _Sought(kind, value)
    query = "SELECT id, content_id, source, session, user FROM interactions"
    stored = {
        identity: content
        for identity, content, source, session, user in database.execute(query)
        if sought.holds(source, session, user, identity)
    }
    if kind == "row":
        copies = "SELECT id, content_id FROM interactions WHERE content_id = ?"
        for content in set(stored.values()):
            stored |= dict(database.execute(copies, (content,)))
    return stored


def _find_refused(database: sqlite3.Connection, kind: ForgetKind, value: str) -> dict[str, str]:
    # They could not be read, so they have no columns: each of their words may be a user or a session.
    refused = database.execute("SELECT id, source, raw FROM refused").fetchall()
    by_name, sought = kind in ("user", "session"), _Sought(kind, value)
    return {
        identity: raw_hash(raw)
        for identity, source, raw in refused
        if (value in names_in(raw) if by_name else sought.holds(source, None, None, None))
    }


def _tombstones(
    kind: ForgetKind, value: str, rows: dict[str, str], refused: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the entries of `forgotten` that keep these rows out of the store and of preparations."""
    # Hashes of what was forgotten, since the names themselves are what has to go.
    if kind == "row":  # by content, since another row may come to that place
        yield tombstone(_REQUEST, value)
        yield from (tombstone("row", identity) for identity in rows)
        yield from (tombstone("content", content) for content in rows.values())
    else:
        yield from (tombstone(kind, str(name)) for name in _names(kind, value))
    if kind != "source":  # the same broken row may come from another place
        yield from (tombstone("raw", raw) for raw in refused.values())


def _record_taints(database: sqlite3.Connection, sought: _Sought) -> tuple[str, ...]:
    """Record the tainted snapshots, and return the folders of the missing ones."""
    # The ids exist nowhere else afterwards, so a second request could not find them again.
    unchecked = []
    for snapshot, path in database.execute("SELECT hash, path FROM snapshots ORDER BY created").fetchall():
        folder = stored_path(path)
        if not (folder / ROWS_FILE).is_file():
            unchecked.append(str(folder))
        elif count := sum(sought.holds(*facts) for facts in _rows_in(folder)):
            with transaction(database):
                database.execute(
                    "INSERT INTO tainted VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET rows = max(rows, excluded.rows)",
                    (snapshot, *tombstone(sought.kind, sought.value), count, time.time()),
                )
    return tuple(unchecked)


def _rows_in(snapshot: Path) -> Iterator[tuple[str, str | None, str | None, str | None]]:
    """Yield source, session, user and interaction id of a snapshot's rows and duplicates."""
    # The text of duplicates, which are not trained, is in its folder all the same.
    facts = ("source", "session", "user", "interaction_id")
    with contextlib.closing(open_to_read(snapshot / ROWS_FILE, finished=True)) as database:
        yield from database.execute(f"SELECT {', '.join(facts)} FROM rows")
    with contextlib.suppress(FileNotFoundError), open(snapshot / DROPPED_FILE, encoding="utf-8") as file:
        for line in file:
            source, session, user, identity = map(json.loads(line).__getitem__, facts)
            yield source, session, user, identity


def _read_taints(database: sqlite3.Connection, kind: ForgetKind, value: str) -> Iterator[Taint]:
    query = (
        "SELECT snapshot, coalesce(path, ''), rows FROM tainted LEFT JOIN snapshots ON hash = snapshot"
        " WHERE kind = ? AND value = ? ORDER BY time"
    )
    for snapshot, path, rows in database.execute(query, tombstone(kind, value)).fetchall():
        runs = database.execute("SELECT path FROM runs WHERE snapshot = ? ORDER BY created", (snapshot,))
        releases = database.execute(
            "SELECT name || '@' || version FROM releases WHERE snapshot = ? AND NOT pruned ORDER BY name, version",
            (snapshot,),
        )
        there = tuple(str(stored_path(run)) for (run,) in runs)
        yield Taint(snapshot, str(stored_path(path)) if path else "", rows, there, tuple(one for (one,) in releases))
