"""`hive.db`: interactions, runs, snapshots and releases in one SQLite file, and the migrations that made its tables.

WAL, so that readers never wait; commits survive a power cut. The file is there whole or not at all: one that is empty,
has lost a table, is of another program or holds values of another type is damaged, and never an empty store.
"""

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from hivetune.base.disk import FULL_DISK, errors_name, home
from hivetune.base.private import make_folder
from hivetune.errors import Busy, DoesNotFit, HivetuneError, UsageError

_T = TypeVar("_T")

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
    """
    ALTER TABLE interactions ADD COLUMN seal INTEGER;  -- `row_seal` of the columns before it
    UPDATE interactions SET seal = row_seal(id, content_id, source, session, user, agent, category, time, success,
      feedback, row);
    """,
)
SEALED_COLUMNS = (
    *("id", "content_id", "source", "session", "user", "agent", "category"),
    *("time", "success", "feedback", "row"),
)
RESTORE = "restore it from a copy; or move it away and collect again: hivetune collect SOURCE (run folders stay usable)"
# Many rows of other people's text: they are checked row by row, by their seals, as they are read.
_NOT_CHECKED_AT_ONCE = frozenset({"interactions", "refused", "cycle_rows", "suspect_rows", "forgotten", "tainted"})
_JSON_COLUMNS = frozenset(
    {("releases", "proof"), ("decisions", "details"), ("expert_steps", "domain"), ("expert_steps", "details")}
)
_STORED_AS = {"TEXT": ("text",), "INTEGER": ("integer",), "REAL": ("real", "integer")}


def database_path() -> Path:
    """Where the home's database is, or will be."""
    return home() / "hive.db"


def open_database(path: Path | None = None) -> sqlite3.Connection:
    """`hive.db`, migrated to this version. WAL, so that readers never wait; commits survive a power cut.

    On a file system that can only be read, so can it. On a full disk it is for this process alone, so that looking and
    deleting work there. Raises UsageError when a newer Hivetune wrote it, or when it is damaged.
    """
    path = path or database_path()
    try:
        return _open(path)
    except sqlite3.OperationalError:  # locked, full, read-only: the file itself is whole
        raise
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from None


def row_seal(*values: object) -> int:
    """CRC-32 of the SEALED_COLUMNS of an interaction, in their order. Numbers count by their value, as SQLite stores
    them: 1, 1.0 and True are one."""
    plain = [float(value) if isinstance(value, int | float) else value for value in values]
    return zlib.crc32(json.dumps(plain, default=repr).encode())


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}", hint=RESTORE)


def _open(path: Path) -> sqlite3.Connection:
    if path.exists() and not os.access(path.parent, os.W_OK):
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True, isolation_level=None)
        _check(database, path)
        return database
    make_folder(path.parent)
    log = path.with_name(f"{path.name}-wal")
    if not path.exists():
        if log.exists() and log.stat().st_size:
            raise UsageError(f"{path} is gone, and {log.name} with its newest rows is left", hint=RESTORE)
        _create(path)
    elif not path.is_file():  # a pipe: SQLite would wait for its other end
        raise UsageError(f"{path} is not an ordinary file", hint="move it away, or set HIVETUNE_HOME")
    try:
        return _connect(path)
    except sqlite3.OperationalError as error:
        if not _is_full(error):
            raise
        return _connect(path, alone=True)


def _connect(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """`alone`: keep the index of the log in memory, not in a file that a full disk has no room for (sqlite.org/wal.html
    part 8). Other processes, and other connections of this one, wait as long."""
    database = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        if alone:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA synchronous=FULL")
        _check(database, path)
        database.execute("PRAGMA journal_mode=WAL")
        if _migrations_done(database) != len(MIGRATIONS):
            _migrate(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raises UsageError for a file that is not what `_migrate` made, as far as a glance tells."""
    if not path.stat().st_size:
        raise _damaged(path, "it is empty")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "migrations" not in tables:
        raise _damaged(path, f"it is the database of another program (tables: {', '.join(sorted(tables)) or 'none'})")
    done = _migrations_done(database)
    expected = [table for script in MIGRATIONS[:done] for table in re.findall(r"CREATE TABLE (\w+)", script)]
    missing = [table for table in expected if table not in tables]
    if missing or not done:
        raise _damaged(path, f"its table {(*missing, 'migrations')[0]!r} is gone or empty")
    for table in expected:
        if table not in _NOT_CHECKED_AT_ONCE:
            _check_values(database, path, table)


def _check_values(database: sqlite3.Connection, path: Path, table: str) -> None:
    """SQLite stores any value in any column: whoever reads a number gets one, or this error."""
    tests = {}
    for _, name, kind, is_needed, _, _ in database.execute(f"PRAGMA table_info({table})").fetchall():
        fits = ", ".join(repr(each) for each in (*_STORED_AS[kind], *(() if is_needed else ("null",))))
        tests[name] = f"(typeof({name}) NOT IN ({fits}))"
        if (table, name) in _JSON_COLUMNS:
            tests[name] = f"({tests[name]} OR ({name} IS NOT NULL AND NOT json_valid({name})))"
    wrong = database.execute(f"SELECT {', '.join(tests.values())} FROM {table} WHERE {' OR '.join(tests.values())}")
    if (row := wrong.fetchone()) is not None:
        name = next(name for name, is_wrong in zip(tests, row, strict=True) if is_wrong)
        raise _damaged(path, f"a row of its table {table!r} has no value of its type as {name!r}")


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


def note_and_free(note: Callable[[], None], free: Callable[[], _T]) -> _T:
    """Note that something is to go, then free its space; returns what `free` does.

    A kill between the two leaves files that nobody names, never a name without its files. A full disk may have no room
    for the note: there it comes second, so `free` itself asks whether it may.
    """
    try:
        note()
    except (DoesNotFit, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL_DISK:
            raise
        freed = free()
        note()
        return freed
    return free()


def _create(path: Path) -> None:
    """A new database with all its tables. Its owner alone may read it; the -wal file copies its mode.

    It takes its name when it is whole: an empty file is always damage. Linked into place, so that no handle of `path`
    itself is ever closed: that would drop the POSIX locks that other connections of this process hold
    (sqlite.org/howtocorrupt.html, 2.2). Then another process takes itself for the last one, deletes the -wal file, and
    commits are lost.
    """
    with errors_name(path):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as database:
            _migrate(database, path)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _migrations_done(database: sqlite3.Connection) -> int:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'migrations'").fetchone():
        return 0
    return int(database.execute("SELECT count(*) FROM migrations").fetchone()[0])


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    """All missing migrations in one transaction: two processes that open a new home together wait for each other."""
    database.create_function("row_seal", -1, row_seal, deterministic=True)
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


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Also what SQLite says of a file of shared memory that gets no room."""
    code = getattr(error, "sqlite_errorcode", 0)  # Python's own errors have none
    return bool(code == sqlite3.SQLITE_FULL or code & 0xFF == sqlite3.SQLITE_IOERR)


def _explain(error: sqlite3.OperationalError) -> HivetuneError | sqlite3.OperationalError:
    if _is_full(error):
        return DoesNotFit(
            f"hive.db cannot be written: {error}; nothing of this batch was stored or acknowledged",
            hint="free space in the home folder (hivetune prune), then run the same command again",
        )
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return Busy("another process holds hive.db for more than 30 s", hint="wait for it, then run this again")
    return error
