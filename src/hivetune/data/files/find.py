"""The search for the files of rows that a path, a folder or a glob names."""

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from hivetune.base.paths import path_hint, quoted, spelled
from hivetune.data.files.unpack import COMPRESSED
from hivetune.errors import UsageError

_LOG_SUFFIXES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LOG_SUFFIXES, ".json", ".csv", ".tsv", ".parquet", ".arrow")
_GIVE = "give a file, a folder, a glob, '-' or 'store'"


def files_below(folder: str, *, hidden: bool = False) -> Iterator[str]:
    """Yield all files below `folder`, also through links, and with `hidden` those whose name or folder begins with a
    point. Raise UsageError for a folder that may not be read.
    """

    def refuse(error: OSError) -> None:
        # Its rows would be missing without a word.
        if not isinstance(error, FileNotFoundError):  # a folder that was removed meanwhile
            message = f"cannot read the folder {spelled(error.filename)}: {error.strerror}"
            raise UsageError(message, hint=path_hint(error)) from None

    # Each folder is entered once: links may form circles.
    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        shown = (os.path.join(parent, name) for name in files if hidden or not name.startswith("."))
        yield from filter(os.path.isfile, shown)


def matching_files(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches, with *, ?, [...] and **. Hidden files match only an explicit point."""
    start, recursive, behind = pattern.rpartition("**")
    if not recursive:
        yield from filter(os.path.isfile, glob.glob(pattern))
        return
    for folder in glob.glob(start, recursive=True) if start else (".",):
        # glob's own way through links that form circles doubles at each of them.
        for path in files_below(folder, hidden="/." in behind):
            inside = PurePath(os.path.relpath(path, folder))
            if inside.match(behind.lstrip("/") or "*"):
                yield os.path.join(start, inside) if folder == start or not start else path


def name_problem(path: str) -> tuple[str, str] | None:
    """Return why a file name can't be stored in a database, YAML and JSON, with a hint; None if it can be."""
    # Python gives the bytes of a name that its locale can't decode as lone surrogates.
    if path.encode("utf-8", "replace").decode() == path:
        return None
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8", "rename it"
    return "this locale does not read its name as UTF-8", "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def check_storable(path: str) -> None:
    """Raise UsageError for a name that can't be written to a config or the store."""
    if problem := name_problem(path):
        raise UsageError(f"{path!a} can't be read: {problem[0]}", hint=problem[1])


def is_pipe(path: str) -> bool:
    """Return whether `path` is a pipe, such as the /dev/fd/63 of a shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def find_sources(paths: str | Sequence[str]) -> list[str]:
    """Return the file names, "-" and "store", each once; files of folders and globs are sorted. Raise UsageError."""
    # A file that two patterns name would be learned twice.
    found: dict[str, str] = {}  # real path -> name
    for path in map(os.path.expanduser, [paths] if isinstance(paths, str) else paths):  # YAML does not expand `~`
        for name in [path] if path in ("-", "store") else _files_of(path):
            found.setdefault(name if name in ("-", "store") else os.path.realpath(name), name)
    return list(found.values())


def _files_of(path: str) -> list[str]:
    if os.path.isdir(path):
        # By the parts of the path, so that a folder's files stay together.
        inside = sorted(map(PurePath, files_below(path)))
        if known := [str(file) for file in inside if _is_known(file.name)]:
            return known
        hint = f"known: {', '.join(_SUFFIXES)}, also .gz and .zst"
        if hidden := next((file for file in files_below(path, hidden=True) if _suffix(file) in _SUFFIXES), None):
            parts = PurePath(os.path.relpath(hidden, path)).parts
            first = next(number for number, part in enumerate(parts, 1) if part.startswith("."))
            hint = f"what is hidden is read only where it is named: {quoted(PurePath(path, *parts[:first]))}"
        raise UsageError(f"{spelled(path)} contains no files of rows", hint=hint)
    if os.path.exists(path):
        # A named pipe waits for a writer, and a device may never end; a shell's <(command) is a pipe too.
        if os.path.isfile(path) or (is_pipe(path) and path.startswith(("/dev/fd/", "/proc/"))):
            return [path]
        hint = f"write its rows to a file, or: cat {quoted(path)} | hivetune ... -"
        raise UsageError(f"{spelled(path)} is a pipe, a device or a socket, not a file", hint=hint)
    if os.path.islink(path):
        raise UsageError(f"{spelled(path)} is a broken link", hint="look at it with ls -l")
    if glob.has_magic(path):
        if matches := sorted(matching_files(path)):
            return matches
        raise UsageError(f"nothing matches {spelled(path)}", hint="quote the pattern; check it with ls")
    get = "rows are read from this machine: get them first (curl -LO URL; hf download --repo-type dataset NAME), or"
    raise UsageError(f"{spelled(path)} does not exist", hint=f"{get} {_GIVE}" if "/" in path else _GIVE)


def refuse_read_once(paths: str | Sequence[str]) -> None:
    """Raise UsageError for standard input and pipes."""
    # They can be read once, and whoever asks reads the rows several times.
    once = next((path for path in ([paths] if isinstance(paths, str) else paths) if path == "-" or is_pipe(path)), None)
    if once is not None:
        name = "standard input" if once == "-" else f"{spelled(once)}, a pipe,"
        message = f"{name} can be read once, and this command reads its rows several times"
        raise UsageError(message, hint="write them to a file first, and name that")


def names_rows(path: str) -> bool:
    """Return whether an argument of a command names rows: `-`, `store`, a folder, or a file with a known suffix."""
    return path in ("-", "store") or os.path.isdir(path) or _is_known(os.path.basename(path))


def is_document(name: str) -> bool:
    """Return whether a file, by its name, is a document that is written once; other files are logs, which may grow."""
    return _suffix(name) in _SUFFIXES and _suffix(name) not in _LOG_SUFFIXES


def _is_known(name: str) -> bool:
    return _suffix(name) in _SUFFIXES and not name.startswith(".")


def _suffix(name: str) -> str:
    """Return the suffix of a name in lower case, ignoring that of a compressed file."""
    lower = name.lower()
    for packed in COMPRESSED:
        lower = lower.removesuffix(packed)
    return os.path.splitext(f"_{os.path.basename(lower)}")[1]
