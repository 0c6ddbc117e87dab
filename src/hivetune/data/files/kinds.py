"""File formats: which one a file has, and how rows of each become numbered lines.

A numbered line is `PLACE TAB r TAB JSON` for a row and `PLACE TAB p TAB TEXT` for a place where reading failed. PLACE
is the line in the original file where the row begins (in Parquet the number of the row), so that errors point there.
"""

import codecs
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hivetune.base.paths import path_hint, spelled
from hivetune.data.files.csv_table import csv_rows, has_header
from hivetune.data.files.encodings import BYTE_ORDERS, legacy_encoding, plain_name_of, wide_encoding
from hivetune.data.files.json_document import json_rows
from hivetune.data.files.message_log import NUM_SAMPLE, message_rows, message_shape
from hivetune.data.files.text import CR_FORMAT, Text, beginning, package, text_lines
from hivetune.data.formats import file_rows, format_of_file, is_file_format
from hivetune.data.pieces.format import Head
from hivetune.data.pieces.logs import PlacedRow, begins_with_json, write_rows
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

HEAD_BYTES = 4096  # by which the kind of a file is told
_SAMPLE_BYTES = 1 << 20  # in which the encoding of a text shows
_LOG_BYTES = 256 << 10  # by which a log is told: a first line may hold an agent's whole instructions
_SERVER_BYTES = 8 << 20  # servers print pages before the first request
_TABLES = (".csv", ".tsv", ".parquet")
MESSAGES = "message-log"


# What files of other kinds begin with, what they are, and how their rows become readable.
_FOREIGN = (
    (
        b"SQLite format 3\0",
        "an SQLite database",
        "hivetune collect 'sqlite:{name}?table=TABLE', then train from: store",
    ),
    (b"%PDF-", "a PDF", "rows are made from documents by: hivetune synth, of texts and not of PDFs"),
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
    (b"word/", "a Word document", "save it as text; rows are made from documents by: hivetune synth"),
    (b"xl/", "an Excel workbook", "save each sheet as CSV"),
    (b"ppt/", "a PowerPoint file", "save its text; rows are made from documents by: hivetune synth"),
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
    (re.compile(rb"#{1,3} |---\s"), "a Markdown text", "rows are made from documents by: hivetune synth"),
)


def _refuse_prose(path: str, name: str, form: str, kind: str) -> None:
    """Raise UsageError for a file that is read as JSON and whose beginning holds none, and no other format."""
    head = beginning(path, form, HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    sample = beginning(path, form, _SAMPLE_BYTES).lstrip()
    # The key may stand anywhere in an object over many lines; of rows, which may name it too, only in the first.
    whole = sample if kind == "json" else sample.partition(b"\n")[0]
    if head.lstrip().startswith(b"{") and b'"nbformat"' in whole:
        raise UsageError(
            f"{spelled(name)} is a notebook, not a file of rows",
            hint="rows are made from documents by: hivetune synth",
        )
    if not head.strip() or any(line.lstrip()[:1] in (b"{", b"[", b'"') for line in head.splitlines()):
        return
    for begins, title, instead in _PROSE:
        if begins.match(head.lstrip()):
            raise UsageError(f"{spelled(name)} is {title}, not a file of rows", hint=instead)


def file_format(path: str, name: str, encoding: str | None = None) -> str:
    """Return one of jsonl, json, csv, tsv, parquet, MESSAGES or a format of whole files;
    after it CR_FORMAT, .as=utf-16-le, .as=gb18030 or the like, and .gz or .zst. Content beats the suffix. `encoding`:
    that of all texts, as the user says.

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
    refuse_foreign(head, name)
    packed = ".gz" if head.startswith(b"\x1f\x8b") else ".zst" if head.startswith(b"\x28\xb5\x2f\xfd") else ""
    lower = lower.removesuffix(packed)
    written = _written_as(path, packed, encoding)
    kind = _kind(beginning(path, written, HEAD_BYTES), lower)
    if kind in ("jsonl", "json") and not name.lower().endswith(_TABLES):
        kind = _log(path, name, kind, written) or kind
    if kind in ("jsonl", "json"):
        _refuse_prose(path, name, written, kind)
    return kind + written


def _written_as(path: str, packed: str, encoding: str | None) -> str:
    """Return the suffix of unusual line breaks and encoding, then `packed`."""
    sample = beginning(path, packed, _SAMPLE_BYTES)
    wide = wide_encoding(sample[:HEAD_BYTES])
    if encoding in BYTE_ORDERS:
        encoding = wide or BYTE_ORDERS[encoding]
    if encoding := encoding or wide or legacy_encoding(sample):
        packed = f".as={encoding}{packed}"
        sample = beginning(path, packed, _SAMPLE_BYTES)
    # Old programs of the Macintosh end lines with carriage returns alone.
    return CR_FORMAT + packed if b"\n" not in sample and b"\r" in sample.rstrip() else packed


def _kind(head: bytes, name: str) -> str:
    """Return the kind of a text that begins so, with a name in lower case."""
    if name.endswith(".csv"):
        return "csv"
    if name.endswith(".tsv"):
        return "tsv"
    return "json" if _is_json_document(head, not name.endswith((".jsonl", ".ndjson"))) else "jsonl"


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


def _log(path: str, name: str, kind: str, written: str) -> str | None:
    """Return which log a file is: of a program, or of a chat application with one message a line; None for others."""
    head = beginning(path, written, _LOG_BYTES)
    if kind == "jsonl":
        lines = head.split(b"\n")
        sample = lines if len(head) < _LOG_BYTES else lines[:-1]
        sample = [line for line in sample if line.strip()][:NUM_SAMPLE]
        events = [_object(line) for line in sample]
        begun = [event for event in events if event is not None]
        if (form := format_of_file(Head(name, head, begun))) is not None:
            return form.name
        if message_shape(events) is not None:
            return MESSAGES
    if begins_with_json(head):
        return None
    printed = format_of_file(Head(name, beginning(path, written, _SERVER_BYTES), ()))
    return None if printed is None else printed.name


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


_READERS: dict[str, Callable[[Text], Iterator[PlacedRow]]] = {
    "json": json_rows,
    "csv": partial(csv_rows, delimiter=None),
    "tsv": partial(csv_rows, delimiter="\t"),
}


def convert(path: str, name: str, form: str, out: str) -> bool:
    """Write the rows of a file called `name` that is not JSONL to `out` as numbered lines, and return whether they were
    messages, which are joined. Streams; never raises for damaged content, which becomes a "p" line.
    """
    kind = form.partition(".")[0]
    damage: list[PlacedRow] = []
    lines = text_lines(path, form, damage)
    if is_file_format(kind):
        rows, joined = file_rows(kind, lines), False
    elif kind == MESSAGES:
        rows, joined = message_rows(((number, line) for number, line in lines if line.strip()), name)
    elif kind == "parquet":
        rows, joined = message_rows(_parquet_rows(path), name)
    else:
        rows, joined = message_rows(_READERS[kind](Text(path, form)), name)
    write_rows(itertools.chain(rows, damage), out)
    return joined


def lacks_header(path: str, form: str) -> bool:
    """Return whether a file is a table whose first line is a row."""
    kind = form.partition(".")[0]
    return kind in ("csv", "tsv") and not has_header(Text(path, form), "\t" if kind == "tsv" else None)


def _parquet_rows(path: str) -> Iterator[PlacedRow]:
    parquet = package("pyarrow.parquet", "parquet")
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
    parquet = package("pyarrow.parquet", "parquet")
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
