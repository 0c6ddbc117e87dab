"""Which file is which: a log keeps its identity when it is renamed, copied, compressed or cut off behind our back.

A generation is the life of one file's content. It is known by device and inode as long as these lead to the same bytes
(hashes of the first and the last 4 KiB that were read), else by these bytes alone, in a renamed or compressed copy.
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

from hivetune.base.packages import install_command
from hivetune.errors import MachineNotFit

SAMPLE_BYTES = 4096
PIECE_BYTES = 8192
PACKED = (".gz", ".zst")


Identity = tuple[int, int]  # device and inode


class Moved(Exception):
    """A file is no longer where it was a moment ago: look at the folder again."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one generation was read. `origin` is its path when it was first seen, `path` where it was last, `base`
    the name that its log has while it is written, `since_ns` the change time of the file when it was first seen.

    `line` counts finished lines, `offset` bytes (of the unpacked content). `pattern`: who follows it. `closed`: rotated
    away and read to the end, or gone (inode 0). `skipping`: inside a line that is too large.
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
    """The content of a plain, .gz or .zst file. Raises Moved when another file has this name by now, or none.

    A name is nothing to rely on: between a look at the folder and this call, logs may have been renamed in a row.
    Raises OSError, and MachineNotFit without zstandard.
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
    """What reading a file with damaged compression raises."""
    zstandard = sys.modules.get("zstandard")
    known: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    return (*known, zstandard.ZstdError) if zstandard else known


def sample_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_exactly(file: IO[bytes], size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data, error = read_before_damage(file, size)
    if error:
        raise error
    return data


def read_before_damage(file: IO[bytes], size: int) -> tuple[bytes, Exception | None]:
    """Up to `size` bytes, and what ended them early if it was not the end: all but the last 8 KiB before damage."""
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
    """Whether the file begins with what was read under `position`. Raises Moved."""
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
    """Whether one file begins with the other, by samples of the start and of the end of the shorter one. Raises Moved.

    A log is copied before it is cut off, which takes seconds for a large one: meanwhile both hold the same rows.
    """
    unreadable: tuple[type[Exception], ...] = (OSError, *damage())
    try:
        with open_unpacked(path, identity) as left, open_unpacked(of.path, of.identity) as right:
            heads = read_exactly(left, SAMPLE_BYTES), read_exactly(right, SAMPLE_BYTES)
            size = min(map(len, heads))
            if heads[0] and not heads[1]:
                return False  # a new, empty log is the origin of nothing
            if heads[0][:size] != heads[1][:size]:
                return False
            if size < SAMPLE_BYTES or is_packed(path) or is_packed(of.path):
                return True
            end = min(os.fstat(left.fileno()).st_size, os.fstat(right.fileno()).st_size) - SAMPLE_BYTES
            return read_exactly_at(left, end) == read_exactly_at(right, end)
    except unreadable:
        return True  # still being written; the next look tells


def read_exactly_at(file: IO[bytes], offset: int) -> bytes:
    """One sample."""
    file.seek(offset)
    return read_exactly(file, SAMPLE_BYTES)


def is_rotation_of(name: str, base: str) -> bool:
    """chat.jsonl.1, chat.jsonl-20260101.gz, chat-20260101.jsonl, chat.1.jsonl of chat.jsonl."""
    stem, suffix = os.path.splitext(base)
    tail = r"[\d.T:_-]*(\.gz|\.zst)?$"
    behind = re.match(rf"{re.escape(base)}[._-]\d{tail}", name)
    inside = re.match(rf"{re.escape(stem)}[._-]\d[\d.T:_-]*?{re.escape(suffix)}(\.gz|\.zst)?$", name)
    return bool(behind or inside)


def scan(folder: str) -> dict[str, os.stat_result]:
    """Path and status of the plain files in a folder; one that vanishes meanwhile is not there."""
    files = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    files[entry.path] = entry.stat()
    return files
