"""Private files and folders: readable only by their owner, since any may hold rows, and not planted by others.

Everything that Hivetune writes goes through here, by `keep_private` even what libraries write. docs/security.md names
the threats.
"""

import errno
import os
import stat
import tempfile
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


def temporary_folder(name: str, below: Path | None = None) -> Path:
    """Return a private folder with a short path in the temporary folder, since a socket's path has at most 107 bytes.

    Its name has the user's number, and it stays for the next process. `below` replaces the temporary folder. Raise
    UsageError if another user made it.
    """
    folder = (below or Path(tempfile.gettempdir())) / f"{name}-{os.geteuid()}"
    make_folder(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & PRIVATE_UMASK:
        raise UsageError(f"{folder} is accessible to other users", hint="remove it, or set TMPDIR")
    return folder


def open_plain(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """Open an ordinary file and return its handle. A file that is written becomes private.

    With `links` the file may be a link, for files that the user names. Raise OSError for any other link, a pipe or a
    device, which could lead to another file or make this process wait for ever.
    """
    try:
        handle = os.open(path, flags | (0 if links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link; links are not followed here", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise OSError(errno.ENXIO, "is not an ordinary file", str(path)) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not an ordinary file", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_mode & PRIVATE_UMASK and status.st_uid == os.geteuid():
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def read_bounded(path: Path, max_bytes: int, *, links: bool = True) -> bytes:
    """Return the content of a file of at most `max_bytes`; `links` as in `open_plain`.

    Raise OSError, also for a larger file before it is read, since a sparse file could fill the memory.
    """
    with open(open_plain(path, links=links), "rb") as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            content = file.read()
            if len(content) <= max_bytes:
                return content
    raise OSError(errno.EFBIG, f"is larger than {max_bytes >> 10:,} KiB", str(path))


def check_own(folder: Path) -> None:
    """Raise UsageError if `folder` may have been made by another user, or a link leads out of it.

    A group may write to it, because on most systems each user has a group of its own.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{folder} belongs to user {status.st_uid}", hint="copy it, and use your own copy")
    if status.st_mode & stat.S_IWOTH:
        raise UsageError(f"{folder} can be changed by every user", hint=f"chmod -R go-w {folder}")
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise UsageError(
                    f"{path} is a symbolic link; links are not followed here",
                    hint="replace it with the file that it points to",
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise UsageError(f"{path} is neither a file nor a folder", hint="remove it")
