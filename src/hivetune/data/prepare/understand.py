"""How each file is read, by a sample of its rows: its format, which columns were read, and which were not."""

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from hivetune.base.disk import scratch_folder
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value
from hivetune.data.columns import QUESTIONS, is_sentence, plain_row
from hivetune.data.conversation import read_conversation
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.files.rows import read_rows
from hivetune.data.formats import format_named
from hivetune.data.mapping import (
    AND,
    OF_ANSWERS,
    OWN,
    ROWS,
    WHERE,
    kept_beside,
    lacks_where,
    map_columns,
    maps_content,
    named_in,
    rows_at,
    where_of,
    write_columns,
)
from hivetune.data.pieces.fields import FACTS, NESTED, as_success, plain_name
from hivetune.data.pieces.said import Conversation, Row, texts_in
from hivetune.data.raw import RawRow, Source
from hivetune.data.read import QUARANTINE_KEY, is_table, parse_row, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.suggest import Suggestion, suggest
from hivetune.records import Example, Progress, silent

STORE = "store"
FIRST_ROWS = 30
FIRST_BYTES = 4 << 20
MAX_PATHS = 6  # that are shown of each kind
PREVIEW_CHARS, LOOKED_AT_CHARS = 70, 2000  # of a text that are shown, and that are searched for secrets
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
UNKNOWN_SHARE = 0.5  # of the first rows; above it a mapping is suggested
DIFFERENT_SHARE = 0.1  # of the rows: equal prompts with different answers above it refuse a table
SAMPLE_ROWS = 400  # by which a file is understood
EMPTY: tuple[Any, ...] = (None, "", [], {})
_QUOTED = re.compile(r"[^\w.,=+\[\]-]")  # what a shell may read otherwise


def rows_of_files(paths: str | Sequence[str], columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RawRow]:
    """Yield every row of these files as `check` finds them. Raise as `plan_inputs` does."""
    with scratch_folder() as spill:
        yield from examine_files(plan_inputs(paths, spill), columns).rows()


def example_of(raw: RawRow) -> Example:
    """Return a row as an Example without its id. Raise RowRefused, also if it is nested too deeply."""
    try:
        return read_example(raw, NO_COLUMNS).example
    except RecursionError:
        raise RowRefused("too-deep") from None


def examine_files(
    inputs: Inputs, columns: Mapping[str, str], ignore: Sequence[str] = (), progress: Progress = silent
) -> Inputs:
    """Return the inputs with what the first rows of each file tell. `ignore`: columns that the user leaves out.

    `progress` counts files. Raise UsageError for a condition on a column that no row has.
    """
    sources: list[Source] = []
    seen: list[Row] = []
    for number, source in enumerate(inputs.sources, 1):
        if source.kind != STORE:
            records = _records(source, SAMPLE_ROWS)
            source = replace(source, **_findings(records, columns, ignore))
            seen += [record for record in records if isinstance(record, dict)] if WHERE in columns else []
        sources.append(source)
        progress(number, len(inputs.sources))
    if ROWS not in columns and (error := lacks_where(seen, columns)) is not None:
        raise error
    return replace(inputs, sources=tuple(sources))


def understood(
    inputs: Inputs, columns: Mapping[str, str], ignore: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Return for each file its formats with their number of sampled rows, the columns that were read, and those that
    were not.
    """
    return {
        source.name: _reading(_sample(source, SAMPLE_ROWS), columns, ignore, source.inside) for source in _files(inputs)
    }


def unclear(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the suggested mappings of each file that is mostly unread, the likeliest first, with examples."""
    if maps_content(columns):
        return {}
    suggested = {source.name: suggest(_records(source, FIRST_ROWS)) for source in _files(inputs) if source.line}
    return {name: list(map(suggestion_document, lines)) for name, lines in suggested.items() if lines}


def suggested_for(
    paths: str | Sequence[str], encoding: str | None, progress: Progress = silent
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return the mappings that `unclear` suggests for these files, and the files that are read without one.

    `progress` counts files, twice.
    """
    with scratch_folder() as spill:
        inputs = plan_inputs(paths, spill, encoding=encoding, progress=progress)
        inputs = examine_files(inputs, NO_COLUMNS, progress=progress)
        suggested = unclear(inputs, NO_COLUMNS)
        layouts = understood(inputs, NO_COLUMNS) if suggested else {}
        return suggested, [name for name, kinds in layouts.items() if kinds and name not in suggested]


def first_row(inputs: Inputs) -> Row:
    """Return the first row of the files that is an object, empty where their samples hold none."""
    samples = (_records(source, FIRST_ROWS) for source in _files(inputs))
    return next((row for row in itertools.chain.from_iterable(samples) if isinstance(row, dict)), {})


def _findings(records: Sequence[Any], columns: Mapping[str, str], ignore: Sequence[str]) -> dict[str, Any]:
    """Return what the first rows of a file tell: where its rows stand, a suggested mapping, and why its tables are
    refused.
    """
    rows = [record for record in records if isinstance(record, dict)]
    if ROWS in columns:
        rows = [row for record in rows for row in rows_at(record, columns[ROWS]) if isinstance(row, dict)]
    tables: list[_Table] = []
    unknown = 0
    for row in rows:
        try:
            conversation = read_conversation(map_columns(row, columns))
        except RowRefused as refused:
            unknown += refused.reason in ("unknown-layout", "who-answers")
        except RecursionError:
            continue  # the checks report it
        else:
            if is_table(conversation, columns):
                tables.append(_Table(row, conversation, not_read(row, conversation, columns, ignore)))
    mapped = maps_content(columns)
    lines = suggest(records[:FIRST_ROWS]) if not mapped and unknown > UNKNOWN_SHARE * len(rows) else []
    return {
        "inside": columns.get(ROWS, ""),
        "line": f"if it is right, read it with {lines[0].option}" if lines else "",
        "telling": _why_refused(tables, columns),
    }


class _Table(NamedTuple):
    """A row of a table: its columns, what was read of them, and those that were not."""

    row: Row
    conversation: Conversation
    unread: list[str]


def not_read(row: Row, conversation: Conversation, columns: Mapping[str, str], ignore: Sequence[str] = ()) -> list[str]:
    """Return the columns of a row that have a value, were not read and are no facts about it."""
    form = format_named(conversation.layout)
    if form is None and not maps_content(columns):
        return []  # the row was made of a file's lines
    read: set[str] = set()
    if form is not None and not maps_content(columns):
        plain = plain_row(row)
        firsts = (next((name for name in names if plain.get(name) not in EMPTY), "") for names in form.one_of)
        read = {*form.reads, *firsts}
    if maps_content(columns):
        sides = (named for field, column in columns.items() for named in named_in(row, field, column))
        read = {part for side in sides for part in (side, re.split(r"[.\[]", side)[0].strip('"'))}
        read |= {name for name in row if plain_name(name) in kept_beside(columns)}
    if WHERE in columns:
        read.add(where_of(columns[WHERE])[0])
    known = {*read, *ignore, *columns.values(), *OF_ANSWERS, *OWN}
    return [
        name
        for name, value in row.items()
        if value not in EMPTY
        and name not in known
        and plain_name(name) not in known
        and plain_name(name) not in FACTS
        and not (plain_name(name) in NESTED and isinstance(value, dict))
    ]


def _why_refused(tables: Sequence[_Table], columns: Mapping[str, str]) -> str:
    """Return why the tables of a file are refused, empty if they are not: with columns that are not read, equal prompts
    have different answers, or one of these columns holds sentences.
    """
    unread = list(dict.fromkeys(name for table in tables for name in table.unread))
    if not unread:
        return ""
    answers: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for _, conversation, _ in tables:
        *before, answer = conversation.messages
        if before:
            answers.setdefault(tuple((m.role, m.content) for m in before), []).append(answer.content)
    differ = sum(len(given) for given in answers.values() if len(set(given)) > 1)
    if differ > DIFFERENT_SHARE * len(tables):
        changing = [name for name in unread if len({str(table.row.get(name)) for table in tables}) > 1] or unread
        return f"equal prompts have different answers, and {_advice(changing, tables, columns)}"
    sentences = [name for name in unread if _holds_sentences([table.row.get(name) for table in tables])]
    return _advice(sentences, tables, columns) if sentences else ""


def _holds_sentences(values: Sequence[Any]) -> bool:
    """Return whether the values of a column are mostly different sentences."""
    texts = [text for value in values if (text := " ".join(texts_in(value)).strip())]
    many = len(texts) > 1 and 2 * len(set(texts)) >= len(texts)
    return many and 2 * sum(map(is_sentence, texts)) > len(texts) and 2 * len(texts) > len(values)


def _advice(names: Sequence[str], tables: Sequence[_Table], columns: Mapping[str, str]) -> str:
    """Return what to do about columns that are not read: the mapping that reads them, and how to leave them out."""
    row = tables[0].row
    asked = columns.get("prompt") or next((name for name in row if plain_name(name) in QUESTIONS), "")
    fact = f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} not read"
    mapping = write_columns({**columns, "prompt": AND.join((asked, *names))}) if asked else ""
    mapping = shlex.quote(mapping) if _QUOTED.search(mapping) else mapping
    ignored = ",".join(names)
    ignored = shlex.quote(ignored) if _QUOTED.search(ignored) else ignored
    reads = f"read {'it' if len(names) == 1 else 'them'} with --columns {mapping}, or " if mapping else ""
    return f"{fact}: {reads}leave {'it' if len(names) == 1 else 'them'} out with --ignore {ignored}"


def suggestion_document(line: Suggestion) -> dict[str, Any]:
    """Return a suggestion as the report holds it."""
    shown = [{"question": _preview(question), "answer": _preview(answer)} for question, answer in line.shown]
    return {
        "line": line.option,
        "columns": line.columns,
        "rows": line.read,
        "shown": shown,
        "left_out": list(line.left_out[:MAX_PATHS]),
    }


def _preview(text: str) -> str:
    """Return the beginning of a text on one line, without secrets and personal data."""
    clean: Any = redact_value(redact_value(" ".join(text[:LOOKED_AT_CHARS].split()), SECRETS), PERSONAL)
    return clean if len(clean) <= PREVIEW_CHARS else f"{clean[: PREVIEW_CHARS - 3]}..."


def _reading(sample: Iterator[RawRow], columns: Mapping[str, str], ignore: Sequence[str], inside: str) -> list[Any]:
    """Return how the rows of a file are read, format by format: the columns that were, and those that were not, each
    with its number of different values and an example.
    """
    counts: Counter[str] = Counter()
    read_of: dict[str, dict[str, None]] = {}
    values_of: dict[str, dict[str, list[str]]] = {}
    for raw in sample:
        try:
            layout = read_example(replace(raw, file=None), columns).layout
            row = parse_row(raw.payload)
            unread = not_read(row, Conversation(layout, ()), columns)
        except (RowRefused, RecursionError):
            continue  # the checks report it
        counts[layout] += 1
        read_of.setdefault(layout, {}).update(dict.fromkeys(name for name in row if name not in unread))
        values = values_of.setdefault(layout, {})
        for name in unread:
            value = row[name]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            values.setdefault(name, []).append(text)
    return [
        {
            "layout": layout,
            "rows": count,
            "rows_at": inside,
            "read": list(read_of[layout]),
            "not_read": [
                {
                    "column": name,
                    "distinct": len(set(values)),
                    "example": _preview(values[0]),
                    "ignored": name in ignore,
                    "hint": _outcome_hint(name, set(values)),
                }
                for name, values in values_of[layout].items()
            ],
        }
        for layout, count in counts.most_common()
    ]


def _outcome_hint(name: str, values: set[str]) -> str:
    """Return how a column is used that may say how good an answer was: two values, or 1 to 5; empty for others."""
    if len(values) == 2 and all(as_success(value) is not None for value in values):
        return f"if it says whether the answer was good: --columns success={name}"
    if len(values) > 2 and values <= {"1", "2", "3", "4", "5"}:
        return f"if it rates the answer: --columns 'where={name} in 4|5'"
    return ""


def _files(inputs: Inputs) -> list[Source]:
    return [source for source in inputs.sources if source.kind != STORE]


def _records(source: Source, limit: int) -> list[Any]:
    """Return the first records of a file, those of a quarantine file out of their wrappers; None for no JSON."""
    records = []
    for raw in _sample(source, limit):
        try:
            record = json.loads(raw.payload)
            records.append(parse_row(raw.payload) if isinstance(record, dict) and QUARANTINE_KEY in record else record)
        except (ValueError, RecursionError, RowRefused):
            records.append(None)
    return records


def _sample(source: Source, limit: int) -> Iterator[RawRow]:
    """Yield the first rows of a file, fewer if they are large."""
    size_bytes = 0
    for raw in itertools.islice(read_rows(source), limit):
        if raw.problem is None:
            yield raw
            size_bytes += len(raw.payload)
            if size_bytes > FIRST_BYTES:
                break
