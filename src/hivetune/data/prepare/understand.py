"""The way each file is read, found from a sample of its rows: its format, the columns that were read and those that
were not, and a possible mapping for a file of no named format.
"""

import contextlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from hivetune.base.disk import scratch_folder
from hivetune.data.checks.redact import redact_everything
from hivetune.data.columns import (
    ANSWERS,
    CATEGORY,
    FACTS,
    QUESTIONS,
    SYSTEM,
    TIME,
    as_position,
    as_success,
    plain_name,
)
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.files.rows import STORE, origins_of, read_rows
from hivetune.data.formats import read_conversation
from hivetune.data.mapping import (
    AND,
    ROWS,
    is_turn_table,
    lacks_where,
    map_columns,
    maps_content,
    rows_at,
    turn_table,
    value_of,
    write_columns,
    write_names,
)
from hivetune.data.pieces.format import Conversation
from hivetune.data.pieces.sessions import ASSISTANT
from hivetune.data.pieces.turns import ROLE_KEYS, ROLES
from hivetune.data.pieces.values import Row, all_texts, objects, parsed, texts_in
from hivetune.data.raw import GATEWAY, RawRow, Source
from hivetune.data.read import EMPTY, is_table, parse_row, read_example, unread_columns
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, Message, Progress, silent

# By these a file is understood: enough that a column which is mostly empty has a value in some of them.
SAMPLE_ROWS, SAMPLE_BYTES = 400, 4 << 20
PREVIEW_CHARS, LOOKED_AT_CHARS = 70, 2000  # of a text that are shown, and that are searched for secrets
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
UNKNOWN_SHARE = 0.5  # of the sampled rows; above it a mapping is suggested
# Of the rows: equal prompts with different answers above it refuse a table, since a column that is not read must tell
# them apart. Below it people answered twice.
DIFFERENT_SHARE = 0.1
_MIN_WORDS, _MIN_WIDE_CHARS = 4, 8  # of a sentence; Chinese and Japanese write without spaces
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# Of a suggestion.
SUGGESTED_FROM_ROWS = 30  # each mapping that is tried reads all of these
SHOWN_ROWS, SHOWN_PATHS = 3, 6
READ_SHARE = 0.8  # of the rows, that a mapping has to read, and in which a column must occur
ASKED_SHARE = 0.25  # of the rows, that have to ask something else
REPEATED_SHARE = 0.7  # of the turns: a column that names conversations has fewer values
MIN_KEYED = 3  # objects in an object: fewer are parts of one row
SPEAKERS = {*ROLE_KEYS, "author", "who", "name"}  # the names of a column that says who speaks
_MAX_DEPTH = 3  # of objects in objects
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NO_TEXTS = FACTS - {*CATEGORY} | {*SYSTEM}  # a category may be the answer


@dataclass(frozen=True)
class Understood:
    """The inputs, each with the findings from its first rows (data/raw.py), and the report's entry for each file:
    `formats` with their columns, and a suggested mapping if most of the file can't be read. `first_row`: the first
    row of all files."""

    inputs: Inputs
    formats: dict[str, list[dict[str, Any]]]
    unclear: dict[str, dict[str, Any]]
    first_row: Row


class _Sampled(NamedTuple):
    """A row that was read: its columns, its format, its turns, and its unread columns."""

    row: Row
    layout: str
    messages: tuple[Message, ...]
    unread: list[str]


def understand(
    inputs: Inputs, columns: Mapping[str, str] = NO_COLUMNS, ignore: Sequence[str] = (), progress: Progress = silent
) -> Understood:
    """Return the inputs with the way to read each file. `ignore`: columns to leave out. `progress` counts files.

    Raise UsageError for a condition on a column that no row has.
    """
    sources: list[Source] = []
    formats: dict[str, list[dict[str, Any]]] = {}
    unclear: dict[str, dict[str, Any]] = {}
    first_row: Row = {}
    lacking: list[bool] = []  # of each file with rows: whether none of the first ones has the column of the condition

    def looked_at(source: Source) -> Source:
        nonlocal first_row
        # As in `read_example`: a mapping is not of the gateway's rows.
        mapping = NO_COLUMNS if source.kind == STORE and source.name == GATEWAY else columns
        source = replace(source, inside=mapping.get(ROWS, ""))
        records, rows, unknown = _sample(source, mapping)
        if records:
            first_row = first_row or records[0]
            lacking.append(lacks_where(records, columns) is not None)
        if is_turn_table(mapping):
            source = replace(source, turns=tuple(mapping.items()))
        else:
            is_unknown = not maps_content(mapping) and unknown > UNKNOWN_SHARE * len(records)
            if is_unknown and (suggested := _suggested(records[:SUGGESTED_FROM_ROWS])) is not None:
                told = f"if this mapping is right, read the rows with {suggested['line']}"
                if source.kind == STORE and not suggested["columns"].keys().isdisjoint((ROWS, "session")):
                    told = f"the store joins no turns: write them to a file, and name it in data.path; {told}"
                else:
                    unclear[source.name] = suggested
                source = replace(source, suggestion=told)
            known = frozenset(name for row in records for name, value in row.items() if value not in EMPTY)
            source = replace(source, refusal=_why_refused(rows, mapping, ignore), columns=known)
        formats[source.name] = _formats(rows, ignore, source.inside)
        return source

    for number, source in enumerate(inputs.sources, 1):
        if source.kind == STORE:  # the rows of each origin have columns of their own
            sources.append(replace(source, parts=tuple(map(looked_at, origins_of(source)))))
        else:
            sources.append(looked_at(source))
        progress(number, len(inputs.sources))
    if lacking and all(lacking):
        # It may come late, in a log that got new fields.
        records = (
            record for source in inputs.sources for record in _records(replace(source, inside=columns.get(ROWS, "")))
        )
        if (error := lacks_where(records, columns)) is not None:
            raise error
    return Understood(replace(inputs, sources=tuple(sources)), formats, unclear, first_row)


def rows_of_files(paths: str | Sequence[str], columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RawRow]:
    """Yield every row of these files in the way `check` reads them. Raise as `plan_inputs`."""
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
    """Return file -> suggested mapping, and, if there are any, the list of files that are read without a mapping."""
    with scratch_folder() as spill:
        found = understand(plan_inputs(paths, spill, encoding=encoding, progress=progress), progress=progress)
    read = [name for name, kinds in found.formats.items() if kinds and name not in found.unclear]
    return found.unclear, read if found.unclear else []


def _sample(source: Source, columns: Mapping[str, str]) -> tuple[list[Row], list[_Sampled], int]:
    """Return the first records of a file, fewer if they are large, those that could be read as rows, and the number of
    those whose columns are unknown.
    """
    records: list[Row] = []
    rows: list[_Sampled] = []
    unknown = size_bytes = 0
    for number, raw in enumerate(read_rows(source), 1):
        try:
            if raw.problem is None:
                records.append(row := parse_row(raw.payload))
                size_bytes += len(raw.payload)
                read = None if is_turn_table(columns) else read_example(raw._replace(file=None), columns)
                layout, messages = ("turns", ()) if read is None else (read.layout, read.example.messages)
                rows.append(_Sampled(row, layout, messages, unread_columns(row, layout, columns)))
        except RowRefused as refused:
            unknown += refused.reason == "unknown-layout"
        except RecursionError:
            pass  # the checks report it
        if number == SAMPLE_ROWS or size_bytes > SAMPLE_BYTES:
            break
    return records, rows, unknown


def _records(source: Source) -> Iterator[Row]:
    """Yield all records of a file that are JSON objects."""
    for raw in read_rows(source):
        with contextlib.suppress(RowRefused, RecursionError):
            if raw.problem is None:
                yield parse_row(raw.payload)


# Columns that are not read.


def _why_refused(rows: Sequence[_Sampled], columns: Mapping[str, str], ignore: Sequence[str]) -> str:
    """Return the reason why the tables of a file are refused, "" if they are not. A table with unread columns is
    refused if equal prompts have different answers, or if one of these columns contains sentences.
    """
    # A named format says which columns it reads; the names of a table's columns are all that is known of it. A fact
    # whose values make no sense, such as a date in words, is still a fact.
    tables = [row for row in rows if is_table(Conversation(row.layout, ()), columns)]
    unread = [name for name in _unread(tables) if {*ignore, *FACTS}.isdisjoint((name, plain_name(name)))]
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


def _holds_sentences(values: Sequence[Any]) -> bool:
    """Return whether the values of a column are mostly different sentences: texts of at least four words, or as many
    signs of a script without spaces.
    """
    texts = [text for value in values if (text := " ".join(texts_in(value)).strip())]
    sentences = sum(
        len(text.split(None, _MIN_WORDS)) >= _MIN_WORDS or len(_WIDE.findall(text)) >= _MIN_WIDE_CHARS for text in texts
    )
    different = len(texts) > 1 and 2 * len(set(texts)) >= len(texts)
    return different and 2 * sentences > len(texts) and 2 * len(texts) > len(values)


def _advice(names: Sequence[str], row: Row, columns: Mapping[str, str]) -> str:
    """Return the advice about unread columns as text: the mapping that reads them, and the option that ignores them."""
    asked = columns.get("prompt") or next((name for name in row if plain_name(name) in QUESTIONS), "")
    whole = next((name for name in row if plain_name(name) == "text"), "")
    mapping = write_columns({**columns, "prompt": AND.join((asked, *names))}) if asked else ""
    if not asked and whole and len(names) == 1:  # a text with its answer, and not one that is learned whole
        mapping = write_columns({**columns, "prompt": whole, "completion": names[0]})
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    reads = f"read {them} with --columns {shlex.quote(mapping)}, or " if mapping else ""
    ignored = shlex.quote(write_names(names))
    return f"{', '.join(map(repr, names))} {are} not read: {reads}leave {them} out with --ignore {ignored}"


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
        filled = (name for sampled in same for name, value in sampled.row.items() if value not in EMPTY)
        read = dict.fromkeys(name for name in filled if name not in not_read)
        facts = {"layout": layout, "rows": len(same), "rows_at": inside}
        formats.append({**facts, "read": list(read), "not_read": list(not_read.values())})
    return formats


def _column(name: str, values: Sequence[Any], ignored: bool) -> dict[str, Any]:
    different = {text: None for text in map(as_text, values)}.keys()
    # Two values, or 1 to 5, look like an outcome. Nothing is decided by it: labels of classes look the same.
    hint = ""
    if len(different) == 2 and all(as_success(value) is not None for value in different):
        hint = f"if it says whether the answer was good: --columns {shlex.quote(f'success={name}')}"
    elif len(different) > 2 and different <= {"1", "2", "3", "4", "5"}:
        hint = f"if it rates the answer: --columns {shlex.quote(f'where={name} in 4|5')}"
    return column_entry(name, len(different), next(iter(different)), ignored, hint)


def column_entry(name: str, distinct: int, example: str, ignored: bool, hint: str) -> dict[str, Any]:
    """Return the report's entry for a column that is not read. `distinct`: the number of its values."""
    return {"column": name, "distinct": distinct, "example": _preview(example), "ignored": ignored, "hint": hint}


def as_text(value: Any) -> str:
    """Return the beginning of a value as text, an object or a list as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:LOOKED_AT_CHARS]


def _preview(text: str) -> str:
    """Return the beginning of a text on one line, without secrets and personal data."""
    # Cut off in front of the search, since a column may hold whole documents; what is shown is far shorter.
    clean: str = redact_everything(" ".join(text[:LOOKED_AT_CHARS].split()))
    return clean if len(clean) <= PREVIEW_CHARS else f"{clean[: PREVIEW_CHARS - 3]}..."


# What a file of no named format may mean: a suggestion is shown, and a person confirms it.


def _suggested(rows: Sequence[Row], inside: str = "") -> dict[str, Any] | None:
    """Return the first mapping that reads most of these rows, in the report's form; None if there is none. `inside`:
    their path in the records of the file.
    """
    if len(rows) == 1 and len(rows[0]) >= MIN_KEYED and objects(list(rows[0].values())):
        return _suggested_inside(rows, "*", inside)  # one object with the rows by their names
    texts = _texts(rows)
    usual = {path: values for path, values in texts.items() if len(values) >= READ_SHARE * len(rows)}
    for columns in _candidates(rows, usual):
        shown: list[tuple[str, str]] = []
        records = _mapped(rows, columns)
        for record in records:
            with contextlib.suppress(RowRefused, RecursionError):
                messages = read_conversation(record).messages
                asked = "\n".join(message.content for message in messages if message.role == "user")
                shown.append((asked, messages[-1].content))
        # What two people are called is no question, and what is empty is no answer.
        is_asked = len({asked for asked, _ in shown}) >= ASKED_SHARE * len(shown)
        is_answered = any(answer.strip() for _, answer in shown[:SHOWN_ROWS])
        if is_asked and is_answered and len(shown) >= READ_SHARE * len(records):
            columns = {ROWS: inside, **columns} if inside else columns
            return {
                "line": f"--columns {shlex.quote(write_columns(columns))}",
                "columns": columns,
                "rows": len(shown),
                "shown": [
                    {"question": _preview(asked), "answer": _preview(said)} for asked, said in shown[:SHOWN_ROWS]
                ],
                "left_out": [path for path in texts if path not in columns.values()][:SHOWN_PATHS],
            }
    for path in [path for path, value in _paths(rows[0]) if objects(value)] if rows else []:
        if (found := _suggested_inside(rows, f"{path}[]", inside)) is not None:
            return found
    return None


def _suggested_inside(rows: Sequence[Row], path: str, inside: str) -> dict[str, Any] | None:
    """Return a mapping for the rows at a path of these."""
    inner = [row for record in rows for row in rows_at(record, path) if isinstance(row, dict)]
    return _suggested(inner[:SUGGESTED_FROM_ROWS], f"{inside}.{path}" if inside else path)


def _mapped(rows: Sequence[Row], columns: Mapping[str, str]) -> list[Row]:
    """Return the rows under our names, turns joined to their conversations; an empty row where one is refused."""
    if is_turn_table(columns):
        found = turn_table(columns).rows(enumerate(map(json.dumps, rows)))
        speaker = {ASSISTANT: columns["assistant"]} if "assistant" in columns else {}
        return [{**json.loads(record), **speaker} if isinstance(record, str) else {} for _, record in found]
    return [map_columns(row, columns)[0] for row in rows]


def _candidates(rows: Sequence[Row], texts: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield the mappings that are tried: lists of turns, and tables of turns; a question and its answer by the names of
    columns, else the longest of these texts in the order of the file.
    """
    lists = dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path, value in _paths(row) if objects(parsed(value)))
    for path in lists:
        yield {"messages": path}
        turns = [turn for row in rows for turn in objects(parsed(value_of(row, path))) or []]
        yield from ({"messages": path, **names} for names in _turns(turns))
    for names in _turns(rows):
        # The first column whose values come again is that of the conversation.
        columns = dict.fromkeys(name for row in rows for name in row)
        values = {name: [str(row[name]) for row in rows if row.get(name) not in EMPTY] for name in columns}
        again = [name for name, said in values.items() if 1 < len(set(said)) < REPEATED_SHARE * len(said)]
        sent = [name for name in values if plain_name(name) in (*TIME, "sent", "sent_at")]
        for session in [name for name in again if name not in names.values()][:1]:
            yield {"session": session, **names, **({"time": sent[0]} if sent else {})}
    names = {plain_name(part).removesuffix("s"): path for path in reversed(texts) for part in re.split(r"[.\[]", path)}
    asked = next((names[name] for name in QUESTIONS if name in names), None)
    answer = next((names[name] for name in ANSWERS if name in names and names[name] != asked), None)
    longest = sorted(texts, key=lambda path: -mean(map(len, texts[path])))
    others = [path for path in longest if path not in (asked, answer)][: 2 - bool(asked) - bool(answer)]
    others.sort(key=list(texts).index)
    if len(others) + bool(asked) + bool(answer) == 2:
        question = asked or others.pop(0)
        yield {"prompt": question, "completion": answer or others.pop(0)}


def _turns(turns: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the columns of turns that name who speaks and what is said, and who answers: whoever speaks most, else not
    first.
    """
    texts = _texts(turns)
    has_roles = {path: ROLES.keys() >= set(map(str.lower, said)) for path, said in texts.items()}
    named = (path for path in texts if not SPEAKERS.isdisjoint(map(plain_name, path.split("."))) or has_roles[path])
    role = next(named, None)
    text = max((path for path in texts if path != role), key=lambda path: mean(map(len, texts[path])), default=None)
    if role is None or text is None:
        return
    spoken = Counter(texts[role])
    order = list(spoken)
    answers = max(order, key=lambda name: (spoken[name], order.index(name)))
    yield {"role": role, "text": text, **({} if has_roles[role] else {"assistant": answers})}


def _texts(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the paths of texts in these rows, each with its values, in the order of the first rows."""
    values: dict[str, list[str]] = {}
    for row in rows:
        for path, value in _paths(row):
            if isinstance(value, str) and value.strip() and plain_name(path) not in _NO_TEXTS:
                values.setdefault(path, []).append(value)
    # Numbers and times are facts, however long they are, unless they stand in a list of answers.
    return {
        path: texts
        for path, texts in values.items()
        if path.endswith("]") or any(as_position(text) is None for text in texts)
    }


def _paths(row: Row, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of everything that is not an object; of a list of texts those of its first."""
    for name, value in row.items():
        plain = _NAME.fullmatch(name) or not (prefix or "." in name or AND in name)
        path = f"{prefix}{name if plain else json.dumps(name)}"
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _paths(value, f"{path}.", depth + 1)
        elif all_texts(value):
            yield f"{path}[0]", value[0]
        else:
            yield path, value
