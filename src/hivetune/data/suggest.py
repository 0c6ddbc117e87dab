"""What a file of no named format may mean: the likeliest mapping and at most two others, each with what it would read.

A suggestion is shown, and a person confirms it. Nothing is trained by one: `data.columns` says how rows are read.
Columns are scored by their names in columns.toml, and where those say nothing by what stands in them.
"""

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.columns import (
    ANSWERED,
    CONTENT,
    CONTEXT,
    FACTS,
    LABELS,
    MEDIA,
    NOTES,
    QUESTIONS,
    SYSTEM,
    THOUGHTS,
    TRUE_ANSWERS,
    TURNS,
    looks_like_content,
)
from hivetune.data.conversation import read_conversation
from hivetune.data.mapping import AND, AS_JSON, ROWS, map_columns, rows_at, write_columns
from hivetune.data.pieces.fields import as_number, as_time, plain_name
from hivetune.data.pieces.said import Row, objects, parsed
from hivetune.data.pieces.turns import ROLES
from hivetune.data.reasons import RowRefused

MAX_SUGGESTIONS, MAX_TRIED = 3, 24
SHOWN_ROWS = 3
READ_SHARE = 0.8  # of the rows, that a mapping has to read
FILLED_SHARE = 0.8  # of the rows, in which a side has to stand
_MAX_DEPTH, _MAX_PATHS = 4, 200
_MAX_SPEAKERS = 6
_FEW_CLASSES = 0.5  # different values of a class, of the rows
_QUOTED = re.compile(r"[^\w.,=+\[\]-]")  # what a shell may read otherwise
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ADDRESS = re.compile(r"\s*(?:https?://|www\.|[\w./-]*/)\S+\s*\Z")
_MODEL_ANSWERS = frozenset(("prediction", "predicted", "model_output", "model_answer", "generated_text", "generation"))


class Suggestion(NamedTuple):
    """A mapping, its (question, answer) of the first rows, the paths of text that it leaves out, and the number of
    sample rows that it reads.
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


class _Column(NamedTuple):
    """A path of texts. `values`: those of the rows that have one; `share`: of the rows, that have one. `answers`: the
    paths of one text that can be an answer: of several texts in a list the first, of an object itself or as JSON.
    """

    path: str
    name: str
    values: list[str]
    share: float
    answers: tuple[str, ...]

    @property
    def different(self) -> float:
        return len(set(self.values)) / max(1, len(self.values))

    @property
    def asks(self) -> float:
        """The share of the texts that end with a question mark."""
        return sum(text.rstrip().endswith(("?", "？", "؟")) for text in self.values) / max(1, len(self.values))

    @property
    def is_prose(self) -> bool:
        return sum(map(looks_like_content, self.values)) > len(self.values) / 2


def suggest(records: Sequence[Any]) -> list[Suggestion]:
    """Return the mappings that read most of these records, the likeliest first; at most MAX_SUGGESTIONS."""
    rows = [record for record in records if isinstance(record, dict)]
    suggestions: list[Suggestion] = []
    for columns in itertools.islice(_candidates(rows), MAX_TRIED):
        tried = _tried(rows, columns)
        if tried is not None and all(tried.shown != suggestion.shown for suggestion in suggestions):
            suggestions.append(tried)
        if len(suggestions) == MAX_SUGGESTIONS:
            break
    return suggestions


def _tried(records: Sequence[Row], columns: dict[str, str]) -> Suggestion | None:
    shown: list[tuple[str, str]] = []
    left_out: tuple[str, ...] = ()
    read = 0
    rows = [row for record in records for row in rows_at(record, columns[ROWS])] if ROWS in columns else records
    for row in rows:
        try:
            conversation = read_conversation(map_columns(row, columns), mapped=True)
        except (RowRefused, RecursionError):
            continue
        read += 1
        if len(shown) < SHOWN_ROWS:
            questions = [message.content for message in conversation.messages if message.role == "user"]
            shown.append(("\n".join(questions), conversation.messages[-1].content))
            whole = "\n".join(text for m in conversation.messages for text in (m.content, m.reasoning or ""))
            unread = (path for path, text, _ in _texts(row) if text.strip() and text.strip() not in whole)
            left_out = left_out or tuple(dict.fromkeys(unread))
    enough = read >= READ_SHARE * max(1, len(rows)) and any(answer.strip() for _, answer in shown)
    return Suggestion(columns, tuple(shown), left_out, read) if enough else None


def _candidates(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield mappings that a person would try: lists of turns, a question with its answer, and both in lists of rows."""
    yield from _turn_lists(rows)
    columns = _columns(rows)
    within: list[dict[str, str]] = []
    for path in dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path, _ in _lists(row)):
        inside = [row for record in rows for row in rows_at(record, f"{path}[]") if isinstance(row, dict)]
        if len(inside) > 1:
            mappings = itertools.chain(_turn_lists(inside), _pairs(_columns(inside)))
            within += ({ROWS: f"{path}[]", **mapping} for mapping in itertools.islice(mappings, MAX_SUGGESTIONS))
    is_document = len(rows) == 1 and next(_lists(rows[0]), None) is not None
    if is_document:
        yield from within
    pairs = list(_pairs(columns, is_document)) or list(_pairs(columns, is_document, use_notes=True))
    yield from pairs
    yield from within
    if not pairs:
        texts = [column for column in columns if not _is_metadata(column)]
        if len(texts) == 1:
            yield {"text": texts[0].path}


def _turn_lists(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield lists of objects with one field for the speaker and one for the text."""
    for path in dict.fromkeys(path for row in rows[:SHOWN_ROWS] for path, _ in _lists(row)):
        at = (rows_at(row, path) for row in rows)
        at = (parsed(found[0]) if len(found) == 1 and isinstance(found[0], str) else found for found in at)
        lists = [turns for found in at if (turns := objects(found))]
        turns = [turn for turns_of_row in lists for turn in turns_of_row]
        if len(lists) < READ_SHARE * len(rows) or len(turns) < 2 * len(lists):
            continue
        fields = [_fields(turn) for turn in turns]
        sizes: Counter[str] = Counter()
        for field in fields:
            sizes.update({name: len(value) for name, value in field.items()})
        text_field = sizes.most_common(1)[0][0] if sizes else ""  # the one with the longest texts
        if 3 * sum(looks_like_content(field.get(text_field)) for field in fields) < len(turns):
            continue  # ids, choices and numbers are nobody's words
        for role in _speaker_fields(fields, text_field):
            speakers = list(dict.fromkeys(field[role] for field in fields))
            line = {"messages": path, "role": role, "text": text_field}
            roles = {ROLES.get(speaker.lower()) for speaker in speakers}
            if {"user", "assistant"} <= roles and None not in roles:
                yield line
            elif len(speakers) > 1:
                likely = [name for name in speakers if ROLES.get(name.lower()) == "assistant"]
                last = Counter(_fields(turns_of_row[-1])[role] for turns_of_row in lists).most_common(1)[0][0]
                yield {**line, "assistant": (likely or [last])[0]}


def _fields(turn: Row) -> dict[str, str]:
    """Return the texts of a turn by their paths; what is true or false can say who speaks."""
    flags = {_path("", name): str(value) for name, value in turn.items() if isinstance(value, bool)}
    return flags | {path: text.strip() for path, text, value in _texts(turn) if not isinstance(value, list)}


def _speaker_fields(turns: Sequence[Mapping[str, str]], text: str) -> list[str]:
    """Return fields with few values that every turn has, fields with known roles first."""
    fields = []
    for name in turns[0]:
        few = {turn.get(name, "") for turn in turns}
        fits = "" not in few and not any(map(looks_like_content, few))
        if name != text and fits and 1 < len(few) <= _MAX_SPEAKERS and len(few) < len(turns) + (len(turns) == 2):
            fields.append((not any(value.lower() in ROLES for value in few), len(few), name))
    return [name for *_, name in sorted(fields)]


def _pairs(
    all_columns: Sequence[_Column], in_document: bool = False, use_notes: bool = False
) -> Iterator[dict[str, str]]:
    """Yield a question and an answer, the likeliest first; the context is joined to the question.

    `in_document`: the columns are those of a document, which may be anything, such as a warning and a title.
    `use_notes`: what has the name of a note and is written text may be a side, such as `body` or `source`.
    """
    columns = [
        column
        for column in all_columns
        if column.share >= FILLED_SHARE and (not _is_metadata(column) or (use_notes and column.is_prose))
    ]
    only_pair = len(columns) == 2 and len(all_columns) <= 3 and not in_document  # beside an id or a date
    order = {column.path: number for number, column in enumerate(columns)}
    scored = []
    for question, answer in itertools.permutations(columns, 2):
        if (_is_answer(question) and not _is_question(question)) or not _is_likely(question, answer, only_pair):
            continue
        score = _as_question(question) + _as_answer(answer, columns)
        score += 1.0 if order[question.path] < order[answer.path] else 0.0
        scored.append((score, question, answer))
    scored.sort(key=lambda column: -column[0])
    for _, question, answer in scored:
        sides = (question, answer)
        contexts = []
        for column in (c for c in columns if c not in sides and _is_context(c)):
            beside = (zip(column.values, side.values, strict=False) for side in sides)
            if not any(all(text in side for text, side in pairs) for pairs in beside):  # else a side repeats it
                contexts.append(column)
        systems = [{"system": column.path} for column in columns if column.name in SYSTEM and column not in sides]
        asked = dict.fromkeys((AND.join(column.path for column in (question, *contexts)), question.path))
        for prompt, completion in itertools.product(asked, answer.answers):
            yield {"prompt": prompt, "completion": completion, **next(iter(systems), {})}


def _is_likely(question: _Column, answer: _Column, only_pair: bool) -> bool:
    """Return whether names or texts suggest that one column asks and another answers. `only_pair`: there are no other
    columns. Tables of facts get no suggestion, since any two of their columns would fit; two columns with names of
    content, such as an article and its summary, get one.
    """
    if question.asks > 1 / 2:
        return answer.asks <= 1 / 2
    if _is_question(question) and _is_answer(answer):
        return True
    if _is_question(question) or _is_answer(answer):
        return (answer if _is_question(question) else question).is_prose
    return question.is_prose and (only_pair or {question.name, answer.name} <= CONTENT)


def _is_question(col: _Column) -> bool:
    return col.name in QUESTIONS


def _is_answer(col: _Column) -> bool:
    return col.name in ANSWERED or col.name in TRUE_ANSWERS or col.name in LABELS


def _as_question(col: _Column) -> float:
    """Return how much a column looks like questions."""
    named = 6.0 - QUESTIONS.index(col.name) / len(QUESTIONS) if _is_question(col) else 0.0
    far = 4.0 if col.name in (*THOUGHTS, *SYSTEM) else 0.0
    return named + 2.0 * col.asks + (1.0 if col.different > 0.5 else -2.0) - far


def _as_answer(col: _Column, columns: Sequence[_Column]) -> float:
    """Return how much a column looks like answers. An expected answer is preferred to that of a model under test."""
    if col.name in TRUE_ANSWERS:
        return 6.5
    tested = col.name in _MODEL_ANSWERS or any(r.name in TRUE_ANSWERS for r in columns if r is not col)
    named = 6.0 - ANSWERED.index(col.name) / len(ANSWERED) if col.name in ANSWERED else 0.0
    kind = 2.0 if col.name in LABELS or (len(col.values) > 3 and col.different < _FEW_CLASSES) else 0.0
    far = -4.0 if col.name in (*THOUGHTS, *SYSTEM, *CONTEXT) or len(set(col.values)) < min(2, len(col.values)) else 0.0
    return max(named, kind) + far - (3.0 if tested else 0.0)


def _is_context(col: _Column) -> bool:
    """Return whether a column is the context of a question: by its name, or for lack of another meaning."""
    if col.name in (*SYSTEM, *THOUGHTS) or _is_answer(col):
        return False
    return col.name in CONTEXT or (col.name not in QUESTIONS and col.different > 0.0 and not col.path.count("."))


def _is_metadata(col: _Column) -> bool:
    """Return whether a column is not part of a conversation: ids, times, numbers, addresses, notes by their names."""
    if col.name in (*QUESTIONS, *ANSWERED, *LABELS, *TRUE_ANSWERS, *CONTEXT):
        return False
    if col.name in MEDIA or col.name in NOTES or col.name in FACTS:
        return True
    return all(as_number(text) is not None or as_time(text) is not None or _ADDRESS.match(text) for text in col.values)


def _columns(rows: Sequence[Row]) -> list[_Column]:
    """Return the paths of texts, in the order of the first rows."""
    values: dict[str, list[str]] = {}
    answers: dict[str, tuple[str, ...]] = {}
    for row in rows:
        text_of: dict[str, tuple[str, Any]] = {}
        for path, text, value in _texts(row):
            text_of.setdefault(path, (text, value))
        for path, (text, value) in text_of.items():
            if text.strip():
                values.setdefault(path, []).append(text)
                whole = (path, f"{path}.{AS_JSON}") if isinstance(value, dict | list) else (path,)
                several = isinstance(value, list) and isinstance(value[0], str)
                answers.setdefault(path, (f"{path}[0]",) if several else whole)
    return [_Column(path, _name_of(path), t, len(t) / len(rows), answers[path]) for path, t in values.items()]


def _name_of(path: str) -> str:
    """Return the name of a path's last step, or the last word of that where only this is the name of a side."""
    name = plain_name(re.sub(r"\[.*?\]", "", path).rpartition(".")[2])
    last = name.rpartition("_")[2]
    sides = (*QUESTIONS, *ANSWERED, *LABELS)
    return last if name not in (*CONTENT, *NOTES) and last in sides else name


def _texts(row: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the text and the value of everything that is a text or several, below objects."""
    if depth > _MAX_DEPTH or not isinstance(row, dict):
        return
    for name, value in itertools.islice(row.items(), _MAX_PATHS):
        path = _path(prefix, name)
        value, plain = parsed(value), plain_name(str(name))
        answers = plain in TRUE_ANSWERS or (plain in ANSWERED and plain not in QUESTIONS)
        are_texts = isinstance(value, list) and bool(value) and isinstance(value[0], str)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield path, str(value), value
        elif are_texts and len(value) == 1:
            yield f"{path}[0]", value[0], value[0]
        elif are_texts:
            yield path, "\n".join(map(str, value)), value
        elif isinstance(value, dict | list) and len(value) > 1 and answers:  # fields, or objects: an answer as a whole
            yield path, json.dumps(value, ensure_ascii=False), value
        elif isinstance(value, dict):
            yield from _texts(value, path, depth + 1)


def _lists(row: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """Yield (path, list) of each list of objects, in nested objects too; names of turns come first."""
    if depth > _MAX_DEPTH or not isinstance(row, dict):
        return
    for name, value in sorted(row.items(), key=lambda item: plain_name(str(item[0])) not in TURNS)[:_MAX_PATHS]:
        value = parsed(value)
        if objects(value) is not None:
            yield _path(prefix, name), value
        elif isinstance(value, dict):
            yield from _lists(value, _path(prefix, name), depth + 1)


def _path(prefix: str, name: Any) -> str:
    step = str(name) if _NAME.fullmatch(str(name)) or not prefix else f'"{name}"'
    return f"{prefix}.{step}" if prefix else step
