"""`hive.db`: interactions, runs, snapshots and releases in one SQLite file, and the migrations that made its tables.

WAL, so that readers never wait; commits survive a power cut.
"""

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from hivetune.base.disk import errors_name, home
from hivetune.base.private import make_folder
from hivetune.errors import Busy, DoesNotFit, HivetuneError, UsageError

# One table says which of these ran; entries are appended, never edited.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE interactions (
      id TEXT PRIMARY KEY,             -- hash of content and source position
      content_id TEXT NOT NULL,        -- hash of the content alone: equal for exact duplicates
      source TEXT NOT NULL,            -- file:line, table:rowid or stream:id
      session TEXT, user TEXT, agent TEXT, category TEXT,
      time REAL, success INTEGER, feedback REAL,
      row TEXT NOT NULL                -- the row as it came, JSON
    );
    CREATE INDEX interactions_content ON interactions(content_id);
    CREATE TABLE cursors (source TEXT PRIMARY KEY, position TEXT NOT NULL);
    CREATE TABLE runs (path TEXT PRIMARY KEY, name TEXT NOT NULL, created REAL NOT NULL, snapshot TEXT NOT NULL);
    CREATE TABLE snapshots (hash TEXT PRIMARY KEY, path TEXT NOT NULL, created REAL NOT NULL);
    CREATE TABLE forgotten (kind TEXT NOT NULL, value TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (kind, value));
    """,
    """
    CREATE TABLE refused (             -- what came in and is no row: kept aside, never lost in silence
      id TEXT PRIMARY KEY,
      source TEXT NOT NULL,            -- as in interactions
      reason TEXT NOT NULL, hint TEXT NOT NULL,
      raw BLOB NOT NULL,               -- its first bytes
      time REAL NOT NULL
    );
    CREATE TABLE intake (              -- per source, since the beginning; committed with the rows themselves
      source TEXT PRIMARY KEY,
      stored INTEGER NOT NULL, duplicates INTEGER NOT NULL, refused INTEGER NOT NULL, forgotten INTEGER NOT NULL
    );
    CREATE TABLE tainted (             -- snapshots that hold rows which were forgotten later
      snapshot TEXT NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, rows INTEGER NOT NULL, time REAL NOT NULL,
      PRIMARY KEY (snapshot, kind, value)
    );
    CREATE INDEX interactions_source ON interactions(source);
    CREATE INDEX interactions_session ON interactions(session);
    CREATE INDEX interactions_user ON interactions(user);
    """,
    """
    CREATE TABLE releases (            -- artefacts in releases/NAME/VERSION; a row here makes a release
      name TEXT NOT NULL, version INTEGER NOT NULL,
      run TEXT NOT NULL,               -- the folder that it was copied from; may be gone
      model TEXT NOT NULL, model_sha256 TEXT NOT NULL, adapter_sha256 TEXT NOT NULL, snapshot TEXT NOT NULL,
      verdict TEXT,                    -- of the gate; NULL: never judged
      proof TEXT NOT NULL,             -- JSON: what was proven of its exports
      created REAL NOT NULL,
      withdrawn TEXT NOT NULL DEFAULT '',  -- why it was rolled back
      pruned INTEGER NOT NULL DEFAULT 0,   -- its artefacts were deleted on purpose
      PRIMARY KEY (name, version)
    );
    CREATE INDEX releases_snapshot ON releases(snapshot);
    CREATE TABLE aliases (
      name TEXT NOT NULL, alias TEXT NOT NULL, version INTEGER NOT NULL,
      PRIMARY KEY (name, alias), FOREIGN KEY (name, version) REFERENCES releases(name, version)
    );
    CREATE TABLE alias_history (
      number INTEGER PRIMARY KEY, name TEXT NOT NULL, alias TEXT NOT NULL,
      version INTEGER, previous INTEGER,   -- NULL: none
      time REAL NOT NULL, by TEXT NOT NULL, reason TEXT NOT NULL, forced INTEGER NOT NULL
    );
    CREATE TABLE desired (name TEXT PRIMARY KEY, version INTEGER NOT NULL, time REAL NOT NULL);
    """,
    """
    CREATE TABLE clients (             -- of the gateway
      name TEXT PRIMARY KEY, token_sha256 TEXT NOT NULL, created REAL NOT NULL, revoked REAL
    );
    CREATE TABLE feedback (
      answer TEXT PRIMARY KEY,         -- id of the interaction that was captured
      release TEXT NOT NULL, rating TEXT, correction TEXT, reason TEXT, client TEXT NOT NULL, time REAL NOT NULL
    );
    CREATE TABLE served (              -- answers of each release since it was first served
      release TEXT PRIMARY KEY,
      answers INTEGER NOT NULL, errors INTEGER NOT NULL, slow INTEGER NOT NULL, complaints INTEGER NOT NULL
    );
    """,
    """
    CREATE TABLE cycles (
      id TEXT PRIMARY KEY,             -- hash of rows, settings and champion
      name TEXT NOT NULL,              -- of the releases
      opened REAL NOT NULL, opened_for TEXT NOT NULL, config TEXT NOT NULL, pool TEXT NOT NULL, champion TEXT,
      closed REAL, ending TEXT, reason TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE decisions (           -- each act of a cycle: written before it begins, its outcome after
      number INTEGER PRIMARY KEY, name TEXT NOT NULL, cycle TEXT, kind TEXT NOT NULL,
      started REAL NOT NULL, ended REAL, outcome TEXT, words TEXT NOT NULL DEFAULT '', details TEXT
    );
    CREATE INDEX decisions_name ON decisions(name);
    CREATE TABLE cycle_rows (          -- rows (hashes of their content) that a cycle has trained on or held out
      name TEXT NOT NULL, row TEXT NOT NULL, PRIMARY KEY (name, row)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE suspect_rows (        -- rows that came with a cycle whose model was worse: left out of the next ones
      name TEXT NOT NULL, row TEXT NOT NULL, cycle TEXT NOT NULL, PRIMARY KEY (name, row)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE expert_steps (        -- what became of each domain of a shared release, and why; never edited
      number INTEGER PRIMARY KEY,
      shared TEXT NOT NULL,            -- name of the shared release
      domain TEXT NOT NULL,            -- JSON: kind, values, title
      step TEXT NOT NULL, reason TEXT NOT NULL,
      expert TEXT NOT NULL,            -- name that its releases have, or would have
      parent TEXT NOT NULL,            -- SHA-256 of the shared adapter then
      details TEXT NOT NULL, time REAL NOT NULL
    );
    CREATE INDEX expert_steps_shared ON expert_steps(shared);
    """,
)


def database_path() -> Path:
    """Where the home's database is, or will be."""
    return home() / "hive.db"


def open_database(path: Path | None = None) -> sqlite3.Connection:
    """`hive.db`, migrated to this version. WAL, so that readers never wait; commits survive a power cut.

    On a file system that can only be read, so can it. Raises UsageError when a newer Hivetune wrote it, or when it is
    damaged.
    """
    path = path or database_path()
    try:
        return _open(path)
    except sqlite3.OperationalError:  # locked, full, read-only: the file itself is whole
        raise
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path} is damaged: {error}", hint="restore it from a copy, or move it away") from None


def _open(path: Path) -> sqlite3.Connection:
    if path.exists() and not os.access(path.parent, os.W_OK):
        return sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True, isolation_level=None)
    make_folder(path.parent)
    if not path.exists():
        _create_private(path)
    elif not path.is_file():  # a pipe: SQLite would wait for its other end
        raise UsageError(f"{path} is not an ordinary file", hint="move it away, or set HIVETUNE_HOME")
    database = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        if _migrations_done(database) != len(MIGRATIONS):
            _migrate(database, path)
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK. Raises DoesNotFit (disk full), Busy (held for more than 30 s)."""
    try:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
    except sqlite3.OperationalError as error:
        raise _explain(error) from error


def _create_private(path: Path) -> None:
    """An empty file that only its owner may read, before SQLite makes it: the -wal file copies its mode.

    Linked into place, so that no handle of `path` itself is ever closed: that would drop the POSIX locks that other
    connections of this process hold (sqlite.org/howtocorrupt.html, 2.2). Then another process takes itself for the last
    one, deletes the -wal file, and commits are lost.
    """
    with errors_name(path):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)


def _migrations_done(database: sqlite3.Connection) -> int:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'migrations'").fetchone():
        return 0
    return int(database.execute("SELECT count(*) FROM migrations").fetchone()[0])


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    """All missing migrations in one transaction: two processes that open a new home together wait for each other."""
    database.execute("BEGIN IMMEDIATE")
    try:
        done = _migrations_done(database)
        if done > len(MIGRATIONS):
            raise UsageError(f"{path} was written by a newer Hivetune", hint="upgrade Hivetune, or set HIVETUNE_HOME")
        if done == 0:
            database.execute("CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY)")
        for number in range(done, len(MIGRATIONS)):
            for statement in _statements(MIGRATIONS[number]):
                database.execute(statement)
            database.execute("INSERT INTO migrations VALUES (?)", (number,))
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """Single statements: executescript would commit the open transaction first."""
    statement = ""
    for piece in script.split(";")[:-1]:
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _explain(error: sqlite3.OperationalError) -> HivetuneError | sqlite3.OperationalError:
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or (code is not None and code & 0xFF == sqlite3.SQLITE_IOERR):
        return DoesNotFit(
            f"hive.db cannot be written: {error}; nothing of this batch was stored or acknowledged",
            hint="free space in the home folder (or set HIVETUNE_HOME), then run the same command again",
        )
    if code == sqlite3.SQLITE_BUSY:
        return Busy("another process holds hive.db for more than 30 s", hint="wait for it, then run this again")
    return error
