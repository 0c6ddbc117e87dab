"""The mapping of the user's columns to our fields: `--columns FIELD=COLUMN,...` and `data.columns`.

  prompt=question,completion=answer       one column each; a question or a text that is `a+b` joins several
  prompt=ticket.text,completion=replies[0].body    paths into objects and lists (JMESPath)
  messages=thread,role=author,text=body,assistant=Ben    a list of turns, its fields, and who answers; all others ask
  session=chat,role=author,text=body,time=sent           a table of turns, one a row, joined by their session
  rows=topics[].items[]                   the path of the rows in each record
  where=outcome=resolved                  other rows are set aside; also `a!=b` and `a in b|c`
  system='You answer in one sentence.'    a text in quotes is the text itself

If a row has a column with exactly the name of a path, the column is used. A column that is called `a+b` is written
"a+b", in quotes. A field that is not mapped is read under its own name.
"""

import csv
import difflib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hivetune.data.columns import ANSWERS, BESIDE, FIELDS, QUESTIONS, as_position, plain_name
from hivetune.data.pieces.format import Log
from hivetune.data.pieces.sessions import ASSISTANT as SPEAKER
from hivetune.data.pieces.sessions import SESSION, TableTurn, table_rows
from hivetune.data.pieces.turns import ROLE_KEYS, ROLES
from hivetune.data.pieces.values import Path, Row, compile_path, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

ROWS, WHERE, ASSISTANT = "rows", "where", "assistant"
CONTENT = ("prompt", "completion", "messages", "text", "chosen", "rejected")  # of which one makes the others ours too
# The name of a fact that goes before all others of its meaning (columns.py).
_FIRST_NAMES = {"session": "session_id", "user": "user_id", "time": "timestamp"}
_SHARED = ("agent", "category", "system", "success", "feedback", "user", "time")  # what the turns of a session share
_OF_TURN_OBJECTS = ("content", "messages", "parts")  # an object with one of these is a turn, others are a question
_OF_TURN = (*ROLE_KEYS, "tool_calls", "tool_call_id", "weight")  # what is read of a turn whose text is mapped
# What may be made of several columns. An answer may not: the layout that we invent for it would be learned.
_JOINED = ("prompt", "text")
AND = "+"
# What else is read of a row: what the gateway and the program itself write.
OF_ANSWERS = frozenset(("chosen", "rejected", "correction", "rejected_answer"))
OWN = frozenset(("answered_by", "client", "latency_s", "logprob", "synth", "untrusted", "origin", "checker"))
MAX_NAMED = 8  # columns in a message
# A comma ends a column only where a field follows it, so that texts, paths and names may have commas. `==` is of paths.
_NEXT_FIELD = re.compile(r",\s*(?=\w+\s*=(?!=))")
_WHERE = re.compile(r"(?P<column>.+?)(?P<how>\s*!=\s*|\s*=\s*|\s+in\s+)(?P<wanted>.*)", re.S)


def map_columns(row: Row, columns: Mapping[str, str]) -> tuple[Row, dict[str, str]]:
    """Return `row` with our field names for the user's columns, and field -> column for each column that the row lacks.
    Raise RowRefused("filtered").
    """
    _filter(row, columns)
    sides = _sides(tuple(columns.items()))
    mapped: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for field, parts in sides.items():
        if (lacking := next((part for part in parts if not _has_column(row, part)), None)) is not None:
            missing[field] = lacking
        elif (value := _content(row, parts)) is not None:
            is_text = field == "prompt" and isinstance(value, dict) and value.keys().isdisjoint(_OF_TURN_OBJECTS)
            mapped[_FIRST_NAMES.get(field, field)] = json.dumps(value, ensure_ascii=False) if is_text else value
    used = {part for parts in sides.values() for part in parts}
    kept = _kept_beside(tuple(sides)) if maps_content(columns) else None
    for name in row:
        if name not in used and (kept is None or plain_name(name) in kept):
            mapped.setdefault(name, row[name])
    if "messages" in sides and isinstance(turns := parsed(mapped.get("messages")), list):
        mapped["messages"] = [_turn(turn, columns) for turn in turns]
        if "role" in columns or ASSISTANT in columns:
            mapped |= {SESSION: "messages", SPEAKER: columns.get(ASSISTANT)}
    return mapped, missing


def is_turn_table(columns: Mapping[str, str]) -> bool:
    """Return whether the mapping describes a table with one turn per row, whose turns are joined by session."""
    return {"session", "role", "text"} <= columns.keys() and "messages" not in columns


def turn_table(columns: Mapping[str, str]) -> Log:
    """Return the format of a table of turns with the user's columns. It refuses rows without a session."""

    def read(event: Row) -> TableTurn | RowRefused:
        session = value_of(event, columns["session"])
        if not isinstance(session, str | int):
            column = columns["session"]
            return RowRefused("unknown-layout", f"it has no session in {column!r}; {near_column(event, column)}")
        try:
            _filter(event, columns)
        except RowRefused as refused:
            return refused
        facts = {_FIRST_NAMES.get(name, name): value_of(event, columns[name]) for name in _SHARED if name in columns}
        return TableTurn(str(session), _turn(event, columns), as_position(facts.get("timestamp")), facts)

    return Log("turns", lambda head: False, lambda lines: table_rows("turns", lines, read))


def _turn(turn: Any, columns: Mapping[str, str]) -> Any:
    """Return a turn with its text and its role under our names; with a speaker instead of a role if the user named the
    assistant or the name is not a role.
    """
    if not isinstance(turn, dict):
        return turn
    plain = {key: turn[key] for key in (_OF_TURN if "text" in columns else turn) if key in turn}
    if "text" in columns:
        plain["content"] = value_of(turn, columns["text"])
    if "role" not in columns and ASSISTANT not in columns:
        return plain
    speaker = value_of(turn, columns["role"]) if "role" in columns else one_of(plain, *ROLE_KEYS)
    is_role = ASSISTANT not in columns and _plain(speaker) in ROLES
    who = {"role": _plain(speaker)} if is_role else {"speaker": str(speaker)}
    return {**{key: value for key, value in plain.items() if key not in ROLE_KEYS}, **who}


# Which columns are read.


def maps_content(columns: Mapping[str, str]) -> bool:
    """Return whether the mapping names columns of the conversation itself; then no unmapped column of it is read."""
    return not columns.keys().isdisjoint(CONTENT)


def columns_read(row: Row, columns: Mapping[str, str]) -> set[str]:
    """Return the columns of a row that a mapping reads, and those that are read under their own names beside it."""
    named = [part for parts in _sides(tuple(columns.items())).values() for part in parts]
    named += [where_of(columns[WHERE])[0]] if WHERE in columns else []
    kept = _kept_beside(tuple(columns)) if maps_content(columns) else ()
    return {head for part in named for head in (part, *_path(part).heads)} | {n for n in row if plain_name(n) in kept}


@lru_cache(16)
def _kept_beside(fields: tuple[str, ...]) -> frozenset[str]:
    """Return the names that are read beside mapped fields: facts, and the side of a pair that was not mapped."""
    kept = {*BESIDE, *OWN}
    if "messages" not in fields and "text" not in fields:
        kept |= set() if "prompt" in fields else {*QUESTIONS, "history"}
        kept |= set() if "completion" in fields else {*ANSWERS}
        kept |= OF_ANSWERS
    return frozenset(kept)


@lru_cache(16)
def _sides(columns: tuple[tuple[str, str], ...]) -> dict[str, tuple[str, ...]]:
    """Return the columns that each field is made of, without the place of rows, a condition and the parts of turns in a
    list: one, or those of a question or a text that is `a+b`.
    """
    others = {ROWS, WHERE, ASSISTANT, *(("role", "text") if "messages" in dict(columns) else ())}
    joined = {field for field, column in columns if field in _JOINED and '"' not in column}
    parts = {field: column.split(AND) if field in joined else [column] for field, column in columns}
    return {field: tuple(part.strip() for part in some) for field, some in parts.items() if field not in others}


def _content(row: Row, parts: tuple[str, ...]) -> Any:
    """Return the content of a column, or of several as lines with their names. None if all are empty."""
    if len(parts) == 1:
        return value_of(row, parts[0])
    values = [(part.rpartition(".")[2], value_of(row, part)) for part in parts]
    lines = [
        f"{name}: {value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in values
        if value not in (None, "")
    ]
    return "\n".join(lines) or None


def value_of(row: Row, column: str) -> Any:
    """Return the value at a path of a row; a list or an object in JSON text is decoded. None if there is none."""
    if column in row:
        return row[column]
    path = _path(column)
    decoded = {name: parsed(row[name]) for name in path.heads if isinstance(row.get(name), str)}
    return path.find({**row, **decoded} if decoded else row)


@lru_cache(256)
def _path(column: str) -> Path:
    """Return a column as a path. Text that is not a path is taken as a column's name."""
    try:
        return compile_path(column)
    except ValueError:
        return Path(column, lambda value: one_of(value, column), frozenset((column,)))


def rows_at(record: Any, path: str) -> list[Any]:
    """Return the rows of a record at `rows=PATH`; an empty list if the path has no value."""
    value = value_of(record, path) if isinstance(record, dict) else _path(path).find(record)
    return value if isinstance(value, list) else [] if value is None else [value]


def _has_column(row: Row, column: str) -> bool:
    above, _, last = column.rpartition(".")
    if column in row or value_of(row, column) is not None:
        return True
    holder = parsed(value_of(row, above)) if above else None
    return isinstance(holder, Mapping) and last in holder


def near_column(row: Row, name: str) -> str:
    """Return a hint that names the other column most like `name`, else the first columns of the row."""
    near = difflib.get_close_matches(name, row.keys() - {name}, 1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(str, list(row)[:MAX_NAMED])) or 'none'}"


# The condition of a mapping.


def _filter(row: Row, columns: Mapping[str, str]) -> None:
    """Raise RowRefused("filtered") for a row that does not fulfil the condition of a mapping."""
    if WHERE not in columns:
        return
    column, how, wanted = where_of(columns[WHERE])
    value = _plain(value_of(row, column))
    fits = value in map(_plain, wanted.split("|")) if how == "in" else value == _plain(wanted)
    if fits == (how == "!="):
        raise RowRefused("filtered", f"{column} is {value[:40]!r}, which does not match where={columns[WHERE]}")


@lru_cache(16)
def where_of(condition: str) -> tuple[str, str, str]:
    """Return (column, one of =, != and in, value) of a condition. Raise UsageError."""
    match = _WHERE.fullmatch(condition.strip())
    if match is None:
        hint = "for example where=state=closed, where=state!=open or where='state in closed|solved'"
        raise UsageError(f"data.columns: {condition!r} is not a condition", hint=hint)
    return match["column"].strip(), match["how"].strip(), match["wanted"].strip()


def lacks_where(rows: Iterable[Row], columns: Mapping[str, str]) -> UsageError | None:
    """Return the error of a condition on a column that none of these rows has; None if a row has it, or there are no
    rows.
    """
    first = None
    for row in rows if WHERE in columns else ():
        first = first or row
        if _has_column(row, where_of(columns[WHERE])[0]):
            return None
    if first is None:
        return None
    column = where_of(columns[WHERE])[0]
    problem = f"data.columns: where={columns[WHERE]}: no row has a column {column!r}"
    return UsageError(problem, hint=near_column(first, column))


def _plain(value: Any) -> str:
    return str(value).strip().lower()


# As it is written.


def parse_columns(text: str) -> dict[str, str]:
    """Return the value of `--columns`: FIELD=COLUMN,... Raise UsageError."""
    columns: dict[str, str] = {}
    for piece in _NEXT_FIELD.split(text.strip().strip(",")):
        field, _, column = (part.strip() for part in piece.partition("="))
        if not field or not column:
            hint = "for example prompt=question,completion=answer"
            raise UsageError(f"--columns {text}: not of the form FIELD=COLUMN,...", hint=hint)
        if field in columns:
            hint = "join columns with +, as in prompt=title+body" if field in _JOINED else "keep one"
            raise UsageError(f"--columns {text}: {field} is mapped twice", hint=hint)
        columns[field] = column
    return columns


def write_columns(columns: Mapping[str, str]) -> str:
    """Return the value of `--columns` that `parse_columns` reads as these columns."""
    # Not those with a name that begins or ends with a blank, or looks like another field (`, a=`).
    return ",".join(f"{field}={column}" for field, column in columns.items())


def parse_names(text: str) -> list[str]:
    """Return the names in the value of `--ignore`: separated by commas, and quoted as in CSV if they contain one."""
    return [name.strip() for line in csv.reader([text], skipinitialspace=True) for name in line if name.strip()]


def write_names(names: Sequence[str]) -> str:
    """Return the value of `--ignore` that `parse_names` reads as these names."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown field, whose column would be ignored, and for text that is not a condition."""
    for name, column in columns.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are: {', '.join(FIELDS)}"
            raise UsageError(f"data.columns: there is no field {name!r}", hint=hint)
        if name == WHERE:
            where_of(column)
    if "role" in columns and "messages" not in columns and not is_turn_table(columns):
        hint = "add messages=COLUMN for a list of turns, or session=COLUMN and text=COLUMN for one turn a row"
        raise UsageError("data.columns: role belongs to a turn, but messages is not mapped", hint=hint)
