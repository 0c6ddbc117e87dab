"""Folders as one file that travels: packed on one machine, unpacked on another with care, put in an old one's place.

A parcel is a tar archive of ordinary files and then its SHA-256, so that nothing of a damaged one is unpacked.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from hivetune.base.disk import DISK, HASH_CHUNK_BYTES
from hivetune.base.private import open_plain

# A run has some tens of files. A home-made parcel with more is refused before anything is written.
MAX_FILES = 20_000
_HASH_BYTES = hashlib.sha256().digest_size
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def pack(folders: Mapping[str, Path], target: Path, *, leave_out: Collection[str] = ()) -> int:
    """Write the files of each folder below its name as a parcel at `target`, and return its size in bytes.

    Hidden names, which are temporary or locks, and the names in `leave_out` ("NAME/file") are left out. A file that
    grows meanwhile is taken as long as it was at first. Raises OSError, also for a file that is gone by its turn.
    """
    with open(open_plain(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "w+b") as out:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, folder in folders.items():
                for path in _visible(folder):
                    member = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
                    if member.name not in leave_out:
                        with open(open_plain(path), "rb") as file:
                            member.size, member.mode = os.fstat(file.fileno()).st_size, 0o600
                            archive.addfile(member, file)
        out.seek(0)
        out.write(_digest(out))
        return out.tell()


def unpack(parcel: Path, target: Path) -> None:
    """Write all files below `target`, a folder that is not there yet, and bring them to the disk.

    Raises ValueError for a parcel that is damaged or names a path that leads elsewhere, before anything of it is
    written; OSError for what the disk refuses. What was written is deleted then.
    """
    with open(open_plain(parcel), "rb") as file:
        size_bytes = file.seek(0, os.SEEK_END) - _HASH_BYTES
        if size_bytes < 0:
            raise ValueError("the parcel is truncated, or is not a parcel")
        file.seek(0)
        if _digest(file, size_bytes) != file.read():
            raise ValueError("the parcel was changed in transit, or is not a parcel")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                members = archive.getmembers()
                _check(members)
                os.mkdir(target, 0o700)
                try:
                    archive.extractall(target, members, filter="data")
                    for folder, _, files in os.walk(target):
                        for path in (*(Path(folder, name) for name in files), Path(folder)):
                            DISK.sync(path)
                except BaseException:
                    shutil.rmtree(target, ignore_errors=True)
                    raise
        except tarfile.TarError as error:
            raise ValueError(f"the parcel can't be unpacked: {error}") from None


def _digest(file: IO[bytes], size_bytes: int = -1) -> bytes:
    """Return the SHA-256 of the next `size_bytes` of a file, or of the rest of it."""
    digest = hashlib.sha256()
    while chunk := file.read(HASH_CHUNK_BYTES if size_bytes < 0 else min(HASH_CHUNK_BYTES, size_bytes)):
        digest.update(chunk)
        size_bytes -= len(chunk) if size_bytes > 0 else 0
    return digest.digest()


def _check(members: Sequence[tarfile.TarInfo]) -> None:
    """Raise ValueError unless the parcel holds nothing but ordinary files below folders of its own."""
    for member in members:
        ordinary = member.type == tarfile.REGTYPE and not member.issparse() and "\\" not in member.name
        parts = member.name.split("/")  # none of them empty, `.`, `..` or hidden, and each one that a disk takes
        if not ordinary or not all(part and part[0] != "." and len(os.fsencode(part)) <= 255 for part in parts):
            raise ValueError(f"the parcel names a file that is not its own: {member.name[:100]!r}")
    if len(members) > MAX_FILES or len({member.name for member in members}) < len(members):
        raise ValueError(f"the parcel names {len(members)} files, too many or one of them twice")


def _visible(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def replace_folder(new: Path, old: Path) -> None:
    """Exchange the names of two folders, which must both be there, in one step.

    On a file system that can't exchange names there are two steps, between which nothing has the name. Raises OSError.
    """
    library = ctypes.CDLL(None, use_errno=True)
    names = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    with contextlib.suppress(AttributeError):  # another system
        if library.renameat2(*names) == 0:
            DISK.sync(old.parent)
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    aside = new.with_name(f"{new.name}.old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)
    DISK.sync(old.parent)
