"""The bytes of a file: unpacked, in UTF-8, block by block."""

import contextlib
import gzip
import importlib
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from hivetune.base.paths import install_command, spelled
from hivetune.data.files.encodings import as_utf8
from hivetune.data.raw import Source
from hivetune.errors import DataRefused, MachineNotFit

COMPRESSED = (".gz", ".zst")
# Logs of equal lines shrink to a 50th or a 150th; a file made to fill a disk (a "bomb") to a 1,000th. Small ones may.
MAX_RATIO = 300
ALWAYS_UNPACKED_BYTES = 64 << 20
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # the exceptions of `unpacked`, beside OSError
BLOCK_BYTES = 1 << 20
_ZST_BYTES = 1024  # unpacked at once: a hostile 1 kB becomes 32 MB


class ZstFile(io.RawIOBase):
    """The content of a .zst file, with the exceptions of a .gz file: zstandard takes any end as the end."""

    def __init__(self, packed: IO[bytes]):
        self._zstandard = package("zstandard", "zst")
        self._packed = packed
        self._frame: Any = None
        self._content = io.BytesIO()  # that is unpacked and not read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (size := self._content.readinto(buffer)):
            is_between = self._frame is None or self._frame.eof
            piece = (self._frame and self._frame.unused_data) or self._packed.read(_ZST_BYTES)
            if not (piece or is_between):
                raise EOFError("Compressed file ended before the end of its frame was reached")
            if not piece:
                return 0
            if is_between:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._content = io.BytesIO(self._frame.decompress(piece))
            except self._zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
        return size


def unpacked(packed: IO[bytes], name: str) -> IO[bytes]:
    """Return the content of a file whose name may end with .gz or .zst. Reading raises OSError or one of DAMAGED.

    Raise MachineNotFit when a package is missing.
    """
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(packed, "rb"))
    return io.BufferedReader(ZstFile(packed)) if name.endswith(".zst") else packed


def read_blocks(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked and as UTF-8. Raise DataRefused where an archive is damaged."""
    blocks = _unpacked_blocks(source) if source.packed else _first_bytes(source)
    return as_utf8(blocks, source.encoding) if source.encoding else blocks


def _first_bytes(source: Source) -> Iterator[bytes]:
    left = source.size
    with open(source.path, "rb") as file:
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            left -= len(block)
            yield block


def _unpacked_blocks(source: Source) -> Iterator[bytes]:
    allowed = max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(source.path))
    done = 0
    with open(source.path, "rb") as packed:
        content = unpacked(packed, f".{source.packed}")
        while True:
            try:
                block = content.read(BLOCK_BYTES)
            except (OSError, *DAMAGED) as error:
                raise DataRefused(
                    f"{spelled(source.name)} is damaged in the MiB behind byte {done:,} of its content: {error}",
                    hint="get the file again; to save what can be read: zcat FILE > rows.jsonl",
                ) from None
            if not block:
                return
            done += len(block)
            if done > allowed:
                raise DataRefused(
                    f"{spelled(source.name)} unpacks to more than {MAX_RATIO} times its size",
                    hint="unpack it yourself, if it is what you expect",
                )
            yield block


def beginning(source: Source, size: int) -> bytes:
    """Return the first bytes of a file as `read_blocks` gives them, at most `size`. A damaged end is met later."""
    data = b""
    with contextlib.suppress(DataRefused):
        for block in read_blocks(source):
            data += block
            if len(data) >= size:
                break
    return data[:size]


def package(module: str, extra: str) -> Any:
    """Return a module that only some files need. Raise MachineNotFit with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise MachineNotFit(f"this file needs the package {name}", hint=install_command(extra)) from None
