"""Sessions of Claude Code: a tree of events, one a line; each tree is one conversation, its kept branch is read.

A line holds one block of an answer; lines with one message id are one answer. A rewound or edited prompt leaves a
branch that was given up; a subagent and what follows a compaction are trees of their own.

https://code.claude.com/docs/en/settings (`~/.claude/projects/*/*.jsonl`)
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation, events, lost, trees, way_to
from hivetune.data.pieces.said import Row
from hivetune.data.reasons import RowRefused

_SPOKEN = ("user", "assistant")
_ASKER = "human"  # as other programs' copies call the user
_BLOCKS = {"tool_use": "assistant", "tool_result": "user"}  # copies give these a line of their own
_OTHER_TYPES = ("summary", "file-history-snapshot", "queue-operation", "progress", "system", "attachment")
INTERRUPTED = "[Request interrupted by user"
REJECTED = "The user doesn't want to proceed with this tool use"
_CLEAR = "<command-name>/clear</command-name>"
# What the program itself writes as a user's turn.
_OWN_TEXTS = (
    *(
        "<local-command-caveat>",
        "<command-name>",
        "<local-command-stdout>",
        "<local-command-stderr>",
        "<command-message>",
    ),
    "Caveat: The",
)
# All that a line has in copies that keep only what was said.
_COPIED = frozenset(("message", "timestamp", "uuid", "parentUuid", "sessionId", "cwd", "requestId", "version"))


@dataclass(slots=True)
class _Event:
    line: int
    parent: str | None
    role: str | None
    message: dict[str, Any] | None
    noise: bool
    is_summary: bool
    is_side: bool
    is_meta: bool


@dataclass(slots=True)
class _Session:
    """Events of one session so far."""

    events: dict[str, _Event] = field(default_factory=dict)
    name: str | None = None
    time: str | None = None
    size: int = 0


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a session."""
    if row.get("type") in (*_SPOKEN, _ASKER):
        message = row.get("message")
        named = any(name in row for name in ("sessionId", "session_id", "timestamp", "uuid"))
        return isinstance(message, dict) and (named or message.get("role") == row["type"])
    if row.get("type") == "summary":
        return "leafUuid" in row
    if "type" not in row and "message" in row and len(row) > 1 and _COPIED.issuperset(row):
        return _role(row) is not None
    return row.get("type") in _OTHER_TYPES and ("sessionId" in row or "snapshot" in row)


def recognise(head: Head) -> bool:
    return any(map(is_line, head.events))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield each tree of a session as one row. Sessions of one file may stand behind or between each other: a line
    belongs where its parent is; without one to the session that it names; else to that of the line before it.
    """
    held: dict[str, _Session] = {}
    owners: dict[str, str] = {}
    name, kept = "", 0
    for number, event, text in events(lines):
        if event is None:
            yield lost(number)
            continue
        event = _in_blocks(event)
        before, parent = name, event.get("parentUuid")
        name = owners.get(str(parent)) or (before if parent and before else str(event.get("sessionId") or before))
        session = held.setdefault(name, _Session())
        _add(session, number, event, len(text))
        if isinstance(event.get("uuid"), str):
            owners[event["uuid"]] = name
        kept += len(text)
        if session.size > MAX_KEPT_CHARS:
            yield number, RowRefused("line-too-large", f"a session of more than {MAX_KEPT_CHARS >> 20} MiB")
            kept -= held.pop(name).size
        while kept > MAX_KEPT_CHARS and len(held) > 1:
            first = next(iter(held))
            kept -= held[first].size
            yield from _rows(held.pop(first))
    for session in held.values():
        yield from _rows(session)


def _in_blocks(event: dict[str, Any]) -> dict[str, Any]:
    """Return a line of Qwen Code, which writes the same tree with the parts of Gemini."""
    message = event.get("message")
    parts = message.get("parts") if isinstance(message, dict) else None
    if not isinstance(parts, list) or "content" in event["message"]:
        return event
    kind = "assistant" if event["message"].get("role") == "model" else "user"
    blocks = [_block_of_part(part) for part in parts if isinstance(part, dict)]
    return {**event, "type": kind, "message": {"role": kind, "content": blocks}}


def _block_of_part(part: dict[str, Any]) -> dict[str, Any]:
    call, result = part.get("functionCall"), part.get("functionResponse")
    if isinstance(call, dict):
        return {"type": "tool_use", "id": call.get("id"), "name": call.get("name"), "input": call.get("args")}
    if isinstance(result, dict):
        given = result.get("response")
        text = given["output"] if isinstance(given, dict) and set(given) == {"output"} else given
        return {"type": "tool_result", "tool_use_id": result.get("id"), "content": text}
    if part.get("thought") is True:
        return {"type": "thinking", "thinking": part.get("text")}
    return {"type": "text", "text": part["text"]} if isinstance(part.get("text"), str) else part


def _add(session: _Session, number: int, event: dict[str, Any], size: int) -> None:
    uuid = event.get("uuid")
    if not isinstance(uuid, str):
        if _role(event) is None:
            return
        uuid = f"line {number}"  # a copy without ids
    session.name = session.name or event.get("sessionId")
    session.time = session.time or event.get("timestamp")
    if uuid in session.events and session.events[uuid].message is not None:
        return  # written twice: the first stands
    role = _role(event)
    message = _block(event) or event.get("message") if role else None
    parent = event.get("parentUuid")
    kept = message if isinstance(message, dict) else None
    session.events[uuid] = _Event(
        number,
        parent if isinstance(parent, str) else None,
        role,
        kept,
        _is_noise(event),
        event.get("isCompactSummary") is True,
        event.get("isSidechain") is True,
        event.get("isMeta") is True,
    )
    session.size += size


def _role(event: Row) -> str | None:
    """Return who speaks in a line; one that lost its `type` says it in its message."""
    message = event.get("message")
    block = str(event.get("type"))
    if block in _BLOCKS and (_block(event) or _has_block(message, block)):
        return _BLOCKS[block]
    kind = event.get("type", message.get("role") if isinstance(message, dict) else None)
    return "user" if kind == _ASKER else kind if kind in _SPOKEN else None


def _block(event: Row) -> dict[str, Any] | None:
    """Return the message of a line that is a call or a result itself."""
    kind = event.get("type")
    if isinstance(event.get("message"), dict) or not isinstance(
        event.get({"tool_use": "name", "tool_result": "tool_use_id"}.get(str(kind), "")), str
    ):
        return None
    return {"role": _BLOCKS[str(kind)], "content": [event]}


def _has_block(message: Any, kind: str) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == kind for part in content)


def _is_noise(event: dict[str, Any]) -> bool:
    """Return whether a line is an error of the API, a note to the user or the output of a command: nobody said it."""
    if event.get("isApiErrorMessage") or event.get("isMeta") or event.get("isVisibleInTranscriptOnly"):
        return True
    message = event.get("message")
    if not isinstance(message, dict):
        return False
    if message.get("model") == "<synthetic>":
        return True
    return _role(event) == "user" and _text(message).lstrip().startswith(_OWN_TEXTS)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict) and "text" in part)


def _rows(session: _Session) -> Iterator[PlacedRow]:
    if len(session.events) > 1 and not any(event.parent for event in session.events.values()):
        _chain(session)
    for event in session.events.values():
        above = session.events.get(event.parent or "")
        if above is not None and event.is_meta and (given := _given_to_command(above)):
            above.noise, above.message = False, {"role": "user", "content": given}
        if _begins_anew(event, above):
            event.parent = None
    for uuids in trees({uuid: event.parent for uuid, event in session.events.items()}).values():
        spoken = [uuid for uuid in uuids if session.events[uuid].role and not session.events[uuid].noise]
        if spoken:
            yield from _row(session, uuids, spoken)


def _begins_anew(event: _Event, above: _Event | None) -> bool:
    """Return whether a conversation of its own begins: what a subagent was asked, or what follows /clear."""
    if event.role != "user":
        return False
    aside = event.is_side and not _parts(event, "tool_result") and above is not None and not above.is_side
    return aside or _text(event.message or {}).lstrip().startswith(_CLEAR)


def _given_to_command(event: _Event) -> str:
    """Return what the user wrote behind the name of a command. The page that a command of their own stands for follows
    as a note; a command of the program has none.
    """
    text = _text(event.message or {}).lstrip()
    given = text.partition("<command-args>")[2].partition("</command-args>")[0]
    return given.strip() if text.startswith("<command-") else ""


def _chain(session: _Session) -> None:
    """Make the order of the lines the conversation where no line names a parent, as in copies by other
    programs. Subagents are chained apart.
    """
    before: dict[bool, str | None] = {}
    for uuid, event in session.events.items():
        asked = event.is_side and event.role == "user" and not _parts(event, "tool_result")
        event.parent = None if event.is_summary or asked else before.get(event.is_side)
        before[event.is_side] = uuid


def _row(session: _Session, uuids: list[str], spoken: list[str]) -> Iterator[PlacedRow]:
    path = set(way_to(spoken[-1], {uuid: session.events[uuid].parent for uuid in uuids}))
    answers = {_answer_id(session.events[uuid]) for uuid in path} - {None}
    calls = {str(part.get("id")) for uuid in path for part in _parts(session.events[uuid], "tool_use")}
    kept, left_out = [], set()
    for uuid in uuids:  # in the order of the file
        event = session.events[uuid]
        if event.noise and uuid in path:
            left_out.add("program-notes")
        elif (
            uuid in path
            or _answer_id(event) in answers
            or any(str(part.get("tool_use_id")) in calls for part in _parts(event, "tool_result"))
        ):
            kept.append(
                event
            )  # results of calls that were made at once, and pieces of one answer, hang beside the path
        elif event.role == "assistant" and not event.noise:
            left_out.add("other-branches")
    messages = _messages([event for event in kept if event.message is not None])
    place = session.events[spoken[0]].line
    yield from conversation("claude-code", place, messages, left_out, session_id=session.name, timestamp=session.time)


def _answer_id(event: _Event) -> str | None:
    """Return the id that all lines of one answer share."""
    known = event.message.get("id") if event.message and event.role == "assistant" else None
    return known if isinstance(known, str) and known else None


def _parts(event: _Event, kind: str) -> list[dict[str, Any]]:
    content = event.message.get("content") if event.message else None
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == kind]


def _messages(kept: list[_Event]) -> list[dict[str, Any]]:
    """Return turns in order; blocks of one answer together, even where a result was written between two of them."""
    turns: list[dict[str, Any]] = []
    answers: dict[str, dict[str, Any]] = {}
    for event in kept:
        message = event.message or {}
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
        known = answers.get(str(message.get("id"))) if event.role == "assistant" and message.get("id") else None
        if known is not None:
            seen = {json.dumps(block, sort_keys=True) for block in known["content"]}
            known["content"] += [block for block in blocks if json.dumps(block, sort_keys=True) not in seen]
        else:
            known = {"role": event.role, "content": list(blocks)}
            turns.append(known)
            if event.role == "assistant" and message.get("id"):
                answers[str(message["id"])] = known
        if message.get("stop_reason") == "max_tokens":
            known["weight"] = 0
    _unlearn_interrupted(turns)
    return [turn for turn in turns if not _is_mark(turn)]


def _unlearn_interrupted(turns: list[dict[str, Any]]) -> None:
    """Give no weight to an answer that the user stopped, or whose call they refused."""
    last: dict[str, Any] | None = None
    for turn in turns:
        if turn["role"] == "assistant":
            last = turn
        elif last is not None and (INTERRUPTED in _text(turn) or _has_rejection(turn)):
            last["weight"] = 0


def _has_rejection(turn: dict[str, Any]) -> bool:
    return any(REJECTED in json.dumps(part.get("content")) for part in turn["content"] if "tool_use_id" in part)


def _is_mark(turn: dict[str, Any]) -> bool:
    """Return whether a turn only says that the user interrupted."""
    return turn["role"] == "user" and _text(turn).startswith(INTERRUPTED) and len(turn["content"]) == 1


FORMAT = Format("claude-code", recognise, rows, "file")
