"""What a file of no named format may mean: the likeliest mapping and at most two others, each with what it would read.

A suggestion is shown, and a person confirms it. Nothing is trained by one: `data.columns` says how rows are read.
"""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

from hivetune.data.conversation import read_conversation
from hivetune.data.mapping import ROWS, map_columns, rows_at, value_of, write_columns
from hivetune.data.pieces.fields import FACTS, as_number, as_time, plain_name
from hivetune.data.pieces.said import Row, objects, parsed
from hivetune.data.pieces.turns import ROLES
from hivetune.data.reasons import RowRefused

MAX_SUGGESTIONS, SHOWN_ROWS = 3, 3
READ_SHARE = 0.8  # of the rows, that a mapping has to read, and in which a column has to stand
_MAX_DEPTH, _MAX_SPEAKERS = 3, 6
_QUOTED = re.compile(r"[^\w.,=+\[\]-]")  # what a shell may read otherwise
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Words in the names of columns; they order the suggestions, and decide nothing else.
_ASKS = frozenset(
    ("question", "ask", "asked", "prompt", "query", "instruction", "input", "problem", "request", "subject", "title")
)
_ANSWERS = frozenset(
    ("answer", "answered", "reply", "response", "completion", "output", "solution", "resolution", "label", "result")
)


class Suggestion(NamedTuple):
    """A mapping, its (question, answer) of the first rows, the columns that it leaves out, and the number of sample
    rows that it reads.
    """

    columns: dict[str, str]
    shown: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    read: int

    @property
    def option(self) -> str:
        """As it is written on the command line."""
        named = write_columns(self.columns)
        return f"--columns {shlex.quote(named) if _QUOTED.search(named) else named}"


def suggest(records: Sequence[Any]) -> list[Suggestion]:
    """Return the mappings that read most of these records, the likeliest first; at most MAX_SUGGESTIONS."""
    rows = [record for record in records if isinstance(record, dict)]
    suggestions: list[Suggestion] = []
    for columns in _candidates(rows):
        tried = _tried(rows, columns)
        if tried is not None and all(tried.shown != suggestion.shown for suggestion in suggestions):
            suggestions.append(tried)
        if len(suggestions) == MAX_SUGGESTIONS:
            break
    return suggestions


def _tried(records: Sequence[Row], columns: dict[str, str]) -> Suggestion | None:
    shown: list[tuple[str, str]] = []
    read = 0
    rows = [row for record in records for row in rows_at(record, columns[ROWS])] if ROWS in columns else records
    for row in rows:
        try:
            conversation = read_conversation(map_columns(row, columns))
        except (RowRefused, RecursionError):
            continue
        read += 1
        if len(shown) < SHOWN_ROWS:
            questions = [message.content for message in conversation.messages if message.role == "user"]
            shown.append(("\n".join(questions), conversation.messages[-1].content))
    if read < READ_SHARE * max(1, len(rows)) or not any(answer.strip() for _, answer in shown):
        return None
    named = "+".join(columns.values())
    left_out = tuple(path for path, *_ in _columns(rows) if path not in named)
    return Suggestion(columns, tuple(shown), left_out, read)


def _candidates(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield mappings that a person would try: lists of turns, a question with its answer, and both in lists of rows."""
    lists = dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path in _lists(row))
    yield from itertools.chain.from_iterable(_turns(rows, path) for path in lists)
    yield from _pairs(rows)
    for path in lists:
        inside = [row for record in rows for row in rows_at(record, f"{path}[]") if isinstance(row, dict)]
        if len(inside) > 1:
            yield from ({ROWS: f"{path}[]", **columns} for columns in itertools.islice(_pairs(inside), 1))


def _turns(rows: Sequence[Row], path: str) -> Iterator[dict[str, str]]:
    """Yield lists of objects with one field for the speaker and one for the text."""
    lists = [turns for row in rows if (turns := objects(parsed(value_of(row, path))))]
    turns = [turn for turns_of_row in lists for turn in turns_of_row]
    if len(lists) < READ_SHARE * len(rows) or len(turns) < 2 * len(lists):
        return
    columns = _columns(turns)
    if len(columns) < 2:
        return
    text = max(columns, key=lambda column: mean(map(len, column[1])))[0]
    for role, values in columns:
        speakers = list(dict.fromkeys(values))
        if role == text or not 1 < len(speakers) <= _MAX_SPEAKERS:
            continue
        line = {"messages": path, "role": role, "text": text}
        roles = {ROLES.get(speaker.lower()) for speaker in speakers}
        if not ({"user", "assistant"} <= roles and None not in roles):
            likely = [name for name in speakers if ROLES.get(name.lower()) == "assistant"]
            last = Counter(str(value_of(turns_of_row[-1], role)) for turns_of_row in lists).most_common(1)[0][0]
            line["assistant"] = (likely or [last])[0]
        yield line


def _pairs(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a question and an answer, the likeliest first."""
    columns = [(path, values) for path, values in _columns(rows) if not all(map(_is_note, values))]
    order = {path: number for number, (path, _) in enumerate(columns)}
    scored = [
        (_asks(question) + _answers(answer) + (order[question[0]] < order[answer[0]]), question[0], answer[0])
        for question, answer in itertools.permutations(columns, 2)
    ]
    for score, question, answer in sorted(scored, key=lambda one: -one[0]):
        if score > 1 or len(columns) == 2:
            yield {"prompt": question, "completion": answer}


def _asks(column: tuple[str, list[str]]) -> float:
    path, values = column
    return 3.0 * bool(_words(path) & _ASKS) + 2.0 * mean(text.rstrip().endswith("?") for text in values)


def _answers(column: tuple[str, list[str]]) -> float:
    path, values = column
    return 3.0 * bool(_words(path) & _ANSWERS) - 2.0 * mean(text.rstrip().endswith("?") for text in values)


def _words(path: str) -> set[str]:
    return set(re.split(r"[\W_]+", plain_name(path)))


def _is_note(text: str) -> bool:
    return as_number(text) is not None or as_time(text) is not None


def _columns(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the paths of texts that most rows have, each with its values, in the order of the first rows."""
    values: dict[str, list[str]] = {}
    for row in rows:
        for path, text in _texts(row):
            values.setdefault(path, []).append(text)
    return [
        (path, texts)
        for path, texts in values.items()
        if len(texts) >= READ_SHARE * len(rows) and plain_name(path) not in FACTS
    ]


def _texts(row: Row, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every text that is not in a list; what is true or false can say who speaks."""
    for name, value in row.items():
        path = f"{prefix}{name if _NAME.fullmatch(name) or not (prefix or '.' in name) else _quoted(name)}"
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _texts(value, f"{path}.", depth + 1)
        elif isinstance(value, str | bool) and str(value).strip():
            yield path, str(value)


def _lists(row: Row, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the paths of lists of objects."""
    for name, value in row.items():
        path = f"{prefix}{name if _NAME.fullmatch(name) else _quoted(name)}"
        inner = parsed(value)
        if objects(inner):
            yield path
        elif isinstance(inner, dict) and depth < _MAX_DEPTH:
            yield from _lists(inner, f"{path}.", depth + 1)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '\\"') + '"'
