"""What stands in a row as an object, a list of objects or a truth value, as the text that a model reads or writes."""

import json
from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Row, objects, parsed
from hivetune.data.rows.find.names import part_of, words
from hivetune.data.rows.layouts.pairs import LABELS, as_json_text

_REQUESTS = ("request", "request_body", "req", "raw_request", "llm_request", "api_request")


class Written(str):
    """An answer that was an object: its text is learned whole, so nobody looks for other texts in it."""


def with_written_answer(row: Row) -> Row:
    """The row with its only answer as JSON text, where it is an object or a list of objects under a name that says
    answer (or under `query`, beside a question), or no text under `answer`; any other row as it is.
    """
    if any(_is_text(value) and part_of(name) == "answered" for name, value in row.items()):
        return row
    if any(isinstance(parsed(value), dict) and plain_name(name) in _REQUESTS for name, value in row.items()):
        return row  # a call of an API that the layouts do not know: what it gave back is no model's text
    asked = any(isinstance(value, str) and part_of(name) == "asked" for name, value in row.items())
    found = {name: text for name, value in row.items() if (text := _as_text(name, value, asked)) is not None}
    return {**row, **found} if len(found) == 1 else row


def _as_text(name: str, value: Any, asked: bool) -> Written | None:
    answers = part_of(name) == "answered" or (asked and words(name) == ("query",))
    if not answers or value in (None, "", [], {}) or (plain_name(name) in LABELS and not _has_parts(value)):
        return None
    if isinstance(value, bool) or _are_numbers(value):
        return Written(json.dumps(value)) if words(name)[-1:] == ("answer",) else None
    if isinstance(value, list) and (objects(value) is None or name.endswith("s")):
        return None  # several answers, maybe one for each of several questions
    text = _as_json(name, _only(parsed(value)))
    return None if text is None else Written(value if isinstance(value, str) else text)


def _as_json(name: str, value: Any) -> str | None:
    """An answer that is an object, as JSON text. What it says of A and of B are choices under a name of several."""
    if isinstance(value, dict) and {"A", "B"} <= value.keys() and not name.endswith("s"):
        return json.dumps(value, ensure_ascii=False)
    return as_json_text(value)


def _only(value: Any) -> Any:
    """The item of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _has_parts(value: Any) -> bool:
    """Whether a value is an object of several parts, and so no class."""
    inner = parsed(value)
    return isinstance(inner, dict) and len(inner) > 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and isinstance(parsed(value), str)


def _are_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, of any depth."""
    if not isinstance(value, list):
        return False
    return all(_are_numbers(one) or (isinstance(one, int | float) and not isinstance(one, bool)) for one in value)


def as_lines(value: Mapping[str, Any]) -> str | None:
    """An object of texts and numbers as a line for each; None for any other."""
    if not value or not all(isinstance(one, str | int | float) for one in value.values()):
        return None
    return "\n".join(f"{name}: {one}" for name, one in value.items())
