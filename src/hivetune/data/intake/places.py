"""The search for files below a folder or by a pattern. Each folder is entered once, even if links form a circle."""

import os
import re
import stat
from collections.abc import Iterator

from hivetune.errors import UsageError


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below `folder`, also through links, and enter each folder once."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        about = os.stat(parent)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders.sort()
        for name in files:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield path


def matching_files(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches, with *, ?, [...] and **. Hidden files match only an explicit point."""
    fixed = re.split(r"[^/]*[*?\[]", pattern, maxsplit=1)[0]
    rest = pattern[len(fixed) :]
    wanted = re.compile(_as_regex(rest))
    folder = fixed or "."
    for path in files_below(folder) if "**" in rest else _files_to_depth(folder, rest.count("/")):
        relative = os.path.relpath(path, folder)
        if wanted.fullmatch(relative):
            yield fixed + relative


def _files_to_depth(folder: str, depth: int) -> Iterator[str]:
    """Yield the files exactly `depth` folders below, which is enough for a pattern without **."""
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except OSError:  # not a readable folder
        return
    for entry in inside:
        if depth == 0 and entry.is_file():
            yield entry.path
        elif depth > 0 and entry.is_dir():
            yield from _files_to_depth(entry.path, depth - 1)


def _as_regex(pattern: str) -> str:
    regex, at_start = "", True
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, flags=re.S):
        visible = r"(?!\.)" if at_start and piece[0] in "*?[" else ""
        if piece == "**/":
            regex += r"(?:(?!\.)[^/]+/)*"
        elif piece in ("*", "**"):
            regex += visible + "[^/]*"
        elif piece == "?":
            regex += visible + "[^/]"
        elif piece[0] == "[" and len(piece) > 1:
            inside = piece[1:-1].replace("\\", r"\\").replace("[", r"\[")
            regex += visible + (f"[^/{inside[1:]}]" if inside[0] == "!" else f"[{inside}]")
        else:
            regex += re.escape(piece)
        at_start = piece.endswith("/")
    return regex


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
