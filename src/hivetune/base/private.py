"""Private files and folders: readable only by their owner, since any of them may contain rows, and made by no other
user.

Everything that Hivetune writes goes through this module; `keep_private` also covers files that libraries write.
docs/security.md lists the threats.
"""

import errno
import os
import stat
from pathlib import Path

from hivetune.errors import UsageError

PRIVATE_FILE, PRIVATE_FOLDER, PRIVATE_UMASK = 0o600, 0o700, 0o077


def keep_private() -> None:
    """Make all files that this process and its children create private, whatever library writes them."""
    os.umask(PRIVATE_UMASK)


def make_folder(folder: Path) -> None:
    """Make a private folder with its missing parents. An existing one stays as it is."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(PRIVATE_FOLDER, exist_ok=True)


def open_plain(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """Open an ordinary file and return its file descriptor. A file that is opened for writing becomes private.

    `links`: follow a symbolic link, for files that the user names. Raise OSError for other links, pipes and devices.
    """
    # A link could lead to another file; opening a pipe waits for its other end, for ever.
    try:
        handle = os.open(path, flags | (0 if links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        # ENXIO: a pipe without a reader.
        reasons = {
            errno.ELOOP: "is a symbolic link; links are not followed here",
            errno.ENXIO: "is not an ordinary file",
        }
        if error.errno in reasons:
            raise OSError(error.errno, reasons[error.errno], str(path)) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not an ordinary file", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_mode & PRIVATE_UMASK and status.st_uid == os.geteuid():
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def read_bounded(path: Path, max_bytes: int, *, links: bool = True) -> bytes:
    """Return the content of a file; `links` as in `open_plain`. Raise OSError, also for more than `max_bytes`."""
    with open(open_plain(path, links=links), "rb") as file:
        # Before it is read: a sparse file could fill the memory.
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"is larger than {max_bytes >> 10:,} KiB", str(path))
        # Not `max_bytes`: Python takes memory for all that it is to read, which a child with a limit does not have.
        return file.read(size)


def check_owner(folder: Path) -> None:
    """Raise UsageError if `folder` may have been made by another user, or a link leads out of it."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{folder} belongs to user {status.st_uid}", hint="copy it, and use your own copy")
    if status.st_mode & stat.S_IWOTH:  # a group may write: on most systems each user has one of its own
        raise UsageError(f"{folder} can be changed by every user", hint=f"chmod -R go-w {folder}")
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a symbolic link; links are not followed here" if stat.S_ISLNK(mode) else "no ordinary file"
                raise UsageError(f"{path} is {kind}", hint="remove it, or put the file itself there")
