"""The lines of the config that would read rows that nothing reads: the likeliest first, each tried on all of a file's
first rows before it is printed. A line that reads something else than its question and its answer is worse than none.
"""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.fields import NO, YES, as_time, plain_name
from hivetune.data.pieces.said import Row, names, objects
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.asking.by_place import alone, guesses_by_place, is_a_number
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.leaves import Node, is_copied, nodes
from hivetune.data.rows.find.made import is_class, judged_together, pairs_by_name
from hivetune.data.rows.find.names import (
    answers_somehow,
    can_answer,
    can_ask,
    is_expected,
    is_retrieved,
    is_verdict,
    is_wrong_answer,
    likely_contents,
    names_role,
    part_of,
    role_of,
    words,
)
from hivetune.data.rows.find.pair import sides_of
from hivetune.data.rows.find.talk.turn_lists import TALK, as_turns, flat, names_party
from hivetune.data.rows.layouts.columns import CHOICE, looks_like_content, names_document
from hivetune.data.rows.layouts.mapped import AND, AS_JSON, map_columns, value_of
from hivetune.data.rows.layouts.pairs import LABELS

MAX_TRIED, MAX_GUESSES = 12, 100
MAX_LINES = 3
READ_SHARE = 0.8  # of the rows, that a line has to read
FEW_ROWS = 3  # in which every answer may be the same by chance
_OF_OTHERS = names("span spans case cases sample samples example examples test tests item items chunk chunks result")
_OF_A_PARTY = names("id role sender speaker author user worker from side party")
_OF_A_STRETCH = names("start end")
_QUOTED = re.compile(r"[^\w.,=+-]")  # what a shell may read otherwise
_ADDRESS = re.compile(r"\s*(?:https?://|www\.|[\w./-]*/)\S+\s*\Z")


class Line(NamedTuple):
    """A column map, the question and the answer of the first row that it reads, and how many rows it reads. `guessed`:
    no name of a column says that it is one of them.
    """

    columns: dict[str, str]
    question: str
    answer: str
    read: int
    guessed: bool = False


def lines_for(rows: Sequence[Row], *, inside: bool = False) -> list[Line]:
    """The maps with which most of these rows are read, the likeliest first; at most MAX_LINES. `inside`: the rows stand
    inside records, as many things do that are none.
    """
    guesses: list[dict[str, str]] = []
    for row in rows[:FEW_ROWS]:
        try:
            guesses += list(itertools.islice(_guesses(row), MAX_GUESSES))
        except (RowRefused, RecursionError):
            continue  # it holds more than anybody would look through
    guesses = [one for i, one in enumerate(guesses) if one not in guesses[:i]]
    guesses = [_with_system(rows[0], one) for one in guesses]
    likely = itertools.islice((one for one in guesses if _is_likely(rows, one)), MAX_TRIED)
    found = (line for columns in likely if (line := _tried(rows, columns)) is not None)
    named = list(itertools.islice(found, MAX_LINES))
    return named or _by_place(rows, inside=inside)


def _by_place(rows: Sequence[Row], *, inside: bool) -> list[Line]:
    """The lines that a person would try where no name and no refusal tells one."""
    if not rows or any(map(_is_told, rows[:FEW_ROWS])):
        return []
    lines = (
        _tried(rows, _with_system(rows[0], columns))
        for columns in (alone(rows[0]) if inside else guesses_by_place(rows))
    )
    return [line._replace(guessed=True) for line in lines if line is not None][:MAX_LINES]


def as_option(columns: Mapping[str, str]) -> str:
    """As it is written on the command line."""
    named = ",".join(f"{ours}={yours}" for ours, yours in columns.items())
    return f"--columns {shlex.quote(named) if _QUOTED.search(named) else named}"


def _with_system(row: Row, columns: dict[str, str]) -> dict[str, str]:
    """A map that names a question, with the column of what is said to the model in front of it."""
    told = [name for name, value in row.items() if part_of(name) == "system" and isinstance(value, str) and value]
    return {**columns, "system": told[0]} if len(told) == 1 and "prompt" in columns else columns


def _is_told(row: Row) -> bool:
    """Whether the refusal of a row names its columns."""
    try:
        read_conversation(row)
    except RowRefused as refused:
        return "--columns" in refused.hint and "=..." not in refused.hint
    except RecursionError:
        return True
    return False


def advised(line: Line) -> str:
    """The line as a refusal says it: who wrote the rows has to decide."""
    if not line.guessed:
        return f"if it is right, read it with {as_option(line.columns)}"
    if "text" in line.columns:
        return f"if each text is to be learned whole: {as_option(line.columns)}"
    return f"if the answer is {_in_words(line.columns['completion'])}: {as_option(line.columns)}"


def _in_words(column: str) -> str:
    *first, last = column.removesuffix(f".{AS_JSON}").split(AND)
    return f"{', '.join(first)} and {last}" if first else last


def _tried(rows: Sequence[Row], columns: dict[str, str]) -> Line | None:
    shown: tuple[str, str] | None = None
    read = 0
    for row in rows:
        try:
            messages = read_conversation(map_columns(row, columns), mapped=True).messages
        except (RowRefused, RecursionError):
            continue
        read += 1
        asked = next((message.content for message in messages if message.role == "user"), "")
        shown = shown or (asked, messages[-1].content)
    return Line(columns, *shown, read) if shown is not None and read >= READ_SHARE * len(rows) else None


def _is_likely(rows: Sequence[Row], columns: Mapping[str, str]) -> bool:
    """Whether the answers look like answers over all rows, and nothing that belongs to the question is left out."""
    if "messages" in columns:
        parties = {columns.get("user_role", "").lower(), columns.get("assistant_role", "").lower()} - {"0", "1"}
        return not parties & (YES | NO)
    asked, answered = columns["prompt"], columns["completion"]
    if _are_settings(rows, asked, answered) or judged_together((asked, answered)) is not None:
        return False  # the latter: two texts that something was said of together
    if all((asked, answered) in _classes(row) for row in rows[:FEW_ROWS]):
        return not any(map(_is_of_a_stretch, rows[:FEW_ROWS])) and all(
            isinstance(row.get(asked), str) for row in rows[:FEW_ROWS]
        )
    if (
        not can_ask(asked)
        or not can_answer(answered)
        or plain_name(asked) in LABELS
        or _is_another(rows, asked, answered)
    ):
        return False
    answers = [value for row in rows if (value := value_of(row, answered)) not in (None, "", [])]
    if len(answers) < READ_SHARE * len(rows) or (len(answers) >= FEW_ROWS and len(set(map(str, answers))) == 1):
        return False
    if 2 * sum(map(_is_no_answer, answers)) > len(answers):
        return False
    copied = (is_copied(str(value_of(row, answered)), str(value_of(row, asked)), answered) for row in rows)
    if 2 * sum(copied) > len(rows):
        return False
    return not any(_is_needed(row, name, asked, answered) for row in rows[:FEW_ROWS] for name in row)


def _are_settings(rows: Sequence[Row], *sides: str) -> bool:
    """Whether a record alone names columns, and holds no text of its own."""
    return len(rows) == 1 and not any(looks_like_content(value_of(rows[0], name)) for name in sides)


def _is_another(rows: Sequence[Row], asked: str, answered: str) -> bool:
    """Whether the question is what is right, or the answer a body, which stands in front of its question, or what a
    system under test said.
    """
    right = is_expected(asked) and part_of(asked.rpartition(".")[2]) != "asked"
    beside = ".".join((*answered.split(".")[:-1], "expected"))
    tested = beside != answered and any(isinstance(value_of(row, beside), str) for row in rows[:FEW_ROWS])
    return right or tested or plain_name(answered) == "body"


def _is_of_a_stretch(row: Row) -> bool:
    """Whether a row says something of a part of its text."""
    return {plain_name(name) for name in row} >= _OF_A_STRETCH


def _is_no_answer(value: Any) -> bool:
    """Whether a value is a number, a time, an address or the name of a file."""
    text = str(value).strip()
    return is_a_number(text) or bool(_ADDRESS.match(text)) or names_document(text) or as_time(text) is not None


def _is_needed(row: Row, name: str, asked: str, answered: str) -> bool:
    """Whether a column tells that the line is wrong: it was given with the question, or it is a better answer."""
    if name in (asked.split(".")[0], answered.split(".")[0]) or row[name] in (None, "", [], {}):
        return False
    if _is_rival_class(name, answered.rpartition(".")[2]):
        return True
    if isinstance(row[name], str) and not is_expected(answered) and _is_better(row, name):
        return True
    task = words(asked)[-1:] == ("instruction",) and part_of(name) == "asked"
    given = (task or part_of(name) == "given" or plain_name(name) == "body") and not is_retrieved(name)
    return given and looks_like_content(row[name]) and str(row[name]) not in str(value_of(row, asked))


def _is_better(row: Row, name: str) -> bool:
    """Whether a column is said to be right, or is the answer beside a verdict: then a model under test gave another."""
    true = is_expected(name) and not is_wrong_answer(name) and part_of(name) in ("answered", "unknown", "content")
    return true or (words(name) == ("answer",) and any(is_verdict(*column) for column in row.items()))


def _is_rival_class(name: str, answered: str) -> bool:
    """Whether a class stands beside what is no answer by its name."""
    is_answer = part_of(answered) == "answered" or answers_somehow(answered)
    return plain_name(name) in LABELS and part_of(name) != "note" and not is_answer


def _guesses(row: Row) -> Iterator[dict[str, str]]:
    """What a person would try: the lists of turns, then a question and an answer by name."""
    yield from _turn_lists(row)
    yield from ({"prompt": text, "completion": made} for text, made in _classes(row))
    questions, replies = sides_of(row)
    asked, answered = _without_several(questions), _without_several(replies)
    answered.sort(key=lambda path: not is_expected(path))
    yield from ({"prompt": one, "completion": other} for one in asked for other in answered if one != other)
    written = _without_several([".".join(node.path) for node in nodes(row) if _is_written(node)])
    written.sort(key=lambda path: (not is_expected(path), not answers_somehow(path)))
    yield from ({"prompt": one, "completion": other} for one in written for other in answered if one != other)
    yield from ({"prompt": one, "completion": other} for one in asked for other in written if one != other)


def _classes(row: Row) -> list[tuple[str, str]]:
    """(text, class) by their names, where several classes, or a column that says something else, made it doubtful; none
    beside a question or anything that was given with one.
    """
    pairs = [pair for pair in pairs_by_name(tuple(row)) if is_class(pair[1])]
    others = (name for name in row if not any(name in pair for pair in pairs))
    beside = any(part_of(name) in ("asked", "answered", "given", "content") or CHOICE.match(name) for name in others)
    doubtful = len({text for text, _ in pairs}) > 1  # of both texts together
    return [] if beside or doubtful or any(part_of(text) in ("asked", "given") for text, _ in pairs) else pairs


def _turn_lists(row: Row) -> Iterator[dict[str, str]]:
    for path, value in nodes(row):
        items = objects(value)
        if items is None or "[]" in path or any("." in name or sum(map(str.isdigit, name)) > 2 for name in path):
            continue
        if (len(items) == 1 and not TALK & set(words(path[-1]))) or _OF_OTHERS & set(words(path[-1])):
            continue  # a list of something else
        if as_turns(value, path[-1]) is not None:
            yield {"messages": ".".join(path)}
        elif (roles := _two_parties([flat(item) for item in items])) is not None:
            yield {"messages": ".".join(path), "user_role": roles[0], "assistant_role": roles[1]}


def _without_several(paths: Sequence[str]) -> list[str]:
    """Without columns of one name with several numbers: of `response 1` and `response 2` neither is it."""
    counts = Counter(map(_without_numbers, paths))
    return [path for path in paths if counts[_without_numbers(path)] == 1]


def _without_numbers(path: str) -> str:
    return ".".join(name.strip("0123456789 _") for name in path.split("."))


def _two_parties(flats: list[dict[str, Any]]) -> tuple[str, str] | None:
    """(who asks, the other) where turns name two speakers that nobody knows."""
    if not likely_contents(iter(flats[0])):
        return None
    for path in sorted(flats[0], key=lambda path: not (names_role(path) or part_of(path) == "unknown")):
        values = [one.get(path) for one in flats]
        if not all(isinstance(value, str | int) and not isinstance(value, bool) for value in values):
            continue
        texts = list(dict.fromkeys(str(value).strip() for value in values))
        if len(texts) == 2 < len(values) and (all(map(names_party, texts)) or _are_ids(path, texts)):
            if role_of(texts[0]) == "assistant" or role_of(texts[1]) == "user":
                return texts[1], texts[0]  # a log may begin with an answer
            return texts[0], texts[1]
    return None


def _are_ids(path: str, texts: Sequence[str]) -> bool:
    """Whether numbers say who speaks: under a name of a role, and not under one that counts something."""
    named = names_role(path) or bool(_OF_A_PARTY & set(words(path)))
    return named and all(text.isdecimal() or names_party(text) for text in texts)


def _is_written(node: Node) -> bool:
    named = "[]" not in node.path and not any("." in name for name in node.path)
    parts = set(map(part_of, node.path))
    return (
        named
        and isinstance(node.value, str)
        and not parts & {"note", "media"}
        and (bool(parts & {"content", "given"}) or answers_somehow(node.path[-1]) or is_expected(node.path[-1]))
        and (looks_like_content(node.value) or is_expected(node.path[-1]))
    )
