"""Logs with one message a line and the session that it belongs to: the table behind most chat applications."""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.rows.fields import SESSION, TIME, as_time, plain_name
from hivetune.data.rows.layouts.turns import ROLES
from hivetune.data.rows.placed import PlacedRow
from hivetune.data.rows.sessions.events import MAX_KEPT_CHARS, broken, conversation, events

_ROLE = ("role", "sender", "speaker", "sender_type", "author_role")
_TEXT = ("content", "message", "text", "body")
_WITH_CALLS = ("tool_calls", "function_call", "tool_call_id")


def is_message_line(event: Mapping[str, Any]) -> bool:
    """Whether a line is one message of a named session."""
    session, role, text, _ = _parts(event)
    return session is not None and role in ROLES and text is not None


def message_rows(lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """One row for each session, by time where all its messages name one. A session is held until the log ends; beyond
    MAX_KEPT_CHARS the oldest is given out, and what comes of it later stays one message a row.
    """
    held: dict[str, list[tuple[int, float | None, dict[str, Any]]]] = {}
    sizes: dict[str, int] = {}
    kept = 0
    given: set[str] = set()
    for number, event, text in events(lines):
        session, role, said, time = _parts(event) if event is not None else (None, None, None, None)
        if event is None or session is None or role is None or said is None or session in given:
            yield broken(number, text)
            continue
        turn = {"role": role, "content": said, **{key: event[key] for key in _WITH_CALLS if key in event}}
        held.setdefault(session, []).append((number, time, turn))
        sizes[session] = sizes.get(session, 0) + len(text)
        kept += len(text)
        while kept > MAX_KEPT_CHARS and len(held) > 1:
            oldest = next(iter(held))
            given.add(oldest)
            kept -= sizes.pop(oldest)
            yield from _row(oldest, held.pop(oldest))
    for session, turns in held.items():
        yield from _row(session, turns)


def _row(session: str, turns: list[tuple[int, float | None, dict[str, Any]]]) -> Iterator[PlacedRow]:
    place = turns[0][0]
    times = [time for _, time, _ in turns if time is not None]
    if len(times) == len(turns):
        turns = sorted(turns, key=lambda turn: turn[1] or 0.0)
    yield from conversation("messages", place, [turn for _, _, turn in turns], (), session=session)


def _parts(event: Mapping[str, Any]) -> tuple[str | None, str | None, str | None, float | None]:
    """(session, role, text, time) of a line."""
    plain = {plain_name(key): value for key, value in event.items()}
    session = next((plain[key] for key in SESSION if isinstance(plain.get(key), str | int)), None)
    role = next((plain[key] for key in _ROLE if isinstance(plain.get(key), str)), None)
    text = next((plain[key] for key in _TEXT if isinstance(plain.get(key), str)), None)
    time = next((as_time(plain[key]) for key in TIME if key in plain), None)
    return None if session is None else str(session), None if role is None else role.strip().lower(), text, time
