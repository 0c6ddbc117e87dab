"""The search for files below a folder or by a pattern. Each folder is entered once, even if links form a circle."""

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import PurePath

from hivetune.errors import UsageError


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below `folder`, also through links, and enter each folder once."""
    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in files:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield path


def matching_files(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches, with *, ?, [...] and **. Hidden files match only an explicit point."""
    start, recursive, behind = pattern.rpartition("**")
    if not recursive:
        yield from filter(os.path.isfile, glob.glob(pattern))
        return
    for folder in glob.glob(start, recursive=True) if start else (".",):
        for path in files_below(folder):  # glob's own way through links that form circles doubles at each of them
            inside = PurePath(os.path.relpath(path, folder))
            hidden = "/." not in behind and any(part.startswith(".") for part in inside.parts)
            if inside.match(behind.lstrip("/") or "*") and not hidden:
                yield os.path.join(start, inside) if folder == start or not start else path


def is_storable(path: str) -> bool:
    """Return whether a name is UTF-8, so that a database, YAML and JSON can hold it."""
    return path.encode("utf-8", "replace").decode() == path


def check_storable(path: str) -> None:
    """Raise UsageError for a name that a config or the store can't hold."""
    if not is_storable(path):
        raise UsageError(f"the name {path!a} is not UTF-8, as settings and the store are", hint="rename it")


def is_pipe(path: str) -> bool:
    """Return whether `path` is a pipe, such as the /dev/fd/63 of a shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
