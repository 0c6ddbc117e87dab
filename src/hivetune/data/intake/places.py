"""Which files lie where: below a folder, behind a pattern; each folder once, however links lead back to it."""

import os
import re
import stat
from collections.abc import Iterator

from hivetune.errors import UsageError


def files_below(folder: str) -> Iterator[str]:
    """All files below `folder`, through links too. A folder that was seen is not entered again: links make circles."""
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
    """The files that a glob names: * and ? within a name, [...] one character, ** any number of folders; a name that
    begins with a point only where the pattern says so.
    """
    fixed = re.split(r"[^/]*[*?\[]", pattern, maxsplit=1)[0]
    rest = pattern[len(fixed) :]
    wanted = re.compile(_as_regex(rest))
    folder = fixed or "."
    for path in files_below(folder) if "**" in rest else _files_to_depth(folder, rest.count("/")):
        relative = os.path.relpath(path, folder)
        if wanted.fullmatch(relative):
            yield fixed + relative


def _files_to_depth(folder: str, depth: int) -> Iterator[str]:
    """Files exactly `depth` folders below: a pattern without ** needs no walk through everything."""
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except OSError:  # not a folder, or not to be read: nothing in it matches
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
    """Whether a database, YAML and JSON can hold the name: it is UTF-8."""
    return path.encode("utf-8", "replace").decode() == path


def check_storable(path: str) -> None:
    """Raises UsageError for a name that a config or the store has to hold and can't."""
    if not is_storable(path):
        raise UsageError(f"the name {path!a} is not UTF-8, as settings and the store are", hint="rename it")


def is_pipe(path: str) -> bool:
    """Whether `path` is a pipe, such as /dev/fd/63, which a shell makes of <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
