"""Paths and commands in messages: where a path leads, how it is quoted, and hints for errors."""

import errno
import os
import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_TO_DO = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "see the permissions of it and of the folders above it: namei -l PATH"
    ),
    errno.EROFS: "give a path on a disk that can be written to",
    errno.EEXIST: "something else is there: give another path",
}


def expanded(path: str | Path) -> Path:
    """Return the path with `~` expanded, or unchanged if there is no such user (a file may be called ~rows.jsonl)."""
    return Path(os.path.expanduser(path))


def real_path(path: str | Path) -> Path:
    """Return the absolute path with `~` and links resolved."""
    # Circular links stay as they are, so that opening them raises OSError; Path.resolve raised RuntimeError until 3.13.
    return Path(os.path.realpath(expanded(path)))


def spelled(path: object) -> str:
    """Return a path or name for a message of one line: unprintable characters are escaped."""
    text = str(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quoted(path: object) -> str:
    """Return a path or name quoted for a shell, and never as an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def path_hint(error: OSError, otherwise: str = "look at the path with ls") -> str:
    """Return the hint for an OSError on a path that a person gave."""
    return _TO_DO.get(error.errno or 0, otherwise).replace("PATH", quoted(error.filename or "PATH"))


ROOT = Path(__file__).parents[3]


def pip_install(python: str | None = None) -> str:
    """Return the beginning of a command that installs packages for this Python, or for another."""
    # The `pip` on PATH may be that of another environment, and an environment that uv made has none.
    if python is None and find_spec("pip") is None:
        return f"uv pip install --python {quoted(sys.executable)}"
    return f"{quoted(python or sys.executable)} -m pip install"


def uv_install(options: str) -> str:
    """Return the command that installs packages for this Python with uv, which chooses the build of torch."""
    pip, python = pip_install(), quoted(sys.executable)
    return (
        f"{pip} {options}"
        if pip[:3] == "uv "
        else f"{pip} uv && {python} -m uv pip install --python {python} {options}"
    )


def install_command(extra: str, python: str | None = None) -> str:
    """Return the command that installs an optional extra: in a source folder by its name, else its packages."""
    if (ROOT / "pyproject.toml").is_file():
        return f"{pip_install(python)} -e {quoted(f'{ROOT}[{extra}]')}"
    needed = [line.partition(";") for line in metadata.requires("hivetune") or ()]
    names = [quoted(name.strip()) for name, _, when in needed if extra in re.findall(r"[\w-]+", when)]
    return f"{pip_install(python)} {' '.join(names)}"
