"""The disk: the home folder, atomic writes, manifests, hashes, locks and scratch folders.

A folder's `manifest.json` is written last and names every file with its size and SHA-256; readers trust only what it
names. A file or folder gets its name when it is complete and on the disk, so a crash leaves the old or the new one.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import platformdirs

from hivetune.base.paths import real_path
from hivetune.base.private import PRIVATE_UMASK, check_owner, make_folder, open_plain, read_bounded
from hivetune.errors import Busy, UsageError

MANIFEST = "manifest.json"
LOCK = ".lock"  # names the process that holds a folder; not part of its manifest
# The largest JSON files are eval.json and compare.json: 10,000 answers of 4 kB, twice, are 80 MB.
MAX_JSON_BYTES = 1 << 30
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# The same in the error messages of children, SQLite and other libraries.
FULL_DISK_ERROR = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full")


def home() -> Path:
    """Return `$HIVETUNE_HOME` or the XDG data folder, which need not exist. Raise UsageError if it is a file."""
    # With links resolved, so that each file below has one name.
    path = real_path(os.environ.get("HIVETUNE_HOME") or platformdirs.user_data_dir("hivetune"))
    if path.is_file():
        raise UsageError(f"the home {path} is a file", hint="set HIVETUNE_HOME to a folder")
    return path


def path_to_store(path: Path) -> str:
    """Return a path as it is stored: relative to the home if it is below it, so that a home can be moved or copied."""
    return str(path.relative_to(home())) if path.is_relative_to(home()) else str(path)


def stored_path(text: str) -> Path:
    """Return the absolute path of a stored path; a relative one is below this home."""
    return home() / text


# Writing.


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that is fsynced and renamed to `path` when the block ends, or deleted if the block fails.

    Raise OSError that names `path`, because the temporary name would tell nobody anything.
    """
    # The kernel's thread numbers are unique on a machine, so two threads that write one file do not meet.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    try:
        with open(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`, whole or not at all, and make its folder. Raise OSError that names `path`."""
    make_folder(path.parent)
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        error.filename = str(path)  # a failed write names no file
        raise


def files_to_write(paths: Sequence[Path], inputs: Sequence[str] = ()) -> None:
    """Raise UsageError, before any work is done, for a file that can't be written, is an input, or is named twice."""
    taken = {os.path.realpath(name): "is also an input and would be overwritten" for name in inputs}
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="give the name of a file")
        # What is written takes the place of the file: of /dev/null too, for a user who may.
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a device or pipe", hint="give the name of a file")
        if problem := taken.get(os.path.realpath(path)):
            raise UsageError(f"{path} {problem}", hint="give another name")
        taken[os.path.realpath(path)] = "is written twice"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, atomically. Raise ValueError for NaN and infinities."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # File names may hold lone surrogates for bytes that are not UTF-8; written as \udcff they are valid JSON.
    write_atomic(path, text.encode("utf-8", "backslashreplace"))


def read_json(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file. With `finite`, NaN and infinities are errors; a model's config may have them.

    Raise OSError, also for a file of more than MAX_JSON_BYTES, and ValueError for a file without such an object.
    """
    return parse_json(read_bounded(path, MAX_JSON_BYTES, links=False), finite=finite)


def parse_json(content: bytes, *, finite: bool = False) -> dict[str, Any]:
    """Return the JSON object in these bytes. Raise ValueError."""
    try:
        value = json.loads(content.decode(), parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


# Hashes and manifests.


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with open(open_plain(path, links=True), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Write the manifest of a folder: name, size and hash of every file, and `extra`."""
    files = {
        str(path.relative_to(folder)): {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder) not in (Path(MANIFEST), Path(LOCK))
    }
    write_json(folder / MANIFEST, {"schema": 1, **(extra or {}), "files": files})


def publish(work: Path, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Write the manifest of a complete folder and rename the folder to its final name, replacing an existing one."""
    write_manifest(work, extra)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(work, folder)


def manifest_problems(folder: Path, only: Collection[str] | None = None, *, read_ns: int = 0) -> list[str]:
    """Return the differences from the manifest in words; an empty list if every file that it names is intact.

    `only` limits the check to these files. The content of files last written before `read_ns` is not read.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        named = {name: (entry["size_bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: {error}"]
    problems = []
    for name, (size_bytes, sha256) in named.items():
        path = folder / name
        if only is not None and name not in only:
            continue
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != size_bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {size_bytes}")
        elif _written_ns(path) > read_ns and sha256_file(path) != sha256:
            problems.append(f"{name}: its hash is not the recorded one")
    return problems


# Times of files have the resolution of the kernel's tick, 1 to 10 ms; a file this close to the manifest is read again.
_TICK_NS = 50_000_000


def problems_since_last_read(folder: Path, only: Collection[str] | None = None) -> list[str]:
    """Return the differences from the manifest, reading only files that were written after their last reading."""
    # The time of the manifest is when its files were last read, which takes 0.7 s for a model of 135 M, 6 s for 1 B.
    # Bits that a disk loses without a write are found by `manifest_problems`.
    manifest, now_ns = folder / MANIFEST, time.time_ns()
    read_ns = manifest.stat().st_mtime_ns - _TICK_NS if manifest.exists() else 0
    problems = manifest_problems(folder, only, read_ns=read_ns)
    others = (path for path in folder.rglob("*") if path.is_file() and path != manifest)
    if not problems and only is None and any(_written_ns(path) > read_ns for path in others):
        with contextlib.suppress(OSError):  # of another user, or on a read-only disk: they are read again next time
            os.utime(manifest, ns=(now_ns, now_ns))
    return problems


def problems_of_files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the differences of these files from the manifest, in words; an empty list without a manifest."""
    return problems_since_last_read(folder, names) if (folder / MANIFEST).is_file() else []


def _written_ns(path: Path) -> int:
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)  # a copy that keeps the time of its content has a new inode


# Locks. `lock_holder` itself holds a free lock for some microseconds, so it is tried again before it counts as held.
_LOCK_TRIES, _LOCK_RETRY_S = 4, 0.01
_MACHINES_PIDS = f"pid:[{0xEFFFFFFC}]"  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


@dataclass(frozen=True)
class LockHolder:
    """The process that has locked a folder, as its lock file names it, and since when (seconds since 1970)."""

    pid: int
    boot_id: str
    since: float


@contextlib.contextmanager
def lock(folder: Path, *, hint: str = "wait until it has ended") -> Iterator[None]:
    """Lock `folder` for this process; the kernel unlocks it when the process dies.

    Raise Busy with `hint` if another process has locked it, and UsageError if the folder is not safe to write to.
    """
    make_folder(folder)
    check_owner(folder)
    with open(open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8") as file:
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_RETRY_S)
        else:
            holder = file.read().split()
            raise Busy(f"{folder} is in use by {f'process {holder[0]}' if holder else 'another process'}", hint=hint)
        name = f"{os.getpid()} {boot_id()}\n".encode()
        try:  # over the last holder's name, so that a full disk has room for it
            os.pwrite(file.fileno(), name, 0)
            os.ftruncate(file.fileno(), len(name))
        except OSError as error:
            if error.errno not in FULL_DISK:  # the folder is held without a name then
                raise
        yield


def lock_holder(folder: Path) -> LockHolder | None:
    """Return the process that has locked `folder`, or None."""
    try:
        handle = open_plain(folder / LOCK)
    except FileNotFoundError:
        return None
    with open(handle, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            fields = file.read().split()
            if len(fields) == 2 and fields[0].isascii() and fields[0].isdigit():
                return LockHolder(int(fields[0]), fields[1], os.fstat(file.fileno()).st_mtime)
    return None


def boot_id() -> str:
    """Return an id of this boot and of the container; a pid identifies a process only where this id is the same."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        return "unknown"
    boot, namespace = path.read_text().strip(), os.readlink("/proc/self/ns/pid")
    return boot if namespace == _MACHINES_PIDS else f"{boot}-{namespace}"


@contextlib.contextmanager
def scratch_folder(below: Path | None = None) -> Iterator[Path]:
    """Yield a private folder, by default where its path is short enough for a socket (107 bytes); it is deleted after
    the block. Raise OSError, and UsageError if another user made the folder that contains it."""
    room = below or Path(tempfile.gettempdir(), f"hivetune-scratch-{os.geteuid()}")
    make_folder(room)
    status = room.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & PRIVATE_UMASK
    if below is None and not is_own:
        raise UsageError(f"{room} is accessible to other users", hint="remove it, or set TMPDIR")
    with contextlib.ExitStack() as stack:
        with open(open_plain(room / LOCK, os.O_RDWR | os.O_CREAT), "r+b") as lock_file:
            # Waits, so that a new folder is locked before another process looks at it.
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            for folder in room.iterdir():  # a process that was killed has left its own
                if folder.is_dir() and lock_holder(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)
            name = stack.enter_context(tempfile.TemporaryDirectory(dir=room, ignore_cleanup_errors=True))
            stack.enter_context(lock(Path(name)))
        yield Path(name)
