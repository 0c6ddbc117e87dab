"""The only question and the only answer of a row, by the words in the names of their paths."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.answers import is_response
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.rendered import goes_on, without_end
from hivetune.data.pieces.said import Row, all_texts, names, parsed, texts_in
from hivetune.data.pieces.turns import is_conversation, read_messages, read_system
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.given import (
    WRITTEN,
    is_within,
    led_to,
    named_choice,
    other_by_letter,
    references,
    refuse_of_a_test,
    replied_to,
    right_answer,
    text_to_follow,
    with_given,
)
from hivetune.data.rows.find.leaves import at, is_copied, open_paths, system_in
from hivetune.data.rows.find.made import made_of, premise_of, with_code
from hivetune.data.rows.find.names import (
    SHORTENED,
    answers_somehow,
    are_alternatives,
    are_of_parties,
    asks_somehow,
    is_a_models,
    is_a_question,
    is_an_answer,
    is_asked_by_its_like,
    is_expected,
    is_proof,
    is_statement,
    is_true,
    is_verdict,
    part_of,
    words,
)
from hivetune.data.rows.find.talk.turn_lists import TALK, both_sides
from hivetune.data.rows.find.written import Written
from hivetune.data.rows.layouts.columns import looks_like_content, stands_in
from hivetune.data.rows.layouts.pairs import LABELS, spoken_prompt
from hivetune.records import Message

QUESTION_WORDS = 2  # of a question that is known by its place alone
_TASKS = ("instruction", "instructions", "definition", "task_description", "task_definition", "task_instruction")
_CLASSED = names("issue ticket complaint problem inquiry enquiry")  # of a question or a prompt its topic is no answer
_RESULTS = {("answer",), ("final", "answer"), ("short", "answer")}
_SOLUTIONS = {("solution",), ("full", "answer"), ("long", "answer")}
_WORKED = _RESULTS | _SOLUTIONS
_SOURCES = names("article document dialogue dialog conversation transcript passage story report email post review")
_CONTEXTS = ("context", "contexts")  # of a dialogue, or of a question that nobody wrote down apart
# JSON, JSON in JSON, or how Python shows an object.
_CODE = re.compile(r"""\s*"?[\[{]\s*\\?["'{\[]""")

_ANSWERS = names("answer answers output response completion reply")


class FoundPair(NamedTuple):
    """What was asked and answered. `used`: the paths that this was read from; `changed`: reasons of severity warn;
    `answered`: the path of the answer, and `answer` its text; `made`: the names of all columns were looked at.
    """

    messages: list[Message]
    used: tuple[tuple[str, ...], ...]
    changed: tuple[str, ...]
    answered: str
    answer: Any
    made: bool


def read_pair(row: Row, decided: "PairSpots | None" = None) -> FoundPair:
    """The only question and the only answer, or those that were decided for the file; other answers are counted.

    Raises RowRefused.
    """
    spots = decided or spots_in(row)
    question, answer = at(row, spots.asked), at(row, spots.answered)
    answer = str(answer) if isinstance(answer, int | float) else answer
    if isinstance(turns := parsed(question), list) and is_conversation(turns):
        question, answer = turns, parsed(answer)
    refuse_of_a_test(row, spots.answered, answer)
    if decided is not None:
        _refuse_no_text(question, answer)
    elif not spots.made:
        _refuse_doubt(row, spots, question, answer)
    if spots.task is not None and isinstance(question, str):
        question = _joined(_lines(at(row, spots.task)), question)
    given = answer[0] if all_texts(answer) else answer
    learned = _without_end(given, question)
    said = {"role": "assistant", "content": learned, **_thoughts(row)}
    asked = with_given(row, spots.asked, question, learned, spots.answered)
    messages = [*_before(row, asked), *read_messages([said], None)]
    beside = [*spots.judged, *([spots.task] if spots.task else [])]
    used = tuple(tuple(path.split(".")) for path in (spots.asked, spots.answered, *beside))
    used += tuple(path[:-1] for path in used[2:] if len(path) > 1)  # with all that was written about it there
    changed = _told(spots, answer, bare=learned != given)
    return FoundPair(messages, used, changed, spots.answered, learned, spots.made)


def _told(spots: "PairSpots", answer: Any, *, bare: bool) -> tuple[str, ...]:
    """The reasons of severity warn. `bare`: marks of a template were taken off the answer."""
    reasons = {
        "other-answers": bool(spots.judged) or (isinstance(answer, list) and len(answer) > 1),
        "turns-from-text": bare,
        "json-answer": isinstance(answer, Written),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _without_end(answer: Any, question: Any) -> Any:
    return without_end(answer, question) if isinstance(answer, str) and isinstance(question, str) else answer


class PairSpots(NamedTuple):
    """Paths: of the question, of the answer, of what to do with the question, of answers that are not learned. `made`:
    the names say that the answer was made of the question, so it may stand in it.
    """

    asked: str
    answered: str
    task: str | None
    judged: list[str]
    made: bool = False


def spots_in(row: Row) -> PairSpots:
    """Raises RowRefused where there is not one question with one answer."""
    if (pair := made_of(row)) is not None:
        if at(row, pair[1]) in (None, ""):
            raise RowRefused("empty-answer", f"{pair[1]} is empty: --columns text={pair[0]} learns the texts whole")
        return PairSpots(*pair, premise_of(row), [], made=True)
    asked, answered = _sides(row)
    answered = [*answered, *references(row, asked, answered), *other_by_letter(row, answered)]
    to_learn = _to_learn(_gold(row, _worked_out(row, answered)))
    to_learn = to_learn or named_choice(row) or right_answer(row, asked)
    asked, to_learn = with_code(row, asked, to_learn)
    task, asked = _task_of(asked if len(asked) > 1 else [*asked, *text_to_follow(row, asked)])
    asked = asked or _statements(row, to_learn) or _asks_somehow(row, to_learn) or _by_its_look(row, to_learn)
    judged = _other_answers(row, answered, to_learn)
    if len(asked) != 1 or len(to_learn) != 1:
        _refuse_empty_answer(row, asked, to_learn)
        raise RowRefused("unknown-layout", f"columns {', '.join(str(key)[:30] for key in list(row)[:8]) or 'none'}")
    return PairSpots(asked[0], to_learn[0], task, judged)


def _refuse_empty_answer(row: Row, asked: list[str], to_learn: list[str]) -> None:
    """Raises RowRefused where only a column without a value is one for the answer."""
    for name, value in row.items() if asked and not to_learn else ():
        is_empty = value in (None, "", []) or (isinstance(value, dict) and not any(value.values()))
        if is_empty and (part_of(name) == "answered" or are_alternatives(name) or answers_somehow(name)):
            raise RowRefused("empty-answer", f"the column {name[:40]!r} is empty in this row")


def _sides(row: Row) -> tuple[list[str], list[str]]:
    """As `sides_of`; where no name says plainly which text is the answer, one that says it weakly."""
    asked, answered = sides_of(row)
    opened = open_paths(row)
    if answered or any(isinstance(one, int | float) and part_of(path) == "answered" for path, one in opened.items()):
        return asked, answered  # of a program beside its result either may be the answer
    return asked, _weakly_answered(row, asked)


def _asks_somehow(row: Row, answered: list[str]) -> list[str]:
    """Paths of questions by the last word of their names, beside an answer by name."""
    opened = open_paths(row) if len(answered) == 1 else {}
    texts = {path: value for path, value in opened.items() if isinstance(value, str)}
    return [path for path, value in texts.items() if asks_somehow(path) and looks_like_content(value)]


def _statements(row: Row, answered: list[str]) -> list[str]:
    """Paths of what a proof, if that is the answer, proves."""
    if len(answered) != 1 or not is_proof(answered[0]):
        return []
    return [path for path, value in open_paths(row).items() if isinstance(value, str) and is_statement(path)]


def _other_answers(row: Row, answered: list[str], to_learn: list[str]) -> list[str]:
    """The answers that are not learned; beside one that is said to be right, those that are weakly named too."""
    others = _weakly_answered(row, to_learn) if any(map(is_expected, to_learn)) else []
    return [path for path in dict.fromkeys([*answered, *others]) if path not in to_learn]


def _weakly_answered(row: Row, asked: list[str]) -> list[str]:
    """Paths of answers by the last word of their names, where nothing is asked those of a short form of a text or of a
    question named alike; else, in a row of a text and its class alone, the class.
    """
    opened = open_paths(row)
    found = [path for path, value in opened.items() if isinstance(value, str) and answers_somehow(path)]
    if not asked:
        proofs = any(map(is_statement, opened))
        shorts = [path for path in found if SHORTENED & set(words(path.rpartition(".")[2]))]
        return shorts or [path for path in found if (proofs and is_proof(path)) or is_asked_by_its_like(path, opened)]
    if found or len(row) != 2 or not any(_CLASSED & set(words(name)) for name in row):
        return found or led_to(row)
    return [name for name in row if plain_name(name) in LABELS and isinstance(row[name], str)]


def _task_of(asked: list[str]) -> tuple[str | None, list[str]]:
    """(the path of what to do, the path of what to do it with) of two questions, as Alpaca and its like have them."""
    tasks = [path for path in asked if plain_name(path) in _TASKS or words(path) == ("instruction",)]
    return (tasks[0], [path for path in asked if path != tasks[0]]) if len(asked) == 2 and tasks else (None, asked)


def _joined(task: str, question: str) -> str:
    """What to do and what to do it with; one of them alone where it holds the other."""
    for whole, piece in ((task, question), (question, task)):
        if looks_like_content(piece) and stands_in(piece.strip(), whole):
            return whole.strip()
    return f"{task}\n{question}".strip()


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_its_look(row: Row, answered: list[str]) -> list[str]:
    """The question of a row whose names tell only the answer: the only other text that somebody wrote, if it asks
    something or is what an answer is given to.
    """
    texts = {path: value for path, value in open_paths(row).items() if isinstance(value, str) and path not in answered}
    written = [path for path, value in texts.items() if looks_like_content(value) and not _is_about(path)]
    if replied := replied_to(row, answered):
        return replied
    if len(written) != 1 or len(answered) != 1 or plain_name(answered[0]) in LABELS:
        return []  # the class of a text
    said = set(words(answered[0].rpartition(".")[2]))
    if (uncut := _not_cut_apart(row, texts[written[0]])) and is_an_answer(answered[0]):
        return [uncut]
    if said & SHORTENED:
        return written if _is_source(row, written[0], answered[0]) else []
    asks = texts[written[0]].rstrip().endswith(("?", "\uff1f"))
    if plain_name(written[0]) in WRITTEN and _is_the_answer(answered[0], asks=asks):
        return written  # whatever is answered was asked, in the words of any row
    return written if _is_answered(row, written[0], answered[0], asks=asks) else []


def _is_the_answer(path: str, *, asks: bool) -> bool:
    """Whether a name is one of an answer; `asks`: beside a question, it may say that the answer is the right one."""
    return plain_name(path) in _ANSWERS or (asks and is_expected(path) and bool(_ANSWERS & set(words(path))))


def _not_cut_apart(row: Row, text: str) -> str | None:
    """The column that holds a text as it was before its words were cut apart, as sets in Chinese have both."""
    bare = "".join(text.split())
    texts = ((name, value) for name, value in row.items() if isinstance(value, str) and len(value) < len(text))
    return next((name for name, value in texts if "".join(value.split()) == bare), None)


def _is_answered(row: Row, path: str, answered: str, *, asks: bool) -> bool:
    """Whether the text at `path` was asked or given, by its look. `asks`: it ends so."""
    if TALK & set(words(path)):
        return False  # what several people said
    is_given = plain_name(path.rpartition(".")[2]) in _CONTEXTS
    if not looks_like_content(at(row, answered)):
        return is_given and (asks or _leads_on(row, set(words(answered.rpartition(".")[2]))))
    return is_given or asks


def _leads_on(row: Row, said: set[str]) -> bool:
    """Whether an answer goes on where its context ends, or thoughts lead from the one to the other."""
    return "continuation" in said or bool(_thoughts(row))


def _is_source(row: Row, path: str, short: str) -> bool:
    """Whether a text is what the short form at `short` was made of: by its name, its length, and as the row has nothing
    else.
    """
    others = (part_of(name) for name in row if name not in (path, short))
    long = len(at(row, path)) > len(at(row, short))
    return long and bool(_SOURCES & set(words(path))) and all(part == "note" for part in others)


def _is_about(path: str) -> bool:
    return any(part_of(name) in ("about", "thoughts", "system") for name in path.split("."))


def _refuse_doubt(row: Row, spots: PairSpots, question: Any, answer: Any) -> None:
    """Raises RowRefused where a question and an answer by name may be none."""
    asked, answered = spots.asked, spots.answered
    if isinstance(answer, str) and goes_on(answer):
        raise RowRefused("rendered-text")
    is_talk = isinstance(question, list)  # the whole prompt; what answers it stands in notes about it
    depths = _named_depths(asked, "asked")
    if any(isinstance(at(row, ".".join(asked.split(".")[:depth])), str) for depth in range(1, asked.count(".") + 1)):
        depths = {max(depths)}  # below a text that is an object: that text may be the question
    if not is_talk and depths.isdisjoint(_named_depths(answered, "answered")):
        raise RowRefused("unknown-layout", f"{asked} and {answered} are parts of different things")
    one_word = isinstance(question, str) and len(question.split()) < QUESTION_WORDS and question.isascii()
    named = is_a_question(asked) or are_of_parties(asked, answered) or spots.task is not None
    if one_word and not named:
        raise RowRefused("unknown-layout", f"{asked} is one word: nothing says that it is the question")
    _refuse_pieces(spots, question, answer)


def _refuse_no_text(question: Any, answer: Any) -> None:
    """Raises RowRefused where the columns that were decided for a file hold no question and no answer."""
    texts = [one for one in (question, answer) if isinstance(one, str) and one.strip() and not _CODE.match(one)]
    if len(texts) < 2 or goes_on(texts[1]):
        raise RowRefused("unknown-layout", "a row unlike the others of its file")


def _refuse_pieces(spots: PairSpots, question: Any, answer: Any) -> None:
    """Raises RowRefused where the answer is a piece of the question, or one of the two an object."""
    if isinstance(answer, Written):
        return
    if isinstance(question, str) and is_copied(str(answer), question, spots.answered):
        raise RowRefused("unknown-layout", f"{spots.answered} stands in {spots.asked} word for word")
    if (isinstance(question, str) and _CODE.match(question)) or (isinstance(answer, str) and is_response(answer)):
        raise RowRefused("unknown-layout", f"{spots.asked} is an object that was written as text")


def _before(row: Row, question: Any) -> list[Message]:
    """Everything in front of the answer."""
    spoken = spoken_prompt(question) if isinstance(question, str) else None
    if spoken or (isinstance(question, list) and is_conversation(question)):
        return read_messages(spoken or question, system_in(row))
    return [*read_system(system_in(row)), *read_messages([{"role": "user", "content": question}], None)]


def _thoughts(row: Row) -> dict[str, str]:
    named = (path for path in open_paths(row) if part_of(path.rpartition(".")[2]) == "thoughts")
    thoughts = next((at(row, path) for path in named), None)
    return {"reasoning_content": thoughts} if isinstance(thoughts, str) else {}


def sides_of(row: Row) -> tuple[list[str], list[str]]:
    """(paths of questions, paths of answers) by their names, each text once."""
    opened = open_paths(row)
    asked, answered = both_sides(opened)
    if len(turns := [path for path in asked if isinstance(opened[path], list) and is_conversation(opened[path])]) == 1:
        said = "\n".join(texts_in(opened[turns[0]]))
        asked = [path for path in asked if path in turns or str(opened[path]).strip() not in said]
    written = [path for path in answered if plain_name(path) not in LABELS]  # beside an answer, a class is about it
    targets = [path for path in answered if plain_name(path) == "target" and not is_within(row, path, written)]
    return _different(row, _nearest(row, asked)), _different(row, [*written, *targets] or answered)


def _nearest(row: Row, paths: list[str]) -> list[str]:
    """Of several texts in one object that is called a question those that are one, by their names or their length."""
    named = [path for path in paths if part_of(path.rpartition(".")[2]) == "asked"]
    written = [path for path in paths if path in named or looks_like_content(at(row, path))]
    written = written if len(paths) > 1 and written else paths
    one = [path for path in written if isinstance(at(row, path), str)]
    lists = [path for path in written if isinstance(many := at(row, path), list) and len(many) > 1]
    return one if len(one) == 1 and len(one) + len(lists) == len(written) else written  # `queries` made of a `query`


def _to_learn(paths: list[str]) -> list[str]:
    """The answers but those of a model that stand beside one other; else the only one that is said to be right."""
    others = [path for path in paths if not is_a_models(path)]
    expected = [path for path in paths if is_expected(path)]
    if any(is_an_answer(path) for path in paths if path not in expected):
        expected = [path for path in expected if is_true(path)]  # `correct` and `answer`: either may be what was said
    best = [path for path in paths if "best" in words(path.rpartition(".")[2])]  # `correct` ones lie beside it
    return next((some for some in (best, others, expected) if len(some) == 1), paths)


def _worked_out(row: Row, paths: list[str]) -> list[str]:
    """Of an answer and of how it was found the latter, which is longer; of two that may be either, the longer one where
    it ends with the other.
    """
    if len(paths) != 2:
        return paths
    names = [words(path.rpartition(".")[2]) for path in paths]
    texts = [str(at(row, path)).strip() for path in paths]
    short, long = sorted(texts, key=len)
    if set(names) & _SOLUTIONS and set(names) & _RESULTS:
        return [paths[texts.index(long)]]
    known = [name in _WORKED for name in names]
    return [paths[texts.index(long)]] if all(known) and names[0] != names[1] and stands_in(short, long) else paths


def _gold(row: Row, paths: list[str]) -> list[str]:
    """Of an answer and what a model said, beside a word on whether that is right, the answer."""
    judged = len(paths) > 1 and any(is_verdict(name, value) for name, value in row.items())
    return [path for path in paths if is_an_answer(path)] or paths if judged else paths


def _named_depths(path: str, part: str) -> set[int]:
    """How deep the names stand that say what a path holds."""
    names = path.split(".")
    return {i for i, name in enumerate(names) if part_of(name) == part} or {len(names) - 1}


def _different(row: Row, paths: Sequence[str]) -> list[str]:
    """One path for each text."""
    return list({str(at(row, path)).strip(): path for path in reversed(paths)}.values())
