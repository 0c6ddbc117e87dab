"""Folders as one file that travels: packed on one machine, unpacked on another with care, put in an old one's place.

A parcel is the bytes of its files, then one line of JSON that names each with its size and SHA-256, then the length of
that line in 8 bytes. It can hold nothing but ordinary files, and what is unpacked is as large as what was received.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import DISK, HASH_CHUNK_BYTES
from hivetune.base.private import make_folder, open_plain

# A run has some tens of files; a home-made parcel with more is refused before anything is written.
MOST_FILES = 20_000
MOST_INDEX_BYTES = 16 << 20
_LENGTH_BYTES = 8
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class _File:
    name: str
    size_bytes: int
    sha256: str


def pack(folders: Mapping[str, Path], target: Path, *, leave_out: Collection[str] = ()) -> int:
    """The files of each folder below its name, as a parcel at `target`; its size in bytes.

    Left out are hidden names, which are temporary or locks, and those of `leave_out` ("NAME/file"). A file that grows
    meanwhile is taken as far as it is read. Raises OSError, also for a file that is gone when it is its turn.
    """
    index: list[tuple[str, int, str]] = []
    with open(open_plain(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as out:
        for name, folder in folders.items():
            for path in _visible(folder):
                part = f"{name}/{path.relative_to(folder).as_posix()}"
                if part not in leave_out:
                    index.append((part, *_copy(path, out)))
        line = json.dumps(index, ensure_ascii=False).encode()
        out.write(line + len(line).to_bytes(_LENGTH_BYTES, "big"))
        return out.tell()


def unpack(parcel: Path, target: Path) -> None:
    """All files below `target`, a folder that is not there yet, each as it was packed and on the disk.

    Raises ValueError for a parcel that is damaged or names a path that leads elsewhere, before anything is written of
    that; OSError for what the disk refuses. What was written is deleted then.
    """
    with open(open_plain(parcel), "rb") as file:
        files = _index(file)
        file.seek(0)
        os.mkdir(target, 0o700)
        try:
            for one in files:
                path = target / one.name
                make_folder(path.parent)
                _write(path, file, one)
            for folder, _, _ in os.walk(target):
                DISK.sync(Path(folder))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise


def replace_folder(new: Path, old: Path) -> None:
    """`new` gets the name of `old`, and `old` that of `new`, in one step; both must be there.

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


def _visible(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _copy(path: Path, out: IO[bytes]) -> tuple[int, str]:
    digest, size_bytes = hashlib.sha256(), 0
    with open(open_plain(path), "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
    return size_bytes, digest.hexdigest()


def _index(file: IO[bytes]) -> list[_File]:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LENGTH_BYTES))
    length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
    if not 0 < length <= min(MOST_INDEX_BYTES, end - _LENGTH_BYTES):
        raise ValueError("the parcel is cut, or is none")
    file.seek(end - _LENGTH_BYTES - length)
    try:
        entries = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the parcel's index is damaged: {error}") from None
    if not isinstance(entries, list):
        raise ValueError("the parcel's index is not a list")
    files = [_checked(entry) for entry in entries]
    if len(files) > MOST_FILES or len({one.name for one in files}) < len(files):
        raise ValueError(f"the parcel names {len(files)} files, too many or one of them twice")
    if sum(one.size_bytes for one in files) != end - _LENGTH_BYTES - length:
        raise ValueError("the parcel has another size than its index says")
    return files


def _checked(entry: Any) -> _File:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError("the parcel's index is not of this format")
    name, size_bytes, sha256 = entry
    plain = isinstance(name, str) and isinstance(sha256, str) and type(size_bytes) is int and size_bytes >= 0
    if not plain or "\0" in name or "\\" in name or not all(_is_own(part) for part in name.split("/")):
        raise ValueError(f"the parcel names a file that is not its own: {str(name)[:100]!r}")
    return _File(name, size_bytes, sha256)


def _is_own(part: str) -> bool:
    """Neither empty (an absolute path), nor `.` or `..`, nor hidden; and a name that a disk takes."""
    return bool(part) and not part.startswith(".") and len(os.fsencode(part)) <= 255


def _write(path: Path, file: IO[bytes], one: _File) -> None:
    digest, left = hashlib.sha256(), one.size_bytes
    with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
        while left:
            chunk = file.read(min(left, HASH_CHUNK_BYTES))
            if not chunk:
                raise ValueError(f"the parcel ends within {one.name}")
            out.write(chunk)
            digest.update(chunk)
            left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != one.sha256:
        raise ValueError(f"{one.name} was changed on its way")
