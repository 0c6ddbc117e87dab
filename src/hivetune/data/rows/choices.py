"""Choices in a list or in columns of their own, of which a number says the right one: counted from 0 or from 1, which
only the rows of a file together tell.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import names, parsed
from hivetune.data.rows.find.names import part_of, words
from hivetune.data.rows.layouts.columns import CHOICE, looks_like_content, numbers_of

MIN_CHOICES = 2
_LETTERS = "ABCDEFGHIJ"
_MAX_DIGITS = 9  # of a choice's number; Python refuses to read one of 4,301 digits
_LISTS = ("option", "options", "choice", "choices", "candidates", "endings")
_TELLS = names("answer label target correct gold key solution truth gt cop")  # the last: correct option
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
    columns = _choices_of(row)[0]
    kept = {key: value for key, value in row.items() if key != name and key not in columns}
    choices = dict(zip(_LETTERS, texts, strict=False))
    return {**_with_question(kept), "options": choices, "answer": _LETTERS[number - first]}


def _with_question(row: dict[str, Any]) -> dict[str, Any]:
    """A row in which no name says question, with the only text that choices can be made for as one: a goal, the
    beginning of a story. A text that another one holds is a piece of it.
    """
    if any(part_of(name) == "asked" for name in row):
        return row
    texts = {name: text for name, text in row.items() if isinstance(text, str) and _may_be_asked(name, text)}
    begun = [name for name in row if any(name != one and name.strip("0123456789") == one[:-1] for one in texts)]
    pieces = [name for name in row if name in begun or name in texts]
    if begun and all(isinstance(row[name], str) and name[-1].isdecimal() for name in pieces):
        said = " ".join(row[name].strip() for name in pieces)  # `sent1`, and `sent2` which each choice goes on
        return {"question": said} | {name: value for name, value in row.items() if name not in pieces}
    whole = [name for name in texts if not any(texts[name] in texts[other] for other in texts if other != name)]
    return {"question" if whole == [name] else name: value for name, value in row.items()}


def _may_be_asked(name: str, text: str) -> bool:
    is_class = words(name)[-1:] == ("label",)
    return part_of(name) in ("unknown", "given", "content") and looks_like_content(text) and not is_class


def with_best_choice(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of a task of BIG-bench, which gives each choice its score, with the best one as the answer, and with the
    choices where the task says nothing else; as it is where two are as good.
    """
    scores = row.get("target_scores")
    numbers = isinstance(scores, dict) and all(isinstance(one, int | float) for one in scores.values())
    if not isinstance(scores, dict) or not numbers or len(scores) < MIN_CHOICES:
        return row
    highest = max(scores.values())
    best = [choice for choice, score in scores.items() if score == highest]
    if len(best) != 1 or "answer" in row or "options" in row:
        return row
    kept = {name: value for name, value in row.items() if name not in _OF_THE_TASK}
    choices = {} if row.get("append_choices_to_input") is False else {"options": list(scores)}
    return {**kept, **choices, "answer": best[0]}


def _numbered(row: Mapping[str, Any]) -> tuple[str, int, list[Any]] | None:
    """(the column of the number, the number, the choices)."""
    columns, texts = _choices_of(row)
    tells = [(name, _number(value)) for name, value in row.items() if name not in columns and _may_tell(name)]
    numbers = [(name, number) for name, number in tells if number is not None]
    if not 1 < len(texts) <= len(_LETTERS) or len({number for _, number in numbers}) != 1:
        return None
    said_otherwise = any(row[name] not in (None, "") for name, number in tells if number is None)
    return None if said_otherwise else (*numbers[0], texts)


def _choices_of(row: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """(the columns of the choices, the choices); both empty where a row has none, or two lists of them."""
    right = any(_says_right(name) and _number(value) is not None for name, value in row.items())
    lists = [name for name, value in row.items() if _is_list(name, value, right=right)]
    if lists:
        return (lists, parsed(row[lists[0]])) if len(lists) == 1 else ([], [])
    lettered = {match.group(1): name for name in row if (match := CHOICE.match(plain_name(name)))}
    numbered = {str(number): name for number, name in numbers_of(row).items()}
    for found, firsts in ((lettered, "a"), (numbered, "01")):
        known = _LETTERS.lower() if found is lettered else "0123456789"
        if found and next(iter(found)) in firsts and "".join(found) in known:
            columns = list(found.values())
            return columns, [row[name] for name in columns if row[name] not in (None, "")]
    return [], []


def _says_right(name: str) -> bool:
    return "correct" in words(name) or words(name) == ("label",)


def _is_list(name: str, value: Any, *, right: bool) -> bool:
    """Whether a column holds the choices as a list of texts or numbers. `right`: a number says which one is correct, so
    that `answers` are choices too.
    """
    plain = plain_name(name)
    if not plain.endswith(_LISTS) and not (right and plain == "answers"):
        return False
    value = parsed(value)
    return isinstance(value, list) and len(value) > 1 and all(isinstance(text, str | int | float) for text in value)


def _may_tell(name: str) -> bool:
    said = set(words(name))
    return bool(said & _TELLS) and said <= _TELLS | _COUNTS


def _number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and len(value) <= _MAX_DIGITS and value.strip().isdecimal():
        return int(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e999 in JSON is infinite
    return int(value) if whole else None
