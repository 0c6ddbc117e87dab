"""The user's columns in the place of ours: `--columns OURS=YOURS,...` and `data.columns`.

    prompt=question,completion=answer       one column each; `a+b` joins several
    prompt=ticket.text,completion=replies[0].body    paths into objects and lists (JMESPath)
    messages=thread,role=author,text=body,assistant=Ben    a list of turns, its fields, and who answers; all others ask
    rows=topics[].items[]                   where in each record the rows stand
    where=outcome=resolved                  other rows are set aside
    system='You answer in one sentence.'    a text in quotes is the text itself
    prompt="Question, in short"             a name with a comma or a quotation mark

A column that is really called so goes before all of these. `a.as_json` is what is not a text as JSON text.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from hivetune.data.columns import ANSWERED, CONTENT, NOTES, QUESTIONS, SYSTEM, TOOLS, is_content
from hivetune.data.pieces.fields import columns_of
from hivetune.data.pieces.said import Row, is_json_text, parsed
from hivetune.data.pieces.turns import ROLES
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

OWN_FIELDS = ("checker", "untrusted", "origin", "weight", "prompt", "completion", "messages")
# Of a list of turns: the field that names who speaks, the field with the words, and what speakers are called.
TURN_FIELDS = ("role", "text", "assistant", "user_role", "assistant_role")
ROWS, WHERE = "rows", "where"
AND = "+"
AS_JSON = "as_json"
_SAY = frozenset(("messages", "contents", "parts", "content", "text", "role", *QUESTIONS))  # columns of messages
_MAX_NAMED = 8  # columns in a message
_PLAIN_STEP = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])*|\[[^\]]*\]|\*", re.ASCII)
_HEAD = re.compile(r'\s*"?([^".\[]+)')
_NAME = r'"(?:[^"\\]|\\.)*"'  # as JSON writes it
_PIECE = re.compile(rf"(?:[^,'\[\"]|'(?:[^'\\]|\\.)*'|{_NAME}|\[[^\]]*\])+")


def map_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return `row` with our field names for the user's columns. Raise RowRefused: filtered.

    If the user maps one column of the conversation, all others are ignored.
    """
    if WHERE in columns:
        column, _, wanted = columns[WHERE].partition("=")
        if _plain(value_of(row, column.strip())) != _plain(wanted):
            raise RowRefused("filtered", f"{column.strip()} is not {wanted.strip()}")
    maps = maps_content(columns)
    sides = {field: column for field, column in columns.items() if _is_side(field, columns)}
    used = {part for field, column in sides.items() for part in named_in(row, field, column)}
    mapped = {key: value for key, value in row.items() if key not in used and not (maps and is_content(key, value))}
    for field, column in sides.items():
        value = side_of(row, field, column)
        if field in QUESTIONS and isinstance(value, dict) and value and _SAY.isdisjoint(value):
            value = json.dumps(value, ensure_ascii=False)  # its fields are what is asked: the user said so
        if value is not None:
            for own in _own_names(field, tuple(mapped)):
                mapped.pop(own, None)
            mapped[field] = value
    if "weight" in sides:
        _check_weight(mapped.get("weight", 1))
    if "messages" in sides and isinstance(turns := parsed(mapped.get("messages")), list):
        mapped["messages"] = [_turn(turn, columns) for turn in turns]
        if "role" in columns:
            named = [value_of(turn, columns["role"]) for turn in turns if isinstance(turn, dict)]
            speakers = [str(speaker) for speaker in named if speaker is not None]
            _check_speakers(speakers, columns.get("assistant", columns.get("assistant_role")))
    return mapped


def _check_speakers(speakers: Sequence[str], assistant: str | None) -> None:
    """Raise RowRefused where the assistant that was named does not speak, or where none was, nobody has its role, and
    somebody has no role."""
    names, roles = ", ".join(dict.fromkeys(speakers)), {ROLES.get(_plain(speaker)) for speaker in speakers}
    if speakers and assistant is not None and _plain(assistant) not in map(_plain, speakers):
        raise RowRefused("no-answer", f"no turn is of {assistant}, only of: {names}")
    if assistant is None and None in roles and "assistant" not in roles:
        raise RowRefused("who-answers", f"{names}: say who answers, as in --columns ...,assistant={speakers[-1]}")


def _check_weight(weight: Any) -> None:
    """Raise RowRefused for a row of weight 0, which is not learned, and for a weight that is neither 0 nor 1."""
    if _plain(weight) in ("0", "0.0", "false"):
        raise RowRefused("no-trained-token", "its weight is 0")
    if _plain(weight) not in ("1", "1.0", "true"):
        raise RowRefused("bad-weight")


@lru_cache(512)
def _own_names(field: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of a row that tell the same fact as a field, such as its session: the user named another."""
    return next((own for own in columns_of((field, *names))[0] if field in own), ())


def _is_side(field: str, columns: Mapping[str, str]) -> bool:
    """Return whether a field names a content column, not the place of rows, a condition or a part of a turn."""
    return field not in (ROWS, WHERE) and not ("messages" in columns and field in TURN_FIELDS)


def _plain(value: Any) -> str:
    return str(value).strip().lower()


def _turn(turn: Any, columns: Mapping[str, str]) -> Any:
    """Return a turn with its role and its text under our names, as the user says who answers."""
    if not isinstance(turn, dict):
        return turn
    named = {field: value_of(turn, columns[field]) for field in ("role", "text") if field in columns}
    plain = dict(turn)
    for field in named:
        plain.pop(columns[field], None)
    if "text" in named:
        plain = {"content": named["text"], **{k: v for k, v in plain.items() if k in ("role", "tool_calls", "weight")}}
    speaker = named.get("role", next((turn[key] for key in ("role", "from", "sender", "speaker") if key in turn), None))
    answers = columns.get("assistant", columns.get("assistant_role"))
    if answers is not None and _plain(speaker) == _plain(answers):
        return {**plain, "role": "assistant"}
    asks = columns.get("user_role")
    if (asks is not None and _plain(speaker) == _plain(asks)) or (answers is not None and asks is None):
        return {**plain, "role": "user"}
    return {**plain, "role": speaker} if "role" in named else plain


def named_in(row: Row, field: str, column: str) -> tuple[str, ...]:
    """Return the columns that a field of ours is made of: one, or those of a question or an answer that is `a+b`."""
    several = AND in column and (field in QUESTIONS or field in ANSWERED) and not _has_column(row, column)
    return tuple(part.strip() for part in column.split(AND)) if several else (column,)


def side_of(row: Row, field: str, column: str) -> Any:
    """Return the content of one or several columns with their names: an answer as JSON text, a question as lines. None
    if a column is missing or empty.
    """
    parts = named_in(row, field, column)
    if len(parts) == 1:
        return value_of(row, column)
    last = [part.removesuffix(f".{AS_JSON}").rpartition(".")[2] for part in parts]
    called = last if len(set(last)) == len(last) else parts  # the last part of each name, if these are unique
    values = {name: value_of(row, part) for name, part in zip(called, parts, strict=True)}
    if not all(_has_column(row, part) for part in parts) or all(value in (None, "") for value in values.values()):
        return None
    if field in ANSWERED:
        return json.dumps(values, ensure_ascii=False)
    texts = {k: v.strip() if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    return "\n".join(f"{name}: {text}" for name, text in texts.items() if values[name] not in (None, ""))


def value_of(row: Row, column: str) -> Any:
    """Return the value at a path of a row; lists and objects in JSON text are decoded. None if there is none."""
    if column in row:
        return row[column]
    above, _, last = column.rpartition(".")
    if last == AS_JSON and above:
        value = value_of(row, above)
        if isinstance(parsed(value), dict) and AS_JSON in parsed(value):
            return parsed(value)[AS_JSON]
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | int | float) else value
    return _compiled(column).search(_opened(row, column))


def _opened(row: Row, column: str) -> Row:
    """Return the row with the JSON texts along a path decoded."""
    head = _HEAD.match(column)
    name = head[1] if head else ""
    value = row.get(name)
    if isinstance(value, str) and is_json_text(value):
        value = parsed(value)
    rest = column[head.end() :].lstrip('".') if head else ""
    if isinstance(value, dict) and rest:
        value = _opened(value, rest)
    return {**row, name: value} if name in row and value is not row[name] else row


@lru_cache(256)
def _compiled(column: str) -> Any:
    """Return the path as JMESPath. Raise UsageError for an invalid path."""
    path = re.sub(r"\.(\d+)(?=\.|\[|\Z)", r"[\1]", column)
    try:
        return jmespath.compile(path)
    except JMESPathError:
        steps = (step if _PLAIN_STEP.fullmatch(step) else json.dumps(step) for step in path.split("."))
        try:
            return jmespath.compile(".".join(steps))
        except JMESPathError as error:
            raise UsageError(f"data.columns: {column!r} is not a path: {str(error).splitlines()[0]}") from None


def rows_at(record: Any, path: str) -> list[Any]:
    """Return the rows of a record, at `rows=PATH`; none where nothing is there."""
    value = value_of(record, path) if isinstance(record, dict) else _compiled(path).search(record)
    return value if isinstance(value, list) else [] if value is None else [value]


def missing_column(row: Row, columns: Mapping[str, str]) -> RowRefused | None:
    """Return which of the user's columns a row does not have, or has without a value; None where it has them all."""
    sides = [(field, name) for field, name in columns.items() if _is_side(field, columns)]
    missing = [(field, name) for field, name in sides if side_of(row, field, name) is None]
    if not missing:
        return None
    field, column = missing[0]
    parts = named_in(row, field, column)
    name = next((part for part in parts if not _has_column(row, part)), None)
    if name is None:
        reason = "empty-answer" if field in ANSWERED else "empty-question" if field in QUESTIONS else "unknown-layout"
        which = f"the column {column!r} is" if len(parts) == 1 else f"the columns {', '.join(parts)} are"
        return RowRefused(reason, f"{which} empty in this row")
    return RowRefused("unknown-layout", f"the row has no column {name!r}; {near_column(row, name)}")


def missing_fields(row: Row, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the fields whose column a row does not have, with or without a value."""
    sides = ((field, column) for field, column in columns.items() if _is_side(field, columns))
    return tuple(
        field for field, name in sides if not all(_has_column(row, part) for part in named_in(row, field, name))
    )


def near_column(row: Row, name: str) -> str:
    """Return which column a person may have meant, in words, else the first columns of the row."""
    near = difflib.get_close_matches(name, row, 1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(str, list(row)[:_MAX_NAMED])) or 'none'}"


def with_user_columns(refused: RowRefused, columns: Mapping[str, str]) -> RowRefused:
    """Return a refusal whose `--columns` line has the user's column names, not ours."""
    hint = re.sub(r"=(\w+)", lambda match: f"={columns.get(match.group(1), match.group(1))}", refused.hint)
    return RowRefused(refused.reason, hint)


def _has_column(row: Row, column: str) -> bool:
    """Return whether a row has a column, with or without a value."""
    above, _, last = column.rpartition(".")
    if column in row or not above:
        return column in row or value_of(row, column) is not None
    holder = parsed(value_of(row, above))
    return (isinstance(holder, Mapping) and last in holder) or value_of(row, column) is not None


def parse_columns(text: str) -> dict[str, str]:
    """Return the value of `--columns`: OURS=YOURS,... with texts in quotes and paths in brackets. Raise UsageError."""
    pieces = _PIECE.findall(text)
    pairs = [(ours.strip(), yours.strip()) for ours, _, yours in (piece.partition("=") for piece in pieces)]
    if ",".join(pieces) != text.strip(",") or not all(ours and yours for ours, yours in pairs):
        hint = 'for example prompt=question; a name with a comma or a quotation mark is quoted: prompt="Ann\'s text"'
        raise UsageError(f"--columns {text}: not of the form OURS=YOURS,...", hint=hint)
    try:
        columns = {ours: json.loads(yours) if _is_written_name(yours) else yours for ours, yours in pairs}
    except ValueError as error:
        raise UsageError(f"--columns {text}: {error}", hint="write \\ as \\\\ in quotation marks") from None
    if len(columns) < len(pairs):
        twice = next(ours for ours, count in Counter(ours for ours, _ in pairs).items() if count > 1)
        hint = "join columns with +, as in prompt=title+body" if twice in QUESTIONS or twice in ANSWERED else "keep one"
        raise UsageError(f"--columns {text}: {twice} is mapped twice", hint=hint)
    return columns


def _is_written_name(yours: str) -> bool:
    return re.fullmatch(_NAME, yours) is not None


def write_columns(columns: Mapping[str, str]) -> str:
    """Return the value of `--columns` that `parse_columns` reads as these columns."""
    return ",".join(f"{ours}={_written(yours)}" for ours, yours in columns.items())


def _written(yours: str) -> str:
    is_plain = _PIECE.fullmatch(yours) and yours == yours.strip() and not _is_written_name(yours)
    return yours if is_plain else json.dumps(yours, ensure_ascii=False)


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown field, whose column would be ignored, and for an invalid path."""
    fields = sorted({*CONTENT, *NOTES, *TOOLS, *SYSTEM, *TURN_FIELDS, *OWN_FIELDS, ROWS, WHERE})
    for name, column in columns.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else "for example prompt=question,completion=reply,session=ticket"
            )
            raise UsageError(f"data.columns: there is no field {name!r}", hint=hint)
        if name == WHERE and "=" not in column:
            raise UsageError(f"data.columns: where: {column!r} lacks a value", hint="for example outcome=resolved")
        if name == ROWS:
            _compiled(column)


def maps_content(columns: Mapping[str, str]) -> bool:
    """Return whether the user named a column of the conversation."""
    return any(name in CONTENT or name in TOOLS for name in columns if name not in (ROWS, WHERE))
