"""Where things are on disk and how they get there whole: home, folders, atomic writes, manifests, locks.

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
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import platformdirs

from hivetune.base.paths import real_path
from hivetune.base.private import check_own, make_folder, open_plain, read_bounded, temporary_folder
from hivetune.errors import Busy, UsageError

MANIFEST = "manifest.json"
LOCK = ".lock"  # says who holds a folder now; no part of what it holds
HASH_CHUNK_BYTES = 1 << 20
# The largest JSON files are eval.json and compare.json: 10,000 answers of 4 kB, twice, are 80 MB.
MAX_JSON_BYTES = 1 << 30
# `lock_holder` holds a free lock itself for some microseconds: whoever takes one asks again before it counts as held.
_ASKED_TIMES, _ASKED_AGAIN_S = 4, 0.01
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# The same in the words of a child's error, of SQLite and of libraries that have errors of their own.
FULL_DISK_WORDS = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full")


class Disk:
    """The operations a crash can fall between. Tests subclass it to fail or drop the n-th one."""

    def write(self, path: Path, data: bytes | memoryview) -> None:
        with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
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
    """`$HIVETUNE_HOME`, else the XDG data folder, without symbolic links: what lies below has one name. Not created
    here. Raises UsageError where it is a file."""
    chosen = os.environ.get("HIVETUNE_HOME")
    path = real_path(chosen or platformdirs.user_data_dir("hivetune"))
    if path.is_file():
        raise UsageError(f"the home {path} is a file", hint="set HIVETUNE_HOME to a folder")
    return path


def write_atomic(path: Path, data: bytes | memoryview, *, disk: Disk = DISK) -> None:
    """All of `data` under `path`, or what was there before: temporary name, fsync, rename, fsync of the folder.

    Raises: OSError, which names `path`; the temporary file is gone then.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        disk.write(temporary, data)
        disk.sync(temporary)
        disk.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        error.filename = str(path)  # nobody knows the temporary one
        raise
    disk.sync(path.parent)


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """An OSError of the block names `path`, whatever temporary file it met."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file of any size that takes its name when all of it is on the disk, and is gone when that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_name(path):
            opened = open(temporary, "wb")  # noqa: SIM115
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_to_write(path: Path, inputs: Iterable[str] = ()) -> Path:
    """`path`, said before the work is done. Raises UsageError where no file can get this name, or an input has it."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file")
    if any(os.path.realpath(path) == os.path.realpath(each) for each in inputs):
        raise UsageError(f"{path} is read here: it would be overwritten", hint="give another name")
    return path


def write_json(path: Path, value: Mapping[str, Any], *, disk: Disk = DISK) -> None:
    """`value` as indented JSON, atomically. Raises ValueError for NaN and infinities: a missing number is null."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Names of files may hold bytes that are not UTF-8, as lone surrogates: written as \udcff they are JSON.
    write_atomic(path, text.encode("utf-8", "backslashreplace"), disk=disk)


def read_json(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """The JSON object in a file. `finite`: of our own, which hold no NaN and no infinity (a model's config may).

    Raises OSError, also for a file of more than MAX_JSON_BYTES, and ValueError for one that holds no such object.
    """
    return parse_json(read_bounded(path, MAX_JSON_BYTES, links=False), finite=finite)


def parse_json(content: bytes, *, finite: bool = False) -> dict[str, Any]:
    """The JSON object in these bytes. Raises ValueError."""
    try:
        value = json.loads(content.decode(), parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(open_plain(path, links=True), "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path, extra: dict[str, Any] | None = None, *, disk: Disk = DISK) -> None:
    """Name, size and hash of every file below `folder`, written last; `extra` is kept beside them."""
    files = {
        str(path.relative_to(folder)): {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder) not in (Path(MANIFEST), Path(LOCK))
    }
    write_json(folder / MANIFEST, {"schema": 1, **(extra or {}), "files": files}, disk=disk)


def manifest_problems(
    folder: Path, *, hash_of: Callable[[Path], str] = sha256_file, only: Collection[str] | None = None
) -> list[str]:
    """What differs from the manifest, in words; an empty list means that every named file is whole.

    `hash_of`: how a file's SHA-256 is found (base/whole.py remembers them). `only`: look at these files alone.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        named = {name: (entry["size_bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: {error}"]
    problems = []
    for name, (size_bytes, sha256) in named.items():
        if only is not None and name not in only:
            continue
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != size_bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {size_bytes}")
        elif hash_of(path) != sha256:
            problems.append(f"{name}: its hash is not the recorded one")
    return problems


@dataclass(frozen=True)
class LockHolder:
    """Who holds a folder, as written in its lock file."""

    pid: int
    boot_id: str


@contextlib.contextmanager
def lock(folder: Path, *, hint: str = "wait until it has ended") -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go when it dies. `hint`: what to do when another holds it.

    Raises Busy naming the other process, UsageError for a folder that is not safe to write to.
    """
    make_folder(folder)
    check_own(folder)
    with open(open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8") as file:
        if not _take(file.fileno()):
            file.seek(0)
            holder = file.read().split()
            who = f"process {holder[0]}" if holder else "another process"
            raise Busy(f"{folder} is in use by {who}", hint=hint)
        _name_holder(file.fileno())
        yield


def _name_holder(handle: int) -> None:
    """Write this process over whoever held it before, so that a full disk has room for it. A new file has none there:
    the folder is held all the same, by nobody who is named."""
    name = f"{os.getpid()} {boot_id()}\n".encode()
    try:
        os.pwrite(handle, name, 0)
        os.ftruncate(handle, len(name))
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise


def _take(handle: int) -> bool:
    """Lock it for this process alone; False when another one keeps it."""
    for asked in range(_ASKED_TIMES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if asked + 1 < _ASKED_TIMES:
                time.sleep(_ASKED_AGAIN_S)
        else:
            return True
    return False


def lock_holder(folder: Path) -> LockHolder | None:
    """The process that holds `folder` now, or None."""
    path = folder / LOCK
    if not path.exists():
        return None
    with open(open_plain(path), encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            words = file.read().split()
            return LockHolder(pid=int(words[0]), boot_id=words[1]) if _is_holder(words) else None
    return None


def _is_holder(words: list[str]) -> bool:
    return len(words) == 2 and words[0].isascii() and words[0].isdigit()


@contextlib.contextmanager
def scratch_folder(below: Path | None = None) -> Iterator[Path]:
    """A temporary folder for its user alone, gone after the block: in `below`, or where its path is short enough for
    that of a socket.

    A process that is killed leaves its own, with a socket or with rows in it: the next one that needs a folder removes
    those that nobody holds. Raises OSError, and UsageError where somebody else has planted the folder of them all.
    """
    if below is not None:
        make_folder(below)
    room = temporary_folder("hivetune-scratch") if below is None else below
    with contextlib.ExitStack() as held:
        with open(open_plain(room / LOCK, os.O_RDWR | os.O_CREAT), "r+b") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)  # waits: a folder is locked before another process looks at it
            for left in room.iterdir():
                if left.is_dir() and lock_holder(left) is None:
                    shutil.rmtree(left, ignore_errors=True)
            made = held.enter_context(tempfile.TemporaryDirectory(dir=room, ignore_cleanup_errors=True))
            held.enter_context(lock(Path(made)))
        yield Path(made)


def boot_id() -> str:
    """Changes at each start of the machine, so that a pid of an earlier boot is never mistaken for a live one."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"
