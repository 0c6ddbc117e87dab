"""A format as data: the entries of formats.toml, and those of a user's own files. The keys of an entry are the fields
of `Spec`; their paths are JMESPath, over a record whose names are in snake_case.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from hivetune.config import refusal_text
from hivetune.data.columns import OWN_ID, as_position, plain_row
from hivetune.data.pieces.answers import Answer, call_of, is_response, read_answer
from hivetune.data.pieces.format import AnyFormat, Batch, Conversation, Format, Log
from hivetune.data.pieces.rendered import has_marks, rendered_turns, without_markup
from hivetune.data.pieces.sessions import ASSISTANT, SESSION, TableTurn, read_session, table_rows, with_speakers
from hivetune.data.pieces.turns import conversation_of, read_messages, read_tools, read_turns, role_of, with_system
from hivetune.data.pieces.values import Path, Row, all_texts, compile_path, has_needs, listed, objects, parsed, text_of
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.errors import UsageError
from hivetune.records import Message, Role

_WHO, _SPOKEN = frozenset(("role", "from")), frozenset(("content", "value", "parts", "tool_calls"))
_OF_TABLE_TURNS = ("speaker", "role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_OF_TURNS = frozenset(("role", "speaker", "weight", "skip", "thread", "position", "day"))
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MAX_SHOWN = 80  # characters of a path, and of what it found
_NOWHERE = Path("", lambda value: None, frozenset())
_ALWAYS = _NOWHERE._replace(find=lambda value: True)


def _compiled(value: Any) -> Path:
    if not isinstance(value, str):
        raise ValueError("a path must be a string")
    return compile_path(value)


def _known(reason: str) -> str:
    if reason not in REASONS:
        raise ValueError(f"there is no reason {reason!r}, see docs/data-checks.md")
    return reason


_Path = Annotated[InstanceOf[Path], BeforeValidator(_compiled)]
_Paths = Annotated[tuple[_Path, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
_Reason = Annotated[str, AfterValidator(_known)]


class Spec(BaseModel):
    """An entry of formats.toml or of a user's file, with its paths compiled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: str = ""  # the page that defines the format
    needs: tuple[str, ...] = Field(min_length=1)  # columns without which a record is not read; "a|b": one of the two
    when: _Path = _ALWAYS  # true for records of this format
    refuse: dict[_Reason, _Path] = {}  # a record for which the path is true is refused with the reason
    # Records that hold rows, which other formats read; `shared`: columns that the record tells of all of them. In these
    # paths and in `needs` names are then as the file spells them.
    rows: _Path = _NOWHERE
    shared: dict[str, _Path] = {}
    # A list of turns, or with `thread` a turn a record: the name of its conversation, and its place among the others.
    messages: _Path = _NOWHERE
    thread: _Path = _NOWHERE
    position: _Path = _NOWHERE
    # The time of a turn, in ISO 8601: the turns of each day are a row. `mark`: a name that each such record has
    # somewhere and few others have; it and `needs` are then names as the file spells them.
    day: _Path = _NOWHERE
    mark: str = ""
    # Of each turn: its role under our names or by `roles`, or who speaks; `skip` is true for what is no turn, and
    # `weight` false for what is read and not learned.
    role: _Path = _NOWHERE
    roles: dict[str, Role] = {}
    speaker: _Path = _NOWHERE
    weight: _Path = _NOWHERE
    skip: _Path = _NOWHERE
    asks: _Path = _NOWHERE  # the speaker who asks; all others answer
    answers: _Path = _NOWHERE  # the speaker who answers
    markup: bool = False  # the words are HTML
    answer: _Path = _NOWHERE  # beside turns that end with a question
    # A question, of which several paths are joined, and its answer.
    prompt: _Paths = ()
    completion: _Path = _NOWHERE
    # What an API was sent, and what it answered.
    request: _Path = _NOWHERE
    response: _Path = _NOWHERE
    text: _Path = _NOWHERE  # the words of a turn, else a text that is learned whole
    system: _Path = _NOWHERE
    tools: _Path = _NOWHERE
    reasoning: _Path = _NOWHERE
    untrusted: _Path = _NOWHERE  # true where a tool or a web page wrote the answer
    reads: tuple[str, ...] = ()  # other columns that have a meaning
    table: bool = False  # the format is no more than names of columns

    def has(self, *keys: str) -> bool:
        """Return whether the entry sets at least one of these keys."""
        return not self.model_fields_set.isdisjoint(keys)


def format_of(name: str, entry: Mapping[str, Any], source: str) -> AnyFormat:
    """Return the format of an entry. `source`: the file, for errors. Raise UsageError for an invalid entry."""
    try:
        spec = Spec.model_validate(entry)
    except ValidationError as error:
        keys = dict.fromkeys(Spec.model_fields, "")
        told = [f"{source}: the format {name!r}: {refusal_text(problem, keys)}" for problem in error.errors()]
        raise UsageError("\n".join(told), hint=f"known keys: {', '.join(keys)}") from None
    if not spec.has("messages", "completion", "response", "text", "rows"):
        hint = "name the paths of the texts: messages, prompt and completion, or text"
        raise UsageError(f"{source}: the format {name!r} has no path to the text of its turns", hint=hint)
    if spec.has("rows"):
        return Batch(name, lambda record: _rows(spec, record), spec.needs)
    if spec.has("thread"):
        return Log(
            name,
            lambda head: len(head.events) > 1 and all(_table_turn(spec, event) for event in head.events),
            lambda lines: table_rows(name, lines, lambda event: _table_turn(spec, event)),
        )
    of_turns = _OF_TURNS | ({"text"} if spec.has("messages") else set())
    values = [getattr(spec, key) for key in spec.model_fields_set - of_turns]
    paths = [value for value in values if isinstance(value, Path)] + [*spec.prompt, *spec.refuse.values()]
    heads = frozenset().union(*(path.heads for path in paths if not path.one_of))
    one_of = tuple(path.one_of for path in paths if path.one_of)
    form = Format(name, lambda row: _read(name, spec, row), spec.needs, heads | {*spec.reads}, one_of, spec.table)
    if not spec.has("day"):
        return form
    if len(spec.messages.heads) != 1 or not spec.mark:
        hint = "messages: a path that begins at one column; mark: a name that few other records have"
        raise UsageError(f"{source}: the format {name!r} sets day, but not mark and a column of turns", hint=hint)
    return form._replace(days=lambda record: _days(spec, record), mark=spec.mark)


def _rows(spec: Spec, record: Row) -> Iterator[Row]:
    if spec.when.find(record):
        shared = {column: value for column, path in spec.shared.items() if (value := path.find(record)) is not None}
        yield from ({**shared, **row} for row in objects(spec.rows.find(record)) or ())


def _days(spec: Spec, record: Row) -> list[Row] | None:
    """Return the record with the turns of each day, without the days that have none; None for one of another format.
    The day is that of the time as it is written; a turn without a time has the day of the turn before it.
    """
    (column,) = spec.messages.heads
    if not spec.when.find(record):
        return None
    days: dict[str, list[Any]] = {}
    day = ""
    for turn in listed(record.get(column)):
        time = _DATE.match(str(spec.day.find(turn)))
        day = time[0] if time else day
        days.setdefault(day, []).append(turn)
    # The id is that of the whole chat, and rows with one id are one.
    chat = {key: value for key, value in record.items() if key not in OWN_ID}
    return [{**chat, column: turns} for turns in days.values() if not all(_is_note(spec, turn) for turn in turns)]


def _table_turn(spec: Spec, event: Row) -> TableTurn | None:
    """Return the turn in a record of a table of turns; None for any other record."""
    row = plain_row(event)
    if not has_needs(spec.needs, row) or not spec.when.find(row):
        return None
    thread, position = spec.thread.find(row), as_position(spec.position.find(row))
    if not isinstance(thread, str | int):
        return None
    if _is_note(spec, row):
        return TableTurn(str(thread), None, position)
    turn = _turn(spec, row, None)
    is_known = not spec.has("role") or role_of(turn["role"]) is not None
    if not is_known or not isinstance(turn["content"], str | list | None):
        return None
    return TableTurn(str(thread), {key: turn[key] for key in _OF_TABLE_TURNS if turn.get(key)}, position)


def _read(name: str, spec: Spec, row: Row) -> Conversation | None:
    if not spec.when.find(row):
        return None
    for reason, path in spec.refuse.items():
        if found := path.find(row):
            # Lists and objects are what somebody wrote; a hint is shown and stored.
            is_told = isinstance(found, str | int) and len(path.text) < _MAX_SHOWN
            told = f"{path.text} is {str(found)[:_MAX_SHOWN]}" if is_told else REASONS[reason].meaning
            raise RowRefused(reason, f"{name}: {told}")
    if spec.has("messages"):
        return _turns(name, spec, row)
    if spec.has("response"):
        messages, tools, changed = call_of(spec.request.find(row), spec.response.find(row))
        return conversation_of(name, messages, tools or read_tools(spec.tools.find(row)), changed)
    if spec.has("prompt"):
        return _pair(name, spec, row)
    text = text_of(spec.text.find(row), "text")
    if (turns := rendered_turns(text, whole=True)) is not None:
        return conversation_of(name, read_messages(turns, None), changed=("turns-from-text",))
    if has_marks(text):
        raise RowRefused("rendered-text")
    return Conversation(name, (Message("assistant", text),))


def _turns(name: str, spec: Spec, row: Row) -> Conversation:
    found = parsed(spec.messages.find(row))
    if not isinstance(found, list):
        raise RowRefused("wrong-type", f"{spec.messages.text} must be a list of turns")
    asks = spec.asks.find(row)
    turns = [turn for turn in found if not _is_note(spec, turn)]
    changed: tuple[str, ...] = ("program-notes",) if len(turns) < len(found) else ()
    if spec.has("role", "speaker", "text"):
        turns = [_turn(spec, turn, asks) for turn in turns]
    system, tools = parsed(spec.system.find(row)), spec.tools.find(row)
    answers = row.get(ASSISTANT) or spec.answers.find(row) or None
    session = {SESSION: name, ASSISTANT: answers, "left_out": [*changed], "system": system, "tools": tools}
    if spec.has("speaker") and asks is None:  # the user says who answers
        return read_session({**session, "messages": turns})
    try:
        # A program wrote its turns; what an API was sent has its answer beside it.
        read, cut = read_turns(turns, logged=spec.has("role", "markup") and not spec.has("answer"))
    except RowRefused as refused:
        people = turns if spec.has("role") else with_speakers(turns)
        if refused.reason != "role-order" or people is turns:
            raise
        return read_session({**session, "messages": people})
    messages, changed = with_system(read, system), (*changed, *cut)
    if messages[-1].role in ("user", "tool") and (answer := spec.answer.find(row)) not in (None, ""):
        more, left_out = read_answer(answer)
        messages, changed = [*messages, *more], (*changed, *left_out)
    return conversation_of(name, messages, read_tools(tools), changed)


def _is_note(spec: Spec, turn: Any) -> bool:
    return isinstance(turn, dict) and bool(spec.skip.find(turn))


def _turn(spec: Spec, turn: Any, asks: Any) -> Any:
    """Return a turn with our field names: with a role, or with a speaker if it is unknown who asks."""
    if not isinstance(turn, dict):
        return turn
    words = spec.text.find(turn) if spec.has("text") else turn.get("content")
    if spec.markup:
        words = without_markup(text_of(words, "text"))
    if not words and (spec.has("speaker") or spec.markup):
        words = [{"type": "file"}]  # people sent something else; what is said behind it rests on it
    named: dict[str, Any] = {"content": words}
    if spec.has("speaker") and asks is None:
        return {"speaker": str(spec.speaker.find(turn)), **named}
    if spec.has("speaker"):
        named["role"] = "user" if str(spec.speaker.find(turn)) == str(asks) else "assistant"
    else:
        role = spec.role.find(turn) if spec.has("role") else turn.get("role")
        named["role"] = spec.roles.get(str(role), role)
    if (thoughts := spec.reasoning.find(turn)) is not None:
        named["reasoning"] = thoughts
    if spec.has("weight"):
        named["weight"] = 1 if spec.weight.find(turn) else 0
    # What the words were made of (parts, calls) is not read again.
    return {**{key: value for key, value in turn.items() if key not in spec.text.heads}, **named}


def _pair(name: str, spec: Spec, row: Row) -> Conversation:
    """Return a question and its answer, each a text, turns, or (of the question) a text that a template wrote."""
    values = [value for path in spec.prompt if (value := path.find(row)) not in (None, "")]
    question, system = values[0] if values else "", spec.system.find(row)
    changed: tuple[str, ...] = ()
    if (turns := _listed_turns(question)) is not None:
        before = read_messages(turns, system)
    elif isinstance(question, str) and (turns := rendered_turns(question, whole=False)) is not None:
        before, changed = read_messages(turns, system), ("turns-from-text",)
    else:
        text = "\n".join(part for value in values if (part := text_of(value, "the question")).strip())
        if has_marks(text):
            raise RowRefused("rendered-text")
        before = with_system([Message("user", text)], system)
    after, left_out = _completion(spec, row)
    tools = read_tools(spec.tools.find(row))
    conversation = conversation_of(name, [*before, *after], tools, (*changed, *left_out))
    return conversation._replace(untrusted=bool(spec.untrusted.find(row)))


def _completion(spec: Spec, row: Row) -> Answer:
    answer = spec.completion.find(row)
    if (turns := _listed_turns(answer)) is not None:
        return read_messages(turns, None), ()
    if isinstance(answer, dict | list) and is_response(answer):
        return read_answer(answer)
    if all_texts(answer):
        column = next((column for column in spec.completion.one_of if row.get(column) == answer), "the answer")
        hint = f"{column} has {len(answer)} texts: --columns completion={column}[0] learns the first"
        raise RowRefused("wrong-type", hint)
    changed: tuple[str, ...] = ()
    if isinstance(answer, dict | list) and answer:
        answer, changed = json.dumps(answer, ensure_ascii=False), ("json-answer",)
    thoughts = spec.reasoning.find(row)
    reasoning = thoughts if isinstance(thoughts, str) and thoughts.strip() else None
    return [Message("assistant", text_of(answer, spec.completion.text), reasoning=reasoning)], changed


def _listed_turns(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of turns, maybe as JSON text. Any other JSON is the text that somebody wrote."""
    turns = parsed(value)
    turns = objects([turns] if isinstance(turns, dict) and "content" in turns else turns) or []
    said = all(not _WHO.isdisjoint(turn) and not _SPOKEN.isdisjoint(turn) for turn in turns)
    return turns if turns and said else None
