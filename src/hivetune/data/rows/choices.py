"""Choices in a list, of which a number says the right one: counted from 0 or from 1, which only the rows of a file
together tell.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.names import words
from hivetune.data.rows.layouts.said import names, parsed

MIN_CHOICES = 2
_LETTERS = "ABCDEFGHIJ"
_LISTS = ("option", "options", "choice", "choices", "candidates", "endings")
_TELLS = names("answer label target correct gold key solution truth gt")
_COUNTS = names("index idx id number position option choice")
# What a task of BIG-bench says of itself and of how a model is asked; only `task_prefix` is part of the question.
_OF_THE_TASK = names(
    "target_scores append_choices_to_input canary name description keywords metrics preferred_score "
    "example_input_prefix example_output_prefix choice_prefix few_shot_example_separator stop_string output_regex "
    "json_schema_version"
)


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


def with_best_choice(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of a task of BIG-bench, which gives each choice its score, with the best one as the answer, and with the
    choices where the task says nothing else; as it is where two are as good.
    """
    scores = row.get("target_scores")
    numbers = isinstance(scores, dict) and all(isinstance(one, int | float) for one in scores.values())
    if not isinstance(scores, dict) or not numbers or len(scores) < MIN_CHOICES:
        return row
    best = [choice for choice, score in scores.items() if score == max(scores.values())]
    if len(best) != 1 or "answer" in row or "options" in row:
        return row
    kept = {name: value for name, value in row.items() if name not in _OF_THE_TASK}
    choices = {} if row.get("append_choices_to_input") is False else {"options": list(scores)}
    return {**kept, **choices, "answer": best[0]}


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
