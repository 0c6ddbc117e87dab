"""What a format makes of a row, and helpers for JSON values: text, JSON text, a list of objects."""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Row = Mapping[str, Any]
Tools = tuple[Mapping[str, Any], ...]
NOT_HELD = "not-held"  # why a turn is refused whose image, file or tool a log does not hold
MAX_PYTHON_CHARS = 1 << 20
MAX_VALUES = 200  # looked at inside one list or object
_PYTHON = re.compile(r"\s*(?:\[\s*)*(?:\{\s*)?'")


class Conversation(NamedTuple):
    """The conversation of a row. `untrusted`: a tool or a web page wrote the answer; `changed`: reasons of severity
    warn.
    """

    layout: str
    messages: tuple[Message, ...]
    tools: Tools = ()
    untrusted: bool = False
    changed: tuple[str, ...] = ()


def is_json_text(value: str) -> bool:
    """Return whether a text begins as a list or an object does."""
    return value[:1] in ("[", "{") or value.lstrip()[:1] in ("[", "{")


def parsed(value: Any) -> Any:
    """Return the list or object in a text of JSON or Python syntax, as in CSV, Parquet and logs; any other value
    unchanged.
    """
    if not isinstance(value, str) or not is_json_text(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        if len(value) > MAX_PYTHON_CHARS or not _PYTHON.match(value):
            return value
    try:  # as Python's `str` writes it: strings have single quotes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that no escape begins with
            return json.loads(json.dumps(ast.literal_eval(value)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return value


def text_of(value: Any, column: str) -> str:
    """Return the text of one value, empty for null. Raise RowRefused("wrong-type") for what is not a text or number."""
    if isinstance(value, bool | dict | list):
        kind = {bool: "true or false", dict: "an object", list: "a list"}[type(value)]
        raise RowRefused("wrong-type", f"{column}: a string, not {kind}")
    return "" if value is None else str(value)


def objects(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of objects that is not empty, without what is null in it; else None."""
    if not isinstance(value, list) or not value:
        return None
    kinds = set(map(type, value))
    if kinds == {dict}:
        return value
    return [item for item in value if item is not None] if kinds == {dict, type(None)} else None


def all_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether `value` is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def listed(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def one_of(value: Any, *names: str) -> Any:
    """Return the first of these keys of an object that has a value, else None."""
    if isinstance(value, dict):
        for name in names:
            field = value.get(name)
            if field is not None:
                return field
    return None


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings in a value, at most MAX_VALUES, without keys."""
    stack, num_values = [value], 0
    while stack and num_values < MAX_VALUES:
        item = stack.pop()
        num_values += 1
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item
