"""Sessions (rollouts) of Codex: items of OpenAI's Responses, one a line, with events of the program between them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.rows.layouts.said import parsed
from hivetune.data.rows.placed import PlacedRow
from hivetune.data.rows.sessions.events import MAX_KEPT_CHARS, broken, conversation, events

_LINE_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_ITEM_TYPES = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "local_shell_call", "web_search_call"),
)


# Items that say nothing to a model. A kind that nobody knows stays, so that the row is refused for it.
_SILENT_ITEMS = ("ghost_snapshot", "compaction", "compaction_summary", "other")


@dataclass(slots=True)
class _Session:
    """Items since the session began or was compacted. `place`: the line of the first one; `told`: what an event says
    that the user said, with the number of items before it.
    """

    name: str | None = None
    time: str | None = None
    system: str | None = None
    place: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    size: int = 0


def is_codex(row: dict[str, Any]) -> bool:
    """Whether an object is a line of such a session: today's form, or the first one, bare items after a header."""
    if row.get("type") in _LINE_TYPES:
        return isinstance(row.get("payload"), dict)
    return "instructions" in row and "timestamp" in row and "id" in row and "messages" not in row and "git" in row


def codex_rows(lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """One row for each stretch of a session between compactions."""
    session = _Session()
    for number, event, text in events(lines):
        if event is None:
            yield broken(number, text)
            continue
        kind, payload = event.get("type"), event.get("payload")
        if not isinstance(payload, dict):
            kind, payload = _bare(event)
        if kind == "session_meta" and session.items:
            yield from _row(session)
            session = _Session()
        if kind == "compacted":
            yield from _row(session)
            session = _Session(session.name, session.time, session.system)
            payload = {"type": "message", "role": "user", "content": payload.get("message")}
            kind = "response_item" if payload["content"] else kind
        _add(session, number, str(kind), payload, event.get("timestamp"))
        session.size += len(text) if kind == "response_item" else 0
        if session.size > MAX_KEPT_CHARS:
            yield number, "p", f"line-too-large:a session of more than {MAX_KEPT_CHARS >> 20} MiB"
            session = _Session(session.name, session.time, session.system)
    yield from _row(session)


def _bare(event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if event.get("type") in _ITEM_TYPES:
        return "response_item", event
    return ("session_meta" if "instructions" in event else "other"), event


def _add(session: _Session, number: int, kind: str, payload: dict[str, Any], time: Any) -> None:
    if kind == "session_meta":
        session.name, session.time = payload.get("id"), payload.get("timestamp") or time
        base = payload.get("base_instructions")
        text = base.get("text") if isinstance(base, dict) else payload.get("instructions")
        session.system = text if isinstance(text, str) else None
    elif kind == "event_msg":
        _learn_of(session, number, payload)
    elif kind == "response_item" and payload.get("type") not in _SILENT_ITEMS:
        session.place = session.place or number
        session.items.append(_item(payload))


def _learn_of(session: _Session, number: int, event: dict[str, Any]) -> None:
    """What an event of the program says of the items."""
    if event.get("type") == "turn_aborted":
        _unlearn_last(session.items)
    elif event.get("type") == "thread_rolled_back":
        _roll_back(session, event.get("num_turns"))
    elif event.get("type") == "user_message" and isinstance(text := event.get("message"), str) and text.strip():
        session.told.append((len(session.items), text))
        session.place = session.place or number


def _item(payload: dict[str, Any]) -> dict[str, Any]:
    """An item as the Responses API has it."""
    if payload.get("type") == "local_shell_call":
        action = payload.get("action")
        command = action.get("command") if isinstance(action, dict) else None
        name = {"name": "local_shell", "arguments": {"command": command}}
        return {"type": "function_call", "call_id": payload.get("call_id"), **name}
    output = payload.get("output")
    if isinstance(output, dict) and isinstance(output.get("content"), str):
        return {**payload, "output": output["content"]}
    return dict(payload)


def _unlearn_last(items: list[dict[str, Any]]) -> None:
    """An answer that was interrupted is read and not learned."""
    for item in reversed(items):
        if item.get("role") == "user":
            return
        if item.get("role") == "assistant":
            item["weight"] = 0
            return


def _roll_back(session: _Session, num_turns: Any) -> None:
    """The user went back: the turns behind that point were given up."""
    turns = [i for i, item in enumerate(session.items) if item.get("role") == "user"]
    count = num_turns if isinstance(num_turns, int) and num_turns > 0 else 0
    if count and turns:
        del session.items[turns[-min(count, len(turns))] :]
        session.told = [(place, text) for place, text in session.told if place < len(session.items)]
        session.left_out.add("other-branches")


def _add_told(session: _Session) -> None:
    """Put what only events say that the user said between the items; mostly an item says it too."""
    said = json.dumps([item for item in session.items if item.get("role") == "user"])
    for place, text in reversed(session.told):
        if json.dumps(text.strip())[1:-1] not in said:
            session.items.insert(place, {"type": "message", "role": "user", "content": text})


def _leave_out_broken_end(session: _Session) -> None:
    """A last call that breaks off, its arguments no object and nothing behind it, is no reason to lose the session."""
    while session.items and _is_broken_call(session.items[-1]):
        session.items.pop()
        session.left_out.add("trailing-turns")


def _is_broken_call(item: dict[str, Any]) -> bool:
    return item.get("type") == "function_call" and not isinstance(parsed(item.get("arguments") or {}), dict)


def _row(session: _Session) -> Iterator[PlacedRow]:
    _leave_out_broken_end(session)
    _add_told(session)
    if any(item.get("role") == "user" for item in session.items):
        facts = {"session_id": session.name, "timestamp": session.time, "system": session.system}
        yield from conversation("codex", session.place, session.items, session.left_out, **facts)
