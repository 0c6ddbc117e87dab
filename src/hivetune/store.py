"""Where things are on disk and how they get there whole: home, folders, atomic writes, manifests, locks, `hive.db`.

A folder is a promise: its `manifest.json` is written last, names every file with size and SHA-256, and readers trust
only what it names. Every change of the disk that must survive a crash goes through a `Disk`, so that tests can fail
the n-th operation.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from hivetune.errors import Busy, UsageError

MANIFEST = "manifest.json"
HASH_CHUNK_BYTES = 1 << 20


class Disk:
    """The operations a crash can fall between. Tests subclass it to fail or drop the n-th one."""

    def write(self, path: Path, data: bytes | memoryview) -> None:
        with open(path, "wb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """fsync of a file or of a folder (its names)."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


DISK = Disk()


def home() -> Path:
    """`$HIVETUNE_HOME`, else the XDG data folder. Not created here."""
    chosen = os.environ.get("HIVETUNE_HOME")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("hivetune"))


def write_atomic(path: Path, data: bytes | memoryview, *, disk: Disk = DISK) -> None:
    """All of `data` under `path`, or what was there before: temporary name, fsync, rename, fsync of the folder.

    Raises: OSError; the temporary file is gone then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        disk.write(temporary, data)
        disk.sync(temporary)
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    disk.sync(path.parent)


def write_json(path: Path, value: Any, *, disk: Disk = DISK) -> None:
    """`value` as indented JSON, atomically. Raises ValueError for NaN and infinities: a missing number is null."""
    write_atomic(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(), disk=disk)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path, extra: dict[str, Any] | None = None, *, disk: Disk = DISK) -> None:
    """Name, size and hash of every file below `folder`, written last; `extra` is kept beside them."""
    files = {
        str(path.relative_to(folder)): {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder) != Path(MANIFEST)
    }
    write_json(folder / MANIFEST, {"schema": 1, **(extra or {}), "files": files}, disk=disk)


def manifest_problems(folder: Path) -> list[str]:
    """What differs from the manifest, in words; an empty list means that every named file is whole."""
    try:
        manifest = read_json(folder / MANIFEST)
        named = {name: (entry["size_bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: {error}"]
    problems = []
    for name, (size_bytes, sha256) in named.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != size_bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {size_bytes}")
        elif sha256_file(path) != sha256:
            problems.append(f"{name}: its hash is not the recorded one")
    return problems


def check_name(name: str) -> str:
    """A name that is safe as a file name. Raises UsageError."""
    if not name or name.startswith(".") or not all(c.isascii() and (c.isalnum() or c in "._-") for c in name):
        raise UsageError(f"{name!r} is no usable name", hint="use letters, digits, '.', '_' and '-'; no leading dot")
    return name


@dataclass(frozen=True)
class LockHolder:
    """Who holds a folder, as written in its lock file."""

    pid: int
    boot_id: str


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go when it dies. Raises Busy naming the other process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            file.seek(0)
            holder = file.read().split()
            who = f"process {holder[0]}" if holder else "another process"
            raise Busy(
                f"{folder} is in use by {who}", hint=f"wait for it, or stop it with: hivetune stop {folder}"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {boot_id()}\n")
        file.flush()
        yield


def lock_holder(folder: Path) -> LockHolder | None:
    """The process that holds `folder` now, or None."""
    path = folder / ".lock"
    if not path.exists():
        return None
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            words = file.read().split()
            return LockHolder(pid=int(words[0]), boot_id=words[1]) if len(words) == 2 else None
    return None


def boot_id() -> str:
    """Changes at each start of the machine, so that a pid of an earlier boot is never mistaken for a live one."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"


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
)


def open_database(path: Path | None = None) -> sqlite3.Connection:
    """`hive.db`, migrated to this version. WAL, so that readers never wait; commits survive a power cut.

    Raises UsageError when a newer Hivetune wrote it.
    """
    path = path or home() / "hive.db"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _create_private(path)
    database = sqlite3.connect(path, timeout=30, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    try:
        if _migrations_done(database) != len(MIGRATIONS):
            _migrate(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _create_private(path: Path) -> None:
    """An empty file that only its owner may read, before SQLite makes it: the -wal file copies its mode.

    Linked into place, so that no handle of `path` itself is ever closed: that would drop the POSIX locks that other
    connections of this process hold (sqlite.org/howtocorrupt.html, 2.2). Then another process takes itself for the last
    one, deletes the -wal file, and commits are lost.
    """
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
