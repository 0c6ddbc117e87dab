"""What a file of no named format may mean: one mapping, with what it would read.

Lists of turns, else a table of turns, else a question and its answer: by the exact names of columns, else two texts in
the order of the file. A suggestion is shown, and a person confirms it. Nothing is trained by one.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

from hivetune.data.columns import ANSWERS, FACTS, QUESTIONS, SESSION, as_number, as_time, plain_name
from hivetune.data.formats import SPOKEN, read_conversation
from hivetune.data.mapping import ASSISTANT, ROWS, map_columns, rows_at, turn_table, value_of, write_columns
from hivetune.data.pieces.sessions import ASSISTANT as ANSWERS_OF
from hivetune.data.pieces.sessions import likely_answers
from hivetune.data.pieces.turns import ROLES
from hivetune.data.pieces.values import Row, objects, parsed
from hivetune.data.reasons import RowRefused

SHOWN_ROWS = 3
READ_SHARE = 0.8  # of the rows, that a mapping has to read, and in which a column has to stand
_MAX_DEPTH, _MAX_SPEAKERS = 3, 6
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Texts = dict[str, list[str]]  # path -> its values


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
        """Return it as it is written on the command line."""
        return f"--columns {shlex.quote(write_columns(self.columns))}"


def suggest(records: Sequence[Any]) -> Suggestion | None:
    """Return the first mapping that reads most of these records, None if there is none."""
    rows = [record for record in records if isinstance(record, dict)]
    return next((found for columns in _candidates(rows) if (found := _tried(rows, columns))), None)


def _candidates(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the mappings that are tried: lists of turns, a table of turns, two columns, and two columns of listed
    rows.
    """
    lists = dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path, value in _paths(row) if objects(parsed(value)))
    for path in lists:
        turns = [turns for row in rows if (turns := objects(parsed(value_of(row, path))))]
        if len(turns) >= READ_SHARE * len(rows):
            yield {"messages": path}  # with the usual names of roles and texts
            yield from ({"messages": path, **columns} for columns in _fields_of_turns(turns))
    for name in (name for name in (rows[0] if rows else ()) if plain_name(name) in {*SESSION, "chat"}):
        talks: dict[str, list[Row]] = {}
        for row in rows:
            talks.setdefault(str(row.get(name)), []).append({key: row[key] for key in row if key != name})
        # The sample cuts the last conversations off.
        several = [talk for talk in talks.values() if len(talk) > 1]
        if 2 * sum(map(len, several)) > len(rows):
            yield from ({"session": name, **columns} for columns in _fields_of_turns(several))
    yield from _pair(rows)
    for path in lists:
        inside = [row for record in rows for row in rows_at(record, f"{path}[]") if isinstance(row, dict)]
        yield from ({ROWS: f"{path}[]", **columns} for columns in _pair(inside) if len(inside) > 1)


def _fields_of_turns(talks: Sequence[Sequence[Row]]) -> Iterator[dict[str, str]]:
    """Yield the fields of turns: texts by their usual name, else the longest ones, and few speakers, with who answers
    where no role says it.
    """
    turns = [turn for talk in talks for turn in talk]
    # Numbers and times are facts, however long they are.
    columns = {path: values for path, values in _texts(turns).items() if not all(map(_is_note, values))}
    # Parts of a text are lists, which are no columns here: Telegram's are in a quarter of its messages.
    named = [name for name in SPOKEN if any(isinstance(turn.get(name), str | list) for turn in turns)]
    if len(turns) < 2 * len(talks) or len({*columns, *named[:1]}) < 2:
        return
    # What is said is longer than who says it, when, and by which id.
    text = named[0] if named else max(columns, key=lambda path: mean(map(len, columns[path])))
    for role, values in columns.items():
        roles = {ROLES.get(speaker.lower()) for speaker in values}
        if role != text and 1 < len(set(values)) <= _MAX_SPEAKERS:
            known = {"user", "assistant"} <= roles and None not in roles
            answers = next((name for name in values if ROLES.get(name.lower()) == "assistant"), likely_answers(values))
            yield {"role": role, "text": text, **({} if known else {ASSISTANT: answers})}


def _pair(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a question and its answer: by their exact names, else the two longest texts in the order of the file."""
    # Numbers and times are facts, however long they are.
    columns = {path: values for path, values in _texts(rows).items() if not all(map(_is_note, values))}
    names = {plain_name(path.rpartition(".")[2]): path for path in reversed(columns)}
    asked = next((names[name] for name in QUESTIONS if name in names), None)
    answer = next((names[name] for name in ANSWERS if name in names and names[name] != asked), None)
    longest = sorted(columns, key=lambda path: -mean(map(len, columns[path])))
    others = [path for path in longest if path not in (asked, answer)][: 2 - bool(asked) - bool(answer)]
    others.sort(key=list(columns).index)
    if len(others) + bool(asked) + bool(answer) == 2:
        question = asked or others.pop(0)
        yield {"prompt": question, "completion": answer or others.pop(0)}


def _is_note(text: str) -> bool:
    return as_number(text) is not None or as_time(text) is not None


def _tried(records: Sequence[Row], columns: dict[str, str]) -> Suggestion | None:
    """Return a mapping with what it reads; None if it does not read most rows."""
    # It is tried as the checks would read it, so that what is shown is what would be trained.
    inside = [row for record in records for row in rows_at(record, columns[ROWS])] if ROWS in columns else records
    rows: Sequence[Row] = [row for row in inside if isinstance(row, dict)]
    talks = rows
    if "session" in columns:
        lines = enumerate(map(json.dumps, rows), 1)
        talks = [json.loads(text) for _, text in turn_table(columns).rows(lines) if isinstance(text, str)]
        # The sample may cut the last conversation.
        talks = [{**talk, ANSWERS_OF: columns.get(ASSISTANT)} for talk in talks if len(talk["messages"]) > 1]
    shown: list[tuple[str, str]] = []
    for talk in talks:
        try:
            conversation = read_conversation(talk if "session" in columns else map_columns(talk, columns))
        except (RowRefused, RecursionError):
            continue
        questions = [message.content for message in conversation.messages if message.role == "user"]
        shown.append(("\n".join(questions), conversation.messages[-1].content))
    if len(shown) < READ_SHARE * max(1, len(talks)) or not any(answer.strip() for _, answer in shown[:SHOWN_ROWS]):
        return None
    left_out = tuple(path for path in _texts(rows, 0) if path not in columns.values())
    return Suggestion(columns, tuple(shown[:SHOWN_ROWS]), left_out, len(shown))


def _texts(rows: Sequence[Row], share: float = READ_SHARE) -> Texts:
    """Return the paths of texts that this share of the rows has, each with its values, in the order of the first rows.

    A column that most rows lack can't be half of a mapping.
    """
    values: Texts = {}
    for row in rows:
        for path, value in _paths(row):
            if isinstance(value, str | bool) and str(value).strip():  # what is true or false can say who speaks
                values.setdefault(path, []).append(str(value))
    return {
        path: texts
        for path, texts in values.items()
        if len(texts) >= share * len(rows) and plain_name(path) not in FACTS
    }


def _paths(row: Row, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of all that is no object."""
    for name, value in row.items():
        plain = _NAME.fullmatch(name) or not (prefix or "." in name)
        path = f"{prefix}{name if plain else json.dumps(name)}"
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _paths(value, f"{path}.", depth + 1)
        else:
            yield path, value
