"""Sessions of Claude Code: a tree of events, one a line; each tree is one conversation, its kept branch is read.

A line has one block of an answer; lines with one message id are one answer. A rewound or edited prompt leaves a
branch that was given up; a subagent and what follows a compaction are trees of their own.

https://code.claude.com/docs/en/settings (`~/.claude/projects/*/*.jsonl`)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.data.pieces.format import Log, PlacedRow
from hivetune.data.pieces.sessions import PlacedEvent, conversation, path_to, session_rows
from hivetune.data.pieces.values import Row, listed, objects, one_of

_SPOKEN = ("user", "assistant")
_OTHER_TYPES = ("summary", "file-history-snapshot", "queue-operation", "progress", "system", "attachment")
_INTERRUPTED = "[Request interrupted by user"
_REJECTED = "The user doesn't want to proceed with this tool use"
_CLEAR = "<command-name>/clear</command-name>"
_NOTES = ("isApiErrorMessage", "isVisibleInTranscriptOnly")  # marks of what no model saw
# What the user gives beside their words. Other attachments are notes of the program.
_ATTACHED = ("file", "directory", "selected_lines_in_ide", "mcp_resource")
# What the program itself writes as a user's turn.
_OWN_TEXTS = (
    *("<local-command-caveat>", "<command-name>", "<local-command-stdout>", "<local-command-stderr>"),
    *("<command-message>", "Caveat: The"),
)


@dataclass(slots=True)
class _Line:
    """A line of a session; `role` is who speaks in it, None if nobody does. `is_note`: an error of the API, a note to
    the user or the output of a command, which nobody said. `answer_id`: the id that all lines of one answer share."""

    number: int
    event: Row
    parent: str | None
    role: str | None
    message: Row
    is_note: bool = False
    answer_id: str | None = None

    def parts(self, kind: str) -> list[Row]:
        return [part for part in listed(self.message.get("content")) if one_of(part, "type") == kind]


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a session."""
    if row.get("type") in _SPOKEN:
        return isinstance(row.get("message"), dict) and any(name in row for name in ("sessionId", "uuid", "parentUuid"))
    if row.get("type") == "summary":
        return "leafUuid" in row
    return row.get("type") in _OTHER_TYPES and ("sessionId" in row or "snapshot" in row)


def _line(number: int, event: Row) -> _Line:
    kind, parent = event.get("type"), event.get("parentUuid")
    said = event.get("message") if kind in _SPOKEN else _attached(event.get("attachment"))
    message: Row = said if isinstance(said, dict) else {}
    role = str(kind) if kind in _SPOKEN else "user" if message else None
    by_program = role == "user" and _text(message).lstrip().startswith(_OWN_TEXTS)
    # The summary of a compaction is shown nowhere else, and the model goes on from it.
    is_marked = not event.get("isCompactSummary") and any(event.get(mark) for mark in _NOTES)
    is_note = by_program or is_marked or message.get("model") == "<synthetic>"
    answer = str(message["id"]) if role == "assistant" and message.get("id") else None
    return _Line(number, event, parent if isinstance(parent, str) else None, role, message, is_note, answer)


def _attached(attachment: Any) -> Row | None:
    """Return what the user attached, or typed while the model answered, as a message; None for a program's note."""
    kind, content = one_of(attachment, "type"), one_of(attachment, "content")
    if kind == "queued_command":
        return {"role": "user", "content": order} if (order := one_of(attachment, "prompt")) else None
    if kind not in _ATTACHED:
        return None
    text = content if isinstance(content, str) else one_of(one_of(content, "file"), "content")
    named = f"{one_of(attachment, 'filename', 'path')}\n{text}"
    return {"role": "user", "content": named if isinstance(text, str) else [{"type": "file"}]}


def _text(message: Row) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in listed(content) if isinstance(part, dict) and "text" in part)


def _lines_of(session: Sequence[PlacedEvent]) -> dict[str, _Line]:
    """Return the lines by their names, in the order of the file."""
    lines: dict[str, _Line] = {}
    orders: dict[str, int] = {}
    for number, event in session:
        if event.get("reason") == "absorbed_mid_turn" and isinstance(event.get("content"), str):
            orders[event["content"]] = number
        name = event["uuid"] if isinstance(event.get("uuid"), str) else f"line {number}"
        if name not in lines or not lines[name].message:  # of what is written twice the first stands
            lines[name] = _line(number, event)
    asked = {_text(line.message) for line in lines.values() if line.role == "user"}
    for order, number in orders.items():
        # An order that only the queue holds stands before the answer that it was typed into.
        below = next((line for line in lines.values() if line.number > number and line.role == "assistant"), None)
        if order not in asked and below is not None:
            lines[f"line {number}"] = _Line(number, {}, below.parent, "user", {"role": "user", "content": order})
            below.parent = f"line {number}"
    return dict(sorted(lines.items(), key=lambda named: named[1].number))


def _rows(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    lines = _lines_of(session)
    for line in lines.values():
        above = lines.get(line.parent or "")
        sidechains = [one is not None and one.event.get("isSidechain") is True for one in (above, line)]
        asks_subagent = sidechains == [False, True] and line.role == "user" and not line.parts("tool_result")
        if asks_subagent or (line.role == "user" and _text(line.message).lstrip().startswith(_CLEAR)):
            line.parent = None  # a conversation of its own begins
    for tree in _trees({name: line.parent for name, line in lines.items()}):
        spoken = [name for name in tree if lines[name].role and not lines[name].is_note]
        if spoken:
            yield _row(lines, tree, spoken)


def _trees(parents: Mapping[str, str | None]) -> list[list[str]]:
    """Return the trees of a log, each with the names of its events in the order of the log."""
    root_of: dict[str, str] = {}
    trees: dict[str, list[str]] = {}
    for name in parents:
        path: dict[str, None] = {}
        node = name
        # A parent may come after its child: programs write what happens at once as it comes.
        while node not in root_of and node not in path:
            path[node] = None
            above = parents[node]
            node = above if above is not None and above in parents else node
        root = root_of.get(node, node)
        root_of |= dict.fromkeys(path, root)
        trees.setdefault(root, []).append(name)
    return list(trees.values())


def _row(lines: Mapping[str, _Line], tree: list[str], spoken: list[str]) -> PlacedRow:
    path = set(path_to(spoken[-1], {name: lines[name].parent for name in tree}))
    answers = {lines[name].answer_id for name in path} - {None}
    calls = {str(part.get("id")) for name in path for part in lines[name].parts("tool_use")}
    kept: list[_Line] = []
    left_out = set()
    for name in tree:
        line = lines[name]
        results = any(str(part.get("tool_use_id")) in calls for part in line.parts("tool_result"))
        if line.is_note and name in path:
            left_out.add("program-notes")
        elif name in path or line.answer_id in answers or results:
            kept.append(line)  # results of calls made at once, and pieces of one answer, hang beside the path
        elif line.role == "assistant" and not line.is_note:
            left_out.add("other-branches")
    session = next((lines[name].event["sessionId"] for name in tree if "sessionId" in lines[name].event), None)
    facts = {"session_id": session, "timestamp": lines[tree[0]].event.get("timestamp")}
    turns = _turns([line for line in kept if line.message])
    return lines[spoken[0]].number, conversation("claude-code", turns, left_out, **facts)


def _turns(lines: list[_Line]) -> list[dict[str, Any]]:
    """Return turns in order. An answer that the user stopped, or whose call they refused, has no weight."""
    turns: list[dict[str, Any]] = []
    answers: dict[str | None, dict[str, Any]] = {}
    last: dict[str, Any] | None = None  # of the model
    for line in lines:
        content = line.message.get("content")
        blocks = list(content) if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
        if line.role == "assistant":
            # The blocks of one answer are one turn, even where a result was written between two of them.
            last = answers.get(line.answer_id) if line.answer_id else None
            if last is None:
                last = answers[line.answer_id] = {"role": "assistant", "content": []}
                turns.append(last)
            earlier = {json.dumps(block, sort_keys=True) for block in last["content"]}
            last["content"] += [block for block in blocks if json.dumps(block, sort_keys=True) not in earlier]
            if line.message.get("stop_reason") == "max_tokens":
                last["weight"] = 0
            continue
        text = _text(line.message)
        results = [part.get("content") for part in objects(blocks) or [] if "tool_use_id" in part]
        if last is not None and (_INTERRUPTED in text or any(_REJECTED in json.dumps(result) for result in results)):
            last["weight"] = 0
        if len(blocks) > 1 or not text.startswith(_INTERRUPTED):  # a turn may only say that they interrupted
            turns.append({"role": line.role, "content": blocks})
    return turns


# The lines of different trees may be interleaved.
FORMAT = Log(
    "claude-code", lambda head: any(map(is_line, head.events)), lambda lines: session_rows(lines, _rows, is_line)
)
