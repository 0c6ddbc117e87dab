"""What a file of no named format may mean: the likeliest mapping and at most two others, each with what it would read.

A suggestion is shown, and a person confirms it. Nothing is trained by one: `data.columns` says how rows are read.
"""

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

from hivetune.data.conversation import read_conversation
from hivetune.data.mapping import (
    ASSISTANT,
    ROWS,
    is_turn_table,
    map_columns,
    rows_at,
    turn_table,
    value_of,
    write_columns,
)
from hivetune.data.pieces.fields import FACTS, SESSION, as_number, as_time, plain_name
from hivetune.data.pieces.said import Row, objects, parsed
from hivetune.data.pieces.session import ASSISTANT as ANSWERS_OF
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
_NAMED = 6.0  # the score of a pair of which both names say what they are
_JOINS = frozenset(("session", "conversation", "thread", "chat", "ticket", "case", "dialogue", "dialog", "room"))

Column = tuple[str, list[str]]  # a path, and its values


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
    inside = [row for record in records for row in rows_at(record, columns[ROWS])] if ROWS in columns else records
    rows: Sequence[Row] = [row for row in inside if isinstance(row, dict)]
    of_turns = is_turn_table(columns)
    talks = _conversations(rows, columns) if of_turns else rows
    shown: list[tuple[str, str]] = []
    read = 0
    for talk in talks:
        try:
            conversation = read_conversation(talk if of_turns else map_columns(talk, columns))
        except (RowRefused, RecursionError):
            continue
        read += 1
        if len(shown) < SHOWN_ROWS:
            questions = [message.content for message in conversation.messages if message.role == "user"]
            shown.append(("\n".join(questions), conversation.messages[-1].content))
    if read < READ_SHARE * max(1, len(talks)) or not any(answer.strip() for _, answer in shown):
        return None
    named = "+".join(columns.values())
    left_out = tuple(path for path, _ in _columns(rows) if path not in named)
    return Suggestion(columns, tuple(shown), left_out, read)


def _conversations(rows: Sequence[Row], columns: dict[str, str]) -> list[Row]:
    """Return the conversations of a table of turns. The sample may cut the last one: it needs no answer yet."""
    lines = enumerate(map(json.dumps, rows), 1)
    talks = [json.loads(text) for _, text in turn_table(columns).rows(lines) if isinstance(text, str)]
    return [{**talk, ANSWERS_OF: columns.get(ASSISTANT)} for talk in talks if len(talk["messages"]) > 1]


def _candidates(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield mappings that a person would try: lists of turns, a table of turns, a question with its answer, and these
    in lists of rows.
    """
    lists = dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path in _lists(row))
    for path in lists:
        turns = [turns for row in rows if (turns := objects(parsed(value_of(row, path))))]
        if len(turns) >= READ_SHARE * len(rows):
            yield from ({"messages": path, **columns} for columns in _fields_of_turns(turns))
    pairs = list(_pairs(rows))
    tables = _tables(rows) if not pairs or pairs[0][0] < _NAMED else ()
    yield from (*tables, *(columns for _, columns in pairs))
    for path in lists:
        inside = [row for record in rows for row in rows_at(record, f"{path}[]") if isinstance(row, dict)]
        if len(inside) > 1:
            yield from ({ROWS: f"{path}[]", **columns} for _, columns in itertools.islice(_pairs(inside), 1))


def _fields_of_turns(talks: Sequence[Sequence[Row]]) -> Iterator[dict[str, str]]:
    """Yield the fields of turns that may say who speaks and what, with who answers where their names do not say it."""
    turns = [turn for talk in talks for turn in talk]
    columns = _columns(turns)
    if len(turns) < 2 * len(talks) or len(columns) < 2:
        return
    text = max(columns, key=lambda column: mean(map(len, column[1])))[0]
    for role, values in columns:
        speakers = list(dict.fromkeys(values))
        if role == text or not 1 < len(speakers) <= _MAX_SPEAKERS:
            continue
        line = {"role": role, "text": text}
        roles = {ROLES.get(speaker.lower()) for speaker in speakers}
        if not ({"user", "assistant"} <= roles and None not in roles):
            likely = [name for name in speakers if ROLES.get(name.lower()) == "assistant"]
            # Who begins asks; of the others the one who speaks most.
            named = [[str(value_of(turn, role)) for turn in talk] for talk in talks]
            answers = Counter(name for names in named for name in names if name != names[0])
            line[ASSISTANT] = (likely or [name for name, _ in answers.most_common(1)] or [values[-1]])[0]
        yield line


def _tables(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield tables of turns: a column names the conversation, and its values come again."""
    for name in rows[0] if rows else ():
        if plain_name(name) not in SESSION and not _words(name) & _JOINS:
            continue
        talks: dict[str, list[Row]] = {}
        for row in rows:
            talks.setdefault(str(row.get(name)), []).append({key: row[key] for key in row if key != name})
        # The sample cuts the last conversations off.
        several = [talk for talk in talks.values() if len(talk) > 1]
        if several and sum(map(len, several)) > len(rows) / 2:
            yield from ({"session": name, **columns} for columns in _fields_of_turns(several))


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield (score, a question and an answer), the likeliest first."""
    columns = [(path, values) for path, values in _columns(rows) if not all(map(_is_note, values))]
    order = {path: number for number, (path, _) in enumerate(columns)}
    scored = [
        (_score(question, _ASKS, 1) + _score(answer, _ANSWERS, -1) + (order[question[0]] < order[answer[0]]),
         question[0], answer[0])
        for question, answer in itertools.permutations(columns, 2)
    ]  # fmt: skip
    for score, question, answer in sorted(scored, key=lambda one: -one[0]):
        if score > 1 or len(columns) == 2:
            yield score, {"prompt": question, "completion": answer}


def _score(column: Column, words: frozenset[str], sign: int) -> float:
    """Return how likely a column asks (`sign` 1) or answers (-1): by the words in its name, and its question marks."""
    path, values = column
    return 3.0 * bool(_words(path) & words) + sign * 2.0 * mean(text.rstrip().endswith("?") for text in values)


def _words(path: str) -> set[str]:
    return set(re.split(r"[\W_]+", plain_name(path)))


def _is_note(text: str) -> bool:
    return as_number(text) is not None or as_time(text) is not None


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return the paths of texts that most rows have, each with its values, in the order of the first rows."""
    values: dict[str, list[str]] = {}
    for row in rows:
        for path, value in _paths(row):
            if isinstance(value, str | bool) and str(value).strip():  # what is true or false can say who speaks
                values.setdefault(path, []).append(str(value))
    usual = READ_SHARE * len(rows)
    return [(path, texts) for path, texts in values.items() if len(texts) >= usual and plain_name(path) not in FACTS]


def _lists(row: Row) -> Iterator[str]:
    """Yield the paths of lists of objects."""
    return (path for path, value in _paths(row) if objects(parsed(value)))


def _paths(row: Row, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of all that is no object."""
    for name, value in row.items():
        plain = _NAME.fullmatch(name) or not (prefix or "." in name)
        path = f"{prefix}{name if plain else json.dumps(name)}"
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _paths(value, f"{path}.", depth + 1)
        else:
            yield path, value
