"""What the readers of sessions share: events of a log, and a conversation as a row that the layout `session` reads."""

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.reasons import RowRefused

MAX_KEPT_CHARS = 64 << 20  # of one session, in memory
MAX_ROW_CHARS = 16 << 20
# (place, a record, its JSON as text, or why there is none). The place is the line of the file where the row begins.
PlacedRow = tuple[int, Mapping[str, Any] | str | RowRefused]
PlacedEvent = tuple[int, dict[str, Any]]  # (line, the object that it holds)
_TURNS = frozenset(("messages", "conversations", "conversation"))
_ANSWERED = frozenset(("completion", "response", "output", "answer", "solution", "assistant"))
_ASKED = frozenset(("prompt", "question", "instruction"))  # the other names are also those of a tool's input
_OF_ROWS = _ANSWERED | _TURNS | {"text"}


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


def is_row(event: Mapping[str, Any]) -> bool:
    """Return whether a line of a log is a row of its own, as in files that were joined: it has an answer, a text or
    turns; where it has a type, as the events of programs have, both a question and an answer, or turns.
    """
    names = {plain_name(name) for name in event}
    if "type" not in event:
        return not _OF_ROWS.isdisjoint(names)
    return not (_TURNS.isdisjoint(names) and (_ASKED.isdisjoint(names) or _ANSWERED.isdisjoint(names)))


def conversation(program: str, messages: Sequence[Any], left_out: Iterable[str] = (), **facts: Any) -> str | RowRefused:
    """Return the record of one conversation; `left_out`: reasons of severity warn."""
    row = {"hivetune_session": program, **{name: value for name, value in facts.items() if value}}
    row["messages"] = list(messages)
    if reasons := sorted(set(left_out)):
        row["left_out"] = reasons
    text = json.dumps(row, ensure_ascii=True)
    if len(text) > MAX_ROW_CHARS // 2:  # MAX_ROW_CHARS with its place, whatever the characters
        return RowRefused("line-too-large", f"the session has {len(text):,} characters")
    return text


def session_rows(
    lines: Iterable[tuple[int, str]],
    begins: Callable[[dict[str, Any]], bool],
    read: Callable[[Sequence[PlacedEvent]], Iterator[PlacedRow]],
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


def trees(parents: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the trees of a log by the names of their first events, each with the names of all its events in the order
    of the log. `parents`: of each event. A parent may stand below its child: programs write what happens at once as it
    comes.
    """
    root_of: dict[str, str] = {}
    names_of: dict[str, list[str]] = {}
    for name in parents:
        path: dict[str, None] = {}
        node = name
        while node not in root_of and node not in path:
            path[node] = None
            above = parents[node]
            node = above if above is not None and above in parents else node
        root = root_of.get(node, node)
        root_of |= dict.fromkeys(path, root)
        names_of.setdefault(root, []).append(name)
    return names_of


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


class Threads:
    """The turns of many conversations that stand mixed in a log.

    They wait in a temporary file, because the threads of a mailbox or of a channel are as large as these.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE turns (name TEXT, place INTEGER, position REAL, turn TEXT); BEGIN;"
        )

    def add(self, name: str, place: int, turn: Any, position: float | None = None) -> None:
        """Add a turn to the conversation `name`. `position` orders its turns where all have one; else they stand in
        the order of the log.
        """
        self._database.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", (name, place, position, json.dumps(turn)))

    def conversations(self) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield (name, place of the first turn, turns) of each conversation, in the order in which they begin."""
        query = (
            "SELECT name, place, position, turn, min(place) OVER (PARTITION BY name) AS begin FROM turns"
            " ORDER BY begin, name, place, rowid"
        )
        for name, group in itertools.groupby(self._database.execute(query), key=lambda row: row[0]):
            rows = list(group)
            if all(position is not None for _, _, position, *_ in rows):
                rows.sort(key=lambda row: row[2])
            yield name, min(row[1] for row in rows), [json.loads(row[3]) for row in rows]
        self._database.close()
