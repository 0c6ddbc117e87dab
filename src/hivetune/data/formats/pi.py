"""Sessions of pi and of OpenClaw, which is built on it: a tree of entries, one a line, of which the kept branch is
read. A compaction begins a new row: its summary stands for what came before.

https://github.com/badlogic/pi-mono/blob/main/packages/coding-agent/docs/session.md
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, path_to, session_rows, trees

_ROLES = ("user", "assistant", "toolResult", "bashExecution", "custom", "hookMessage")
_COPIES = ("delivery-mirror", "gateway-injected")  # in the place of a model: OpenClaw wrote down what it had sent
_BROKEN_OFF = ("aborted", "length", "error")


def is_line(event: Mapping[str, Any]) -> bool:
    """Return whether an object is a line of such a session."""
    if event.get("type") == "session":
        return all(name in event for name in ("cwd", "timestamp")) and ("version" in event or "modelId" in event)
    message = event.get("message")
    if event.get("type") != "message" or not isinstance(message, dict) or "timestamp" not in event:
        return False
    return message.get("role") in _ROLES and ("parentId" in event or isinstance(message.get("timestamp"), int))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return session_rows(lines, lambda event: event.get("type") == "session", _rows)


def _rows(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    """Yield the rows of each tree of a session: a broken line ends one, and later lines begin another. Of each tree the
    branch with the newest message is read.
    """
    facts: dict[str, Any] = {}
    entries: dict[str, PlacedEvent] = {}
    parents: dict[str, str | None] = {}
    for number, event in events:
        if event.get("type") == "session":
            facts = {"session_id": event.get("id"), "timestamp": event.get("timestamp")}
            continue
        parent = event.get("parentId", next(reversed(entries), None))  # the first version had no tree
        name = event["id"] if isinstance(event.get("id"), str) else f"line {number}"
        entries[name], parents[name] = (number, event), parent if isinstance(parent, str) else None
    for names in trees(parents).values():
        leaf = next((name for name in reversed(names) if entries[name][1].get("type") == "message"), None)
        path = path_to(leaf, {name: parents[name] for name in names})
        has_other_answers = any(_is_answer(entries[name][1]) for name in set(names).difference(path))
        for begin, turns in _stretches([(name, *entries[name]) for name in path]):
            yield begin, conversation("pi", turns, ["other-branches"] if has_other_answers else [], **facts)


def _stretches(path: Sequence[tuple[str, int, dict[str, Any]]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (place, turns) of each stretch between compactions in which something was answered."""
    begin, answered = 0, False
    turns: list[dict[str, Any]] = []
    names = [name for name, _, _ in path]
    for at, (_, number, event) in enumerate(path):
        new_turns = _turns(event)
        if event.get("type") == "compaction":
            if answered:
                yield begin, turns
            first = event.get("firstKeptEntryId")
            carried = path[names.index(first) : at] if first in names[:at] else []
            before = [turn for _, _, e in carried for turn in _turns(e)]  # stands in the last row too
            turns = new_turns + [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in before]
            begin, answered = 0, False
        elif new_turns:
            begin = begin or number
            answered = answered or _is_answer(event)
            turns += new_turns
    if answered:
        yield begin, turns


def _is_answer(event: Mapping[str, Any]) -> bool:
    message = event.get("message")
    return isinstance(message, dict) and message.get("role") == "assistant"


def _turns(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an entry, in the form of other programs."""
    kind, message = event.get("type"), event.get("message")
    if kind in ("compaction", "branch_summary"):
        return [{"role": "user", "content": event.get("summary")}]
    if kind == "custom_message":
        return [{"role": "user", "content": event.get("content")}]
    if kind != "message" or not isinstance(message, dict):
        return []
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        if message.get("model") in _COPIES or not content:
            return []
        turn = {"role": "assistant", "content": content}
        return [{**turn, "weight": 0} if message.get("stopReason") in _BROKEN_OFF else turn]
    if role == "toolResult":
        ids = {"tool_call_id": message.get("toolCallId"), "name": message.get("toolName")}
        return [{"role": "tool", "content": content, **ids}]
    if role == "bashExecution":
        if message.get("excludeFromContext"):
            return []
        content = f"Ran `{message.get('command')}`\n```\n{message.get('output')}\n```"
    return [{"role": "user", "content": content}]


FORMAT = Log("pi", lambda head: any(map(is_line, head.events)), rows)
