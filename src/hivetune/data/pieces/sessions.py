"""Conversations that a program logged or stores: the lines of a session, tickets, tables of turns. Parts that the
program left out are noted."""

import difflib
import itertools
import json
import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.columns import plain_name
from hivetune.data.pieces.format import NOT_HELD, Conversation, PlacedRow
from hivetune.data.pieces.turns import (
    CONTENT_KEYS,
    ROLE_KEYS,
    conversation_of,
    read_tools,
    read_turns,
    role_of,
    with_system,
)
from hivetune.data.pieces.values import Row, listed, one_of
from hivetune.data.reasons import REWRITTEN, RowRefused
from hivetune.records import Message

SESSION, ASSISTANT = "hivetune_session", "hivetune_assistant"  # the program, and who answers as the user says
MAX_KEPT_CHARS = 64 << 20  # of one session, in memory
MAX_ROW_CHARS = 16 << 20
PlacedEvent = tuple[int, dict[str, Any]]  # (line, the object that it holds)
_AGENTS = ("claude-code", "codex", "opencode")  # programs that may hide what was thought
_MAX_NAMED = 5
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


def conversation(program: str, messages: Sequence[Any], left_out: Iterable[str] = (), **facts: Any) -> str | RowRefused:
    """Return the record of one conversation, which `read_session` reads; `left_out`: reasons of severity warn."""
    row = {SESSION: program, **{name: value for name, value in facts.items() if value}, "messages": list(messages)}
    if reasons := sorted(set(left_out)):
        row["left_out"] = reasons
    text = json.dumps(row, ensure_ascii=True)
    if len(text) > MAX_ROW_CHARS // 2:  # MAX_ROW_CHARS with its place, whatever the characters
        return RowRefused("too-long", f"it has {len(text):,} characters, the limit is {MAX_ROW_CHARS // 2:,}: split it")
    return text


def session_rows(
    lines: Iterable[tuple[int, str]],
    read: Callable[[Sequence[PlacedEvent]], Iterator[PlacedRow]],
    is_line: Callable[[dict[str, Any]], bool],
    begins: Callable[[dict[str, Any]], bool] = lambda event: False,
) -> Iterator[PlacedRow]:
    """Yield the rows that `read` makes from the events of each session. `is_line`: whether an object belongs to a
    session; `begins`: whether an event begins one. A session of more than MAX_KEPT_CHARS is read in pieces.
    """
    session: list[PlacedEvent] = []
    size = 0
    for number, event, text in events(lines):
        if event is None:  # it is counted, and the session goes on without it
            yield number, RowRefused(NOT_HELD, "a line of the session is not JSON; its other lines are read")
            continue
        # In a file that was joined of several a line may be a row: it has turns, or a question and an answer. Programs
        # write new types of events, which hold nothing that is said.
        if not is_line(event):
            names = {plain_name(name) for name in event}
            asks_and_answers = not _ASKED.isdisjoint(names) and not _ANSWERED.isdisjoint(names)
            if "type" not in event or asks_and_answers or not _TURNS.isdisjoint(names):
                yield number, text
                continue
        if session and (begins(event) or size > MAX_KEPT_CHARS):
            yield from read(session)
            session, size = [], 0
        session.append((number, event))
        size += len(text)
    if session:
        yield from read(session)


def path_to(leaf: str | None, parents: Mapping[str, Any]) -> list[str]:
    """Return the names from the root of a tree to `leaf`; an empty list if the parents form a cycle."""
    path: dict[str, None] = {}
    node = leaf
    while isinstance(node, str) and node in parents:
        if node in path:
            return []
        path[node] = None
        node = parents[node]
    return list(path)[::-1]


class TableTurn(NamedTuple):
    """One turn of a conversation whose turns are separate rows, or None for a note of the program. Its place is the
    row where it begins. The turns are sorted by `position` if all have one, else they keep the order of the file.
    `facts` belong to the whole conversation."""

    thread: str
    turn: Mapping[str, Any] | None
    position: float | None = None
    facts: Mapping[str, Any] = {}


class Threads:
    """The turns of many conversations that are interleaved in a file."""

    def __init__(self) -> None:
        # A temporary file: the threads of a mailbox or of a channel are as large as these.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE turns (thread TEXT, place INTEGER, position REAL, turn TEXT, facts TEXT); BEGIN;"
        )

    def add(self, place: int, said: TableTurn) -> None:
        values = (said.thread, place, said.position, json.dumps(said.turn), json.dumps(said.facts))
        self._database.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", values)

    def rows(self, name: str) -> Iterator[PlacedRow]:
        """Yield the record of each conversation, in the order of their beginnings. Turns without a thread are
        left out."""
        query = (
            "SELECT thread, place, position, turn, facts,"
            " min(place) FILTER (WHERE turn <> 'null') OVER (PARTITION BY thread) AS begin"
            " FROM turns ORDER BY begin, thread, place, rowid"
        )
        for thread, group in itertools.groupby(self._database.execute(query), key=lambda row: row[0]):
            rows = list(group)
            begin = rows[0][5]
            if all(position is not None for _, _, position, *_ in rows):
                rows.sort(key=lambda row: row[2])
            facts = {key: fact for row in rows[::-1] for key, fact in json.loads(row[4]).items()}
            turns = [turn for row in rows if (turn := json.loads(row[3])) is not None]
            left_out = ["program-notes"] if len(turns) < len(rows) else []
            if begin is not None:
                yield begin, conversation(name, turns, left_out, **{"session_id": thread, **facts})
        self._database.close()


def table_rows(
    name: str, lines: Iterable[tuple[int, str]], read: Callable[[dict[str, Any]], TableTurn | RowRefused | None]
) -> Iterator[PlacedRow]:
    """Yield one row for each conversation of a table of turns; a record that `read` returns None for stays a row."""
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
        raise RowRefused("wrong-type", "messages must be a list of objects")
    name, turns = str(row[SESSION]), _with_roles(row["messages"], row.get(ASSISTANT))
    read, cut = read_turns(turns, logged=True)
    said = with_system(read, row.get("system"))
    answered = [m for m in said if not _is_lone_thought(m, hides_thoughts=name in _AGENTS)]
    question = next(i for i, message in enumerate(answered) if message.role == "user")
    # Results in front of the first question belong to calls that stand elsewhere.
    messages = [message for i, message in enumerate(answered) if i >= question or message.role != "tool"]
    # A file of others may have such a field too: only reasons are believed.
    left_out = [reason for reason in listed(row.get("left_out")) if isinstance(reason, str) and reason in REWRITTEN]
    left_out += ["lone-thought"] if len(answered) < len(said) else []
    left_out += ["result-without-call"] if len(messages) < len(answered) else []
    return conversation_of(name, messages, read_tools(row.get("tools")), list(dict.fromkeys([*left_out, *cut])))


def with_speakers(turns: list[Any]) -> list[Any]:
    """Return turns with a speaker instead of a role where they name several people: some names are no roles, and none
    is that of an assistant. Other turns are returned as they are.
    """
    names = [one_of(turn, *ROLE_KEYS) for turn in turns]
    if not all(isinstance(name, str) and name.strip() for name in names):
        return turns
    roles = [role_of(name) for name in names]
    if None not in roles or not {None, "system", "user"}.issuperset(roles) or len(set(names)) < 2:
        return turns
    return [
        turn if role == "system" else {**turn, "speaker": name.strip(), "content": one_of(turn, *CONTENT_KEYS)}
        for turn, role, name in zip(turns, roles, names, strict=True)
    ]


def _with_roles(turns: list[Any], assistant: Any) -> list[Any]:
    """Return turns that name a `speaker`, with a role for each: `assistant` answers, all others ask. Raise RowRefused:
    who-answers if no assistant is named; filtered if the assistant answers nobody.
    """
    said = [str(turn["speaker"]) for turn in turns if isinstance(turn, dict) and "speaker" in turn]
    if not said:
        return turns
    speakers = Counter(said)
    if assistant is None:
        named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(_MAX_NAMED))
        # Who begins asks, and of the others the one who speaks most answers.
        likely = next((name for name, _ in speakers.most_common() if name != said[0]), said[0])
        example = shlex.quote(f"assistant={likely}")
        raise RowRefused("who-answers", f"{named}: name who answers, as in --columns {example}")
    # Whoever only announces something, or speaks before anybody asked, answers nobody.
    asked = next((place for place, speaker in enumerate(said) if speaker != assistant), len(said))
    if assistant not in said[asked:]:
        # A first name alone is meant as often as it is misspelt: "Ben" is 0.55 like "Ben Osei".
        near = [] if assistant in said else difflib.get_close_matches(str(assistant), speakers, 1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise RowRefused("filtered", f"{assistant!r} answers nobody here{meant}")
    with_role: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and "speaker" in turn:
            speaker = str(turn["speaker"])
            turn = {**turn, "role": "assistant" if speaker == assistant else "user"}
            # Where several ask, an answer may depend on whom it is for.
            if speaker != assistant and len(speakers) > 2 and isinstance(turn.get("content"), str):
                turn["content"] = f"{speaker}: {turn['content']}"
        with_role.append(turn)
    return with_role


def _is_lone_thought(message: Message, *, hides_thoughts: bool) -> bool:
    """Return whether a turn has only a thought: the session ends there, or the user stopped it."""
    has_content = message.role != "assistant" or bool(message.tool_calls) or bool(message.content.strip())
    return not has_content and (hides_thoughts or bool(message.reasoning))
