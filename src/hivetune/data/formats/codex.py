"""Sessions (rollouts) of Codex: items of OpenAI's Responses, one a line, with events of the program between them.

https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs (`RolloutItem`)
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import NOT_HELD, Head, Log, PlacedRow
from hivetune.data.pieces.sessions import PlacedEvent, conversation, session_rows
from hivetune.data.pieces.turns import ITEMS
from hivetune.data.pieces.values import Row, objects, one_of, parsed
from hivetune.data.reasons import RowRefused

_FIRST_LINE = re.compile(rb'\A\s*\{"timestamp":\s*"[^"]*",\s*"type":\s*"session_meta"')
_LINE_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_SUMMARIES = ("compaction", "compaction_summary")
# Items that say nothing to a model. A kind that nobody knows stays, so that the row is refused for it.
_SILENT_ITEMS = ("ghost_snapshot", "other", *_SUMMARIES)
# Items that a log holds as the model saw them. A search of the web has no result: its answer says what was found.
_HELD_ITEMS = (*ITEMS, "message", "web_search_call")


@dataclass(slots=True)
class _Session:
    """Items since the session began or was compacted. `place`: the line of the first one, 0 if nothing followed."""

    name: str | None = None
    time: str | None = None
    system: str | None = None
    place: int = 0
    is_hidden: bool = False  # the summary of what came before is encrypted, or not there
    items: list[dict[str, Any]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a session."""
    return row.get("type") in _LINE_TYPES and isinstance(row.get("payload"), dict)


def recognise(head: Head) -> bool:
    # The first line may be longer than the head: it has all instructions of the agent.
    return _FIRST_LINE.match(head.data) is not None or any(map(is_line, head.events))


def _rows(events: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    """Yield one row for each stretch of a session between compactions."""
    session = _Session()
    for number, event in events:
        kind, payload = event.get("type"), event.get("payload")
        if not isinstance(payload, dict):
            continue
        if kind == "compacted":
            yield from _row(session)
            session = _after(payload, session)
            # The history that replaces the turns holds the summary too.
            told = None if payload.get("replacement_history") else payload.get("message")
            payload = {"type": "message", "role": "user", "content": told}
            kind = "response_item" if told else kind
        if kind == "session_meta":
            session.name, session.time = payload.get("id"), payload.get("timestamp") or event.get("timestamp")
            text = one_of(payload.get("base_instructions"), "text") or payload.get("instructions")
            session.system = text if isinstance(text, str) else None
        elif kind == "event_msg":
            _apply(session, payload)
        elif kind == "response_item" and payload.get("type") not in _SILENT_ITEMS:
            session.place = session.place or number
            _add(session.items, payload)
    yield from _row(session)


def _after(compaction: dict[str, Any], session: _Session) -> _Session:
    """Return the session behind a compaction, with the items that it kept; the row before it learns their answers."""
    history = objects(compaction.get("replacement_history")) or []
    hidden = any(item.get("encrypted_content") for item in history if item.get("type") in _SUMMARIES)
    hidden = hidden or not (history or compaction.get("message"))
    following = _Session(session.name, session.time, session.system, is_hidden=hidden)
    for item in history:
        if item.get("type") not in _SUMMARIES:
            _add(following.items, {**item, "weight": 0} if _is_of_answer(item) else item)
    return following


def _add(items: list[dict[str, Any]], payload: dict[str, Any]) -> None:
    """Add an item in the form of the Responses API. A note of the program between the lines of a question is put before
    the question, since chat templates have no place for it inside.
    """
    item = {**payload}
    if payload.get("type") == "local_shell_call":
        item = {"type": "function_call", "call_id": payload.get("call_id"), "name": "local_shell"}
        item["arguments"] = {"command": one_of(payload.get("action"), "command")}
    elif isinstance(text := one_of(payload.get("output"), "content"), str):
        item["output"] = text
    at = len(items)
    while item.get("role") == "developer" and at and items[at - 1].get("role") == "user":
        at -= 1
    items.insert(at, item)


def _apply(session: _Session, event: dict[str, Any]) -> None:
    """Apply an event of the program to the items. Messages in events are ignored, since items repeat them."""
    count = event.get("num_turns")
    if event.get("type") == "turn_aborted":
        _unlearn_answer(session.items)
    elif event.get("type") == "thread_rolled_back" and isinstance(count, int) and count > 0:
        # The user went back, and gave up the last turns: each begins with what they asked.
        asked = [i for i, item in enumerate(session.items) if item.get("role") == "user"]
        begins = [i for i in asked if i == 0 or session.items[i - 1].get("role") != "user"]
        if begins:
            del session.items[begins[max(0, len(begins) - count)] :]
            session.left_out.add("other-branches")


def _is_broken_call(item: dict[str, Any]) -> bool:
    return item.get("type") == "function_call" and not isinstance(parsed(item.get("arguments") or {}), dict)


def _is_of_answer(item: dict[str, Any]) -> bool:
    """Return whether the model wrote an item: its words, thoughts and calls."""
    return item.get("role", "assistant") == "assistant" and not str(item.get("type")).endswith("_output")


def _unlearn_answer(items: list[dict[str, Any]]) -> None:
    """Give no weight to the answer at the end, nor to its thoughts and calls."""
    for item in itertools.takewhile(_is_of_answer, reversed(items)):
        item["weight"] = 0


def _row(session: _Session) -> Iterator[PlacedRow]:
    while session.items and _is_broken_call(session.items[-1]):
        session.items.pop()  # the session ended within it
        session.left_out.add("trailing-turns")
    items: list[dict[str, Any]] = []
    for item in session.items:
        broken = _is_broken_call(item)  # it is read as the text that it is, and not learned
        items.append({**item, "type": "custom_tool_call", "input": str(item.get("arguments"))} if broken else item)
        if broken:
            _unlearn_answer(items)
    if not session.place or not any(item.get("role") == "user" for item in items):
        return
    kinds = (str(item.get("type")) for item in items if "role" not in item)
    if session.is_hidden:
        if any(_is_of_answer(item) and item.get("weight", 1) for item in items):
            reason = "the session was compacted, and its earlier turns are not in the log as plain text"
            yield session.place, RowRefused("earlier-turns-missing", reason)
    elif hidden := next((kind for kind in kinds if kind not in _HELD_ITEMS), None):
        # The answer before it would end in the middle if it were cut there.
        yield session.place, RowRefused(NOT_HELD, f"the result of {hidden[:40]} is not in the log as the model saw it")
    else:
        system = [{"type": "message", "role": "system", "content": session.system}] if session.system else []
        facts = {"session_id": session.name, "timestamp": session.time}
        yield session.place, conversation("codex", [*system, *items], session.left_out, **facts)


FORMAT = Log(
    "codex",
    recognise,
    lambda lines: session_rows(lines, _rows, is_line, lambda event: event.get("type") == "session_meta"),
)
