"""The database `hive.db`: interactions, runs, snapshots and releases in one SQLite file; hive.sql has its tables.

In WAL mode readers never wait, and commits survive a power failure. A file that is empty, lacks a table or belongs to
another program is damaged. It is never taken for an empty store.
"""

import contextlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from hivetune.base.disk import FULL_DISK, home
from hivetune.base.private import PRIVATE_FILE, make_folder
from hivetune.errors import Busy, DoesNotFit, UsageError

_T = TypeVar("_T")

SCHEMA = Path(__file__).with_name("hive.sql").read_text("utf-8")
VERSION = 1  # of the schema, in the file's user_version
_TABLES = re.findall(r"CREATE TABLE (\w+)", SCHEMA)
RESTORE = "restore it from a copy; or move it away and collect again: hivetune collect SOURCE (run folders stay usable)"


def database_path() -> Path:
    """Return the path of the home's database."""
    return home() / "hive.db"


def open_database(path: Path | None = None) -> sqlite3.Connection:
    """Open `hive.db`, and make it where there is none.

    Raise UsageError if another version of Hivetune wrote it, or if it is damaged.
    """
    path = path or database_path()
    if path.exists() and not path.is_file():  # SQLite would wait for the other end of a pipe
        raise UsageError(f"{path} is not an ordinary file", hint="move it away, or set HIVETUNE_HOME")
    log = path.with_name(f"{path.name}-wal")
    if not path.exists() and log.exists() and log.stat().st_size:
        raise UsageError(f"{path} is missing, but {log.name} with its newest rows exists", hint=RESTORE)
    if not path.exists():
        make_folder(path.parent)
        _create(path)
    try:
        return _connect(path)
    except sqlite3.OperationalError as error:
        # The index of the log is a file of shared memory. A full disk has no room for it (sqlite.org/wal.html, 8), but
        # this process has: others, and other connections of its own, have to wait then.
        if not _is_full(error):
            raise
        return _connect(path, "PRAGMA locking_mode=EXCLUSIVE")
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path} is damaged: {error}", hint=RESTORE) from None


@contextlib.contextmanager
def open_existing_database() -> Iterator[sqlite3.Connection]:
    """Open `hive.db` for reading. A home without it reads as empty, and the file is not created."""
    if database_path().exists():
        database = open_database()
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.executescript(SCHEMA)
    with contextlib.closing(database):
        yield database


def open_to_read(path: Path | str, *, finished: bool = False) -> sqlite3.Connection:
    """Connect to a database file that this process only reads. `finished`: nobody writes it any more, so it is read
    without locks."""
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' * finished}"
    return sqlite3.connect(address, uri=True, timeout=30, isolation_level=None)


def _connect(path: Path, *pragmas: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        for pragma in pragmas:
            database.execute(pragma)
        _check(database, path)
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA journal_mode=WAL")
    except BaseException:
        database.close()
        raise
    return database


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raise UsageError for a file that is not what `_create` made."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    missing = [table for table in _TABLES if table not in tables]
    if missing:
        problem = f"its table {missing[0]!r} is gone"
        if len(missing) == len(_TABLES):
            problem = f"it is of another program (tables: {', '.join(sorted(tables))})" if tables else "it is empty"
        raise UsageError(f"{path} is damaged: {problem}", hint=RESTORE)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        hint = "move it away, or set HIVETUNE_HOME"
        raise UsageError(f"{path} was written by another version of Hivetune", hint=hint)


def _create(path: Path) -> None:
    """Make a new database with all tables, readable only by its owner; the -wal file copies its mode."""
    # It gets its name when it is complete. A link puts it there, because no handle of `path` may be closed: that would
    # drop the POSIX locks of this process's other connections (sqlite.org/howtocorrupt.html, 2.2).
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        temporary.touch(PRIVATE_FILE)
        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as database:
            database.executescript(f"BEGIN; {SCHEMA}; PRAGMA user_version = {VERSION}; COMMIT;")
            # The mode is kept in the file. To change it needs the file alone, and does not wait for who reads it, so of
            # two commands in a new home one failed.
            database.execute("PRAGMA journal_mode=WAL")
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(temporary, path)


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
        if _is_full(error):
            raise DoesNotFit(
                f"hive.db cannot be written: {error}; nothing of this batch was stored or acknowledged",
                hint="free space in the home folder (hivetune rm --unused), then run the same command again",
            ) from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            busy = "another process has locked hive.db for more than 30 s"
            raise Busy(busy, hint="wait for it, then run the command again") from error
        raise


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Return whether the disk is full; SQLite reports a full disk differently if its shared memory gets no room."""
    code = getattr(error, "sqlite_errorcode", 0)  # Python's own errors have none
    return bool(code == sqlite3.SQLITE_FULL or code & 0xFF == sqlite3.SQLITE_IOERR)


def record_then_delete(note: Callable[[], None], free: Callable[[], _T]) -> _T:
    """Run `note`, which records a removal durably, and then `free`, which deletes the files. Return its result."""
    try:
        note()  # first: a kill between the two leaves unnamed files, never a name without its files
    except (DoesNotFit, OSError) as error:  # a full disk has no room for the record; `free` checks whether it may
        if isinstance(error, OSError) and error.errno not in FULL_DISK:
            raise
        freed = free()
        note()
        return freed
    return free()
