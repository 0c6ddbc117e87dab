"""Which files hold the rows that a path, a folder or a glob names."""

import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from hivetune.base.paths import path_hint, quoted, spelled
from hivetune.data.files.unpack import COMPRESSED
from hivetune.errors import UsageError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below `folder`, also through links, and enter each folder once.

    Raise UsageError for a folder that may not be read: its rows would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a folder that was removed meanwhile
            message = f"cannot read the folder {spelled(error.filename)}: {error.strerror}"
            raise UsageError(message, hint=path_hint(error)) from None

    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
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


def name_problem(path: str) -> tuple[str, str] | None:
    """Return why a database, YAML and JSON can't hold a name, with a hint; None where they can."""
    if path.encode("utf-8", "replace").decode() == path:
        return None
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8", "rename it"
    return "this locale does not read its name as UTF-8", "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def check_storable(path: str) -> None:
    """Raise UsageError for a name that a config or the store can't hold."""
    if problem := name_problem(path):
        raise UsageError(f"{path!a} can't be kept in settings and the store: {problem[0]}", hint=problem[1])


def is_pipe(path: str) -> bool:
    """Return whether `path` is a pipe, such as the /dev/fd/63 of a shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def find_sources(paths: str | Sequence[str]) -> list[str]:
    """Return the file names, "-" and "store", each once; folders and globs are sorted. Raise UsageError."""
    names: list[str] = []
    for path in map(os.path.expanduser, [paths] if isinstance(paths, str) else paths):  # YAML does not expand `~`
        if path in ("-", "store"):
            names.append(path)
        elif os.path.isdir(path):
            inside = [str(p) for p in sorted(map(Path, files_below(path))) if _is_known(p.name)]
            if not inside:
                raise UsageError(
                    f"{spelled(path)} holds no data files", hint=f"known: {', '.join(_SUFFIXES)}, also .gz and .zst"
                )
            names += inside
        elif os.path.exists(path):
            _refuse_endless(path)
            names.append(path)
        elif os.path.islink(path):
            raise UsageError(f"{spelled(path)} is a broken link", hint="look at it with ls -l")
        elif any(c in path for c in "*?["):
            matches = sorted(matching_files(path))
            if not matches:
                raise UsageError(f"nothing matches {spelled(path)}", hint="quote the pattern; check it with ls")
            names += matches
        else:
            raise UsageError(f"{spelled(path)} does not exist", hint=_elsewhere(path))
    return list(
        {name if name in ("-", "store") else os.path.realpath(name): name for name in reversed(names)}.values()
    )[::-1]


def _elsewhere(path: str) -> str:
    """Return the hint for a source that is not a file: a URL, a data set of the Hub, or a wrong name."""
    name = path.removeprefix("hf://").removeprefix("datasets/")
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.isdir(name.partition("/")[0])
    if path.startswith("hf://") or of_hub:
        data_set = "/".join(name.split("/")[:2])
        folder = data_set.rpartition("/")[2]
        return (
            "rows are read from this machine. Of the Hub: "
            f"hf download {quoted(data_set)} --repo-type dataset --local-dir {quoted(folder)}, then give {folder}"
        )
    if "://" in path:
        return f"rows are read from this machine: curl -LO {quoted(path)}, then give the file"
    return "give a file, a folder, a glob, '-' or 'store'"


def _refuse_endless(path: str) -> None:
    """Raise UsageError for a named pipe, which waits for a writer, and for a device, which may never end."""
    if is_pipe(path) and not path.startswith(("/dev/fd/", "/proc/")):
        raise UsageError(
            f"{spelled(path)} is a named pipe",
            hint=f"read it through standard input: cat {quoted(path)} | hivetune ... -",
        )
    if not (os.path.isfile(path) or is_pipe(path)):
        raise UsageError(
            f"{spelled(path)} is a device or socket, not a file", hint="give a file, a folder, a glob, '-' or 'store'"
        )


def refuse_read_once(paths: str | Sequence[str]) -> None:
    """Raise UsageError for standard input and pipes, where rows are read several times."""
    once = next((path for path in ([paths] if isinstance(paths, str) else paths) if path == "-" or is_pipe(path)), None)
    if once is not None:
        name = "standard input" if once == "-" else f"{spelled(once)}, a pipe,"
        message = f"{name} can be read once, and this command reads its rows several times"
        raise UsageError(message, hint="write them to a file first, and name that")


def names_rows(path: str) -> bool:
    """Return whether a word of a command line means rows: `-`, `store`, a folder, or a file with a known suffix."""
    return path in ("-", "store") or os.path.isdir(path) or _is_known(os.path.basename(path))


def _is_known(name: str) -> bool:
    lower = name.lower()
    for suffix in COMPRESSED:
        lower = lower.removesuffix(suffix)
    return lower.endswith(_SUFFIXES) and not name.startswith(".")
