"""The kind of a file, by its content and then its suffix, and the encoding of its text.

Text is UTF-8, UTF-16 or UTF-32 with a byte order mark, or in the encoding named by `data.encoding`; nothing is guessed.
"""

import codecs
import json
from dataclasses import replace
from typing import Any

import chardet

from hivetune.base.paths import path_hint, spelled
from hivetune.data.files.unpack import beginning
from hivetune.data.formats import format_of_file, store_of, tables_of
from hivetune.data.pieces.format import Head
from hivetune.data.raw import Source
from hivetune.errors import DataRefused, UsageError

# The first bytes, by which the kind of a file is told.
HEAD_BYTES = 4096
# The part of a text that is searched for another encoding: its first letter beyond ASCII may come late.
_SAMPLE_BYTES = 1 << 20
# The part by which a format of logs is told: a first line may hold an agent's whole instructions.
_LOG_BYTES = 256 << 10
# The lines of that part which are parsed.
_NUM_LINES = 20
# Fewer lines that are not UTF-8 are broken rows, and no other encoding.
_MIN_BROKEN_LINES = 3
# Each ASCII letter in UTF-16 has a zero byte, and even Chinese JSON has quotes, braces and names.
_MIN_ZERO_SHARE = 0.15
# The longest first, since UTF-32's mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_SQLITE = b"SQLite format 3\0"
# What files of other kinds begin with, what they are, and how their rows become readable.
_FOREIGN = (
    (
        _SQLITE,
        "an SQLite database",
        "hivetune collect 'sqlite:{name}?table=TABLE', then train from: store; its tables: {tables}",
    ),
    (b"%PDF-", "a PDF", "rows are made from documents by: hivetune synth, of texts and not of PDFs"),
    (b"GGUF", "a model in GGUF", "rows are JSONL, CSV, Parquet or SQLite"),
    (b"PK\x03\x04", "a ZIP archive or an Office file", "unpack the archive; save each sheet as CSV"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel or Word file", "save each sheet as CSV"),
    (b"BZh9", "compressed by bzip2", "unpack it (bunzip2); .gz and .zst are read as they are"),
    (b"\xfd7zXZ\0", "compressed by xz", "unpack it (unxz); .gz and .zst are read as they are"),
)


def source_of(path: str, name: str, encoding: str | None = None) -> Source:
    """Return the file at `path` as a source, without its size and lines. `encoding`: the user's setting for all texts.

    The kinds are jsonl, json, csv, parquet, arrow, or the name of a format of whole files. Raise UsageError if the file
    can't be read or contains no rows, DataRefused for text in another encoding.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {spelled(name)}: {error.strerror}", hint=path_hint(error)) from None
    if head.startswith(b"PAR1"):
        return Source(path, name, "parquet")
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):  # a file, a stream
        return Source(path, name, "arrow")
    if head.startswith(_SQLITE) and (store := store_of(path)) is not None:
        return Source(path, name, store)
    refuse_foreign(head, path, name)
    packed = "gz" if head.startswith(b"\x1f\x8b") else "zst" if head.startswith(b"\x28\xb5\x2f\xfd") else ""
    source = Source(path, name, "", packed, size=_SAMPLE_BYTES)
    source = replace(source, encoding=_encoding(source, encoding))
    return replace(source, kind=_kind(source), size=0)


def refuse_foreign(head: bytes, path: str, name: str) -> None:
    """Raise UsageError if the first bytes of a file show a type that contains no rows, such as a PDF or an image."""
    for begins, title, instead in _FOREIGN:
        if head.startswith(begins):
            tables = ", ".join(sorted(tables_of(path))) if begins == _SQLITE else ""
            hint = instead.format(name=name, tables=tables or "none")
            raise UsageError(f"{spelled(name)} is {title}, not a file of rows", hint=hint)


def _encoding(source: Source, named: str | None) -> str | None:
    """Return the encoding of a text, None for UTF-8. Raise DataRefused if it is not UTF-8, has no byte order mark and
    no encoding was named.
    """
    sample = beginning(source, _SAMPLE_BYTES)
    if named is not None:
        plain = _plain_name(named)
        return None if plain == "utf-8" else plain
    marked = next((name for mark, name in _MARKS if sample.startswith(mark)), None)
    seems = None if marked else likely_encoding(sample)
    if seems:
        raise DataRefused(
            f"{spelled(source.name)} is not UTF-8; it seems to be {seems}",
            hint=f"if it is, name it: data.encoding: {seems} (--set data.encoding={seems})",
        )
    return marked


def _plain_name(encoding: str) -> str:
    """Return the canonical name of an encoding: iso8859-1 for Latin-1 or ISO-8859-1. Raise UsageError."""
    try:
        name = codecs.lookup(encoding).name
        bytes(range(256)).decode(name, "replace")  # codecs such as base64, rot13 and idna read no texts
    except (LookupError, UnicodeError):
        message = f"data.encoding: there is no encoding {encoding!r}"
        raise UsageError(message, hint="for example cp1252, koi8-r") from None
    return name.replace("_", "-")


def likely_encoding(sample: bytes) -> str | None:
    """Return the encoding that a text seems to have, for an error message; None if most of it is UTF-8."""
    if sample.count(0) > _MIN_ZERO_SHARE * len(sample):
        return "utf-16-le" if sample[1::2].count(0) > sample[::2].count(0) else "utf-16-be"
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    broken = [line for line in lines if not _is_utf8(line)]
    if len(broken) < _MIN_BROKEN_LINES or 2 * len(broken) <= len(lines):
        return None
    encoding = chardet.detect(b"\n".join(broken))["encoding"]
    return None if encoding is None else codecs.lookup(encoding).name.replace("_", "-")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # cut at the end of the sample
    return True


def _kind(source: Source) -> str:
    """Return the kind of a text file. Raise UsageError for one that contains no rows."""
    lower = source.name.lower().removesuffix(f".{source.packed}")
    if lower.endswith((".csv", ".tsv")):
        return "csv"
    data = beginning(source, _LOG_BYTES).removeprefix(codecs.BOM_UTF8)
    head = data[:HEAD_BYTES]
    kind = "json" if _is_json_document(head, not lower.endswith((".jsonl", ".ndjson"))) else "jsonl"
    lines = data.split(b"\n")[: _NUM_LINES + 1]
    events = [event for line in lines if (event := object_in(line)) is not None] if kind == "jsonl" else []
    if (log := format_of_file(Head(data, events))) is not None:
        return log.name
    if head.strip() and not any(line.lstrip()[:1] in (b"{", b"[", b'"') for line in head.splitlines()):
        if lower.endswith((".jsonl", ".ndjson", ".json")):
            return "jsonl"  # each line is refused with its reason
        raise UsageError(
            f"{spelled(source.name)} is neither JSON nor a table with the suffix .csv or .tsv",
            hint="write one JSON object a line; rows are made from documents by: hivetune synth",
        )
    return kind


def _is_json_document(head: bytes, spread: bool) -> bool:
    """Return whether a text is an array of rows, or a sequence of objects that span several lines (`spread`: recognize
    those by less).
    """
    # By its first lines: a name says little, since arrays are called .jsonl, and JSON Lines .json.
    text = head.lstrip()
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


def object_in(record: object) -> dict[str, Any] | None:
    """Return the JSON object in a text or its bytes; None if there is none."""
    try:
        event = json.loads(record) if isinstance(record, str | bytes) else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
