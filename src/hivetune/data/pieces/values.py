"""JSON values: texts, JSON in texts, lists of objects, and paths (JMESPath) into them."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import jmespath
from jmespath.exceptions import JMESPathError

from hivetune.data.reasons import RowRefused

Row = Mapping[str, Any]
MAX_PYTHON_CHARS = 1 << 20
MAX_VALUES = 200  # looked at inside one list or object
_PYTHON = re.compile(r"\s*(?:\[\s*)*(?:\{\s*)?'")
_NAMES = re.compile(r"\w+(?:\s*\|\|\s*\w+)*")


def parsed(value: Any) -> Any:
    """Return the list or object in a text of JSON or Python syntax, as in CSV, Parquet and logs; other values
    unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
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
    """Return the text of one value, "" for null. Raise RowRefused("wrong-type") unless it is a text or a number."""
    if isinstance(value, bool | dict | list):
        kind = {bool: "true or false", dict: "an object", list: "a list"}[type(value)]
        raise RowRefused("wrong-type", f"{column} must be a string, not {kind}")
    return "" if value is None else str(value)


def objects(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` without nulls if it is a non-empty list of objects; else None."""
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
    """Return the value of the first of these keys that is present and not null; None if there is none."""
    if isinstance(value, dict):
        for name in names:
            field = value.get(name)
            if field is not None:
                return field
    return None


def has_needs(needs: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether the columns `names` include all that a format needs; a need `a|b` is met by either."""
    return all(not set(need.split("|")).isdisjoint(names) for need in needs)


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


class Path(NamedTuple):
    """A compiled path. `heads`: the top-level columns that it reads. `one_of`: columns of which only the first one that
    is present is read."""

    text: str
    find: Callable[[Any], Any]
    heads: frozenset[str]
    one_of: tuple[str, ...] = ()


WHOLE = "@"  # a path that begins at the row itself
# Of these only the first part begins at a column.
_STEPS = ("subexpression", "index_expression", "projection", "value_projection", "filter_projection", "flatten", "pipe")


@lru_cache(1024)
def compile_path(text: str) -> Path:
    """Return a path. Raise ValueError for text that is not a path."""
    if _NAMES.fullmatch(text):
        names = tuple(re.split(r"\s*\|\|\s*", text))

        def first(value: Any) -> Any:
            empty = None
            for name in names if isinstance(value, dict) else ():
                found = value.get(name)
                if found not in (None, "", [], {}):
                    return found
                empty = found if empty is None else empty
            return empty

        return Path(text, first, frozenset(names), names)  # most paths; JMESPath takes ten times as long
    try:
        compiled = jmespath.compile(text)
    except JMESPathError as error:
        raise ValueError(f"{text!r} is not a path: {str(error).splitlines()[0]}") from None

    def search(value: Any) -> Any:
        try:
            return compiled.search(value)
        except (JMESPathError, TypeError):  # a function or a comparison was given a value of another type
            return None

    begins = frozenset(_heads(compiled.parsed))
    if WHOLE in begins:
        return Path(text, search, begins - {WHOLE})
    nothing = search({})
    # Most rows have no column of a long path, and JMESPath takes 15 us to find nothing.
    has_none = begins.isdisjoint
    return Path(text, lambda value: nothing if isinstance(value, dict) and has_none(value) else search(value), begins)


def _heads(node: Mapping[str, Any]) -> Iterator[str]:
    if node["type"] in ("current", "identity"):
        yield WHOLE
    if node["type"] == "field":
        yield node["value"]
    for child in node["children"][:1] if node["type"] in _STEPS else node["children"]:
        yield from _heads(child)
