"""Choices in a list, of which a number says the right one: counted from 0 or from 1, which only the rows of a file
together tell.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.names import words
from hivetune.data.rows.layouts.said import names, parsed

_LETTERS = "ABCDEFGHIJ"
_LISTS = ("option", "options", "choice", "choices", "candidates", "endings")
_TELLS = names("answer label target correct gold key solution truth gt")
_COUNTS = names("index idx id number position option choice")


def first_number(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """What the first choice counts as in such rows: 0 or 1; None where their answers are no numbers of choices, or do
    not tell.
    """
    told = [one for row in rows if (one := _numbered(row)) is not None]
    if 2 * len(told) <= len(rows):
        return None
    numbers = {number for _, number, _ in told}
    past = any(number == len(texts) for _, number, texts in told)
    return 0 if 0 in numbers and not past else 1 if past and 0 not in numbers else None


def with_letter(row: Mapping[str, Any], first: int) -> dict[str, Any]:
    """A row whose answer is the letter of its choice; as it is where nothing numbers one."""
    told = _numbered(row)
    if told is None or not 0 <= told[1] - first < len(told[2]):
        return dict(row)
    name, number, texts = told
    kept = {key: value for key, value in row.items() if key != name and not _is_list(key, value)}
    return {**kept, "options": dict(zip(_LETTERS, texts, strict=False)), "answer": _LETTERS[number - first]}


def _numbered(row: Mapping[str, Any]) -> tuple[str, int, list[Any]] | None:
    """(the column of the number, the number, the choices)."""
    lists = [parsed(value) for name, value in row.items() if _is_list(name, value)]
    tells = [(name, _number(value)) for name, value in row.items() if _may_tell(name)]
    numbers = [(name, number) for name, number in tells if number is not None]
    if len(lists) != 1 or len(lists[0]) > len(_LETTERS) or len({number for _, number in numbers}) != 1:
        return None
    said_otherwise = any(row[name] not in (None, "") for name, number in tells if number is None)
    return None if said_otherwise else (*numbers[0], lists[0])


def _is_list(name: str, value: Any) -> bool:
    """Whether a column holds the choices as a list of texts or numbers."""
    if not plain_name(name).endswith(_LISTS):
        return False
    value = parsed(value)
    return isinstance(value, list) and len(value) > 1 and all(isinstance(text, str | int | float) for text in value)


def _may_tell(name: str) -> bool:
    said = set(words(name))
    return bool(said & _TELLS) and said <= _TELLS | _COUNTS


def _number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return int(value) if isinstance(value, int | float) and value == int(value) else None
