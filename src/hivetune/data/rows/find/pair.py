"""The only question and the only answer of a row, by the words in the names of their paths."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.given import named_choice, with_given
from hivetune.data.rows.find.leaves import at, nodes
from hivetune.data.rows.find.names import (
    answers_somehow,
    is_a_models,
    is_a_question,
    is_an_answer,
    is_expected,
    is_note,
    part_of,
    words,
)
from hivetune.data.rows.find.talk.turn_lists import TALK, both_sides
from hivetune.data.rows.layouts.answers import is_response
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.pairs import LABELS, spoken_prompt
from hivetune.data.rows.layouts.said import Row, names
from hivetune.data.rows.layouts.turns import read_messages, read_system
from hivetune.data.rows.sessions.rendered import goes_on
from hivetune.records import Message

QUESTION_WORDS = 2  # of a question that is known by its place alone
_QUERY = re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE|CREATE|MATCH|PREFIX)\s", re.I)
_NEXT_QUERY = re.compile(r";\s*(?:SELECT|WITH)\s", re.I)
_TASKS = ("instruction", "instructions", "definition", "task_description", "task_definition", "task_instruction")
_PARTIES = ("user", "agent")  # who it was; or, beside the other's words, what they said
_CLASSED = names("issue ticket complaint problem inquiry enquiry")  # of a question or a prompt its topic is no answer
_CONTEXTS = ("context", "contexts")  # of a dialogue, or of a question that nobody wrote down apart
# JSON, JSON in JSON, or how Python shows an object.
_CODE = re.compile(r"""\s*"?[\[{]\s*\\?["'{\[]""")


class FoundPair(NamedTuple):
    """What was asked and answered. `used`: the paths that this was read from; `changed`: reasons of severity warn;
    `answered`: the path of the answer, and `answer` its text.
    """

    messages: list[Message]
    used: tuple[tuple[str, ...], ...]
    changed: tuple[str, ...]
    answered: str
    answer: Any


def read_pair(row: Row) -> FoundPair:
    """The only question and the only answer; other answers are counted. Raises RowRefused."""
    asked, answered = _sides(row)
    to_learn = _to_learn(answered)
    asked, to_learn = _with_code(row, asked, to_learn or named_choice(row))
    task, asked = _task_of(asked)
    asked = asked or _by_its_look(row, to_learn)
    judged = _other_answers(row, answered, to_learn)
    if len(asked) != 1 or len(to_learn) != 1:
        raise RowRefused("unknown-layout", f"columns {', '.join(str(key)[:30] for key in list(row)[:8]) or 'none'}")
    question, answer = at(row, asked[0]), at(row, to_learn[0])
    _refuse_doubt(asked[0], to_learn[0], question, answer)
    if task is not None and isinstance(question, str):
        question = f"{_lines(at(row, task))}\n{question}".strip()
    several = isinstance(answer, list) and all(isinstance(text, str) for text in answer)
    learned = answer[0] if several else answer
    said = {"role": "assistant", "content": learned, **_thoughts(row)}
    messages = [*_before(row, with_given(row, asked[0], question, learned)), *read_messages([said], None)]
    used = tuple(tuple(path.split(".")) for path in (asked[0], to_learn[0], *judged, *([task] if task else [])))
    changed = ("other-answers",) if judged or (several and len(answer) > 1) else ()
    return FoundPair(messages, used, changed, to_learn[0], learned)


def _sides(row: Row) -> tuple[list[str], list[str]]:
    """As `sides_of`; where no name says plainly which text is the answer, one that says it weakly."""
    asked, answered = sides_of(row)
    return asked, answered or (_weakly_answered(row) if asked else [])


def _other_answers(row: Row, answered: list[str], to_learn: list[str]) -> list[str]:
    """The answers that are not learned; beside one that is said to be right, those that are weakly named too."""
    others = _weakly_answered(row) if any(map(is_expected, to_learn)) else []
    return [path for path in dict.fromkeys([*answered, *others]) if path not in to_learn]


def _weakly_answered(row: Row) -> list[str]:
    """Paths of answers by the last word of their names; else, in a row of a text and its class alone, the class."""
    found = [path for path, value in open_paths(row).items() if isinstance(value, str) and answers_somehow(path)]
    if found or len(row) != 2 or not any(_CLASSED & set(words(name)) for name in row):
        return found
    return [name for name in row if plain_name(name) in LABELS and isinstance(row[name], str)]


def _with_code(row: Row, asked: list[str], answered: list[str]) -> tuple[list[str], list[str]]:
    """(questions, answers): of two questions, one that is a query in a language of databases answers the other."""
    if len(asked) == 2 and not answered:
        queries = [path for path in asked if isinstance(text := at(row, path), str) and _QUERY.match(text)]
        if len(queries) == 1 and not _NEXT_QUERY.search(at(row, queries[0])):  # else all that would be right
            return [path for path in asked if path != queries[0]], queries
    return asked, answered


def _task_of(asked: list[str]) -> tuple[str | None, list[str]]:
    """(the path of what to do, the path of what to do it with) of two questions, as Alpaca and its like have them."""
    tasks = [path for path in asked if plain_name(path) in _TASKS]
    return (tasks[0], [path for path in asked if path != tasks[0]]) if len(asked) == 2 and tasks else (None, asked)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_its_look(row: Row, answered: list[str]) -> list[str]:
    """The question of a row whose names tell only the answer: the only other text that somebody wrote, if it asks
    something or is what an answer is given to.
    """
    texts = {path: value for path, value in open_paths(row).items() if isinstance(value, str) and path not in answered}
    written = [path for path, value in texts.items() if looks_like_content(value) and not _is_about(path)]
    if len(written) != 1 or len(answered) != 1 or not looks_like_content(at(row, answered[0])):
        return []
    if plain_name(answered[0]) in LABELS or TALK & set(words(written[0])):
        return []  # the class of a text; or what several people said
    is_given = plain_name(written[0].rpartition(".")[2]) in _CONTEXTS
    return written if is_given or texts[written[0]].rstrip().endswith(("?", "\uff1f")) else []


def _is_about(path: str) -> bool:
    return any(part_of(name) in ("about", "thoughts", "system") for name in path.split("."))


def _refuse_doubt(asked: str, answered: str, question: Any, answer: Any) -> None:
    """Raises RowRefused where a question and an answer by name may be none."""
    if isinstance(answer, str) and goes_on(answer):
        raise RowRefused("rendered-text")
    if max(_named_depths(asked, "asked")) not in _named_depths(answered, "answered"):
        raise RowRefused("unknown-layout", f"{asked} and {answered} are parts of different things")
    one_word = isinstance(question, str) and len(question.split()) < QUESTION_WORDS and question.isascii()
    if one_word and not is_a_question(asked):
        raise RowRefused("unknown-layout", f"{asked} is one word: nothing says that it is the question")
    if (isinstance(question, str) and _CODE.match(question)) or (isinstance(answer, str) and is_response(answer)):
        raise RowRefused("unknown-layout", f"{asked} is an object that was written as text")


def _before(row: Row, question: Any) -> list[Message]:
    """Everything in front of the answer."""
    spoken = spoken_prompt(question) if isinstance(question, str) else None
    if spoken:
        return read_messages(spoken, system_in(row))
    return [*read_system(system_in(row)), *read_messages([{"role": "user", "content": question}], None)]


def _thoughts(row: Row) -> dict[str, str]:
    named = (path for path in open_paths(row) if part_of(path.rpartition(".")[2]) == "thoughts")
    thoughts = next((at(row, path) for path in named), None)
    return {"reasoning_content": thoughts} if isinstance(thoughts, str) else {}


def sides_of(row: Row) -> tuple[list[str], list[str]]:
    """(paths of questions, paths of answers) by their names, each text once."""
    asked, answered = both_sides(open_paths(row))
    written = [path for path in answered if plain_name(path) not in LABELS]  # beside an answer, a class is about it
    return _different(row, _nearest(row, asked)), _different(row, written or answered)


def _nearest(row: Row, paths: list[str]) -> list[str]:
    """Of several texts in one object that is called a question those that are one, by their names or their length."""
    named = [path for path in paths if part_of(path.rpartition(".")[2]) == "asked"]
    written = [path for path in paths if path in named or looks_like_content(at(row, path))]
    return written if len(paths) > 1 and written else paths


def _to_learn(paths: list[str]) -> list[str]:
    """The answers but those of a model that stand beside one other; else the only one that is said to be right."""
    others = [path for path in paths if not is_a_models(path)]
    expected = [path for path in paths if is_expected(path)]
    if any(is_an_answer(path) for path in paths if path not in expected):
        expected = []  # `truth` and `answer`: either may be what was said
    return next((some for some in (others, expected) if len(some) == 1), paths)


def _named_depths(path: str, part: str) -> set[int]:
    """How deep the names stand that say what a path holds."""
    names = path.split(".")
    return {i for i, name in enumerate(names) if part_of(name) == part} or {len(names) - 1}


def _different(row: Row, paths: Sequence[str]) -> list[str]:
    """One path for each text."""
    return list({str(at(row, path)).strip(): path for path in reversed(paths)}.values())


def open_paths(row: Row) -> dict[str, Any]:
    """The texts of a row that stand in no list and below no note."""
    found: dict[str, Any] = {}
    for path, value in nodes(row):
        if is_note(path) and plain_name(path[-1]) not in _PARTIES and not _is_reply(path[-1], value):
            continue
        if any(part_of(name) == "media" or "." in name for name in path) or "[]" in path:
            continue
        if isinstance(value, dict):
            continue
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            value = value[0] if len(set(value)) == 1 else value
        found[".".join(path)] = value
    return found


def _is_reply(name: str, value: Any) -> bool:
    """Whether a name that begins as a note's does is one for an answer: `gen_alpha_reply`."""
    return answers_somehow(name) and isinstance(value, str) and looks_like_content(value)


def system_in(row: Row) -> Any:
    found = [node for node in nodes(row) if part_of(node.path[-1]) == "system" and isinstance(node.value, str | list)]
    texts = {str(node.value): node.value for node in found if node.value}
    return next(iter(texts.values())) if len(texts) == 1 else None
