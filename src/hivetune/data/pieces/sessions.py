"""Conversations that a program logged, exported or keeps: many lines of a session, chats, tickets, tables of turns.

What its program left out and what is missing is said. Of a tree of turns the branch that was kept is read; retries and
edits that were given up are counted (`other-branches`). Help desks keep messages as HTML.
"""

import html
import itertools
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.columns import plain_name
from hivetune.data.pieces.format import NOT_HELD, Conversation, PlacedRow, Tools
from hivetune.data.pieces.turns import conversation_of, read_messages, read_system, read_tools, read_turn
from hivetune.data.pieces.values import Row, listed
from hivetune.data.reasons import REWRITTEN, RowRefused
from hivetune.records import Message

SESSION, ASSISTANT = "hivetune_session", "hivetune_assistant"  # the program, and who answers as the user says
MAX_KEPT_CHARS = 64 << 20  # of one session, in memory
MAX_ROW_CHARS = 16 << 20
PlacedEvent = tuple[int, dict[str, Any]]  # (line, the object that it holds)
_AGENTS = ("claude-code", "codex")  # programs that may hide what was thought
_MAX_NAMED = 5
_NO_TEXT = (NOT_HELD, "unsupported-content")  # why a conversation ends before a turn
_TURNS = frozenset(("messages", "conversations", "conversation"))
_ANSWERED = frozenset(("completion", "response", "output", "answer", "solution", "assistant"))
_ASKED = frozenset(("prompt", "question", "instruction"))  # the other names are also those of a tool's input


# From the lines of a file to records.


def events(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Yield (line, event or None, the line) for each line that is not blank; None: it is not a JSON object."""
    for number, line in lines:
        text = line.strip()
        if not text:
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        yield number, event if isinstance(event, dict) else None, text.replace("\t", " ")


def is_row(event: Row) -> bool:
    """Return whether a line of a log is a row of its own, as in files that were joined: it has an answer, a text or
    turns; where it has a type, as the events of programs have, both a question and an answer, or turns.
    """
    names = {plain_name(name) for name in event}
    if "type" not in event:
        return not (_ANSWERED | _TURNS | {"text"}).isdisjoint(names)
    return not (_TURNS.isdisjoint(names) and (_ASKED.isdisjoint(names) or _ANSWERED.isdisjoint(names)))


def conversation(program: str, messages: Sequence[Any], left_out: Iterable[str] = (), **facts: Any) -> str | RowRefused:
    """Return the record of one conversation, which `read_session` reads; `left_out`: reasons of severity warn."""
    row = {SESSION: program, **{name: value for name, value in facts.items() if value}, "messages": list(messages)}
    if reasons := sorted(set(left_out)):
        row["left_out"] = reasons
    text = json.dumps(row, ensure_ascii=True)
    if len(text) > MAX_ROW_CHARS // 2:  # MAX_ROW_CHARS with its place, whatever the characters
        return RowRefused("line-too-large", f"the session has {len(text):,} characters")
    return text


def session_rows(
    lines: Iterable[tuple[int, str]],
    read: Callable[[Sequence[PlacedEvent]], Iterator[PlacedRow]],
    begins: Callable[[dict[str, Any]], bool] = lambda event: False,
) -> Iterator[PlacedRow]:
    """Yield what `read` makes of the events of each session; `begins`: whether an event begins one.

    A session of more than MAX_KEPT_CHARS is read in pieces. A line that is not JSON is reported, and left out; a row of
    its own is a row.
    """
    session: list[PlacedEvent] = []
    size = 0
    for number, event, text in events(lines):
        if event is None or is_row(event):
            yield number, text if event is not None else RowRefused("broken-line")
            continue
        if session and (begins(event) or size > MAX_KEPT_CHARS):
            yield from read(session)
            session, size = [], 0
        session.append((number, event))
        size += len(text)
    if session:
        yield from read(session)


def path_to(leaf: str | None, parents: Mapping[str, Any]) -> list[str]:
    """Return the names from the root of a tree to `leaf`. Empty where they go in a circle."""
    path: dict[str, None] = {}
    node = leaf
    while isinstance(node, str) and node in parents:
        if node in path:
            return []
        path[node] = None
        node = parents[node]
    return list(path)[::-1]


class TableTurn(NamedTuple):
    """One turn of a conversation whose turns stand apart: its place is the row where it begins. `position` orders the
    turns where all have one, else they stand in the order of the file; `facts` belong to the whole conversation.
    """

    thread: str
    turn: Mapping[str, Any]
    position: float | None = None
    facts: Mapping[str, Any] = {}


class Threads:
    """The turns of many conversations that stand mixed in a file.

    They wait in a temporary file, because the threads of a mailbox or of a channel are as large as these.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE turns (thread TEXT, place INTEGER, position REAL, turn TEXT, facts TEXT); BEGIN;"
        )

    def add(self, place: int, said: TableTurn) -> None:
        values = (said.thread, place, said.position, json.dumps(said.turn), json.dumps(said.facts))
        self._database.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", values)

    def rows(self, name: str) -> Iterator[PlacedRow]:
        """Yield the record of each conversation, in the order in which they begin. A thread without a name is none."""
        query = (
            "SELECT thread, place, position, turn, facts, min(place) OVER (PARTITION BY thread) AS begin FROM turns"
            " ORDER BY begin, thread, place, rowid"
        )
        for thread, group in itertools.groupby(self._database.execute(query), key=lambda row: row[0]):
            rows = list(group)
            begin = rows[0][1]
            if all(position is not None for _, _, position, *_ in rows):
                rows.sort(key=lambda row: row[2])
            facts = {key: fact for row in rows[::-1] for key, fact in json.loads(row[4]).items()}
            yield begin, conversation(name, [json.loads(row[3]) for row in rows], **{"session_id": thread, **facts})
        self._database.close()


def table_rows(
    name: str, lines: Iterable[tuple[int, str]], read: Callable[[dict[str, Any]], TableTurn | RowRefused | None]
) -> Iterator[PlacedRow]:
    """Yield one row for each conversation of a table of turns; a row of which `read` returns None stays a row."""
    threads = Threads()
    for number, event, text in events(lines):
        said = None if event is None else read(event)
        if isinstance(said, TableTurn):
            threads.add(number, said)
        else:
            yield number, said or text
    yield from threads.rows(name)


# From a record to its conversation.


def read_session(row: Row) -> Conversation:
    """Return the conversation that a file's format joined from many lines. Raise RowRefused."""
    if not isinstance(row.get("messages"), list):
        raise RowRefused("wrong-type", "messages: a list of objects")
    turns, system = _with_roles(row["messages"], row.get(ASSISTANT)), row.get("system")
    cut: tuple[str, ...] = ()
    try:
        read = read_messages(turns, system)
    except RowRefused as refused:
        if refused.reason not in _NO_TEXT:
            raise
        before, _, cut = _before_media(turns, read_turn)  # up to the first turn that holds an image or a file
        read = read_messages(turns[: len(before)], system)
    name = str(row[SESSION])
    answered = [message for message in read if not is_lone_thought(message, silent=name in _AGENTS)]
    first_question = next((i for i, message in enumerate(answered) if message.role == "user"), None)
    if first_question is None:
        raise RowRefused("no-question")
    # Results in front of the first question are left out: their calls stand elsewhere.
    begun = [message for i, message in enumerate(answered) if i >= first_question or message.role != "tool"]
    messages: list[Message] = []
    changed = dict.fromkeys(() if len(answered) == len(read) else ("lone-thought",))
    for message in begun:
        last = messages[-1] if messages else Message("system", "")
        if message.role == "tool" and last.role == "user":
            changed["result-without-call"] = None
            continue
        is_answer = message.role == "assistant" and bool(message.content.strip() or not message.tool_calls)
        if is_answer and last.role == "assistant" and last.tool_calls:
            messages += [Message("tool", "", tool_call_id=call.get("id")) for call in last.tool_calls]
            changed["call-without-result"] = None
        messages.append(message)
    # A file of others may have such a field too: only reasons are believed.
    left_out = (reason for reason in listed(row.get("left_out")) if isinstance(reason, str) and reason in REWRITTEN)
    return ordered_conversation(name, messages, read_tools(row.get("tools")), (*left_out, *cut, *changed))


def _with_roles(turns: list[Any], assistant: Any) -> list[Any]:
    """Return turns that name a `speaker`, with the role that each has when `assistant` answers: all others ask. The
    name of a speaker stays before what they say where several ask. Raise RowRefused: who-answers.
    """
    said = [str(turn["speaker"]) for turn in turns if isinstance(turn, dict) and "speaker" in turn]
    if not said:
        return turns
    speakers = Counter(said)
    if assistant not in speakers:
        named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(_MAX_NAMED))
        raise RowRefused("who-answers", f"{named}: say who answers, as in --columns assistant={likely_answers(said)}")
    with_role: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and "speaker" in turn:
            speaker, rest = str(turn["speaker"]), {key: value for key, value in turn.items() if key != "speaker"}
            if speaker != assistant and len(speakers) > 2 and isinstance(rest.get("content"), str):
                rest["content"] = f"{speaker}: {rest['content']}"
            turn = {"role": "assistant" if speaker == assistant else "user", **rest}
        with_role.append(turn)
    return with_role


def likely_answers(speakers: Sequence[str]) -> str:
    """Return who answers most likely: who begins asks, and of the others the one who speaks most answers."""
    others = Counter(name for name in speakers if name != speakers[0]).most_common(1)
    return others[0][0] if others else speakers[0]


def is_lone_thought(message: Message, *, silent: bool) -> bool:
    """Return whether a turn holds a thought alone: the session ends there, or the user stopped it. `silent`: its
    program may hide what was thought, so that nothing is there.
    """
    has_content = message.role != "assistant" or bool(message.tool_calls) or bool(message.content.strip())
    return not has_content and (silent or bool(message.reasoning))


def ordered_conversation(
    name: str, messages: Sequence[Message], tools: Tools = (), changed: Sequence[str] = ()
) -> Conversation:
    """Return the conversation of the format `name`; a system text between two questions is moved before them."""
    ordered: list[Message] = []
    for i, message in enumerate(messages):
        index = len(ordered)
        if message.role == "system":
            following = next((other.role for other in messages[i + 1 :] if other.role != "system"), None)
            while following == "user" and index and ordered[index - 1].role == "user":
                index -= 1
        ordered.insert(index, message)
    return conversation_of(name, ordered, tools, changed)


_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)


def without_markup(body: str) -> str:
    """Return what a person reads of a message's HTML; text without tags is only rid of its entities."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


# Exported chats.


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        self.messages = [replace(m, weight=0) if m.role == "assistant" else m for m in messages]
        self.messages = self.messages or [Message("assistant", "", 0)]


def branch(nodes: Mapping[str, Any], parents: Mapping[str, Any], leaf: str) -> list[Any]:
    """Return the nodes from the root to `leaf`. Raise RowRefused when they go in a circle."""
    path = path_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return [nodes[name] for name in path]


def _before_media(
    turns: Iterable[Any], read: Callable[[Any], list[Message]]
) -> tuple[list[list[Message]], list[RowRefused], tuple[str, ...]]:
    """Return (messages of each turn up to the first that holds what is not a text, why some of them are not learned,
    reasons of severity warn): what follows rests on what nobody can read. Raise RowRefused where nothing is learned
    before it.
    """
    messages: list[list[Message]] = []
    refusals: list[RowRefused] = []
    for turn in turns:
        try:
            messages.append(read(turn))
        except NotLearned as noted:
            refusals.append(noted.refused)
            messages.append(noted.messages)
        except RowRefused as refused:
            learned = any(m.role == "assistant" and m.weight for read_before in messages for m in read_before)
            if refused.reason not in _NO_TEXT or not learned:
                raise
            return messages, refusals, ("ends-before-media",)
    return messages, refusals, ()


def chat(
    name: str, turns: Iterable[Any], read: Callable[[Any], list[Message]], others: int, system: Any = None
) -> Conversation:
    """Return the conversation of an exported chat; `others` is the number of answers on branches that were given up.

    An answer is read and not learned if it is incomplete, or if it used a tool whose results the export lacks: `read`
    raises NotLearned for such a turn.
    """
    read_so_far, refusals, cut = _before_media(turns, read)
    messages: list[Message] = []
    asks = ("user", "system")
    for is_question, turn in itertools.groupby(itertools.chain.from_iterable(read_so_far), lambda m: m.role in asks):
        answer = list(turn)
        has_results = sum(len(part.tool_calls) for part in answer) == sum(part.role == "tool" for part in answer)
        if not is_question and not (has_results and all(part.weight for part in answer)):
            # Which calls have their results nobody can tell: the words of such an answer are kept, and not learned.
            texts = [part for part in answer if part.role == "assistant" and part.content.strip()]
            answer = [replace(part, weight=0, tool_calls=()) for part in texts]
            if not answer:
                cut = ("ends-before-media",)
                break
        messages += answer
    weights = [message.weight for message in messages if message.role == "assistant"]
    if not any(weights) and (refusals or weights):
        raise (*refusals, RowRefused(NOT_HELD, "the result of a call is not held"))[0]
    changed = ("other-branches",) if others else ()
    return ordered_conversation(name, [*read_system(system), *messages], changed=(*changed, *cut))
