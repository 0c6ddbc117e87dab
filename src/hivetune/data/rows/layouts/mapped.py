"""The user's columns in the place of ours: `--columns OURS=YOURS,...` and `data.columns`.

`a.b` reaches into an object, `a.0` into a list; `a.as_json` is what is no text as JSON text. A question or an answer
may be several columns, `a+b`. A column that is really called so goes before all of these.
"""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.said import Row, parsed
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.columns import ANSWERED, ASKED, CONTENT, NOTES, SYSTEM, TOOLS, is_content
from hivetune.errors import UsageError

OWN_FIELDS = ("checker", "untrusted", "origin", "weight", "prompt", "completion", "messages")
NAMED_ROLES = ("user_role", "assistant_role")
AND = "+"
AS_JSON = "as_json"
_SAY = frozenset(("messages", "contents", "parts", "content", "text", "role", *ASKED))  # names of what somebody says
_MOST_NAMED = 8  # columns in a message


def map_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """`row` with our field names for the user's columns.

    Who maps one column of the conversation maps them all: others that look like content are not looked at.
    """
    own = maps_content(columns)
    used = {part for field, column in columns.items() for part in named_in(row, field, column)}
    mapped = {key: value for key, value in row.items() if key not in used and not (own and is_content(key, value))}
    for field, column in columns.items():
        if field in NAMED_ROLES:
            mapped[field] = column  # no column: what the turns call who speaks
            continue
        value = side_of(row, field, column)
        if value is not None:
            mapped[field] = _as_json(value) if field in ASKED else value
    return mapped


def named_in(row: Row, field: str, column: str) -> tuple[str, ...]:
    """The columns that a field of ours is made of: one, or those of a question or an answer that is `a+b`."""
    several = AND in column and (field in ASKED or field in ANSWERED) and not _is_there(row, column)
    return tuple(part.strip() for part in column.split(AND)) if several else (column,)


def side_of(row: Row, field: str, column: str) -> Any:
    """What stands in a column, or in several, with their names: an answer as JSON text, a question as lines of text.

    None where nothing stands there, or where the row lacks one of several.
    """
    parts = named_in(row, field, column)
    if len(parts) == 1:
        return value_of(row, column)
    values = {name: value_of(row, part) for name, part in zip(_short(parts), parts, strict=True)}
    if not all(_is_there(row, part) for part in parts) or all(value in (None, "") for value in values.values()):
        return None
    if field in ANSWERED:
        return json.dumps(values, ensure_ascii=False)
    return "\n".join(f"{name}: {_text(value)}" for name, value in values.items() if value not in (None, ""))


def _short(parts: tuple[str, ...]) -> list[str]:
    """The last part of each name, where that tells them apart."""
    last = [part.removesuffix(f".{AS_JSON}").rpartition(".")[2] for part in parts]
    return last if len(set(last)) == len(last) else list(parts)


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_json(value: Any) -> Any:
    """An object whose fields are what is asked, as JSON text: the user said that it is the question. One with messages
    or a text in it, and any other value, as it is.
    """
    if not isinstance(value, dict) or not value or not _SAY.isdisjoint(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def value_of(row: Row, column: str) -> Any:
    value: Any = row
    for part in (column,) if column in row else tuple(column.split(".")):
        value = parsed(value)
        if part == AS_JSON and isinstance(value, list | dict | int | float) and not _has(value, part):
            value = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _has(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and key in value


def missing_column(row: Row, columns: Mapping[str, str]) -> RowRefused | None:
    """Which of the user's columns a row does not have, or has without a value; None where it has them all."""
    sides = [(field, name) for field, name in columns.items() if field not in NAMED_ROLES]
    missing = [(field, name) for field, name in sides if side_of(row, field, name) is None]
    if not missing:
        return None
    field, column = missing[0]
    parts = named_in(row, field, column)
    name = next((part for part in parts if not _is_there(row, part)), None)
    if name is None:
        reason = "empty-answer" if field in ANSWERED else "empty-question" if field in ASKED else "unknown-layout"
        which = f"the column {column!r} is" if len(parts) == 1 else f"the columns {', '.join(parts)} are"
        return RowRefused(reason, f"{which} empty in this row")
    near = difflib.get_close_matches(name, row, 1)
    named = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(str, list(row)[:_MOST_NAMED])) or 'none'}"
    return RowRefused("unknown-layout", f"the row has no column {name!r}; {named}")


def in_your_words(refused: RowRefused, columns: Mapping[str, str]) -> RowRefused:
    """A refusal whose `--columns` line names the user's columns: ours are in no file of the user's."""
    hint = re.sub(r"=(\w+)", lambda found: f"={columns.get(found.group(1), found.group(1))}", refused.hint)
    return RowRefused(refused.reason, hint)


def _is_there(row: Row, column: str) -> bool:
    """Whether a row has a column, with or without a value."""
    above, _, last = column.rpartition(".")
    if column in row or not above:
        return column in row
    holder = parsed(value_of(row, above))
    return _has(holder, last) or value_of(row, column) is not None


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises UsageError for a field of ours that is none: its column would be read by nobody."""
    fields = sorted({*CONTENT, *NOTES, *TOOLS, *SYSTEM, *NAMED_ROLES, *OWN_FIELDS})
    for name in columns:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else "for example prompt=question,completion=reply,session=ticket"
            )
            raise UsageError(f"data.columns: there is no field {name!r}", hint=hint)


def maps_content(columns: Mapping[str, str]) -> bool:
    """Whether the user named a column of the conversation."""
    return any(name in CONTENT or name in TOOLS for name in columns)
