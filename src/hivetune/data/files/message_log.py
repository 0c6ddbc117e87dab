"""Tables with one message a row and the session that it belongs to, under their exact names: `session_id`, `role` and
`content`; or `session_id` and `message`, an object, as LangChain's histories in SQL have it.
"""

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.formats import file_rows, format_of_file
from hivetune.data.pieces.fields import as_time, plain_name
from hivetune.data.pieces.format import Head
from hivetune.data.pieces.logs import PlacedRow, conversation
from hivetune.data.pieces.said import parsed
from hivetune.data.pieces.turns import ROLES

NUM_SAMPLE = 20  # rows by which a table is told; all of its objects have to be messages
SESSIONS = ("session_id", "conversation_id", "thread_id", "chat_id", "session", "conversation")
TEXTS = ("content", "text", "message")
ORDERS = ("timestamp", "created_at", "time", "turn_index", "turn", "message_index", "index", "seq")
_BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content")
# The place of a record, the object that it is or None, and the record as text or why there is none.
_Event = tuple[int, dict[str, Any] | None, Any]


class MessageShape(NamedTuple):
    """The columns of a table of messages. `role` is empty where `content` is a message as an object."""

    session: str
    role: str
    content: str
    order: str | None


def message_rows(rows: Iterator[PlacedRow], name: str) -> tuple[Iterator[PlacedRow], bool]:
    """Return (one row for each conversation of a file called `name`, True) if its rows are messages, else (`rows`,
    False).
    """
    first = [_event(row) for row in itertools.islice(rows, NUM_SAMPLE)]
    events = [event for _, event, _ in first]
    everything = itertools.chain(first, map(_event, rows))
    begun = [event for event in events if event is not None]
    if len(begun) == len(events) and (written := format_of_file(Head(name, b"", begun))) is not None:
        problems: list[PlacedRow] = []
        return itertools.chain(file_rows(written.name, _lines(everything, problems)), problems), False
    if (shape := message_shape(events)) is not None:
        return _joined(everything, shape), True
    return ((number, record) for number, _, record in everything), False


def _lines(events: Iterable[_Event], problems: list[PlacedRow]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log; `problems` gets the places without one."""
    for number, _, record in events:
        if isinstance(record, str):
            yield number, record
        else:
            problems.append((number, record))


def _event(row: PlacedRow) -> _Event:
    number, record = row
    if isinstance(record, Mapping):
        record = json.dumps(record, ensure_ascii=False)
    if not isinstance(record, str):
        return number, None, record
    try:
        event = json.loads(record)
    except (ValueError, RecursionError):
        event = None
    return number, event if isinstance(event, dict) else None, record


def message_shape(events: Sequence[Mapping[str, Any] | None]) -> MessageShape | None:
    """Return the columns of a table of messages by its first rows; None for any other table."""
    tables = [_plain(event) for event in events if event is not None]
    if len(tables) < 2 or 2 * len(tables) < len(events):  # a line may be broken
        return None
    shared = set.intersection(*map(set, tables))
    session = next((name for name in SESSIONS if name in shared), None)
    texts = (name for name in TEXTS if all(isinstance(table.get(name), str | list | None) for table in tables))
    content = next((name for name in texts if name in shared), None)
    if session is None:
        return None
    order = next((name for name in ORDERS if all(_order(table.get(name)) is not None for table in tables)), None)
    if content is not None and all(str(table.get("role")).lower() in ROLES for table in tables):
        return MessageShape(session, "role", content, order)
    if all(isinstance(message := parsed(table.get("message")), dict) and "type" in message for table in tables):
        return MessageShape(session, "", "message", order)
    return None


def _plain(event: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(str(name)): value for name, value in event.items()}


def _order(value: Any) -> float | None:
    """Return what orders a message: a number or a time."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else None
    if isinstance(value, str):
        return float(value) if value.strip().isdecimal() and len(value) < 300 else as_time(value)
    return None


def _joined(events: Iterable[_Event], shape: MessageShape) -> Iterator[PlacedRow]:
    """Yield one row for each session, in the order in which they begin; lines that are no messages stay rows."""
    with contextlib.closing(sqlite3.connect("", isolation_level=None)) as database:  # a temporary file
        database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE turns (session TEXT, line INTEGER, position REAL, turn TEXT);"
        )
        database.execute("BEGIN")
        for line, event, record in events:
            table = {} if event is None else _plain(event)
            session, turn = table.get(shape.session), _turn(table, shape)
            if turn is None or not isinstance(session, str | int):
                yield line, record
                continue
            position = None if shape.order is None else _order(table.get(shape.order))
            database.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", (str(session), line, position, json.dumps(turn)))
        query = (
            "SELECT session, line, position, turn, min(line) OVER (PARTITION BY session) AS begin FROM turns"
            " ORDER BY begin, session, line"
        )
        for session, group in itertools.groupby(database.execute(query), key=lambda row: row[0]):
            turns = list(group)
            if all(position is not None for _, _, position, *_ in turns):
                turns.sort(key=lambda row: row[2])
            begin = turns[0][4]
            yield begin, conversation("messages", [json.loads(row[3]) for row in turns], session=session)


def _turn(table: Mapping[str, Any], shape: MessageShape) -> Mapping[str, Any] | None:
    if not shape.role:
        message = parsed(table.get("message"))
        return message if isinstance(message, dict) else None
    role, text = str(table.get("role")).lower(), table.get(shape.content)
    beside = {name: table[name] for name in _BESIDE if table.get(name)}
    if role not in ROLES or not isinstance(text, str | list | None):
        return None
    return {"role": role, "content": text, **beside}
