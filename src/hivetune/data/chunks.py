"""A chunk of the inputs, and its rows as they came, each with its place."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import SEALED_COLUMNS, is_read_only, open_to_read, row_seal
from hivetune.data.formats import may_hold_rows, rows_inside
from hivetune.data.mapping import rows_at
from hivetune.data.reasons import RowRefused

ChunkKind = Literal["lines", "numbered", "oversize", "store"]
MAX_LINE_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
STORE_COLUMNS = ("session", "user", "agent", "category", "time", "success", "feedback")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a file or of the store.

    `path` has the bytes, `name` is the user's name for it. `start` and `end` are bytes, or row ids of the store.
    `first` is the line number at `start`, `last` says whether the file ends here, `rows` counts lines. `inside` is the
    path of the rows in a record (`rows` of data.columns), empty if a record is a row.

    The other fields describe the whole file: `line` suggests a mapping for unread rows, `telling` is an unread column
    that distinguishes equal questions.
    """

    kind: ChunkKind
    path: str
    name: str
    start: int
    end: int
    first: int
    last: bool
    rows: int
    inside: str = ""
    line: str = ""
    telling: str = ""


Parcel = Sequence[Chunk]  # chunks that are examined together, with one result


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it came. `problem`: reading itself failed here. `stored`: what the store knows beside the row;
    `chunk`: where it stood, with what the first rows of its file told.
    """

    source: str
    payload: bytes
    problem: RowRefused | None = None
    interaction_id: str | None = None
    stored: Mapping[str, Any] | None = None
    chunk: Chunk | None = None


def read_rows(chunk: Chunk) -> Iterator[RawRow]:
    """Yield the rows of one chunk in order; blank lines are not rows. Raise OSError when the file is gone."""
    if chunk.kind == "store":
        yield from _store_rows(chunk)
    elif chunk.kind == "oversize":
        size = f"{(chunk.end - chunk.start) / (1 << 20):.1f} MiB, the limit is {MAX_LINE_BYTES >> 20}: split the row"
        yield RawRow(f"{chunk.name}:{chunk.first}", b"", RowRefused("line-too-large", size))
    else:
        for raw in _line_rows(chunk):
            yield from _inner_rows(raw, chunk.inside)


def _inner_rows(raw: RawRow, path: str) -> Iterator[RawRow]:
    """Yield the row itself, or the rows that it holds, at `path` where the user named one; all have its place in the
    file.
    """
    inside = None
    if raw.problem is None and path:
        with suppress(ValueError, RecursionError):  # it is no JSON
            inside = [json.dumps(row).encode() for row in rows_at(json.loads(raw.payload), path)]
        if inside == []:
            yield replace(raw, problem=RowRefused("unknown-layout", f"no rows at {path!r}, as rows= says"))
    elif raw.problem is None and may_hold_rows(raw.payload):
        inside = rows_inside(raw.payload)
    if inside is None:
        yield raw
    else:
        for payload in inside:
            yield replace(raw, payload=payload)


def _line_rows(chunk: Chunk) -> Iterator[RawRow]:
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        data = file.read(chunk.end - chunk.start)
    position, number, size = 0, chunk.first, len(data)
    while position < size:
        line_end = data.find(b"\n", position)
        end = size if line_end < 0 else line_end
        line = data[position:end].strip()
        if number == 1 and chunk.kind == "lines":
            line = line.removeprefix(BOM).strip()
        if chunk.kind == "numbered":
            place, mark, text = line.split(b"\t", 2)
            source = f"{chunk.name}:{place.decode()}"
            if mark == b"r":
                yield RawRow(source, text, chunk=chunk)
            else:
                reason, _, hint = text.decode("utf-8", "replace").partition(":")
                yield RawRow(source, b"", RowRefused(reason, hint))
        elif line:
            problem = _truncated(line) if chunk.last and line_end < 0 else None
            yield RawRow(f"{chunk.name}:{number}", line, problem, chunk=chunk)
        position, number = end + 1, number + 1


def _truncated(line: bytes) -> RowRefused | None:
    """Return the refusal of an incomplete last line, which has no line break. `parse_row` reports other problems."""
    try:
        json.loads(line)
    except UnicodeDecodeError as error:
        return RowRefused("truncated-line") if error.reason == "unexpected end of data" else None
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(error.doc) or (error.pos >= len(error.doc) - 6 and error.doc[-1:] not in "}]")
        return RowRefused("truncated-line") if at_end or error.msg.startswith("Unterminated") else None
    except (ValueError, RecursionError):  # as of an integer with more digits than Python reads
        return None
    return None


def _store_rows(chunk: Chunk) -> Iterator[RawRow]:
    with closing(open_to_read(chunk.path, finished=is_read_only(Path(chunk.path)))) as database:
        # Invalid UTF-8, as from a flipped bit, refuses only its row.
        database.text_factory = lambda content: content.decode("utf-8", "backslashreplace")
        query = f"SELECT {', '.join(SEALED_COLUMNS)}, seal FROM interactions WHERE rowid >= ? AND rowid < ?"
        for *values, seal in database.execute(query + " ORDER BY rowid", (chunk.start, chunk.end)):
            row = dict(zip(SEALED_COLUMNS, values, strict=True))
            source = str(row["source"])
            if seal is not None and seal != row_seal(*values):  # None: stored by 0.1.0 while this version was in use
                yield RawRow(source, b"", RowRefused("damaged-row"))
                continue
            stored = {name: row[name] for name in STORE_COLUMNS if row[name] is not None}
            yield RawRow(source, str(row["row"]).encode("utf-8", "surrogatepass"), None, row["id"], stored)
