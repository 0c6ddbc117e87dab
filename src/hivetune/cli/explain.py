"""Unexpected exceptions, turned into one message with an exit code; a bug leaves its traceback in the home folder."""

import errno
import os
import sqlite3
import time
import traceback
from pathlib import Path

from hivetune.base.disk import FULL_DISK, home
from hivetune.base.paths import install_command, path_hint
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.machine.inventory import disk_free_bytes

# Errors caused by a path, link, mode or mount that the user chose, not by a full or failing disk.
OF_THE_PATH = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG}
    | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY, errno.EEXIST, errno.EFBIG}
)
# Packages of the extra `serve`, which a command imports when it is loaded.
_OF_SERVE = frozenset({"starlette", "uvicorn", "httpx2", "prometheus_client"})
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ROOM_BYTES = 1 << 20  # more than SQLite's log and shared memory need


def explain(error: Exception) -> HivetuneError:
    """Return what happened in words; the traceback of an unknown error is written to a file."""
    if isinstance(error, sqlite3.DatabaseError):
        return _database(error)
    if isinstance(error, ModuleNotFoundError) and error.name in _OF_SERVE:
        return MachineNotFit(f"the package {error.name} is not installed", hint=install_command("serve"))
    if isinstance(error, MemoryError):
        return DoesNotFit("out of memory", hint="free some memory, then run the same command again")
    if not isinstance(error, OSError) or error.errno is None:
        return _bug(error)
    if error.errno == errno.ENOENT and error.filename is None:  # of os.getcwd
        return UsageError("the working directory was deleted", hint="change to a folder that exists")
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno in FULL_DISK:
        return DoesNotFit(f"the disk is full: {message}", hint="free some space, then run the same command again")
    if error.errno == errno.EFBIG and not error.filename:  # by the kernel, and not a limit of ours for what is read
        hint = "use another disk (FAT32 ends at 4 GB), or raise the limit: ulimit -f unlimited"
        return DoesNotFit("a file became larger than its disk or ulimit -f allows", hint=hint)
    if error.errno in OF_THE_PATH:
        hint = path_hint(error)
        if error.errno in _READ_ONLY and _is_ours(error):
            hint = f"{hint}, or set HIVETUNE_HOME to a folder that you own"
        return UsageError(message, hint=hint)
    if error.errno == errno.EIO:
        return MachineNotFit(message, hint="the disk may be failing: see dmesg")
    return HivetuneError(message)


def _is_ours(error: OSError) -> bool:
    """Return whether the error concerns a path in the home folder, or no path."""
    return error.filename is None or Path(str(error.filename)).absolute().is_relative_to(home())


def _database(error: sqlite3.DatabaseError) -> HivetuneError:
    text, again = str(error), "free some space, then run the same command again"
    # SQLite says "disk I/O error" too if its shared memory file finds no space.
    is_full = "full" in text or ("disk I/O error" in text and disk_free_bytes(home()) < _ROOM_BYTES)
    if is_full:
        return DoesNotFit(f"the disk of {home()} is full: {text}", hint=again)
    if "locked" in text:
        return Busy(f"the store is in use: {text}", hint="try again when the other command has ended")
    if "readonly" in text or "unable to open" in text:
        hint = "set HIVETUNE_HOME to a folder that you can write to"
        return UsageError(f"cannot write to the store: {text}", hint=hint)
    if "disk I/O error" in text:
        return MachineNotFit(f"the disk of {home()} is failing: {text}", hint="see dmesg")
    return UsageError(f"a database is damaged: {text}", hint="restore hive.db, or the snapshot, from a backup")


def _bug(error: Exception) -> HivetuneError:
    text = "".join(traceback.format_exception(error))
    message = f"this is a bug in Hivetune: {type(error).__name__}: {error}"
    path = home() / "bugs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as unwritten:
        return HivetuneError(
            f"{message}\n{text}", hint=f"please report it with these lines ({path}: {unwritten.strerror})"
        )
    return HivetuneError(message, hint=f"please report it with {path}; check it first, since it may quote your rows")
