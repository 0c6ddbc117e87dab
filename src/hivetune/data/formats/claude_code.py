"""Sessions of Claude Code: a tree of events, one a line; each tree is one conversation, its kept branch is read.

A line holds one block of an answer; lines with one message id are one answer. A rewound or edited prompt leaves a
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
# What the program itself writes as a user's turn.
_OWN_TEXTS = (
    *("<local-command-caveat>", "<command-name>", "<local-command-stdout>", "<local-command-stderr>"),
    *("<command-message>", "Caveat: The"),
)


@dataclass(slots=True)
class _Line:
    number: int
    event: dict[str, Any]
    parent: str | None
    role: str | None
    message: dict[str, Any]
    noise: bool

    def parts(self, kind: str) -> list[dict[str, Any]]:
        parts = listed(self.message.get("content"))
        return [part for part in parts if isinstance(part, dict) and part.get("type") == kind]

    @property
    def answer_id(self) -> str | None:
        """Return the id that all lines of one answer share."""
        answer_id = self.message.get("id") if self.role == "assistant" else None
        return answer_id if isinstance(answer_id, str) and answer_id else None

    @property
    def asks_subagent(self) -> bool:
        return self.role == "user" and self.event.get("isSidechain") is True and not self.parts("tool_result")


def is_line(row: Row) -> bool:
    """Return whether an object is a line of such a session."""
    if row.get("type") in _SPOKEN:
        return isinstance(row.get("message"), dict) and any(name in row for name in ("sessionId", "uuid", "parentUuid"))
    if row.get("type") == "summary":
        return "leafUuid" in row
    return row.get("type") in _OTHER_TYPES and ("sessionId" in row or "snapshot" in row)


def _lines_of(session: Sequence[PlacedEvent]) -> dict[str, _Line]:
    """Return the lines by their names, with orders that only the queue holds before the answer that they were typed
    into.
    """
    lines: dict[str, _Line] = {}
    orders: dict[str, int] = {}
    for number, event in session:
        if event.get("reason") == "absorbed_mid_turn" and isinstance(event.get("content"), str):
            orders[event["content"]] = number
        attached, kind, uuid, parent = _attached(event), event.get("type"), event.get("uuid"), event.get("parentUuid")
        role = "user" if attached else str(kind) if kind in _SPOKEN else None
        name = uuid if isinstance(uuid, str) else f"line {number}"
        if name in lines and lines[name].message:
            continue  # written twice: the first stands
        message = attached or event.get("message") if role else None
        message = message if isinstance(message, dict) else {}
        above = parent if isinstance(parent, str) else None
        lines[name] = _Line(number, event, above, role, message, _is_noise(event, role))
    for order, number in orders.items():
        if any(_text(line.message) == order for line in lines.values() if line.role == "user"):
            continue  # an attachment says it too
        below = next((line for line in lines.values() if line.number > number and line.role == "assistant"), None)
        if below is not None:
            message = {"role": "user", "content": order}
            lines[f"line {number}"] = _Line(number, {}, below.parent, "user", message, noise=False)
            below.parent = f"line {number}"
    return dict(sorted(lines.items(), key=lambda named: named[1].number))


def _attached(event: Row) -> dict[str, Any] | None:
    """Return the user's turn that an attachment is: an order that was typed while the model answered, or the text of a
    file. Others are notes of the program.
    """
    attached = event.get("attachment") if event.get("type") == "attachment" else None
    if one_of(attached, "type") == "queued_command" and (order := one_of(attached, "prompt")):
        return {"role": "user", "content": order}
    text = one_of(one_of(one_of(attached, "content"), "file"), "content")
    if one_of(attached, "type") == "file" and isinstance(text, str):
        return {"role": "user", "content": f"{one_of(attached, 'filename')}\n{text}"}
    return None


def _is_noise(event: Row, role: str | None) -> bool:
    """Return whether a line is an error of the API, a note to the user or the output of a command, which nobody
    said.
    """
    if event.get("isApiErrorMessage") or event.get("isMeta") or event.get("isVisibleInTranscriptOnly"):
        return True
    message = event.get("message")
    if not isinstance(message, dict):
        return False
    written = role == "user" and _text(message).lstrip().startswith(_OWN_TEXTS)
    return written or message.get("model") == "<synthetic>"


def _text(message: Row) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in listed(content) if isinstance(part, dict) and "text" in part)


def _rows(session: Sequence[PlacedEvent]) -> Iterator[PlacedRow]:
    lines = _lines_of(session)
    for line in lines.values():
        above = lines.get(line.parent or "")
        if above is not None and line.event.get("isMeta") is True and (text := _command_arguments(above)):
            above.noise, above.message = False, {"role": "user", "content": text}
        aside = line.asks_subagent and above is not None and above.event.get("isSidechain") is not True
        if aside or (line.role == "user" and _text(line.message).lstrip().startswith(_CLEAR)):
            line.parent = None  # a conversation of its own begins
    for tree in _trees({name: line.parent for name, line in lines.items()}).values():
        spoken = [name for name in tree if lines[name].role and not lines[name].noise]
        if spoken:
            yield _row(lines, tree, spoken)


def _trees(parents: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the trees of a log by the names of their first events, each with the names of all its events in the order
    of the log. A parent may stand below its child: programs write what happens at once as it comes.
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


def _command_arguments(line: _Line) -> str:
    """Return what the user wrote after the name of a command. The page that a command of their own stands for follows
    as a note; a command of the program has none.
    """
    text = _text(line.message).lstrip()
    arguments = text.partition("<command-args>")[2].partition("</command-args>")[0]
    return arguments.strip() if text.startswith("<command-") else ""


def _row(lines: Mapping[str, _Line], tree: list[str], spoken: list[str]) -> PlacedRow:
    path = set(path_to(spoken[-1], {name: lines[name].parent for name in tree}))
    answers = {lines[name].answer_id for name in path} - {None}
    calls = {str(part.get("id")) for name in path for part in lines[name].parts("tool_use")}
    kept: list[_Line] = []
    left_out = set()
    for name in tree:  # in the order of the file
        line = lines[name]
        results = any(str(part.get("tool_use_id")) in calls for part in line.parts("tool_result"))
        if line.noise and name in path:
            left_out.add("program-notes")
        elif name in path or line.answer_id in answers or results:
            kept.append(line)  # results of calls made at once, and pieces of one answer, hang beside the path
        elif line.role == "assistant" and not line.noise:
            left_out.add("other-branches")
    first = lines[spoken[0]]
    named = next((lines[name].event for name in tree if "sessionId" in lines[name].event), first.event)
    facts = {"session_id": named.get("sessionId"), "timestamp": lines[tree[0]].event.get("timestamp")}
    return first.number, conversation("claude-code", _turns([line for line in kept if line.message]), left_out, **facts)


def _turns(lines: list[_Line]) -> list[dict[str, Any]]:
    """Return turns in order; blocks of one answer together, even where a result was written between two of them. An
    answer that the user stopped, or whose call they refused, has no weight.
    """
    turns: list[dict[str, Any]] = []
    answers: dict[str, dict[str, Any]] = {}
    for line in lines:
        content, answer = line.message.get("content"), str(line.message.get("id") or "")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
        turn = answers.get(answer) if line.role == "assistant" else None
        if turn is None:
            turn = {"role": line.role, "content": list(blocks)}
            turns.append(turn)
            if line.role == "assistant" and answer:
                answers[answer] = turn
        else:
            earlier = {json.dumps(block, sort_keys=True) for block in turn["content"]}
            turn["content"] += [block for block in blocks if json.dumps(block, sort_keys=True) not in earlier]
        if line.message.get("stop_reason") == "max_tokens":
            turn["weight"] = 0
    last: dict[str, Any] | None = None
    for turn in turns:
        if turn["role"] == "assistant":
            last = turn
        elif last is not None:
            results = [part.get("content") for part in objects(turn["content"]) or [] if "tool_use_id" in part]
            if _INTERRUPTED in _text(turn) or any(_REJECTED in json.dumps(result) for result in results):
                last["weight"] = 0
    # A user's turn of one part may only say that they interrupted.
    marks = [t["role"] == "user" and len(t["content"]) == 1 and _text(t).startswith(_INTERRUPTED) for t in turns]
    return [turn for turn, is_mark in zip(turns, marks, strict=True) if not is_mark]


# The lines of a tree may stand between those of others.
FORMAT = Log("claude-code", lambda head: any(map(is_line, head.events)), lambda lines: session_rows(lines, _rows))
