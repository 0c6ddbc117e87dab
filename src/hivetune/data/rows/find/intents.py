"""Sets of intents: several ways to ask one thing, beside the ways to answer it."""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import all_texts
from hivetune.data.rows.find.names import part_of, words
from hivetune.data.rows.layouts.columns import looks_like_content

_WAYS = (("pattern",), ("patterns",), ("utterance",), ("utterances",), ("phrases",), ("training", "phrases"))
_PHRASINGS = (*_WAYS, ("question",), ("query",))
_REPLIES = (("response",), ("reply",), ("answer",))


def phrasings(item: dict[str, Any]) -> tuple[list[str], list[str]] | None:
    """(the ways to ask, the ways to answer) of an object that has a list of the one and the other beside it."""
    asked = [name for name, value in item.items() if words(name) in _PHRASINGS and are_all_texts(value)]
    answered = [value for name, value in item.items() if words(name) in _REPLIES and value]
    given = any(_is_given(name, value) for name, value in item.items())
    if len(asked) != 1 or len(answered) != 1 or given:
        return None
    ways, answers = item[asked[0]], [answered[0]] if isinstance(answered[0], str) else answered[0]
    each_its_own = words(asked[0]) not in _WAYS and len(ways) == len(answers) > 1
    return (ways, answers) if are_all_texts(answers) and not each_its_own else None


def _is_given(name: str, value: Any) -> bool:
    """Whether choices or texts stand there on which a question was answered, and no name of a context."""
    choices = plain_name(name).endswith(("choice", "choices", "options"))
    return part_of(name) == "given" and (looks_like_content(value) or (choices and bool(value)))


def phrased(value: Any) -> Iterator[dict[str, Any]]:
    """A row for each way to ask; a name of the intent stays with it."""
    found = phrasings(value) if isinstance(value, dict) else None
    if found is not None:
        ways, answers = found
        about = {name: one for name, one in value.items() if part_of(name) == "note" and isinstance(one, str)}
        yield from ({**about, "question": text, "correct_answers": answers} for text in ways)


def are_all_texts(value: Any) -> bool:
    return all_texts(value) and all(value)
