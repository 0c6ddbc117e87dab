"""How each file is read, by a sample of its rows: its format, which columns were read, and which were not."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from hivetune.base.disk import scratch_folder
from hivetune.data.checks.redact import redact_everything
from hivetune.data.columns import FACTS, NESTED, QUESTIONS, as_success, plain_name, plain_row
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.files.rows import read_rows
from hivetune.data.formats import format_named
from hivetune.data.mapping import (
    AND,
    OF_ANSWERS,
    OWN,
    ROWS,
    WHERE,
    is_turn_table,
    kept_beside,
    lacks_where,
    maps_content,
    named_in,
    where_of,
    write_columns,
)
from hivetune.data.pieces.format import Conversation
from hivetune.data.pieces.sessions import SESSION
from hivetune.data.pieces.values import Row, texts_in
from hivetune.data.raw import RawRow, Source
from hivetune.data.read import is_table, parse_row, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.suggest import Suggestion, suggest
from hivetune.records import Example, Message, Progress, silent

# By these a file is understood: enough that a column which is mostly empty has a value in some of them.
SAMPLE_ROWS, SAMPLE_BYTES = 400, 4 << 20
# A suggestion tries mappings one after the other, each on all of these.
SUGGESTED_FROM_ROWS = 30
SHOWN_PATHS = 6
PREVIEW_CHARS, LOOKED_AT_CHARS = 70, 2000  # of a text that are shown, and that are searched for secrets
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
UNKNOWN_SHARE = 0.5  # of the sampled rows; above it a mapping is suggested
# Of the rows: equal prompts with different answers above it refuse a table, since a column that is not read must tell
# them apart. Below it people answered twice.
DIFFERENT_SHARE = 0.1
EMPTY: tuple[Any, ...] = (None, "", [], {})
_MIN_WORDS, _MIN_WIDE_CHARS = 4, 8  # of a sentence; Chinese and Japanese write without spaces
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


@dataclass(frozen=True)
class Understood:
    """The inputs with what their first rows told (data/raw.py), and what the report says of each file: its `formats`
    with their columns, and the suggested mapping of one that is mostly unread. `first_row`: of all files.
    """

    inputs: Inputs
    formats: dict[str, list[dict[str, Any]]]
    unclear: dict[str, dict[str, Any]]
    first_row: Row


class _Sampled(NamedTuple):
    """A row that was read: its columns, its format, its turns, and the columns that were not read."""

    row: Row
    layout: str
    messages: tuple[Message, ...]
    unread: list[str]


def understand(
    inputs: Inputs, columns: Mapping[str, str] = NO_COLUMNS, ignore: Sequence[str] = (), progress: Progress = silent
) -> Understood:
    """Return how the files are read. `ignore`: columns that the user leaves out. `progress` counts files.

    Raise UsageError for a condition on a column that no row has.
    """
    sources: list[Source] = []
    formats: dict[str, list[dict[str, Any]]] = {}
    unclear: dict[str, dict[str, Any]] = {}
    seen: list[Row] = []
    for number, source in enumerate(inputs.sources, 1):
        if source.kind != "store":  # whose rows were understood when they were collected
            source = replace(source, inside=columns.get(ROWS, ""))
            raws = list(_sample(source))
            records = [record for raw in raws if (record := _record(raw)) is not None]
            seen += records
            if is_turn_table(columns):
                rows = [_Sampled(row, "turns", (), _not_read(row, "turns", columns)) for row in records]
                source = replace(source, turns=tuple(columns.items()))
            else:
                rows, unknown = _read(raws, columns)
                is_unknown = not maps_content(columns) and unknown > UNKNOWN_SHARE * len(records)
                if is_unknown and (line := suggest(records[:SUGGESTED_FROM_ROWS])) is not None:
                    unclear[source.name] = _suggestion(line)
                    source = replace(source, line=f"if this mapping is right, read the file with {line.option}")
                source = replace(source, telling=_why_refused(rows, columns, ignore))
            formats[source.name] = _formats(rows, ignore, source.inside)
        sources.append(source)
        progress(number, len(inputs.sources))
    if (error := lacks_where(seen, columns)) is not None:
        raise error
    return Understood(replace(inputs, sources=tuple(sources)), formats, unclear, seen[0] if seen else {})


def rows_of_files(paths: str | Sequence[str], columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RawRow]:
    """Yield every row of these files as `check` finds them. Raise as `plan_inputs` does."""
    with scratch_folder() as spill:
        yield from understand(plan_inputs(paths, spill), columns).inputs.rows()


def example_of(raw: RawRow) -> Example:
    """Return a row as an Example without its id. Raise RowRefused, also if it is nested too deeply."""
    try:
        return read_example(raw, NO_COLUMNS).example
    except RecursionError:
        raise RowRefused("bad-json", "the JSON is nested too deeply: flatten the row") from None


def suggested_for(
    paths: str | Sequence[str], encoding: str | None, progress: Progress = silent
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the mapping that is suggested for each of these files, and the files that are read without one."""
    with scratch_folder() as spill:
        found = understand(plan_inputs(paths, spill, encoding=encoding, progress=progress), progress=progress)
    read = [name for name, kinds in found.formats.items() if kinds and name not in found.unclear]
    return found.unclear, read if found.unclear else []


def _sample(source: Source) -> Iterator[RawRow]:
    """Yield the first rows of a file, fewer if they are large."""
    size_bytes = 0
    for number, raw in enumerate(read_rows(source), 1):
        if raw.problem is None:
            yield raw
            size_bytes += len(raw.payload)
        if number == SAMPLE_ROWS or size_bytes > SAMPLE_BYTES:
            return


def _record(raw: RawRow) -> Row | None:
    """Return a row as JSON; None for what the checks refuse."""
    with contextlib.suppress(RowRefused, RecursionError):
        return parse_row(raw.payload)
    return None


def _read(raws: Sequence[RawRow], columns: Mapping[str, str]) -> tuple[list[_Sampled], int]:
    """Return the rows that could be read, and the number of those whose columns are unknown."""
    rows, unknown = [], 0
    for raw in raws:
        try:
            found, row = read_example(replace(raw, file=None), columns), parse_row(raw.payload)
            rows.append(_Sampled(row, found.layout, found.example.messages, _not_read(row, found.layout, columns)))
        except RowRefused as refused:
            unknown += refused.reason == "unknown-layout"
        except RecursionError:
            pass  # the checks report it
    return rows, unknown


def _not_read(row: Row, layout: str, columns: Mapping[str, str]) -> list[str]:
    """Return the columns of a row that have a value, were not read and are no facts about it."""
    form = format_named(layout)
    # Rows that were made of a file's lines have the columns of no line.
    if SESSION in row or not (form or maps_content(columns)):
        return []
    if maps_content(columns):
        sides = (named for field, column in columns.items() for named in named_in(row, field, column))
        read = {part for side in sides for part in (side, re.split(r"[.\[]", side)[0].strip('"'))}
        read |= {name for name in row if plain_name(name) in kept_beside(tuple(columns))}
    elif form is not None:
        # Of columns that mean the same, the first with a value is read, and the others are not.
        plain = plain_row(row)
        firsts = (next((name for name in names if plain.get(name) not in EMPTY), "") for names in form.one_of)
        read = {*form.reads, *firsts}
    if WHERE in columns:
        read.add(where_of(columns[WHERE])[0])
    known = {*read, *columns.values(), *OF_ANSWERS, *OWN, *FACTS}
    return [
        name
        for name, value in row.items()
        if value not in EMPTY
        and known.isdisjoint((name, plain_name(name)))
        and not (plain_name(name) in NESTED and isinstance(value, dict))
    ]


def _why_refused(rows: Sequence[_Sampled], columns: Mapping[str, str], ignore: Sequence[str]) -> str:
    """Return why the tables of a file are refused, empty if they are not: with columns that are not read, equal prompts
    have different answers, or one of these columns holds sentences.
    """
    # A named format says which columns it reads; the names of a table's columns are all that is known of it.
    tables = [row for row in rows if is_table(Conversation(row.layout, ()), columns)]
    unread = [name for name in _unread(tables) if name not in ignore and plain_name(name) not in ignore]
    if not unread:
        return ""
    answers: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for table in tables:
        *before, answer = table.messages
        if before:
            answers.setdefault(tuple((m.role, m.content) for m in before), []).append(answer.content)
    differ = sum(len(given) for given in answers.values() if len(set(given)) > 1)
    if differ > DIFFERENT_SHARE * len(tables):
        changing = [name for name in unread if len({str(table.row.get(name)) for table in tables}) > 1] or unread
        return f"equal prompts have different answers, and {_advice(changing, tables[0].row, columns)}"
    sentences = [name for name in unread if _holds_sentences([table.row.get(name) for table in tables])]
    return _advice(sentences, tables[0].row, columns) if sentences else ""


def _unread(rows: Sequence[_Sampled]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.unread))


def _is_sentence(text: str) -> bool:
    """Return whether a text has at least four words, or as many signs of a script without spaces."""
    has_words = len(text.split(None, _MIN_WORDS)) >= _MIN_WORDS
    return has_words or (not text.isascii() and len(_WIDE.findall(text)) >= _MIN_WIDE_CHARS)


def _holds_sentences(values: Sequence[Any]) -> bool:
    """Return whether the values of a column are mostly different sentences."""
    texts = [text for value in values if (text := " ".join(texts_in(value)).strip())]
    many = len(texts) > 1 and 2 * len(set(texts)) >= len(texts)
    return many and 2 * sum(map(_is_sentence, texts)) > len(texts) and 2 * len(texts) > len(values)


def _advice(names: Sequence[str], row: Row, columns: Mapping[str, str]) -> str:
    """Return what to do about columns that are not read: the mapping that reads them, and how to leave them out."""
    asked = columns.get("prompt") or next((name for name in row if plain_name(name) in QUESTIONS), "")
    mapping = write_columns({**columns, "prompt": AND.join((asked, *names))}) if asked else ""
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    reads = f"read {them} with --columns {shlex.quote(mapping)}, or " if mapping else ""
    ignored = shlex.quote(",".join(names))
    return f"{', '.join(map(repr, names))} {are} not read: {reads}leave {them} out with --ignore {ignored}"


def _suggestion(line: Suggestion) -> dict[str, Any]:
    """Return a suggestion as the report holds it."""
    return {
        "line": line.option,
        "columns": line.columns,
        "rows": line.read,
        "shown": [{"question": _preview(question), "answer": _preview(answer)} for question, answer in line.shown],
        "left_out": list(line.left_out[:SHOWN_PATHS]),
    }


def _preview(text: str) -> str:
    """Return the beginning of a text on one line, without secrets and personal data."""
    # Cut off in front of the search, since a column may hold whole documents; what is shown is far shorter.
    clean: str = redact_everything(" ".join(text[:LOOKED_AT_CHARS].split()))
    return clean if len(clean) <= PREVIEW_CHARS else f"{clean[: PREVIEW_CHARS - 3]}..."


def _formats(rows: Sequence[_Sampled], ignore: Sequence[str], inside: str) -> list[dict[str, Any]]:
    """Return the formats of a file, the most frequent first: the columns that were read, and those that were not, each
    with its number of different values and an example.
    """
    by_layout: dict[str, list[_Sampled]] = {}
    for row in rows:
        by_layout.setdefault(row.layout, []).append(row)
    formats = []
    for layout, same in sorted(by_layout.items(), key=lambda item: -len(item[1])):
        not_read = {
            name: _column(name, [sampled.row[name] for sampled in same if name in sampled.unread], name in ignore)
            for name in _unread(same)
        }
        # That some rows have no value in it does not make an unread column a read one.
        read = dict.fromkeys(name for sampled in same for name in sampled.row if name not in not_read)
        facts = {"layout": layout, "rows": len(same), "rows_at": inside}
        formats.append({**facts, "read": list(read), "not_read": list(not_read.values())})
    return formats


def _column(name: str, values: Sequence[Any], ignored: bool) -> dict[str, Any]:
    """Return what the report says of a column that was not read."""
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    different = set(texts)
    # Two values, or 1 to 5, look like an outcome. Nothing is decided by it: labels of classes look the same.
    hint = ""
    if len(different) == 2 and all(as_success(value) is not None for value in different):
        hint = f"if it says whether the answer was good: --columns success={name}"
    elif len(different) > 2 and different <= {"1", "2", "3", "4", "5"}:
        hint = f"if it rates the answer: --columns 'where={name} in 4|5'"
    example = _preview(texts[0])
    return {"column": name, "distinct": len(different), "example": example, "ignored": ignored, "hint": hint}
