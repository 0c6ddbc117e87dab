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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.columns import as_number, as_time, plain_row
from hivetune.data.pieces.answers import call_of, is_response, read_answer
from hivetune.data.pieces.format import NOT_HELD, AnyFormat, Batch, Conversation, Format, Log
from hivetune.data.pieces.rendered import has_marks, rendered_turns
from hivetune.data.pieces.sessions import (
    ASSISTANT,
    SESSION,
    NotLearned,
    TableTurn,
    branch,
    chat,
    ordered_conversation,
    read_session,
    table_rows,
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
from hivetune.data.pieces.values import Path, Row, all_texts, compile_path, listed, objects, parsed, text_of
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.errors import UsageError
from hivetune.records import Message

_OF_TURNS = ("role", "speaker", "weight", "skip", "not_held", "position", "thread")
_PATHS = (
    *("when", "rows", "messages", "text", "reasoning", "asks", "answers", "answer", "completion", "calls"),
    *("history", "request", "response", "system", "tools", "untrusted", *_OF_TURNS),
)
_NAMED_PATHS = ("refuse", "unlearned", "branch", "versions", "shared")  # tables of paths
_WORDS = ("messages", "completion", "calls", "response", "text", "rows")  # one of which an entry must have
KEYS = frozenset((*_PATHS, *_NAMED_PATHS, "page", "needs", "roles", "markup", "prompt", "reads", "table"))
_WHO, _SPOKEN = frozenset(("role", "from")), frozenset(("content", "value", "parts", "tool_calls"))
_BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # what a turn in a table of turns may have


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

    def first_true(self, table: str, value: Any) -> tuple[str, Path, Any] | None:
        """Return the first (reason, path, what it found) of a table of reasons, None if no path finds anything."""
        found = ((reason, path, path.find(value)) for reason, path in self.named.get(table, {}).items())
        return next((one for one in found if one[2]), None)

    def claims(self, row: Row) -> bool:
        needed = all(not set(need.split("|")).isdisjoint(row) for need in self.needs)
        return needed and ("when" not in self.paths or bool(self.get("when", row)))


def format_of(name: str, entry: Mapping[str, Any], source: str) -> AnyFormat:
    """Return the format of an entry. `source`: the file, for errors. Raise UsageError for an invalid entry."""
    if unknown := next((key for key in entry if key not in KEYS), None):
        near = difflib.get_close_matches(unknown, KEYS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(KEYS))}"
        raise UsageError(f"{source}: the format {name!r} has an unknown key {unknown!r}", hint=hint)
    prompts = entry.get("prompt", [])
    try:
        paths = {key: compile_path(entry[key]) for key in _PATHS if key in entry}
        named = {
            key: {part: compile_path(path) for part, path in entry[key].items()} for key in _NAMED_PATHS if key in entry
        }
        asked = tuple(map(compile_path, [prompts] if isinstance(prompts, str) else prompts))
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
        return Log(
            name,
            lambda head: len(head.events) > 1 and all(_table_turn(spec, event) for event in head.events),
            lambda lines: table_rows(name, lines, lambda event: _table_turn(spec, event)),
        )
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


def _table_turn(spec: Spec, event: Row) -> TableTurn | None:
    """Return the turn that a record of a table of turns is; None for any other record."""
    row = plain_row(event)
    thread, words, role = spec.get("thread", row), spec.get("text", row), spec.get("role", row)
    if not spec.claims(row) or not isinstance(thread, str | int) or not isinstance(words, str | list | None):
        return None
    if "role" in spec.paths and str(role).lower() not in ROLES:
        return None
    who = {"speaker": str(spec.get("speaker", row))} if "speaker" in spec.paths else {"role": str(role).lower()}
    beside = {key: row[key] for key in _BESIDE if row.get(key)}
    position = spec.get("position", row)
    place = as_time(position) if as_number(position) is None else as_number(position)
    return TableTurn(str(thread), {**who, "content": words, **beside}, place)


def _read(spec: Spec, row: Row) -> Conversation | None:
    if "when" in spec.paths and not spec.get("when", row):
        return None
    if found := spec.first_true("refuse", row):
        raise RowRefused(found[0], f"{spec.name}: {found[1].text} is {str(found[2])[:80]}")
    if "messages" in spec.paths:
        return _turns(spec, row)
    if "response" in spec.paths:
        messages, tools, changed = call_of(spec.get("request", row), spec.get("response", row))
        return conversation_of(spec.name, messages, tools or read_tools(spec.get("tools", row)), changed)
    return _pair(spec, row) if spec.prompt else _text(spec, row)


def _turns(spec: Spec, row: Row) -> Conversation | None:
    turns = parsed(spec.get("messages", row))
    if not spec.named.keys().isdisjoint(("branch", "versions", "unlearned")):
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
        return read_session({SESSION: spec.name, "messages": turns, ASSISTANT: answers})
    if spec.paths.keys() & {"role", "speaker", "text"}:
        kept = [turn_read for turn in kept if (turn_read := _turn(spec, turn, asks)) is not None]
    system = spec.get("system", row)
    messages = read_messages(kept, parsed(system) if isinstance(system, str) else system)
    answer, changed = spec.get("answer", row), notes
    if messages[-1].role in ("user", "tool") and answer not in (None, ""):
        more, left_out = read_answer(answer)
        messages, changed = [*messages, *more], (*notes, *left_out)
    return ordered_conversation(spec.name, messages, read_tools(spec.get("tools", row)), changed)


def _chat(spec: Spec, row: Row, turns: Any) -> Conversation | None:
    """Return the kept branch of an exported chat, with the selected version of each turn."""
    others = 0
    if isinstance(turns, dict):
        nodes = {str(name): node for name, node in turns.items() if isinstance(node, dict)}
        parents = {name: spec.of("branch", "parent", node) for name, node in nodes.items()}
        turns = branch(nodes, parents, str(spec.of("branch", "leaf", row)))
        answers = [sum(spec.get("role", node) == "assistant" for node in some) for some in (nodes.values(), turns)]
        others = answers[0] - answers[1]
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
        if found := spec.first_true("unlearned", turn):
            raise NotLearned(RowRefused(found[0], f"{spec.name}: {found[1].text}"), *messages)
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
    conversation = conversation_of(spec.name, [*before, *after], read_tools(spec.get("tools", row)), changed)
    return conversation._replace(untrusted=bool(spec.get("untrusted", row)))


def _listed_turns(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of turns, maybe as JSON text. Any other JSON is the text that somebody wrote."""
    turns = parsed(value)
    turns = objects([turns] if isinstance(turns, dict) and "content" in turns else turns) or []
    said = all(not _WHO.isdisjoint(turn) and not _SPOKEN.isdisjoint(turn) for turn in turns)
    return turns if turns and said else None


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
