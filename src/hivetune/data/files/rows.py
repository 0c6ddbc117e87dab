"""The rows of a file, one after the other. A damaged file is refused with the place of the damage; a bad line becomes a
row with a problem.

The place of a row is the line where it begins; in Parquet and Arrow it is the number of the row.
"""

import codecs
import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.base.database import open_to_read
from hivetune.base.paths import quoted, spelled
from hivetune.data.files.kinds import object_in
from hivetune.data.files.unpack import package, read_blocks
from hivetune.data.formats import format_of_file, joins_rows, rows_inside, rows_of_file, slack
from hivetune.data.mapping import rows_at, turn_table
from hivetune.data.pieces.format import Head, Log, PlacedRow
from hivetune.data.raw import MAX_ROW_BYTES, RawRow, Source
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused

# The rows by which a table of messages is told: all have to be of one format.
_NUM_SAMPLE = 20
# Of a line that is larger than any row so much is held, to tell what it was.
KEPT_BYTES = 4096
# The one that the header has most of, outside of quotes: Excel writes a semicolon where the comma is the decimal sign.
DELIMITERS = (",", ";", "\t")
_QUOTED = re.compile(r'"[^"]*"')
_TOLD_DELIMITER = re.compile(r'"?sep=(.)"?\s*', re.I)  # the first line of a table that is written for Excel
# A document is held as one text, since the line of each row is told.
MAX_DOCUMENT_CHARS = 1 << 30
STORE = "store"  # its kind and its name
# The part of a place up to its last colon, in SQL.
_ORIGIN = "rtrim(source, replace(source, ':', ''))"
STORE_COLUMNS = ("session", "user", "agent", "category", "time", "success", "feedback")
# The keys of a document below which its rows are, as APIs and the Hub's viewer name them.
_LIST = re.compile(r'"(?:data|rows|examples|records)"\s*:\s*\[(?=\s*\{)')
# The list begins within this many characters: counts and versions may come before it.
_HEAD_CHARS = 1024
_SPACE = re.compile(r"\s*")
_scan = json.JSONDecoder().raw_decode


def read_rows(source: Source) -> Iterator[RawRow]:
    """Yield the rows of a file or of the store in order; blank lines are not rows. Raise DataRefused for damage."""
    if source.kind == STORE:
        yield from _store_rows(source)
        return
    for raw in _records(source):
        yield from _inner_rows(raw, source.inside)


def _records(source: Source) -> Iterator[RawRow]:
    if source.kind == "jsonl" and not source.turns:
        yield from _json_lines(source)
        return
    if source.parts:
        rows = slack.rows(_lines_of_days(source.parts), slack.user_names(source.users))
    elif joins_rows(source.kind) and not source.turns:
        rows = rows_of_file(source.kind, source.path, _text_lines(source))
    else:
        mapped = turn_table(dict(source.turns)) if source.turns else None
        rows = _joined_rows(_single(source), mapped)
    for number, record in rows:
        if isinstance(record, RowRefused):
            yield RawRow(source.place(number), b"", record)
            continue
        text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
        payload = text.encode("utf-8", "surrogatepass")
        yield RawRow(source.place(number), payload, too_large(len(payload)), file=source)


def _lines_of_days(days: Sequence[Source]) -> Iterator[tuple[int, str]]:
    """Yield the messages of a channel's days as (line, text), with the lines counted through all files."""
    before = 0
    for day in days:
        for number, text in _document_rows(day):
            yield before + number, str(text)
        before += day.lines


def _single(source: Source) -> Iterator[PlacedRow]:
    """Yield the records of a file separately."""
    if source.kind in ("parquet", "arrow"):
        return _arrow_rows(source)
    if source.kind == "csv":
        return _csv_rows(source)
    if source.kind == "json":
        return _document_rows(source)
    return ((number, line) for number, line in _text_lines(source) if line.strip())


def _joined_rows(rows: Iterator[PlacedRow], log: Log | None) -> Iterator[PlacedRow]:
    """Yield one row for each conversation of a file if a format, or `log`, joins its rows; else the rows."""
    # The beginning tells a log; what comes behind it and is no line of it is a row of its own.
    first = list(itertools.islice(rows, _NUM_SAMPLE))
    everything = itertools.chain(first, rows)
    begun = [event for _, record in first if (event := object_in(record)) is not None]
    if log is None and begun and 2 * len(begun) >= len(first):  # a line may be broken
        log = format_of_file(Head(b"", begun))
    if log is None:
        yield from everything
        return
    problems: list[PlacedRow] = []
    yield from log.rows(_lines_of_log(everything, problems))
    yield from problems


def _lines_of_log(rows: Iterable[PlacedRow], problems: list[PlacedRow]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log as (place, text); records that could not be read are appended to `problems`."""
    for number, record in rows:
        if isinstance(record, str):
            yield number, record
        else:
            problems.append((number, record))


def too_large(size_bytes: int) -> RowRefused | None:
    """Return the refusal of a row with this number of bytes; None if it is not too large."""
    if size_bytes <= MAX_ROW_BYTES:
        return None
    return RowRefused(
        "too-long", f"the row has {size_bytes / (1 << 20):.1f} MiB, the limit is {MAX_ROW_BYTES >> 20} MiB: split it"
    )


def _inner_rows(raw: RawRow, path: str) -> Iterator[RawRow]:
    """Yield the row itself, or the rows inside it, at `path` if the user gave one; all get its place."""
    inside = None
    if path and raw.problem is None:
        with suppress(ValueError, RecursionError):  # it is no JSON
            inside = [json.dumps(row).encode() for row in rows_at(json.loads(raw.payload), path)]
        if inside == []:
            raw = RawRow(
                raw.source,
                raw.payload,
                RowRefused("unknown-layout", f"the record has no rows at {path!r}: correct rows= in the mapping"),
            )
            inside = None
    elif raw.problem is None or raw.problem.reason == "too-long":
        # A record that is larger than any row may hold many rows, none of which is too large.
        inside = rows_inside(raw.payload)
    if inside is None:
        yield raw
    else:
        for payload in inside:
            yield RawRow(raw.source, payload, too_large(len(payload)), file=raw.file)


class _Line(NamedTuple):
    """A line of bytes, cut if it has more than MAX_ROW_BYTES. `ended`: a line break follows."""

    number: int
    data: bytes
    size: int
    ended: bool


def byte_lines(blocks: Iterable[bytes]) -> Iterator[_Line]:
    """Yield the lines of a file."""
    # Of one that is larger than any row only the beginning is held: a file without line breaks may exceed the memory.
    begun: list[bytes] = []
    size, number = 0, 1
    for block in blocks:
        for i, piece in enumerate(block.split(b"\n")):
            if i:
                yield _Line(number, b"".join(begun), size, True)
                begun, size, number = [], 0, number + 1
            size += len(piece)
            begun.append(piece)
            if size > MAX_ROW_BYTES:
                begun = [b"".join(begun)[:KEPT_BYTES]]
    if size:
        yield _Line(number, b"".join(begun), size, False)


def _json_lines(source: Source) -> Iterator[RawRow]:
    for number, data, size, _ in byte_lines(read_blocks(source)):
        place = f"{source.name}:{number}"
        line = data.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else data.strip()
        if size > MAX_ROW_BYTES:
            yield RawRow(place, b"", too_large(size))
        elif line:
            yield RawRow(place, line, file=source)


def _text_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (number, line without its break). Bytes that are not UTF-8 become lone surrogates, which checks refuse."""
    for number, data, size, _ in byte_lines(read_blocks(source)):
        if size > MAX_ROW_BYTES:
            raise DataRefused(
                f"{spelled(source.name)}:{number} has {size:,} characters", hint="a line may have 16 MiB: split it"
            )
        data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        yield number, data.removesuffix(b"\r").decode("utf-8", "surrogateescape")


def _csv_rows(source: Source) -> Iterator[PlacedRow]:
    """Yield the rows of a table whose first line has the names of the columns. Raise DataRefused at a wrong quote."""
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = (f"{line}\n" for _, line in _text_lines(source))
    delimiter, before, first = "", 0, ""
    for before, first in enumerate(lines):  # noqa: B007 (both are of the line with the names)
        if told := _TOLD_DELIMITER.fullmatch(first):
            delimiter = told[1]
        elif first.strip():
            break
    named = _QUOTED.sub("", first)
    delimiter = delimiter or max(DELIMITERS, key=named.count)
    # Not strict, the library would take all rows after an open quote for one field.
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    names, header = list[str](), list[str]()
    number = before + 1
    try:
        for fields in reader:
            if not header:
                names, header = fields, _names(fields, source.name)
            # No blank line, no separators alone, and no header of another file that was joined to this one.
            elif any(fields) and fields != names:
                if len(fields) == len(header):
                    yield number, json.dumps(dict(zip(header, fields, strict=True)), ensure_ascii=False)
                else:
                    hint = f"it has {len(fields)} fields, the header {len(header)}: quote each {delimiter!r} in a field"
                    yield number, RowRefused("csv-columns", hint)
            number = before + reader.line_num + 1
    except csv.Error as error:
        has_other_breaks = "new-line" in str(error)
        raise DataRefused(
            f"{spelled(source.name)}:{number} is not valid CSV: {error}; the rest of the file cannot be read",
            hint="its lines end with carriage returns alone: convert them (tr '\\r' '\\n')"
            if has_other_breaks
            else 'inside a quoted field write two quotes ("") for one, and close each field',
        ) from None


def _names(header: list[str], name: str) -> list[str]:
    # One without a name is called by its place: pandas writes its index so.
    names = [column.strip() or f"column_{place}" for place, column in enumerate(header, 1)]
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise DataRefused(
            f"{spelled(name)}:1: two columns are called {twice!r}",
            hint="rename one: the first line must have each name once",
        )
    return names


def _arrow_rows(source: Source) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet or Arrow file. Raise DataRefused if it is damaged."""
    number = 0
    try:
        for batch in _arrow_batches(source):
            for row in batch.to_pylist():
                number += 1
                # Escaped, bytes that are no text refuse their row only where they are read: a picture in a column.
                yield number, json.dumps(_plain(row), default=str)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        raise DataRefused(
            f"{spelled(source.name)} is damaged after row {number:,}: {' '.join(str(error).split())}",
            hint="get the file again",
        ) from None


def _arrow_batches(source: Source) -> Iterator[Any]:
    if source.kind == "parquet":
        with package("pyarrow.parquet", "parquet").ParquetFile(source.path) as file:
            yield from file.iter_batches(batch_size=500)
        return
    ipc = package("pyarrow.ipc", "parquet")
    with open(source.path, "rb") as file:
        if file.read(6) == b"ARROW1":
            content = ipc.open_file(source.path)
            yield from (content.get_batch(i) for i in range(content.num_record_batches))
        else:
            file.seek(0)
            yield from ipc.open_stream(file)


def _plain(value: Any) -> Any:
    """Return a value without NaN and null, with bytes decoded to text."""
    # Arrow has all columns in all rows, and all keys in all structs: those that a row lacks are null.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _document_rows(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, JSON of a row) of a document: an array of rows, possibly below a key ({"data": [..]}), or objects
    one after the other. Raise DataRefused if it is broken or too large for one text in memory.
    """
    # One row after the other, since the objects of a whole document take many times its text.
    text = _whole_text(source)
    begin = _begin_of_list(text)
    at, line, counted = _behind_space(text, begin), 1, 0

    def refused(problem: str) -> DataRefused:
        return DataRefused(
            f"{spelled(source.name)}:{line} is not valid JSON: {problem}; the rest of the file cannot be read",
            hint="correct the file, or write one JSON object a line: a broken line is then refused alone",
        )

    while not (text.startswith("]", at) if begin else at == len(text)):
        line, counted = line + text.count("\n", counted, at), at
        try:
            _, end = _scan(text, at)
        except (ValueError, RecursionError) as error:  # also of an integer with more digits than Python reads
            raise refused(str(error)) from None
        yield line, text[at:end]
        at = _behind_space(text, end)
        if begin and text[at : at + 1] not in (",", "]"):
            raise refused("a comma or ] must follow a row")
        if begin and text[at] == ",":
            at = _behind_space(text, at + 1)
    rest = text[at + 1 :].strip()
    if begin and not (rest == "" if text.lstrip().startswith("[") else _has_no_rows(f'{{"": 0{rest}')):
        raise refused("what follows the list of rows was not read")


def _whole_text(source: Source) -> str:
    pieces: list[str] = []
    size = 0
    for piece in codecs.iterdecode(read_blocks(source), "utf-8-sig", "surrogateescape"):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_DOCUMENT_CHARS:
            raise DataRefused(
                f"{spelled(source.name)} is one JSON document of more than {MAX_DOCUMENT_CHARS >> 20} MiB",
                hint=f"write one JSON object a line: jq -c '.[]' {quoted(source.name)} > rows.jsonl",
            )
    return "".join(pieces)


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _begin_of_list(text: str) -> int:
    """Return the offset just after the opening bracket of a document's list of rows; 0 if the document is a sequence of
    objects.
    """
    start = _behind_space(text, 0)
    if text.startswith("[", start):
        return start + 1
    found = _LIST.search(text, start, start + _HEAD_CHARS)
    return found.end() if found and _has_no_rows(f'{text[start : found.start()]}"": 0}}') else 0


def _has_no_rows(document: str) -> bool:
    """Return whether an object has only texts, numbers, and objects of these, such as the page numbers and counts that
    an API puts around a list of rows.
    """
    try:
        values = json.loads(document).values()
    except (ValueError, RecursionError):
        return False
    inner = [item for value in values if isinstance(value, dict) for item in value.values()]
    return not any(isinstance(value, list) for value in values) and not any(isinstance(v, dict | list) for v in inner)


def _store_rows(source: Source) -> Iterator[RawRow]:
    origins = {part.name: part for part in source.parts}
    columns = ("id", "source", "row", *STORE_COLUMNS)
    query = f"SELECT {', '.join(columns)} FROM interactions WHERE rowid <= ?"
    if source.name == STORE:
        found = _in_store(source, f"{query} ORDER BY rowid", source.last)
    else:
        # By the index: all places of an origin are between these, beside those of names that go on behind the colon.
        places = f"{source.name}:", f"{source.name};", f"{source.name}:"
        found = _in_store(source, f"{query} AND source > ? AND source < ? AND {_ORIGIN} = ?", source.last, *places)
    for values in found:
        row = dict(zip(columns, values, strict=True))
        stored = {name: row[name] for name in STORE_COLUMNS if row[name] is not None}
        place, payload = str(row["source"]), str(row["row"]).encode("utf-8", "surrogatepass")
        yield RawRow(place, payload, None, row["id"], stored, origins.get(place.rpartition(":")[0]))


def origins_of(store: Source) -> Iterator[Source]:
    """Yield the files, tables and streams that the store's rows came from, each as a source of its own."""
    for (origin,) in _in_store(store, f"SELECT DISTINCT {_ORIGIN} FROM interactions ORDER BY 1"):
        yield replace(store, name=origin.removesuffix(":"))


def _in_store(store: Source, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
    with closing(open_to_read(store.path)) as database:
        # Invalid UTF-8, as from a flipped bit, refuses only its row, and not the whole query.
        database.text_factory = lambda content: content.decode("utf-8", "backslashreplace")
        yield from database.execute(query, values)
