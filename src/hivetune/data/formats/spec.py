"""A format as data: the entries of formats.toml, and those of a user's own files.

A path is JMESPath, over a record whose names are in snake_case. Keys of an entry:

    page         the page that defines the format
    needs        columns that a record must have before it is read; "a|b" is one of the two
    when         a path that is true for records of this format
    refuse       {reason = path}: a record for which the path is true is refused with the reason
    rows         the path of the rows in a record; the rows are read by other formats; shared = {COLUMN = path}: what
                 the record tells of all of them
    messages     the path of a list of turns, with, for each turn:
                 role, text, speaker, reasoning, weight: paths; roles = {NAME = ROLE}; skip: a path that is true for
                 what is no turn; asks, answers: paths of the speaker who does; markup = true where texts are HTML
    branch       {parent = path, leaf = path}: the turns are a tree, an object of nodes; the branch to the leaf is read
    versions     {of = path, selected = path}: a turn has versions, of which one is read
    unlearned    {reason = path}: a turn for which the path is true is read and not learned
    not_held     a path that is true for a turn whose files the export lacks: the conversation ends before it
    thread       each record is a turn of the conversation that this path names, with role or speaker, and text;
                 position: a path of its place among the others
    answer       the answer, where the turns end with a question
    prompt, completion   a question (several paths are joined) and its answer; history: what stood before them;
                         calls: the answer is a list of calls
    request, response    what an API was sent and what it answered
    text         a text that is learned whole
    system, tools, reasoning, untrusted   paths of what belongs to all of these
    reads        other columns that have a meaning; table = true: the format is no more than names of columns
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jmespath
from jmespath.exceptions import JMESPathError

from hivetune.data.pieces.answers import call_of, is_response, read_answer
from hivetune.data.pieces.fields import as_number, as_time, plain_name
from hivetune.data.pieces.format import AnyFormat, Batch, Format, Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, Threads, conversation, events
from hivetune.data.pieces.rendered import has_marks, rendered_turns
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, all_texts, listed, objects, parsed, text_of
from hivetune.data.pieces.session import (
    ASSISTANT,
    NotLearned,
    branch,
    chat,
    ordered_conversation,
    read_session,
    without_markup,
)
from hivetune.data.pieces.turns import (
    ROLES,
    calls_in_text,
    conversation_of,
    read_call,
    read_messages,
    read_system,
    read_tools,
    read_turn,
)
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.errors import UsageError
from hivetune.records import Message

_PLAIN = re.compile(r"\w+(?:\s*\|\|\s*\w+)*")
_OF_TURNS = ("role", "speaker", "weight", "skip", "not_held", "position", "thread")
_PATHS = (
    *("when", "rows", "messages", "text", "reasoning", "asks", "answers", "answer", "completion", "calls"),
    *("history", "request", "response", "system", "tools", "untrusted", *_OF_TURNS),
)
_NAMED_PATHS = ("refuse", "unlearned", "branch", "versions", "shared")  # tables of paths
_WORDS = ("messages", "completion", "calls", "response", "text", "rows")  # one of which an entry must have
_SPOKEN = frozenset(("content", "value", "parts", "tool_calls"))
KEYS = frozenset((*_PATHS, *_NAMED_PATHS, "page", "needs", "roles", "markup", "prompt", "reads", "table"))


class Path(NamedTuple):
    """A path, compiled. `heads`: the columns at which it begins; `one_of`: those of which the first is read."""

    text: str
    find: Callable[[Any], Any]
    heads: frozenset[str]
    one_of: tuple[str, ...] = ()


@lru_cache(1024)
def compile_path(text: str) -> Path:
    """Return a path. Raise ValueError for text that is none."""
    if _PLAIN.fullmatch(text):
        names = tuple(re.split(r"\s*\|\|\s*", text))
        return Path(text, _first_of(names), frozenset(names), names)  # most paths; JMESPath takes ten times as long
    try:
        compiled = jmespath.compile(text)
    except JMESPathError as error:
        raise ValueError(f"{text!r} is not a path: {str(error).splitlines()[0]}") from None

    def find(value: Any) -> Any:
        try:
            return compiled.search(value)
        except JMESPathError:  # a function was given a value of another type
            return None

    return Path(text, find, frozenset(_heads(compiled.parsed)))


def _first_of(names: tuple[str, ...]) -> Callable[[Any], Any]:
    def find(value: Any) -> Any:
        empty = None
        for name in names if isinstance(value, dict) else ():
            found = value.get(name)
            if found not in (None, "", [], {}):
                return found
            empty = found if empty is None else empty
        return empty

    return find


def _heads(node: Mapping[str, Any]) -> Iterator[str]:
    if node["type"] == "field":
        yield node["value"]
    elif node["type"] in ("subexpression", "index_expression", "projection", "value_projection", "filter_projection",
                          "flatten", "pipe"):  # fmt: skip
        yield from _heads(node["children"][0])
    else:
        for child in node["children"]:
            yield from _heads(child)


class Spec(NamedTuple):
    """An entry, its paths compiled."""

    name: str
    needs: tuple[str, ...]
    paths: Mapping[str, Path]
    named: Mapping[str, Mapping[str, Path]]
    prompt: tuple[Path, ...]
    roles: Mapping[str, str]
    markup: bool

    def get(self, key: str, value: Any) -> Any:
        path = self.paths.get(key)
        return None if path is None else path.find(value)

    def of(self, table: str, key: str, value: Any) -> Any:
        return self.named[table][key].find(value)

    def has_needs(self, names: Sequence[str]) -> bool:
        return all(not set(need.split("|")).isdisjoint(names) for need in self.needs)


def format_of(name: str, entry: Mapping[str, Any], source: str) -> AnyFormat:
    """Return the format of an entry. `source`: the file, for errors. Raise UsageError for an invalid entry."""
    unknown = next((key for key in entry if key not in KEYS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, KEYS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(KEYS))}"
        raise UsageError(f"{source}: the format {name!r} has an unknown key {unknown!r}", hint=hint)
    prompt = entry.get("prompt", [])
    prompts = [prompt] if isinstance(prompt, str) else prompt
    try:
        paths = {key: compile_path(entry[key]) for key in _PATHS if key in entry}
        named = {
            key: {part: compile_path(path) for part, path in entry[key].items()} for key in _NAMED_PATHS if key in entry
        }
        asked = tuple(map(compile_path, prompts))
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{source}: the format {name!r}: {error}", hint="https://jmespath.org has examples") from None
    needs = tuple(entry.get("needs", ()))
    spec = Spec(name, needs, paths, named, asked, entry.get("roles", {}), entry.get("markup", False))
    if not needs or paths.keys().isdisjoint(_WORDS):
        hint = "name the columns in needs, and where the words stand in messages, prompt and completion, or text"
        raise UsageError(f"{source}: the format {name!r} lacks needs, or a path of its words", hint=hint)
    reasons = (*named.get("refuse", ()), *named.get("unlearned", ()))
    if missing := next((reason for reason in reasons if reason not in REASONS), None):
        raise UsageError(f"{source}: {name!r}: there is no reason {missing!r}", hint="see docs/data-checks.md")
    if "rows" in paths:
        return Batch(name, lambda record: _rows(spec, record), needs)
    if "thread" in paths:
        return Log(name, lambda head: _is_table(spec, head), lambda lines: _threads(spec, lines))
    inner = {*_OF_TURNS, *(("text",) if "messages" in paths else ())}
    of_row = [path for key, path in paths.items() if key not in inner]
    of_row += [*spec.prompt, *named.get("refuse", {}).values()]
    heads = frozenset().union(*(path.heads for path in of_row if not path.one_of))
    one_of = tuple(path.one_of for path in of_row if path.one_of)
    reads = frozenset((*entry.get("reads", ()), *heads))
    return Format(name, lambda row: _read(spec, row), needs, reads, one_of, bool(entry.get("table", False)))


def _rows(spec: Spec, record: Row) -> Iterator[Row]:
    if "when" not in spec.paths or spec.get("when", record):
        shared = {name: path.find(record) for name, path in spec.named.get("shared", {}).items()}
        given = {name: value for name, value in shared.items() if value is not None}
        yield from ({**given, **row} for row in objects(spec.get("rows", record)) or ())


def _is_turn_of_thread(spec: Spec, event: Mapping[str, Any]) -> bool:
    row = {plain_name(str(name)): value for name, value in event.items()}
    if not spec.has_needs(tuple(row)) or ("when" in spec.paths and not spec.get("when", row)):
        return False
    if not isinstance(spec.get("thread", row), str | int) or not isinstance(spec.get("text", row), str | list | None):
        return False
    return "role" not in spec.paths or str(spec.get("role", row)).lower() in ROLES


def _is_table(spec: Spec, head: Head) -> bool:
    return len(head.events) > 1 and all(_is_turn_of_thread(spec, event) for event in head.events)


def _threads(spec: Spec, lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each conversation of a file with a turn a record; what is none stays a row."""
    threads = Threads()
    for number, event, text in events(lines):
        if event is None or not _is_turn_of_thread(spec, event):
            yield number, text
            continue
        row = {plain_name(str(name)): value for name, value in event.items()}
        position = spec.get("position", row)
        place = as_number(position)
        place = as_time(position) if place is None else place
        threads.add(str(spec.get("thread", row)), number, table_turn(spec, row), place)
    for name, begin, turns in threads.conversations():
        yield begin, conversation(spec.name, turns, session_id=name)


def table_turn(spec: Spec, row: Row) -> Mapping[str, Any]:
    """Return the turn that a record of a table of turns is."""
    beside = {key: row[key] for key in ("tool_calls", "tool_call_id", "name", "reasoning_content") if row.get(key)}
    who = {"speaker": str(spec.get("speaker", row))} if "speaker" in spec.paths else {}
    role = {"role": str(spec.get("role", row)).lower()} if "role" in spec.paths else {}
    return {**who, **role, "content": spec.get("text", row), **beside}


def _read(spec: Spec, row: Row) -> Conversation | None:
    if "when" in spec.paths and not spec.get("when", row):
        return None
    for reason, path in spec.named.get("refuse", {}).items():
        if found := path.find(row):
            raise RowRefused(reason, f"{spec.name}: {path.text} is {str(found)[:80]}")
    if "messages" in spec.paths:
        return _turns(spec, row)
    if "response" in spec.paths:
        messages, tools, changed = call_of(spec.get("request", row), spec.get("response", row))
        return conversation_of(spec.name, messages, tools or _tools(spec, row), changed)
    return _pair(spec, row) if spec.prompt else _text(spec, row)


def _tools(spec: Spec, row: Row) -> tuple[Mapping[str, Any], ...]:
    return read_tools(spec.get("tools", row))


def _turns(spec: Spec, row: Row) -> Conversation | None:
    turns = parsed(spec.get("messages", row))
    if "branch" in spec.named or "versions" in spec.named or "unlearned" in spec.named:
        return _chat(spec, row, turns)
    if not isinstance(turns, list):
        raise RowRefused("wrong-type", f"{spec.paths['messages'].text}: a list of turns")
    kept = [turn for turn in turns if not (isinstance(turn, dict) and spec.get("skip", turn))]
    notes = ("program-notes",) if len(kept) < len(turns) else ()
    asks = spec.get("asks", row)
    if "speaker" in spec.paths and asks is None:  # people: the user says who answers
        said = ((str(spec.get("speaker", turn)), _words(spec, spec.get("text", turn))) for turn in kept)
        turns = [{"speaker": speaker, "content": text} for speaker, text in said if text]
        answers = row.get(ASSISTANT) or spec.get("answers", row) or None
        return read_session({"hivetune_session": spec.name, "messages": turns, ASSISTANT: answers})
    if spec.paths.keys() & {"role", "speaker", "text"}:
        kept = [turn_read for turn in kept if (turn_read := _turn(spec, turn, asks)) is not None]
    system = spec.get("system", row)
    messages = read_messages(kept, parsed(system) if isinstance(system, str) else system)
    answer, changed = spec.get("answer", row), notes
    if messages[-1].role in ("user", "tool") and answer not in (None, ""):
        more, left_out = read_answer(answer)
        messages, changed = [*messages, *more], (*notes, *left_out)
    return ordered_conversation(spec.name, messages, _tools(spec, row), changed)


def _chat(spec: Spec, row: Row, turns: Any) -> Conversation | None:
    """Return the kept branch of an exported chat, with the selected version of each turn."""
    others = 0
    if isinstance(turns, dict):
        nodes = {str(name): node for name, node in turns.items() if isinstance(node, dict)}
        parents = {name: spec.of("branch", "parent", node) for name, node in nodes.items()}
        path = branch(parents, str(spec.of("branch", "leaf", row)))
        others = sum(spec.get("role", node) == "assistant" for name, node in nodes.items() if name not in path)
        turns = [nodes[name] for name in path]
    chosen = []
    for turn in objects(turns) or []:
        versions = objects(spec.of("versions", "of", turn)) if "versions" in spec.named else [turn]
        if versions is None:
            return None
        number = spec.of("versions", "selected", turn) if "versions" in spec.named else 0
        chosen.append(versions[number if isinstance(number, int) and 0 <= number < len(versions) else -1])
        others += len(versions) - 1

    def read(turn: Any) -> list[Message]:
        if spec.get("not_held", turn):
            raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
        messages = read_turn(_turn(spec, turn, None))
        for reason, path in spec.named.get("unlearned", {}).items():
            if path.find(turn):
                raise NotLearned(RowRefused(reason, f"{spec.name}: {path.text}"), *messages)
        return messages

    return chat(spec.name, chosen, read, others, spec.get("system", row))


def _turn(spec: Spec, turn: Any, asks: Any) -> Any:
    """Return a turn under our names; None for one without words."""
    if not isinstance(turn, dict):
        return turn
    words = _words(spec, spec.get("text", turn)) if "text" in spec.paths else turn.get("content")
    role = spec.get("role", turn) if "role" in spec.paths else turn.get("role")
    if "speaker" in spec.paths:
        role = "user" if str(spec.get("speaker", turn)) == str(asks) else "assistant"
    named = {key: value for key in ("reasoning", "weight") if (value := spec.get(key, turn)) is not None}
    if "weight" in named:
        named["weight"] = int(bool(named["weight"]))
    if spec.markup and not words:
        return None
    return {**turn, "role": spec.roles.get(str(role), role), "content": words, **named}


def _words(spec: Spec, value: Any) -> Any:
    if spec.markup:
        text = without_markup(text_of(value, "text"))
        if not text and "<img" in str(value).lower():
            raise RowRefused("unsupported-content", "a message that is only an image")
        return text
    if isinstance(value, list) and any(isinstance(piece, str) for piece in value):  # some of it bold, or links
        return "".join(str(piece.get("text") or "") if isinstance(piece, dict) else str(piece) for piece in value)
    return value


def _text(spec: Spec, row: Row) -> Conversation | None:
    text = text_of(spec.get("text", row), "text")
    if (turns := rendered_turns(text, whole=True)) is not None:
        return conversation_of(spec.name, read_messages(turns, None), changed=("turns-from-text",))
    if has_marks(text):
        raise RowRefused("rendered-text")
    return Conversation(spec.name, (Message("assistant", text),))


def _pair(spec: Spec, row: Row) -> Conversation | None:
    """Return a question and its answer, each a text, turns or (of the question) a text that a template wrote."""
    values = [path.find(row) for path in spec.prompt]
    question, answer = next((value for value in values if value not in (None, "")), None), spec.get("completion", row)
    before = read_system(spec.get("system", row))
    changed: tuple[str, ...] = ()
    if (turns := _listed_turns(question)) is not None:
        before = read_messages(turns, spec.get("system", row))
    elif isinstance(question, str) and (turns := rendered_turns(question, whole=False)) is not None:
        before, changed = read_messages(turns, spec.get("system", row)), ("turns-from-text",)
    else:
        text = "\n".join(part for value in values if (part := text_of(value, "the question")).strip())
        if has_marks(text):
            raise RowRefused("rendered-text")
        before += [*_history(spec.get("history", row)), Message("user", text)]
    if "calls" in spec.paths:
        calls = objects(parsed(spec.get("calls", row)))
        if calls is None:
            return None
        after = [Message("assistant", "", tool_calls=tuple(map(read_call, calls)))]
    elif (replies := _listed_turns(answer)) is not None:
        after = read_messages(replies, None)
    elif isinstance(answer, dict | list) and is_response(answer):
        after, changed = read_answer(answer)
    else:
        if all_texts(answer):
            column = next((name for name in spec.paths["completion"].one_of if row.get(name) == answer), "the answer")
            hint = f"{column} holds {len(answer)} texts: --columns completion={column}[0] learns the first"
            raise RowRefused("wrong-type", hint)
        if isinstance(answer, dict | list) and answer:
            answer, changed = json.dumps(answer, ensure_ascii=False), (*changed, "json-answer")
        text, written = calls_in_text(text_of(answer, spec.paths["completion"].text))
        thoughts = spec.get("reasoning", row)
        reasoning = thoughts if isinstance(thoughts, str) and thoughts.strip() else None
        after = [Message("assistant", text, tool_calls=written, reasoning=reasoning)]
    conversation = conversation_of(spec.name, [*before, *after], _tools(spec, row), changed)
    return conversation._replace(untrusted=bool(spec.get("untrusted", row)))


def _listed_turns(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of turns, maybe as JSON text. Any other JSON is the text that somebody wrote."""
    turns = parsed(value)
    turns = objects([turns] if isinstance(turns, dict) and "content" in turns else turns)
    return turns if turns and all(map(_is_turn, turns)) else None


def _is_turn(value: Mapping[str, Any]) -> bool:
    return any(key in value for key in ("role", "from")) and not _SPOKEN.isdisjoint(value)


def _history(value: Any) -> list[Message]:
    """Return earlier turns: a list of turns, or of [question, answer]."""
    history = parsed(value)
    if not history:
        return []
    if (turns := _listed_turns(history)) is not None:
        return read_messages(turns, None)
    pairs: Sequence[Any] = listed(history)
    if not pairs or not all(all_texts(pair) and len(pair) == 2 for pair in pairs):
        raise RowRefused("wrong-type", "history: a list of [question, answer] pairs")
    return [message for asked, told in pairs for message in (Message("user", asked), Message("assistant", told))]
