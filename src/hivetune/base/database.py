"""The database `hive.db`: interactions, runs, snapshots and releases in one SQLite file; hive.sql has its tables.

In WAL mode readers never wait, and commits survive a power cut. A file that is empty, lacks a table, belongs to another
program or has values of another type is damaged. It is never taken for an empty store.
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

from hivetune.base.disk import FULL_DISK, errors_name, home, moved_with_home
from hivetune.base.private import make_folder
from hivetune.errors import Busy, DoesNotFit, HivetuneError, UsageError

_T = TypeVar("_T")

# Scripts that make the tables; the table `migrations` records which of them ran.
MIGRATIONS = tuple(
    re.split(r"^-- migration \d+\n", Path(__file__).with_name("hive.sql").read_text("utf-8"), flags=re.MULTILINE)[1:]
)
SEALED_COLUMNS = (
    *("id", "content_id", "source", "session", "user", "agent", "category"),
    *("time", "success", "feedback", "row"),
)
RESTORE = "restore it from a copy; or move it away and collect again: hivetune collect SOURCE (run folders stay usable)"
# These tables may have many rows, which are checked by their seals when they are read.
_NOT_CHECKED_AT_ONCE = frozenset({"interactions", "refused", "cycle_rows", "forgotten", "tainted"})
_JSON_COLUMNS = frozenset({("releases", "proof")})
_STORED_AS = {"TEXT": ("text",), "INTEGER": ("integer",), "REAL": ("real", "integer")}


def database_path() -> Path:
    """Return the path of the home's database."""
    return home() / "hive.db"


def open_database(path: Path | None = None) -> sqlite3.Connection:
    """Open `hive.db` and migrate it to this version.

    On a read-only file system it is read-only. On a full disk only this process can use it, so that reading and
    deleting still work. Raise UsageError if a newer Hivetune wrote it, or if it is damaged.
    """
    path = path or database_path()
    try:
        return _open(path)
    except sqlite3.OperationalError:  # locked, full or read-only: the file itself is intact
        raise
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from None


@contextlib.contextmanager
def home_as_it_is() -> Iterator[sqlite3.Connection]:
    """Open `hive.db` to look at a home. One without it reads as an empty one, and a look does not make it."""
    if database_path().exists():
        database = open_database()
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
        _migrate(database, database_path())
    with contextlib.closing(database):
        yield database


def open_to_read(path: Path | str, *, finished: bool = False) -> sqlite3.Connection:
    """Connect to a database file that this process only reads. `finished`: nobody writes it any more, so no locks."""
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' * finished}"
    return sqlite3.connect(address, uri=True, timeout=30, isolation_level=None)


def is_read_only(path: Path) -> bool:
    """Return whether a database's folder can't be written, where SQLite has no place for the index of its log."""
    return not os.access(path.parent, os.W_OK)


def row_seal(*values: object) -> int:
    """Return the CRC-32 of an interaction's SEALED_COLUMNS. As in SQLite, 1, 1.0 and True are equal."""
    plain = [float(value) if isinstance(value, int | float) else value for value in values]
    return zlib.crc32(json.dumps(plain, default=repr).encode())


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is damaged: {reason}", hint=RESTORE)


def _open(path: Path) -> sqlite3.Connection:
    if path.exists() and is_read_only(path):
        database = open_to_read(path, finished=True)
        _check(database, path)
        return database
    make_folder(path.parent)
    log = path.with_name(f"{path.name}-wal")
    if not path.exists():
        if log.exists() and log.stat().st_size:
            raise UsageError(f"{path} is missing, but {log.name} with its newest rows exists", hint=RESTORE)
        _create(path)
    elif not path.is_file():  # SQLite would wait for the other end of a pipe
        raise UsageError(f"{path} is not an ordinary file", hint="move it away, or set HIVETUNE_HOME")
    try:
        return _connect(path)
    except sqlite3.OperationalError as error:
        if not _is_full(error):
            raise
        return _connect(path, exclusive=True)


def _connect(path: Path, *, exclusive: bool = False) -> sqlite3.Connection:
    """Connect. With `exclusive` the WAL index is in memory: a full disk has no room for it (sqlite.org/wal.html, 8).

    Then other processes, and other connections of this process, have to wait.
    """
    database = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        if exclusive:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA synchronous=FULL")
        _check(database, path)
        database.execute("PRAGMA journal_mode=WAL")
        if _migrations_done(database) != len(MIGRATIONS):
            _migrate(database, path)
        if not exclusive:
            _follow_home(database, path.parent)
    except BaseException:
        database.close()
        raise
    return database


def _follow_home(database: sqlite3.Connection, folder: Path) -> None:
    """Record the present paths below the home `folder`, if it was moved since they were written."""
    paths = database.execute("SELECT path FROM runs UNION SELECT path FROM snapshots").fetchall()
    recorded = (Path(path) for (path,) in paths)
    old = next((str(path.parents[1]) for path in recorded if moved_with_home(path, folder) != path), None)
    if old is not None:
        with transaction(database):
            for table, column in (("runs", "path"), ("snapshots", "path"), ("cycles", "pool")):
                database.execute(
                    f"UPDATE OR REPLACE {table} SET {column} = ?1 || substr({column}, length(?2) + 1)"
                    f" WHERE substr({column}, 1, length(?2) + 1) = ?2 || '/'",
                    (str(folder), old),
                )


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raise UsageError for a file whose tables or values are not what `_migrate` made."""
    if not path.stat().st_size:
        raise _damaged(path, "it is empty")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "migrations" not in tables:
        raise _damaged(path, f"it is the database of another program (tables: {', '.join(sorted(tables)) or 'none'})")
    version = _migrations_done(database)
    expected = [table for script in MIGRATIONS[:version] for table in re.findall(r"CREATE TABLE (\w+)", script)]
    missing = [table for table in expected if table not in tables]
    if missing or not version:
        raise _damaged(path, f"its table {(*missing, 'migrations')[0]!r} is gone or empty")
    for table in expected:
        if table not in _NOT_CHECKED_AT_ONCE:
            _check_values(database, path, table)


def _check_values(database: sqlite3.Connection, path: Path, table: str) -> None:
    """Raise UsageError for a value of a wrong type, since SQLite stores any value in any column."""
    tests = {}
    for _, name, kind, is_needed, _, _ in database.execute(f"PRAGMA table_info({table})").fetchall():
        fits = ", ".join(repr(kind_name) for kind_name in (*_STORED_AS[kind], *(() if is_needed else ("null",))))
        tests[name] = f"(typeof({name}) NOT IN ({fits}))"
        if (table, name) in _JSON_COLUMNS:
            tests[name] = f"({tests[name]} OR ({name} IS NOT NULL AND NOT json_valid({name})))"
    wrong = database.execute(f"SELECT {', '.join(tests.values())} FROM {table} WHERE {' OR '.join(tests.values())}")
    if (row := wrong.fetchone()) is not None:
        name = next(name for name, is_wrong in zip(tests, row, strict=True) if is_wrong)
        raise _damaged(path, f"a row of its table {table!r} has no value of its type as {name!r}")


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction. Raise DoesNotFit (disk full) or Busy (locked for more than 30 s)."""
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
    """Record that something is removed, then free its space, and return the result of `free`.

    A kill between the two leaves unnamed files, never a name without its files. If a full disk has no room for the
    record, the space is freed first; `free` itself checks whether it may.
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
    """Make a new database with all tables, readable only by its owner; the -wal file copies its mode.

    It gets its name when it is complete, since an empty file counts as damage. A link puts it there, because no handle
    of `path` may be closed: that would drop the POSIX locks of this process's other connections
    (sqlite.org/howtocorrupt.html, 2.2), and another process could delete the -wal file with its commits.
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
    """Run all missing migrations in one transaction, so that two processes with a new home wait for each other."""
    database.create_function("row_seal", -1, row_seal, deterministic=True)
    database.execute("BEGIN IMMEDIATE")
    try:
        version = _migrations_done(database)
        if version > len(MIGRATIONS):
            raise UsageError(f"{path} was written by a newer Hivetune", hint="upgrade Hivetune, or set HIVETUNE_HOME")
        if version == 0:
            database.execute("CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY)")
        for number in range(version, len(MIGRATIONS)):
            for statement in _statements(MIGRATIONS[number]):
                database.execute(statement)
            database.execute("INSERT INTO migrations VALUES (?)", (number,))
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """Yield single statements, because executescript would commit the open transaction."""
    statement = ""
    for piece in script.split(";")[:-1]:
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Return whether the disk is full, also for a file of shared memory that gets no room."""
    code = getattr(error, "sqlite_errorcode", 0)  # Python's own errors have none
    return bool(code == sqlite3.SQLITE_FULL or code & 0xFF == sqlite3.SQLITE_IOERR)


def _explain(error: sqlite3.OperationalError) -> HivetuneError | sqlite3.OperationalError:
    if _is_full(error):
        return DoesNotFit(
            f"hive.db cannot be written: {error}; nothing of this batch was stored or acknowledged",
            hint="free space in the home folder (hivetune rm --unused), then run the same command again",
        )
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return Busy("another process holds hive.db for more than 30 s", hint="wait for it, then run the command again")
    return error
