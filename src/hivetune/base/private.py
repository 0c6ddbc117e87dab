"""Files and folders that are their owner's alone, since rows may be in any of them, and that nobody else has planted.

All that Hivetune writes goes through here: by `keep_private` even what libraries write. docs/security.md says against
whom this protects.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path

from hivetune.errors import UsageError

PRIVATE_FILE, PRIVATE_FOLDER, PRIVATE_UMASK = 0o600, 0o700, 0o077


def keep_private() -> None:
    """All that this process and its children create from now on, through whatever library, is for its user alone."""
    os.umask(PRIVATE_UMASK)


def make_folder(folder: Path) -> None:
    """`folder` and those above it that are missing, for their owner alone. One that exists stays as it is."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(PRIVATE_FOLDER, exist_ok=True)


def temporary_folder(name: str, below: Path | None = None) -> Path:
    """`name` and this user's number among the temporary files, for what needs a short path: the name of a socket has at
    most 107 bytes. `below`: instead of the folder for temporary files. It stays, and the next process finds it again.
    Raises UsageError where somebody else has planted it.
    """
    folder = (below or Path(tempfile.gettempdir())) / f"{name}-{os.geteuid()}"
    make_folder(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & PRIVATE_UMASK:
        raise UsageError(f"{folder} is not a folder of this user alone", hint="remove it, or set TMPDIR")
    return folder


def open_plain(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """A handle of an ordinary file. What is written is for its owner alone, also where it was open to others before.

    `links`: the user has named this file, and it may be a link. Raises OSError for any other link, a pipe or a device:
    whoever planted it would have another file read or written, or have us wait for ever.
    """
    try:
        handle = os.open(path, flags | (0 if links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed here", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise OSError(errno.ENXIO, "is not an ordinary file", str(path)) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not an ordinary file", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_mode & PRIVATE_UMASK and status.st_uid == os.geteuid():
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def read_bounded(path: Path, most_bytes: int, *, links: bool = True) -> bytes:
    """The content of a file of at most `most_bytes`. `links` as in `open_plain`: the user or a model's maker wrote it.

    Raises OSError, also for a larger file, before any of it is read: nothing that is read whole may fill the memory (a
    sparse file has any size that it likes), nor come from a pipe that nobody writes to.
    """
    with open(open_plain(path, links=links), "rb") as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read()
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 10:,} KiB", str(path))


def check_own(folder: Path) -> None:
    """Whether `folder` is safe to write to: nobody else can have planted it, and no link leads out of it.

    Raises UsageError. A group may write to it: on most systems each user has a group of its own.
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
                    f"{path} is a symbolic link, which is not followed here",
                    hint="replace it with the file that it points to",
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise UsageError(f"{path} is neither a file nor a folder", hint="remove it")
