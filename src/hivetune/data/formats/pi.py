"""Sessions of pi and of OpenClaw, which is built on it: a tree of entries, one a line, of which the kept branch is
read. A compaction begins a new row: its summary stands for what came before.

https://github.com/badlogic/pi-mono/blob/main/packages/coding-agent/docs/session.md
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows, trees, way_to

_ROLES = ("user", "assistant", "toolResult", "bashExecution", "custom", "hookMessage")
_SUMMARIES = ("compaction", "branch_summary")
_COPIES = ("delivery-mirror", "gateway-injected")  # in the place of a model: OpenClaw wrote down what it had sent
_BROKEN_OFF = ("aborted", "length", "error")


@dataclass(slots=True)
class _Entry:
    line: int
    parent: str | None
    event: dict[str, Any]


@dataclass(slots=True)
class _Session:
    name: Any = None
    time: Any = None
    entries: dict[str, _Entry] = field(default_factory=dict)


def is_line(event: Mapping[str, Any]) -> bool:
    """Return whether an object is a line of such a session."""
    if event.get("type") == "session":
        return all(name in event for name in ("cwd", "timestamp")) and ("version" in event or "modelId" in event)
    message = event.get("message")
    if event.get("type") != "message" or not isinstance(message, dict) or "timestamp" not in event:
        return False
    return message.get("role") in _ROLES and ("parentId" in event or isinstance(message.get("timestamp"), int))


def recognise(head: Head) -> bool:
    return any(map(is_line, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return session_rows(lines, lambda event: event.get("type") == "session", _rows)


def _rows(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    """Yield the rows of each tree of a session: a line that is broken ends one, and what lies below it begins
    another.
    """
    session = _Session()
    for number, event in events:
        if event.get("type") == "session":
            session.name, session.time = event.get("id"), event.get("timestamp")
            continue
        before = next(reversed(session.entries), None)
        name = event.get("id") if isinstance(event.get("id"), str) else f"line {number}"
        parent = event.get("parentId", before)  # the first version had no tree
        session.entries[str(name)] = _Entry(number, parent if isinstance(parent, str) else None, event)
    for names in trees({name: one.parent for name, one in session.entries.items()}).values():
        yield from _stretches(session, names)


def _stretches(session: _Session, names: list[str]) -> Iterator[PlacedRow]:
    """Yield one row for each stretch between compactions of the branch that was kept."""
    path = _path(session, names)
    given_up = any(_is_answer(session.entries[name].event) for name in set(names).difference(path))
    stretch: list[_Entry] = []
    turns: list[dict[str, Any]] = []
    for name in path:
        one = session.entries[name]
        said = _turns(one.event)
        if one.event.get("type") == "compaction":
            yield from _row(session, stretch, turns, given_up)
            kept = _kept(path, name, one.event.get("firstKeptEntryId"))
            turns = [*said, *(turn for other in kept for turn in _read_before(session.entries[other].event))]
            stretch = []
        elif said:
            stretch.append(one)
            turns += said
    yield from _row(session, stretch, turns, given_up)


def _row(session: _Session, stretch: list[_Entry], turns: list[dict[str, Any]], given_up: bool) -> Iterator[PlacedRow]:
    if any(_is_answer(one.event) for one in stretch):
        left_out = ["other-branches"] if given_up else []
        yield from conversation("pi", stretch[0].line, turns, left_out, session_id=session.name, timestamp=session.time)


def _path(session: _Session, names: list[str]) -> list[str]:
    """Return the branch of a tree that ends at the message written last, from its beginning."""
    said = (name for name in reversed(names) if session.entries[name].event.get("type") == "message")
    return way_to(next(said, None), {name: session.entries[name].parent for name in names})


def _kept(path: list[str], end: str, first: Any) -> list[str]:
    """Return what a compaction left as it was: the entries from `first` up to it."""
    before = path[: path.index(end)]
    return before[before.index(first) :] if first in before else []


def _read_before(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of an entry for the next row, where they are not learned again."""
    return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in _turns(event)]


def _is_answer(event: Mapping[str, Any]) -> bool:
    message = event.get("message")
    return isinstance(message, dict) and message.get("role") == "assistant"


def _turns(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what an entry adds to the conversation, as other programs write it."""
    kind, message = event.get("type"), event.get("message")
    if kind in _SUMMARIES:
        return [{"role": "user", "content": event.get("summary")}]
    if kind == "custom_message":
        return [{"role": "user", "content": event.get("content")}]
    if kind != "message" or not isinstance(message, dict):
        return []
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return _answer(message)
    if role == "toolResult":
        ids = {"tool_call_id": message.get("toolCallId"), "name": message.get("toolName")}
        return [{"role": "tool", "content": content, **ids}]
    if role == "bashExecution":
        if message.get("excludeFromContext"):
            return []
        content = f"Ran `{message.get('command')}`\n```\n{message.get('output')}\n```"
    return [{"role": "user", "content": content}]


def _answer(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if message.get("model") in _COPIES or not content:
        return []
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    turn = {"role": "assistant", "content": [_part(part) for part in parts]}
    return [{**turn, "weight": 0} if message.get("stopReason") in _BROKEN_OFF else turn]


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "toolCall":
        return {"type": "tool_use", "id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
    return part


FORMAT = Format("pi", recognise, rows, "file")
