"""The identity of logs that are renamed, copied, compressed or truncated.

A generation is the life of one file's content. It is recognised by device and inode while these lead to the same bytes
(hashes of the first and the last 4 KiB that were read), else by these bytes in a renamed or compressed copy.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, cast

from hivetune.base.paths import install_command
from hivetune.errors import MachineNotFit

SAMPLE_BYTES = 4096
PIECE_BYTES = 8192
PACKED = (".gz", ".zst")


Identity = tuple[int, int]  # device and inode


class Moved(Exception):
    """A file is no longer where it was, so the folder must be read again."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position in one generation.

    `origin` is its first path, `path` its last one, `base` the name of its log while it is written, `since_ns` the
    change time when it was first seen. `line` counts finished lines, `offset` bytes of the decompressed content.
    `pattern` is the pattern that follows it. `closed`: rotated and read to the end, or gone (inode 0). `skipping`:
    inside of a line that is too large.
    """

    origin: str
    generation: int
    pattern: str
    path: str
    base: str
    since_ns: int
    device: int
    inode: int
    offset: int = 0
    line: int = 0
    head: str = ""
    tail: str = ""
    closed: bool = False
    skipping: bool = False

    @property
    def identity(self) -> Identity:
        return self.device, self.inode

    @property
    def key(self) -> str:
        return f"jsonl:{self.origin}#{self.generation}"

    def dump(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def load_position(text: str) -> Position:
    return Position(**json.loads(text))


def is_packed(path: str) -> bool:
    return path.endswith(PACKED)


@contextlib.contextmanager
def open_unpacked(path: str, identity: Identity) -> Iterator[IO[bytes]]:
    """Open the content of a plain, .gz or .zst file. Raise Moved if another file has this name now, or none.

    Logs may have been renamed since the folder was read. Raise OSError, and MachineNotFit without zstandard.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise Moved(path) from None
    with file:
        if inode_of(os.fstat(file.fileno())) != identity:
            raise Moved(path)
        if path.endswith(".gz"):
            with gzip.open(file, "rb") as unpacked:
                yield cast(IO[bytes], unpacked)
        elif path.endswith(".zst"):
            try:
                import zstandard
            except ImportError:
                raise MachineNotFit(f"{path} needs zstandard", hint=install_command("zst")) from None
            with zstandard.open(file, "rb") as unpacked:
                yield cast(IO[bytes], unpacked)
        else:
            yield file


def damage() -> tuple[type[Exception], ...]:
    """Return the exceptions of a file with damaged compression."""
    zstandard = sys.modules.get("zstandard")
    exceptions: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    return (*exceptions, zstandard.ZstdError) if zstandard else exceptions


def sample_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_exactly(file: IO[bytes], size: int) -> bytes:
    """Return up to `size` bytes; fewer only at the end of the file."""
    data, error = read_before_damage(file, size)
    if error:
        raise error
    return data


def read_before_damage(file: IO[bytes], size: int) -> tuple[bytes, Exception | None]:
    """Return up to `size` bytes (all but the last 8 KiB before damage), and the error that ended them, if any."""
    parts = []
    broken = damage()
    try:
        while size > 0 and (part := file.read(min(size, PIECE_BYTES))):
            parts.append(part)
            size -= len(part)
    except broken as error:
        return b"".join(parts), error
    return b"".join(parts), None


def inode_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def holds(path: str, identity: Identity, position: Position) -> bool:
    """Return whether the file begins with the bytes that `position` has read. Raise Moved."""
    if position.offset == 0:
        return True
    size = min(position.offset, SAMPLE_BYTES)
    unreadable: tuple[type[Exception], ...] = (OSError, *damage())
    try:
        with open_unpacked(path, identity) as file:
            if sample_hash(read_exactly(file, size)) != position.head:
                return False
            file.seek(position.offset - size)
            return sample_hash(read_exactly(file, size)) == position.tail
    except unreadable:
        return False


def may_be_copy(path: str, identity: Identity, of: Position) -> bool:
    """Return whether one file begins with the other, by samples from both ends of the shorter one. Raise Moved.

    A log is copied before it is truncated, which takes seconds for a large one; meanwhile both have the same rows.
    """
    unreadable: tuple[type[Exception], ...] = (OSError, *damage())
    try:
        with open_unpacked(path, identity) as file, open_unpacked(of.path, of.identity) as other_file:
            heads = read_exactly(file, SAMPLE_BYTES), read_exactly(other_file, SAMPLE_BYTES)
            size = min(map(len, heads))
            if heads[0] and not heads[1]:
                return False  # a new, empty log has no copies
            if heads[0][:size] != heads[1][:size]:
                return False
            if size < SAMPLE_BYTES or is_packed(path) or is_packed(of.path):
                return True
            end = min(os.fstat(file.fileno()).st_size, os.fstat(other_file.fileno()).st_size) - SAMPLE_BYTES
            return read_exactly_at(file, end) == read_exactly_at(other_file, end)
    except unreadable:
        return True  # it is still written; the next look decides


def read_exactly_at(file: IO[bytes], offset: int) -> bytes:
    """Return one sample."""
    file.seek(offset)
    return read_exactly(file, SAMPLE_BYTES)


def is_rotation_of(name: str, base: str) -> bool:
    """Return whether a name is a rotation of `base`: chat.jsonl.1, chat-20260101.jsonl.gz, chat.1.jsonl."""
    stem, suffix = os.path.splitext(base)
    tail = r"[\d.T:_-]*(\.gz|\.zst)?$"
    behind = re.match(rf"{re.escape(base)}[._-]\d{tail}", name)
    inside = re.match(rf"{re.escape(stem)}[._-]\d[\d.T:_-]*?{re.escape(suffix)}(\.gz|\.zst)?$", name)
    return bool(behind or inside)


def scan(folder: str) -> dict[str, os.stat_result]:
    """Return path -> status of the plain files in a folder, without files that vanish meanwhile."""
    files = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    files[entry.path] = entry.stat()
    return files
