"""The bytes of a file: unpacked, in UTF-8, block by block."""

import codecs
import contextlib
import gzip
import importlib
import os
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import Any

from hivetune.base.paths import install_command, spelled
from hivetune.data.raw import Source
from hivetune.errors import DataRefused, MachineNotFit

COMPRESSED = (".gz", ".zst")
# Logs of equal lines shrink to a 50th or a 150th; a file made to fill a disk (a "bomb") to a 1,000th. Small ones may.
MAX_RATIO = 300
ALWAYS_UNPACKED_BYTES = 64 << 20
# What `blocks_of` raises for a damaged file.
DAMAGED = (OSError, EOFError, zlib.error)
BLOCK_BYTES = 1 << 20
# The packed bytes that are unpacked at once: a hostile 1 kB becomes 32 MB.
_ZST_BYTES = 1024


def blocks_of(file: BufferedReader, packed: str) -> Iterator[bytes]:
    """Yield the content of a file from its current position, unpacked: `packed` is "gz", "zst" or "". Raise one of
    DAMAGED, also if a packed file ends too early; raise MachineNotFit if a package is missing.
    """
    if packed == "zst":
        yield from _zst_blocks(file)
        return
    content = gzip.GzipFile(fileobj=file) if packed else file
    while block := content.read1(BLOCK_BYTES):  # what is before a damaged place is given
        yield block


def _zst_blocks(file: BufferedReader) -> Iterator[bytes]:
    zstandard = package("zstandard", "zst")
    frame, rest = None, b""
    while piece := rest or file.read(_ZST_BYTES):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            block = frame.decompress(piece)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from None
        frame, rest = (None, frame.unused_data) if frame.eof else (frame, b"")
        if block:
            yield block
    if frame is not None:  # zstandard's readers take any end as the end
        raise EOFError("Compressed file ended before the end of its frame was reached")


def read_blocks(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked and as UTF-8. Raise DataRefused if it is damaged."""
    return as_utf8(_checked_blocks(source), source.encoding) if source.encoding else _checked_blocks(source)


def _checked_blocks(source: Source) -> Iterator[bytes]:
    allowed, done = max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(source.path)), 0
    with open(source.path, "rb") as file:
        blocks = blocks_of(file, source.packed)
        while True:
            try:
                block = next(blocks, b"")
            except DAMAGED as error:
                raise DataRefused(
                    f"{spelled(source.name)} is damaged within 1 MiB after unpacked byte {done:,}: {error}",
                    hint="get the file again; to save what can be read: zcat FILE > rows.jsonl",
                ) from None
            if not source.packed:
                block = block[: source.size - done]  # a log may have grown since it was hashed
            done += len(block)
            if not block:
                return
            if source.packed and done > allowed:
                raise DataRefused(
                    f"{spelled(source.name)} unpacks to more than {MAX_RATIO} times its size",
                    hint="unpack it yourself, if it is what you expect",
                )
            yield block


def as_utf8(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield blocks of text in another encoding as UTF-8."""
    # What is broken in it becomes U+FFFD, which the checks refuse in its row.
    texts = codecs.iterdecode(blocks, encoding, "replace")
    yield next(texts, "").removeprefix("\ufeff").encode("utf-8", "replace")
    for text in texts:
        yield text.encode("utf-8", "replace")


def beginning(source: Source, size: int) -> bytes:
    """Return at most the first `size` bytes of a file's unpacked text, as `read_blocks` yields it."""
    data = b""
    # Damage is told where the rows are read, with its place.
    with contextlib.suppress(DataRefused):
        for block in read_blocks(source):
            data += block
            if len(data) >= size:
                break
    return data[:size]


def package(module: str, extra: str) -> Any:
    """Import an optional module and return it. Raise MachineNotFit with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise MachineNotFit(f"these rows need the package {name}", hint=install_command(extra)) from None
