"""Sessions (rollouts) of Codex: items of OpenAI's Responses, one a line, with events of the program between them.

https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs (`RolloutItem`)
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.answers import HIDDEN_CALLS, is_of_answer, unlearn_answer, unlearn_hidden_calls
from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedEvent, PlacedRow, conversation, session_rows
from hivetune.data.pieces.said import NOT_HELD, Row, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused

_FIRST_LINE = re.compile(rb'\A\s*\{"timestamp":\s*"[^"]*",\s*"type":\s*"session_meta"')
_LINE_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_ITEM_TYPES = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "local_shell_call", "web_search_call"),
)
_LONG_TEXT = 40  # characters; that many stand in another text only where it repeats them
_NEAR = 12  # items between an event and the item that says the same
_FROM_EVENT = "hivetune_told"  # marks words that an event tells; mostly an item says them too
# What an event says that somebody said, and where it says it.
_EVENT_ROLES = {
    "user_message": ("user", "message"),
    "agent_message": ("assistant", "message"),
    "task_complete": ("assistant", "last_agent_message"),
    "turn_complete": ("assistant", "last_agent_message"),
}
# Items that say nothing to a model. A kind that nobody knows stays, so that the row is refused for it.
_SILENT_ITEMS = ("ghost_snapshot", "compaction", "compaction_summary", "other")


@dataclass(slots=True)
class _Session:
    """Items since the session began or was compacted, and between them, marked by _FROM_EVENT, messages of events.
    `place`: the line of the first one.
    """

    name: str | None = None
    time: str | None = None
    system: str | None = None
    place: int = 0
    is_encrypted: bool = False  # the summary of what came before
    items: list[dict[str, Any]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a session: today's form, or the header of the first version."""
    if row.get("type") in _LINE_TYPES:
        return isinstance(row.get("payload"), dict)
    return {"instructions", "timestamp", "id", "git"} <= row.keys() and "messages" not in row


def recognise(head: Head) -> bool:
    """Return whether the first lines are a session of Codex. The first may be longer than the head: it has all
    instructions of the agent.
    """
    return _FIRST_LINE.match(head.data) is not None or any(map(is_line, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each stretch of a session between compactions."""
    return session_rows(lines, lambda event: _kind_and_payload(event)[0] == "session_meta", _rows)


def _rows(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    session = _Session()
    for number, event in events:
        kind, payload = _kind_and_payload(event)
        if kind == "compacted":
            yield from _row(session)
            session = _Session(session.name, session.time, session.system)
            history = objects(payload.get("replacement_history")) or []
            session.is_encrypted = any(item.get("encrypted_content") for item in history if _is_summary(item))
            # What was answered before is learned in the row above.
            session.items = [{**item, "weight": 0} for item in history if not _is_summary(item)]
            payload = {"type": "message", "role": "user", "content": payload.get("message")}
            kind = "response_item" if payload["content"] else kind
        if kind == "session_meta":
            session.name, session.time = payload.get("id"), payload.get("timestamp") or event.get("timestamp")
            text = one_of(payload.get("base_instructions"), "text") or payload.get("instructions")
            session.system = text if isinstance(text, str) else None
        elif kind == "event_msg":
            _learn_of(session, number, payload)
        elif kind == "response_item" and payload.get("type") not in _SILENT_ITEMS:
            session.place = session.place or number
            item = {**payload}  # as the Responses API has it
            if payload.get("type") == "local_shell_call":
                item = {"type": "function_call", "call_id": payload.get("call_id"), "name": "local_shell"}
                item["arguments"] = {"command": one_of(payload.get("action"), "command")}
            elif isinstance(text := one_of(payload.get("output"), "content"), str):
                item["output"] = text
            session.items.append(item)
    yield from _row(session)


def _kind_and_payload(event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind and the payload of a line; the first version wrote bare items after a header."""
    if isinstance(event.get("payload"), dict):
        return str(event.get("type")), event["payload"]
    if event.get("type") in _ITEM_TYPES:
        return "response_item", event
    return ("session_meta" if "instructions" in event else "other"), event


def _learn_of(session: _Session, number: int, event: dict[str, Any]) -> None:
    """Apply an event of the program to the items."""
    kind = event.get("type")
    role, column = _EVENT_ROLES.get(str(kind), ("", ""))
    if kind == "turn_aborted":
        unlearn_answer(session.items, len(session.items))
    elif kind == "thread_rolled_back":  # the user went back, and gave up the last turns
        count = event.get("num_turns")
        if isinstance(count, int) and count > 0 and (begin := _begin_of_turn(session.items, count)) is not None:
            del session.items[begin:]
            session.left_out.add("other-branches")
    elif role and isinstance(text := event.get(column, event.get("content")), str) and text.strip():
        session.items.append({"type": "message", "role": role, "content": text, _FROM_EVENT: True})
        session.place = session.place or number


def _begin_of_turn(items: Sequence[dict[str, Any]], count: int) -> int | None:
    """Return where the last `count` turns begin, or all of them where there are fewer; None without a turn. What is
    told between two answers is one turn, whether items or events tell it.
    """
    begin, asked_below = None, False
    for index in range(len(items) - 1, -1, -1):
        asks = items[index].get("role") == "user"
        if asks and not asked_below:
            if count == 0:
                break
            count -= 1
            begin = index
        elif asks and _FROM_EVENT in items[begin or 0]:
            begin = index  # the event repeats this item
        asked_below = asks
    return begin


def _leave_out_repeated(session: _Session) -> None:
    """Remove events that an item near them or an earlier event of the same answer repeats."""
    items: list[dict[str, Any]] = []
    told: set[str] = set()  # by events, in the answer so far
    texts = [(str(item.get("role")), _text(item)) for item in session.items]
    for index, item in enumerate(session.items):
        if _FROM_EVENT in item:
            near = range(max(0, index - _NEAR), min(len(texts), index + _NEAR + 1))
            others = (texts[i] for i in near if _FROM_EVENT not in session.items[i])
            text = texts[index][1]
            if text in told or any(role == item["role"] and _repeats(text, other) for role, other in others):
                continue
            told.add(text)
        if item.get("role") == "user":
            told = {texts[index][1]}
        items.append(item)
    session.items = items


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    texts = [content] if isinstance(content, str) else (one_of(part, "text") for part in listed(content))
    return "\n".join(text for text in texts if isinstance(text, str)).strip()


def _repeats(text: str, whole: str) -> bool:
    """Return whether an item's text is this one, or holds it, after what an editor writes before a question."""
    return text == whole or (len(text) >= _LONG_TEXT and text in whole)


def _is_summary(item: dict[str, Any]) -> bool:
    return item.get("type") in ("compaction", "compaction_summary")


def _is_broken_call(item: dict[str, Any]) -> bool:
    return item.get("type") == "function_call" and not isinstance(parsed(item.get("arguments") or {}), dict)


def _row(session: _Session) -> Iterator[PlacedRow]:
    """Yield the row of a session. Its last call may break off, with arguments that are no object: it is left out. One
    in the middle is read as the text that it is, without weight.
    """
    while session.items and _is_broken_call(session.items[-1]):
        session.items.pop()
        session.left_out.add("trailing-turns")
    _leave_out_repeated(session)
    items = session.items
    for index, item in enumerate(items):
        if _is_broken_call(item):
            items[index] = {**item, "type": "custom_tool_call", "input": str(item.get("arguments"))}
            unlearn_answer(items, index + 1)
    hidden = next((item["type"] for item in items if item.get("type") in HIDDEN_CALLS), None)
    items = unlearn_hidden_calls(items)
    if not any(item.get("role") == "user" for item in items):
        return
    learned = [item for item in items if is_of_answer(item) and item.get("weight", 1)]
    if session.is_encrypted:
        if learned:
            reason = "the session was compacted, and the summary of what came before is encrypted"
            yield session.place, RowRefused("earlier-turns-missing", reason)
        return
    if hidden and not learned:
        reason = f"no answer is left to learn: {hidden}, a tool that the provider ran itself; its result is not logged"
        yield session.place, RowRefused(NOT_HELD, reason)
        return
    system = [{"type": "message", "role": "system", "content": session.system}] if session.system else []
    facts = {"session_id": session.name, "timestamp": session.time}
    yield session.place, conversation("codex", [*system, *items], session.left_out, **facts)


FORMAT = Log("codex", recognise, rows)
