"""What stands beside a question and its answer: what the answer was given on, and what was written about it after.

What was given belongs to the question: passages as they are, choices each on a line of its own. What is about the
answer is left out and counted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Row, names, objects, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.choices import MIN_CHOICES, with_best_choice
from hivetune.data.rows.find.leaves import at, open_paths
from hivetune.data.rows.find.made import is_class, is_found, is_query
from hivetune.data.rows.find.names import (
    is_an_answer,
    is_expected,
    is_reference,
    is_retrieved,
    is_wrong_answer,
    part_of,
    words,
)
from hivetune.data.rows.find.written import as_lines
from hivetune.data.rows.layouts.columns import CHOICE, looks_like_content, numbers_of
from hivetune.data.rows.layouts.pairs import LABELS

_LETTERS = "ABCDEFGHIJ"
_CHOICES = ("option", "options", "choice", "choices", "candidates")
_OF_AN_AGENT = names(
    "action actions observation observations step steps call calls called result results event events trajectory"
)
_OBJECTS = re.compile(r"\s*(?:\[\s*)?[A-Z]\w*\(\w+=")  # [Document(id=..., content=...
WRITTEN = ("text", "content", "sentence", "input_text", "body")  # by somebody who may ask something
_REPLIES, _REPLIED_TO = names("response reply"), names("comment review post tweet email mail feedback statement")
_LETTER_ALONE = re.compile(r"\(?[A-J]\)?")
_RIGHT = ("label", "gold", "target")  # beside numbered choices the number of the right one
_IN_FRONT = names("body task_prefix informal_prefix question_prefix prompt_prefix")  # of the question
CHARS_A_WORD = 20  # on average at most, where words have spaces between them
SHARED_WORDS = 0.6  # of an answer's words, found in another column: it may be where the answer comes from


def gathered(row: Row) -> Row:
    """A row whose choices stand in columns of their own (`option_a`, `A`, `option_1` ...), with all of them as
    `options`, each behind its letter or number.
    """
    row = with_best_choice(row)
    if "options" not in row and (numbered := _numbered(row)):
        columns = (name for name in row if name not in numbers_of(row).values())
        zero = "0" in numbered  # else a label may still count from 0
        called = {n: "answer" if zero and n in _RIGHT and str(row[n]) in numbered else n for n in columns}
        return {**{called[name]: row[name] for name in called}, "options": numbered}
    found = {match.group(1).upper(): name for name in row if (match := CHOICE.match(plain_name(name)))}
    if not {"A", "B"} <= found.keys() or "options" in row or list(found) != sorted(found):
        return row
    kept = {name: value for name, value in row.items() if name not in found.values()}
    return {**kept, "options": {letter: row[name] for letter, name in found.items() if row[name] not in (None, "")}}


def _numbered(row: Row) -> dict[str, Any]:
    """The choices in columns with numbers by those, or by their letters where a letter names the right one."""
    found = numbers_of(row)
    first = min(found, default=0)
    if len(found) < MIN_CHOICES or first > 1 or list(found) != list(range(first, first + len(found))):
        return {}
    texts = [row[name] for name in found.values() if row[name] not in (None, "")]
    letters = tuple(_LETTERS[: len(texts)])
    lettered = any(value.strip() in letters for value in row.values() if isinstance(value, str))
    return dict(zip(letters if lettered else map(str, found), texts, strict=False))


def named_choice(row: Row) -> list[str]:
    """The column that says which choice is right, under whatever name: the only other one whose value is the letter of
    a choice.
    """
    texts = [_choices(parsed(value), None) for name, value in row.items() if name.lower().endswith(_CHOICES) and value]
    if len(texts) != 1 or texts[0] is None:
        return []
    letters = _LETTERS[: len(texts[0].splitlines())]
    named = [name for name in row if "correct" in words(name) or "answer" in words(name) or "key" in words(name)]
    return [name for name in named if isinstance(row[name], str) and row[name].strip() in tuple(letters)]


def with_given(row: Row, path: str, question: Any, answer: Any, answered: str) -> Any:
    """The question at `path` with what is given beside it, in the order of the row; not what a system found whose
    answer is not the one that is learned. `answered`: the path of the answer. Raises RowRefused.
    """
    if not isinstance(question, str):
        return question
    texts = [question]
    for holder in _holders(row, path):
        for name, value in holder.items():
            in_front = plain_name(name) in _IN_FRONT
            if (
                (part_of(name) != "given" and not in_front)
                or value in (None, "", [], {})
                or name in (path.rpartition(".")[2], answered)
                or (is_retrieved(name) and is_expected(answered))
            ):
                continue
            text = _text(name, parsed(value), answer)
            if text and text not in question and text not in texts:
                texts.insert(0 if in_front else len(texts), text)
    return "\n".join(texts)


def _holders(row: Row, path: str) -> list[Mapping[str, Any]]:
    """The row and the objects in it that the question stands in."""
    found: list[Mapping[str, Any]] = [row]
    for key in path.split(".")[:-1]:
        inner = parsed(found[-1].get(key))
        if not isinstance(inner, dict):
            break
        found.append(inner)
    return found


def _text(name: str, value: Any, answer: Any) -> str | None:
    """What is given as text; None for what nobody would know how to write."""
    if isinstance(value, str):
        if _OBJECTS.match(value):
            raise RowRefused("unexplained-column", f"{name[:60]!r} holds objects as a program shows them")
        return None if is_reference(name, value) else value.strip() or None
    if any(name.lower().endswith(word) for word in _CHOICES):
        return _choices(value, answer)
    if isinstance(value, list) and all(isinstance(piece, str) for piece in value):
        return "\n".join(piece for piece in value if not is_reference(name, piece)) or None
    if isinstance(value, dict) and words(name) == ("context",):
        return as_lines(value)
    if (titled := _titled(value)) is not None:
        return titled
    texts = [piece.get("text") for piece in objects(value) or []]
    return "\n".join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else None


def _titled(value: Any) -> str | None:
    """Passages that are pairs of a title and its sentences, as HotpotQA has them; None for anything else."""
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        return None
    if not all(isinstance(said, list) and all(isinstance(one, str) for one in said) for _, said in pairs):
        return None
    return "\n".join(f"{title}\n{' '.join(one.strip() for one in said)}" for title, said in pairs)


def _choices(value: Any, answer: Any) -> str | None:
    """Choices, each behind its letter where the answer is one. Raises RowRefused where the answer is a number: nobody
    knows whether it counts from 0 or from 1.
    """
    labels, texts = _labelled(value)
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        return None
    if len(labels) == len(texts) and all(isinstance(label, str) for label in labels):
        _refuse_letter(answer, labels, texts)
        if str(answer).strip().isdecimal() and all(label in _LETTERS for label in labels):
            _refuse_number(answer, texts)
        return "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    if all(_LETTER_ALONE.fullmatch(str(text).strip()) for text in texts):
        return None  # the question names them
    said = str(answer).strip()
    if said in map(str, texts):
        return "\n".join(map(str, texts))
    _refuse_number(said, texts)
    _refuse_letter(said, _LETTERS[: len(texts)], texts)
    if said in tuple(_LETTERS[: len(texts)]) and not str(texts[0]).startswith(("A", "(A", "a)")):
        texts = [f"{letter}. {text}" for letter, text in zip(_LETTERS, texts, strict=False)]
    return "\n".join(map(str, texts))


def _refuse_number(answer: Any, texts: Sequence[Any]) -> None:
    said = str(answer).strip()
    if said.isdecimal() and said not in map(str, texts):
        raise RowRefused("unknown-layout", f"the answer {said} is the number of a choice, from 0 or from 1")


def _refuse_letter(answer: Any, labels: Sequence[Any], texts: Sequence[Any]) -> None:
    """Raises RowRefused where the answer is the letter of a choice that the row does not have."""
    said = str(answer).strip()
    if said not in tuple(_LETTERS) or said in labels or any(str(text).strip().startswith(said) for text in texts):
        return
    if all(label in tuple(_LETTERS) for label in labels):
        raise RowRefused("unknown-layout", f"the answer {said} is none of the {len(texts)} choices")


def _labelled(value: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """(labels, texts) of choices; no labels where they have none."""
    if isinstance(value, dict) and isinstance(value.get("text"), list) and isinstance(value.get("label"), list):
        return value["label"], value["text"]
    if isinstance(value, dict):
        return list(value), list(value.values())
    if (items := objects(value)) is not None:
        texts = [one_of(item, "text", "value", "content") for item in items]
        return [one_of(item, "label", "key") for item in items], texts
    return (), value if isinstance(value, list) else ()


def is_about(row: Row, path: Sequence[str], value: str, answered: str | None, answer: Any) -> bool:
    """Whether a text was written about the answer: its name says so, or it stands behind the answer in the same object
    of a row that is not sorted by name, and is not where the answer comes from.
    """
    if any(part_of(name) == "about" or is_wrong_answer(name) for name in path if name != "[]"):
        return True
    if plain_name(path[-1]) in LABELS and not looks_like_content(value):
        return True  # which kind of question it is
    if answered is None or not isinstance(answer, str):
        return False
    if "[]" in path and is_expected(path[0]) and part_of(path[0]) != "given":
        return True  # what else a test looks for: `expected_tools`
    if _is_of_a_test(path, answered):
        return True
    rival = "reference" in words(path[-1]) and looks_like_content(value) and not is_an_answer(answered)
    return not rival and _stands_behind(row, path, value, (answered, answer))  # a reference is the right answer


def _is_of_a_test(path: Sequence[str], answered: str) -> bool:
    """Whether a text is one of several questions beside the one that is learned, or what a system that was tested had
    found. `answered`: the path of the answer.
    """
    records = part_of(path[0]) == "given" and len(path) > 1 and path[1] != "[]"
    found = is_expected(answered) and (records or any(map(is_retrieved, path)))
    return found or (part_of(path[0]) == "asked" and "[]" in path)


def _stands_behind(row: Row, path: Sequence[str], value: str, said: tuple[str, str]) -> bool:
    """Whether a text stands behind the answer in the same object, and is not where the answer comes from. `said`: the
    path of the answer, and its text.
    """
    answered, answer = said
    *above, name = answered.split(".")
    holder = parsed(at(row, ".".join(above))) if above else row
    if not isinstance(holder, dict) or list(path[: len(above)]) != above or len(path) <= len(above):
        return False
    keys = [str(key) for key in holder]
    beside = path[len(above)]
    if keys == sorted(keys) or beside not in keys or part_of(beside) != "unknown":
        return False
    noted = is_expected(answered) or not _may_hold(value, answer)  # of a question of a test, or of what is known
    return keys.index(beside) > keys.index(name) and noted


def _may_hold(value: str, answer: str) -> bool:
    """Whether an answer may have been taken from a text."""
    if not looks_like_content(answer):
        return True  # a word or a number may come from anywhere
    said, there = _pieces(answer), _pieces(value)
    return len(said & there) >= SHARED_WORDS * len(said)


def _pieces(text: str) -> set[str]:
    """The words of a text; of a script without spaces, every two signs."""
    if len(text.split()) * CHARS_A_WORD < len(text) and not text.isascii():
        return {text[i : i + 2] for i in range(len(text) - 1)}
    return {word.strip(".,;:!?\"'()").lower() for word in text.split()} - {""}


def refuse_half_of_an_agent(row: Row, used: Sequence[tuple[str, ...]], answer: Any) -> None:
    """Raises RowRefused where a question and an answer stand beside what an agent did to get from one to the other.
    What an answer that is a query found came after it.
    """
    for name, value in row.items():
        if not (value and parsed(value) and isinstance(parsed(value), list)) or (name,) in used:
            continue
        if is_found(name) and is_query(answer):
            continue
        if _is_of_an_agent(name):
            raise RowRefused("unexplained-column", f"{name[:60]!r}: what was done between question and answer")
        if "history" in words(name):
            raise RowRefused("wrong-type", f"{name[:60]!r}: what was said before, and nothing says by whom")


def _is_of_an_agent(name: str) -> bool:
    return bool(_OF_AN_AGENT & set(words(name))) and part_of(name) not in ("note", "about")


def is_beside(path: Sequence[str]) -> bool:
    """Whether a text beside a list of turns says nothing in it: what a conversation is about, or what came of it. A
    document that was talked about, or a prompt, is content.
    """
    parts = {part_of(name) for name in path if name != "[]"}
    if len(path) > 1 and plain_name(path[0]) == "instance":
        return True  # the whole task of a benchmark, beside what an agent did with it
    if any(map(_is_of_an_agent, path)):
        return False
    return not parts & {"given", "system", "asked", "answered", "thoughts", "tools", "content", "media"}


def refuse_of_a_test(row: Row, answered: str, answer: Any) -> None:
    """Raises RowRefused where something else was expected: then a system under test gave this answer. Where the row
    expects something of a record that holds what was expected itself, a judge is tested with answers that may be wrong.
    """
    above = answered.split(".")[:-1]
    expected = at(row, ".".join((*above, "expected")))
    if isinstance(expected, str) and expected.strip() and expected.strip() != str(answer).strip():
        raise RowRefused("unexplained-column", f"{answered} is not what was expected")
    if above and expected is not None and row.get("expected") is not None:
        raise RowRefused("unexplained-column", f"{'.'.join(above)} is what a judge is tested with")


def other_by_letter(row: Row, answered: list[str]) -> list[str]:
    """The other one of two answers that letters tell apart: `completion_b` of `completion_a`."""
    others = [f"{path[:-1]}{'ab'[path.endswith('_a')]}" for path in answered if path.endswith(("_a", "_b"))]
    return [path for path in others if path not in answered and isinstance(at(row, path), str)]


def led_to(row: Row) -> list[str]:
    """The column of what thoughts led to, where it stands behind them as the only other one beside a question: words,
    or a call.
    """
    told = [name for name, value in row.items() if part_of(name) != "note" and value not in (None, "")]
    if len(told) != 3 or part_of(told[0]) != "asked" or part_of(told[2]) != "unknown" or is_class(told[2]):
        return []
    thoughts = part_of(told[1]) == "thoughts" or words(told[1]) == ("analysis",)
    text = row[told[2]]
    says = isinstance(text, str) and (looks_like_content(text) or text.rstrip().endswith(")"))
    return told[2:] if thoughts and says else []


def is_within(row: Row, path: str, others: Sequence[str]) -> bool:
    """Whether one of the other texts says what stands at `path`; else a system that was tested may have given them."""
    said = str(at(row, path)).strip().lower()
    return any(said in str(at(row, other)).lower() for other in others)


def text_to_follow(row: Row, asked: list[str]) -> list[str]:
    """The only text that an instruction, where that alone is asked, is to be followed with."""
    if not asked or words(asked[0]) != ("instruction",):
        return []
    texts = [name for name, value in row.items() if plain_name(name) in WRITTEN and looks_like_content(value)]
    told = str(at(row, asked[0])).strip()  # a text with the instruction in it is the whole row
    return texts if len(texts) == 1 and isinstance(text := row[texts[0]], str) and told not in text else []


def replied_to(row: Row, answered: list[str]) -> list[str]:
    """The comment or the like that a response replies to, in a row of these two."""
    if len(answered) != 1 or len(row) != 2 or not set(words(answered[0])) & _REPLIES:
        return []
    others = [name for name in row if name not in answered and set(words(name)) & _REPLIED_TO]
    return others if all(isinstance(row[name], str) for name in row) else []


def references(row: Row, asked: list[str], answered: list[str]) -> list[str]:
    """The text called `reference` beside what a system under test said; beside an `answer` it may be where that is
    from.
    """
    if not asked or not answered or any(map(is_an_answer, answered)):
        return []
    named = (path for path in open_paths(row) if words(path.rpartition(".")[2]) == ("reference",))
    return [path for path in named if looks_like_content(at(row, path)) and path not in answered]


def right_answer(row: Row, asked: list[str]) -> list[str]:
    """The text called `reference` beside a question that nothing else answers."""
    named = [path for path in open_paths(row) if words(path.rpartition(".")[2]) == ("reference",)] if asked else []
    return [path for path in named if isinstance(value := at(row, path), str) and _is_written(value)]


def _is_written(value: str) -> bool:
    """Whether a text is more than the name of something: prose or code."""
    return looks_like_content(value) or any(sign in value for sign in "(){}=;")
