"""Errors of the disk and of databases as one message with the documented exit code; what is left is a bug of ours."""

import errno
import sqlite3

from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError

# What a person's path, link, mode or mount leads to, against a disk that is full or breaks.
OF_THE_PATH = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG}
    | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY, errno.EEXIST, errno.EFBIG}
)
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def explain(error: Exception) -> HivetuneError | None:
    """None: nothing is known of it."""
    if isinstance(error, sqlite3.DatabaseError):
        return _database(error)
    if not isinstance(error, OSError) or error.errno is None:
        return None
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno in _FULL:
        return DoesNotFit(f"the disk is full: {what}", hint="free some space, then give the same command again")
    if error.errno in _READ_ONLY:
        return UsageError(what, hint="give yourself the right to it, or set HIVETUNE_HOME to a folder of your own")
    if error.errno in OF_THE_PATH:
        return UsageError(what)
    if error.errno == errno.EIO:
        return MachineNotFit(what, hint="the disk is failing: see dmesg")
    return HivetuneError(what)


def _database(error: sqlite3.DatabaseError) -> HivetuneError:
    text = str(error)
    if "locked" in text:
        return Busy(f"the store is in use: {text}", hint="try again when the other command has ended")
    if "full" in text:
        return DoesNotFit(f"the disk is full: {text}", hint="free some space, then give the same command again")
    if "readonly" in text or "unable to open" in text:
        return UsageError(
            f"the store can't be written to: {text}", hint="set HIVETUNE_HOME to a folder that you may write to"
        )
    return UsageError(f"a database is damaged: {text}", hint="restore hive.db, or the snapshot, from a copy")
