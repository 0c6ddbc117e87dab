"""A person's path: where it leads, and what to do where it cannot be used, by the error that the system gives."""

import errno
import os
import shlex
from pathlib import Path

_OWN = "give yourself the right to it"
_TO_DO = {
    errno.EACCES: _OWN,
    errno.EPERM: _OWN,
    errno.EROFS: "give a path on a disk that can be written to",
    errno.EISDIR: "a folder is there: give the name of a file",
    errno.ENOTDIR: "a file is there where a folder should be: give another path",
    errno.EEXIST: "something else is there: give another path",
    errno.ENOTEMPTY: "give an empty or a new folder",
    errno.ENAMETOOLONG: "give a shorter name",
}


def real_path(path: str | Path) -> Path:
    """Where it leads: absolute, `~` and links resolved. Links in a circle stay as they are, so that whoever opens them
    gets an OSError; Path.resolve raises RuntimeError for them before Python 3.13."""
    return Path(os.path.realpath(Path(path).expanduser()))


def spelled(path: object) -> str:
    """A path or name inside a message, which stays one line: what is no printable character is spelled out (\\n)."""
    text = str(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quoted(path: object) -> str:
    """A path or name in a command that is proposed, as a shell takes it."""
    return shlex.quote(str(path))


def what_to_do(error: OSError, otherwise: str = "look at the path with ls") -> str:
    """The hint for a person whose path led to this error."""
    return _TO_DO.get(error.errno or 0, otherwise)
