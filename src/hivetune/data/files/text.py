"""The text of a file: unpacked, in UTF-8, with line feeds, block by block up to where the file is damaged.

The format of a file says after its kind how it is written: `csv.cr.as=utf-16-le.gz`.
"""

import codecs
import gzip
import importlib
import io
import math
import os
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from hivetune.base.paths import install_command
from hivetune.data.files.encodings import as_utf8
from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit

CR_FORMAT = ".cr"  # lines end with carriage returns alone
ENCODED_FORMAT = re.compile(r"\.as=([a-z0-9_-]+)")
COMPRESSED = (".gz", ".zst")
# Logs of equal lines shrink to a 50th or a 150th; a file made to fill a disk (a "bomb") to a 1,000th. Small ones may.
MAX_RATIO = 300
ALWAYS_UNPACKED_BYTES = 64 << 20
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # the exceptions of `unpacked`, beside OSError
_BLOCK_BYTES = 1 << 20
_ZST_BYTES = 1024  # unpacked at once: a hostile 1 kB becomes 32 MB
_PIECE_BYTES = 8192  # read at once, so that a failure costs at most the last few kB in front of it


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
    """Return the content of a file whose name or format may end with .gz or .zst. Reading raises OSError or one of
    DAMAGED.

    Raise MachineNotFit when a package is missing.
    """
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(packed, "rb"))
    return io.BufferedReader(ZstFile(packed)) if name.endswith(".zst") else packed


def read_blocks(path: str, form: str, problems: list[str]) -> Iterator[bytes]:
    """Return the bytes of a file of format `form`, decompressed, as UTF-8, its lines ending with line feeds. Where the
    file can't be read on, they end, and `problems` gets the reason.

    Raise MachineNotFit when a package is missing.
    """
    blocks = _unpacked(path, form, problems)
    if encoded := ENCODED_FORMAT.search(form):
        blocks = as_utf8(blocks, encoded.group(1))
    return (block.replace(b"\r", b"\n") for block in blocks) if CR_FORMAT in form else blocks


def _unpacked(path: str, form: str, problems: list[str]) -> Iterator[bytes]:
    is_packed = form.endswith(COMPRESSED)
    bytes_left = max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(path)) if is_packed else math.inf
    pieces: list[bytes] = []
    size = 0
    with open(path, "rb") as packed:
        file: Any = unpacked(packed, form)
        try:
            while piece := file.read1(_PIECE_BYTES):  # `read` would lose what it has when the next piece is damaged
                pieces.append(piece)
                size += len(piece)
                bytes_left -= len(piece)
                if bytes_left < 0:
                    problems.append(f"unpacks to more than {MAX_RATIO} times its size; unpack it yourself")
                    break
                if size >= _BLOCK_BYTES:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        except (OSError, *DAMAGED) as error:
            problems.append(f"damaged: {error}")
    yield b"".join(pieces)


def beginning(path: str, form: str, size: int) -> bytes:
    """Return the first bytes of a file as `read_blocks` gives them, at most `size`."""
    data = b""
    for block in read_blocks(path, form, []):
        data += block
        if len(data) >= size:
            break
    return data[:size]


class Text:
    """Text of a file, which is read once. Bytes that are not UTF-8 become lone surrogates, which the checks refuse."""

    def __init__(self, path: str, form: str):
        self._problems: list[str] = []
        blocks = read_blocks(path, form, self._problems)
        self._texts = codecs.iterdecode(blocks, "utf-8-sig", "surrogateescape")
        self.ended = False

    @property
    def problem(self) -> str | None:
        """Why the text ended before its end."""
        return self._problems[0] if self._problems else None

    def more(self) -> str:
        """Return the next text, empty at the end."""
        text = next(self._texts, "")
        self.ended = not text
        return text

    def lines(self) -> Iterator[str]:
        """Yield all lines with their line feeds, in place of `more`."""
        begun: list[str] = []
        for text in self._texts:
            *lines, rest = text.split("\n")
            for line in lines:
                yield "".join((*begun, line, "\n"))
                begun.clear()
            begun += [rest] if rest else []
        if begun:
            yield "".join(begun)


def text_lines(path: str, form: str, damage: list[PlacedRow] | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of a text, without its line break; bytes that are no UTF-8 become lone surrogates.

    `damage` gets a row with the reason if the text ends early.
    """
    text, number = Text(path, form), 0
    for number, line in enumerate(text.lines(), 1):
        yield number, line.rstrip("\r\n")
    if text.problem and damage is not None:
        damage.append((number, RowRefused("broken-file", text.problem)))


def share_before_damage(path: str, form: str) -> float | None:
    """Return how much of an archive lies before the place where it can't be read on; None when it just ends too early,
    and for other files.
    """
    size, position = os.path.getsize(path), 0
    with open(path, "rb") as file:
        if form.endswith(".zst"):
            content = ZstFile(file)
            try:
                while content.read(_BLOCK_BYTES):
                    position = file.tell()
            except zlib.error:
                return position / size
            except EOFError:
                return None
        if not form.endswith(".gz"):
            return None
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while block := file.read(4096):
            while block:
                try:
                    unpacker.decompress(block)
                except zlib.error:
                    return position / size
                position += len(block) - len(unpacker.unused_data)
                block = unpacker.unused_data
                if unpacker.eof:
                    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    return None


def package(module: str, extra: str) -> Any:
    """Return a module that only some files need. Raise MachineNotFit with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise MachineNotFit(f"this file needs the package {name}", hint=install_command(extra)) from None
