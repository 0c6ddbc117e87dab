"""File formats: which one a file has, how compressed bytes are read, and how rows of each become numbered lines.

A numbered line is `PLACE TAB r TAB JSON` for a row and `PLACE TAB p TAB TEXT` for a place where reading failed. PLACE
is the line in the original file where the row begins (in Parquet the number of the row), so that errors point there.
"""

import codecs
import gzip
import importlib
import itertools
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from hivetune.base.paths import install_command, path_hint, spelled
from hivetune.data.files.csv_table import csv_rows, has_header
from hivetune.data.files.encodings import (
    BYTE_ORDERS,
    ByteSource,
    Transcoded,
    WithLineFeeds,
    legacy_encoding,
    plain_name_of,
    wide_encoding,
)
from hivetune.data.files.json_document import json_rows
from hivetune.data.files.message_log import (
    MIN_MESSAGES,
    NUM_SAMPLE,
    TEXTS,
    is_event_like,
    message_rows,
    message_shape,
)
from hivetune.data.files.text_file import RENDERED, TEXT_FORMS, httprr_rows, is_rendered_file, text_form, text_rows
from hivetune.data.formats import file_rows, format_of_file, is_file_format
from hivetune.data.formats.http_recording import HTTPRR_HEAD
from hivetune.data.formats.inspect_ai import eval_rows, is_eval_file
from hivetune.data.pieces.format import Head
from hivetune.data.pieces.logs import PlacedRow, begins_with_json, write_rows
from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit, UsageError

BLOCK_CHARS = 1 << 20
HEAD_BYTES = 4096  # by which the kind of a file is told
# Logs of equal lines shrink to a 50th or a 150th; a file made to fill a disk (a "bomb") to a 1,000th. Small ones may.
MAX_RATIO = 300
ALWAYS_UNPACKED_BYTES = 64 << 20
ENCODED_FORMAT = re.compile(r"\.as=([a-z0-9_-]+)")
CR_FORMAT = ".cr"  # lines end with carriage returns alone
_SAMPLE_BYTES = 1 << 20  # in which the encoding of a text shows


class _Stream:
    """A file whose decompression may fail anywhere; the bytes before the failure are kept. `most_bytes`: maximum
    unpacked size.
    """

    def __init__(self, file: BinaryIO, errors: tuple[type[Exception], ...], most_bytes: int | None = None):
        self._file = file
        self._errors = errors
        self._bytes_left = most_bytes

    def read(self, size: int) -> tuple[bytes, str | None]:
        pieces: list[bytes] = []
        left = size
        while left > 0:
            try:
                # Small reads, so that a failure costs at most the last few kB in front of it.
                piece = self._file.read(min(left, 8192))
            except self._errors as error:
                return b"".join(pieces), f"damaged: {error}"
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
            if self._bytes_left is not None:
                self._bytes_left -= len(piece)
                if self._bytes_left < 0:
                    return b"".join(pieces), f"unpacks to more than {MAX_RATIO} times its size; unpack it yourself"
        return b"".join(pieces), None


# What files of other kinds begin with, what they are, and how their rows become readable.
_FOREIGN = (
    (
        b"SQLite format 3\0",
        "an SQLite database",
        "hivetune collect 'sqlite:{name}?table=TABLE', then train from: store",
    ),
    (b"%PDF-", "a PDF", "rows are made from documents by: hivetune data synth, of texts and not of PDFs"),
    (b"GGUF", "a model in GGUF", "give it as the model: --model {name}"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel or Word file", "save each sheet as CSV"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it"),
    (b"BZh9", "compressed by bzip2", "unpack it (bunzip2); .gz and .zst are read as they are"),
    (b"\xfd7zXZ\0", "compressed by xz", "unpack it (unxz); .gz and .zst are read as they are"),
    (b"\x89PNG\r\n", "a picture", "only text can be learned"),
    (b"\xff\xd8\xff", "a picture", "only text can be learned"),
)


# Office's files are ZIP archives; the name of a file in them tells which (ECMA-376, part 2).
_IN_ARCHIVES = (
    (b"word/", "a Word document", "save it as text; rows are made from documents by: hivetune data synth"),
    (b"xl/", "an Excel workbook", "save each sheet as CSV"),
    (b"ppt/", "a PowerPoint file", "save its text; rows are made from documents by: hivetune data synth"),
)


def refuse_foreign(head: bytes, name: str) -> None:
    """Raise UsageError where a file that begins so is of a kind that holds no rows."""
    for begins, title, instead in _FOREIGN:
        if head.startswith(begins):
            if begins == b"PK\x03\x04":
                foreign = next((kind for kind in _IN_ARCHIVES if kind[0] in head), (begins, title, instead))
                _, title, instead = foreign
            raise UsageError(f"{spelled(name)} is {title}, not a file of rows", hint=instead.format(name=name))


# Texts that people have and that hold no rows as they are: what they begin with, what they are, and what to do.
_MARKED_TIME = rb"\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4},? \d{1,2}:\d{2}.{0,12}?[\]-] ?[^:\n]{1,40}: "
_PROSE = (
    (
        re.compile(rb"commit [0-9a-f]{40}\b"),
        "a git log",
        "it answers nobody's question; issues do: gh issue list --json title,body,author,comments > issues.json",
    ),
    (
        re.compile(_MARKED_TIME),
        "a chat log with times",
        "export it as JSON, then say who answers: --columns assistant=NAME",
    ),
    (re.compile(rb"#{1,3} |---\s"), "a Markdown text", "rows are made from documents by: hivetune data synth"),
)


def refuse_prose(path: str, name: str, form: str) -> None:
    """Raise UsageError for a file that is read as JSON lines and whose beginning holds none, and no other format."""
    head = open_bytes(path, form).read(HEAD_BYTES)[0].removeprefix(codecs.BOM_UTF8)
    if head.lstrip().startswith(b"{") and b'"nbformat"' in open_bytes(path, form).read(_SAMPLE_BYTES)[0]:
        raise UsageError(
            f"{spelled(name)} is a notebook, not a file of rows",
            hint="rows are made from documents by: hivetune data synth",
        )
    if not head.strip() or any(line.lstrip()[:1] in (b"{", b"[", b'"') for line in head.splitlines()):
        return
    for begins, title, instead in _PROSE:
        if begins.match(head.lstrip()):
            raise UsageError(f"{spelled(name)} is {title}, not a file of rows", hint=instead)


def file_format(path: str, name: str, encoding: str | None = None) -> str:
    """Return one of jsonl, json, csv, tsv, parquet, eval, httprr or TEXT_FORMS; after it CR_FORMAT, .as=utf-16-le,
    .as=gb18030 or the like, and .gz or .zst. Content beats the suffix. `encoding`: that of all texts, as the user says.

    Raise UsageError when the file can't be read, or is of a kind that holds no rows.
    """
    lower = name.lower()
    if encoding is not None:
        encoding = plain_name_of(encoding)
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {spelled(name)}: {error.strerror}", hint=path_hint(error)) from None
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"PK\x03\x04") and is_eval_file(path):
        return "eval"
    refuse_foreign(head, name)
    compression = ""
    if head.startswith(b"\x1f\x8b"):
        compression = ".gz"
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        compression = ".zst"
    if compression:
        lower = lower.removesuffix(compression)
        head = open_bytes(path, compression).read(HEAD_BYTES)[0]
    if encoding in BYTE_ORDERS:
        encoding = wide_encoding(head) or BYTE_ORDERS[encoding]
    compression = _written_as(path, head, compression, encoding)
    head = open_bytes(path, compression).read(HEAD_BYTES)[0]
    if lower.endswith(".csv"):
        return "csv" + compression
    if lower.endswith((".tsv", ".txt")):
        form = text_form(_lines_of(head), table=lower.endswith(".tsv"))
        if form is not None:
            return form + compression
    elif is_rendered_file(_lines_of(head)):  # whatever its name
        return RENDERED + compression
    elif _lines_of(head).startswith(HTTPRR_HEAD):
        return "httprr" + compression
    return ("json" if _is_json_document(head, not lower.endswith((".jsonl", ".ndjson"))) else "jsonl") + compression


def _written_as(path: str, head: bytes, compression: str, encoding: str | None) -> str:
    """Return the suffix of unusual line breaks and encoding, then `compression`."""
    sample = open_bytes(path, compression).read(_SAMPLE_BYTES)[0]
    if encoding := encoding or wide_encoding(head) or legacy_encoding(sample):
        compression = f".as={encoding}{compression}"
        sample = open_bytes(path, compression).read(_SAMPLE_BYTES)[0]
    # Old programs of the Macintosh end lines with carriage returns alone.
    return CR_FORMAT + compression if b"\n" not in sample and b"\r" in sample.rstrip() else compression


def _lines_of(head: bytes) -> str:
    """Return the beginning of a text, without a last line that may be cut."""
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").replace("\r\n", "\n")
    return text if len(head) < HEAD_BYTES else text[: text.rfind("\n") + 1]


def _is_json_document(head: bytes, spread: bool) -> bool:
    """Return whether a text is an array of rows, or (`spread`: unless it is named JSONL) objects over several lines."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    first, line_break, rest = text.partition(b"\n")
    if text.startswith(b"["):
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return True
        return not rest.strip()  # else a list alone on the first line is a line of JSONL, no file
    indented = rest[:1] in (b" ", b"\t") and rest.lstrip(b" \t\r\n")[:1] in (b'"', b"{", b"[")  # whatever its name
    begun = first.rstrip() in (b"{", b"") or (first.startswith(b"{") and first.rstrip()[-1:] in b"{[,:")
    return (spread or indented) and bool(line_break) and begun


def open_bytes(path: str, form: str) -> ByteSource:
    """Return the bytes of a file of format `form`, decompressed, as UTF-8, its lines ending with line feeds.

    Raise MachineNotFit when a package is missing.
    """
    file: Any = open(path, "rb")  # noqa: SIM115
    errors: tuple[type[Exception], ...] = (OSError,)
    most_bytes = None
    if form.endswith((".gz", ".zst")):
        most_bytes = max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(path))
    if form.endswith(".gz"):
        file, errors = gzip.open(file, "rb"), (OSError, EOFError, zlib.error)  # noqa: SIM115
    elif form.endswith(".zst"):
        zstandard = _package("zstandard", "zst")
        file = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        errors = (zstandard.ZstdError, OSError, lzma.LZMAError)
    stream: ByteSource = _Stream(file, errors, most_bytes)
    if encoded := ENCODED_FORMAT.search(form):
        stream = Transcoded(stream, encoded.group(1))
    return WithLineFeeds(stream) if CR_FORMAT in form else stream


def share_before_damage(path: str) -> float | None:
    """Return how much of a gzip file lies before the place where it can't be read on; None when it just ends too early,
    and for other files.
    """
    size, position = os.path.getsize(path), 0
    with open(path, "rb") as file:
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


def text_lines(stream: ByteSource, damage: list[PlacedRow] | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of a text, without its line break; bytes that are no UTF-8 become lone surrogates.

    `damage` gets a row with the reason if the text ends early.
    """
    text, number = _Text(stream), 0
    for number, line in enumerate(text.lines(), 1):
        yield number, line.rstrip("\r\n")
    if text.problem and damage is not None:
        damage.append((number, RowRefused("broken-file", text.problem)))


def convert_lines(path: str, form: str, out: str) -> None:
    """Write the rows of a file that is not JSONL to `out` as numbered lines. Streams; never raises for damaged content,
    which becomes a "p" line.
    """
    kind = form.split(".")[0]
    if kind == "parquet":
        rows = _parquet_rows(path)
    elif kind == "eval":
        rows = eval_rows(path)
    elif kind == "httprr":
        rows = httprr_rows(_Text(open_bytes(path, form)))
    elif kind == "json":
        rows = json_rows(_Text(open_bytes(path, form)))
    elif kind in TEXT_FORMS:
        rows = text_rows(_Text(open_bytes(path, form)), kind)
    else:
        rows = csv_rows(_Text(open_bytes(path, form)), "\t" if kind == "tsv" else None)
    write_rows(rows, out)


def lacks_header(path: str, form: str) -> bool:
    """Return whether a file is a table whose first line is a row."""
    kind = form.split(".")[0]
    return kind in ("csv", "tsv") and not has_header(_Text(open_bytes(path, form)), "\t" if kind == "tsv" else None)


class _Text:
    """Text of a byte stream; bytes that are not UTF-8 become lone surrogates, which the checks refuse."""

    def __init__(self, stream: ByteSource):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.ended = False
        self.problem: str | None = None

    def more(self, size: int = BLOCK_CHARS) -> str:
        """Return the next text, empty at the end."""
        while not self.ended:
            block, self.problem = self._stream.read(size)
            self.ended = not block or self.problem is not None
            text = self._decoder.decode(block, final=self.ended)
            if text:
                return text
        return ""

    def lines(self) -> Iterator[str]:
        begun: list[str] = []
        while text := self.more():
            *lines, rest = text.split("\n")
            for line in lines:
                yield "".join((*begun, line, "\n"))
                begun.clear()
            begun += [rest] if rest else []
        if begun:
            yield "".join(begun)


def _parquet_rows(path: str) -> Iterator[PlacedRow]:
    parquet = _package("pyarrow.parquet", "parquet")
    arrow = importlib.import_module("pyarrow")
    number, num_rows = 1, 1
    try:
        with parquet.ParquetFile(path) as file:
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=500):
                for row in batch.to_pylist():
                    yield number, json.dumps(_plain(row), default=str, ensure_ascii=False)
                    number += 1
    except (arrow.ArrowException, OSError, ValueError) as error:
        for lost in range(number, max(number, num_rows) + 1):
            yield lost, RowRefused("broken-file", " ".join(f"no Parquet from here on: {error}".split()))


def parquet_rows_and_bytes(path: str) -> tuple[int, int] | None:
    """Return rows of a Parquet file and the bytes of its columns, unpacked, as its end says; None for any other file.

    Raise MachineNotFit without the package.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PAR1":
            return None
    parquet = _package("pyarrow.parquet", "parquet")
    arrow = importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as content:
            groups = [content.metadata.row_group(n) for n in range(content.num_row_groups)]
            return content.metadata.num_rows, sum(group.total_byte_size for group in groups)
    except (arrow.ArrowException, OSError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """Return a value without NaN and null, which Parquet writes for columns that a row lacks, and with bytes as
    text.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise MachineNotFit(f"this file needs the package {name}", hint=install_command(extra)) from None


# Which log a file is, and its conversations as numbered lines, as for every format that is no JSONL.

_MESSAGES = "message-log"  # its name may say that it is a conversation
_HEAD_BYTES = 256 << 10  # a first line may hold an agent's whole instructions
_HEAD_LINE = 4096  # bytes of a line about a log
_NUM_LINES = 20
_SERVER_HEAD_BYTES = 8 << 20  # servers print pages before the first request
_OF_EVENTS = tuple(f'"{name}"'.encode() for name in (*TEXTS, "type", "event", "kind", "role", "user", "assistant"))
_TABLES = (".csv", ".tsv", ".parquet")


def session_format(path: str, name: str, form: str) -> str:
    """Return `form`, or the format of a log (`is_session`), with .gz or .zst if packed."""
    kind = form.partition(".")[0]
    if kind not in ("jsonl", "json") or name.lower().endswith(_TABLES):
        return form
    head = open_bytes(path, form).read(_HEAD_BYTES)[0]
    session = _agent(head, name) if kind == "jsonl" else None
    if session is None and not begins_with_json(head):
        head = open_bytes(path, form).read(_SERVER_HEAD_BYTES)[0]
        printed = format_of_file(Head(name, head, ()))
        session = printed.name if printed is not None else None
    return session + form.removeprefix(kind) if session else form


def _agent(head: bytes, name: str) -> str | None:
    """Return the coding agent that wrote this, or a chat application with one message a line."""
    events: list[dict[str, Any]] = []
    for line in head.split(b"\n")[:_NUM_LINES]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    if (layout := format_of_file(Head(name, head, events))) is not None:
        return layout.name
    return _MESSAGES if _is_message_log(head, name) else None


def _is_message_log(head: bytes, name: str) -> bool:
    """Return whether the first lines are messages that name their session, or all lines are one conversation."""
    *lines, last = head.split(b"\n")
    whole = len(head) < _HEAD_BYTES and len(lines) < NUM_SAMPLE
    events: list[dict[str, Any] | None] = []
    for line in [*lines, last][:NUM_SAMPLE] if whole else lines[:NUM_SAMPLE]:
        if not line.strip():
            continue
        if (
            len(events) < MIN_MESSAGES
            and not any(name in line for name in _OF_EVENTS)
            and (events or len(line) > _HEAD_LINE)
        ):
            return False  # a quick no, before anything is parsed; the first line may be about the log
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        events.append(event if isinstance(event, dict) else None)
        if len(events) == MIN_MESSAGES and not all(
            event is None or is_event_like(event) or "source" in event for event in events[1:]
        ):
            return False
    return message_shape(events, name, whole=whole) is not None


def convert_session(path: str, name: str, form: str, out: str) -> None:
    """Write the conversations of a log called `name` to `out` as numbered lines. A place is its first line."""
    kind = form.partition(".")[0]
    damage: list[PlacedRow] = []
    lines = text_lines(open_bytes(path, form), damage)
    rows = message_rows(lines, name) if kind == _MESSAGES else file_rows(kind, lines)
    write_rows(itertools.chain(rows, damage), out)


def is_session(form: str) -> bool:
    kind = form.partition(".")[0]
    return kind == _MESSAGES or is_file_format(kind)
