"""Transcripts of OpenCode (`/export`), Markdown with one session: what was said below `## User` and `## Assistant`, the
calls of an answer after its words. And its export of a session (`opencode export`): `info` of the session, `messages`
of info and parts; a tool's call and result are one part.

Nothing in a transcript divides a thought from the words after it. Only a thought of one paragraph before a call is told
apart; any other answer with a thought is read and not learned.

https://opencode.ai/docs/tui/#export and https://opencode.ai/docs/cli/#export
"""

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from hivetune.data.pieces.format import Format, Lines, Log
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation
from hivetune.data.pieces.said import Conversation, Row, listed, objects, one_of
from hivetune.data.pieces.session import is_lone_thought
from hivetune.data.pieces.turns import conversation_of, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_HEAD = re.compile(rb"\A# [^\n]*\n+\*\*Session ID:\*\* ses_\w+ *\n\*\*Created:\*\* ")
_ID = re.compile(r"^\*\*Session ID:\*\* (\S+)", re.MULTILINE)
# A heading, or a place where a result begins or may end.
_MARK = re.compile(
    r"^---\n\n## (?P<who>User|Assistant(?: \(.*\))?)\n\n|(?P<opens>\n\*\*(?:Output|Error):\*\*\n```\n)|\n```", re.M
)
_TOOL = re.compile(r"^\*\*Tool: (\S+)\*\*$", re.MULTILINE)
_INPUT = re.compile(r"\n+\*\*Input:\*\*\n```json\n(.*?)\n```\n", re.DOTALL)
_RESULT = re.compile(r"\n\*\*(?:Output|Error):\*\*\n```\n")
_RESULT_ENDS = "\n```"
_HIDDEN = {"role": "assistant", "content": [{"type": "tool that was exported without its input"}]}  # refused as it is
_THOUGHT = "_Thinking:_"


def rows(lines: Lines) -> Iterator[PlacedRow]:
    text = ""
    for _, line in lines:
        text += f"{line}\n"
        if len(text) > MAX_KEPT_CHARS:
            yield 1, RowRefused("line-too-large", f"a session of more than {MAX_KEPT_CHARS >> 20} MiB")
            return
    messages: list[dict[str, Any]] = []
    for who, content in _turns(text):
        turns = [{"role": "user", "content": content}] if who == "User" else _answer(content)
        messages += [turn for turn in turns if turn["content"] or turn.get("tool_calls")]
    name = _ID.search(text)
    if messages:
        yield 1, conversation("opencode", messages, session_id=name[1] if name else None)


def _turns(text: str) -> Iterator[tuple[str, str]]:
    """Yield (who, what) in order. A heading inside of a result that is still open is a part of the result."""
    who, begin, at, is_open = "", 0, 0, False
    while mark := _MARK.search(text, at):
        at = mark.end() - 1  # its line break may begin the next one
        if not mark["who"]:
            is_open = bool(who and mark["opens"])
        elif not is_open:
            if who:
                yield who, text[begin : mark.start()].strip()
            who, begin, at = mark["who"], mark.end(), mark.end()
    if who:
        yield who, text[begin:].strip().removesuffix("---").rstrip()


def _answer(page: str) -> list[dict[str, Any]]:
    """Return the turns of an answer and of the tools that it called."""
    tools = list(_TOOL.finditer(page))
    text = page[: tools[0].start()] if tools else page
    turn: dict[str, Any] = {"role": "assistant", "content": text.strip(), "tool_calls": []}
    thought = text.strip().removeprefix(_THOUGHT).strip()
    if text.lstrip().startswith(_THOUGHT) and tools and "\n\n" not in thought:
        turn |= {"content": "", "reasoning_content": thought}
    elif _THOUGHT in text:
        turn["weight"] = 0
    results = []
    for number, (tool, after) in enumerate(zip_longest(tools, tools[1:])):
        section = page[tool.end() : after.start() if after else len(page)]
        match = _INPUT.match(section)
        if match is None:
            return [_HIDDEN]
        try:
            arguments = json.loads(match.group(1))
        except ValueError:
            return [_HIDDEN]
        call = {"id": str(number), "type": "function", "function": {"name": tool.group(1), "arguments": arguments}}
        turn["tool_calls"].append(call)
        result, shown = _RESULT.search(section, match.end() - 1), section.rstrip()
        if result is not None and shown.endswith(_RESULT_ENDS, result.end()):
            content = shown[result.end() :].removesuffix(_RESULT_ENDS)
            results.append({"role": "tool", "tool_call_id": str(number), "content": content})
    return [turn if tools else {**turn, "tool_calls": None}, *results]


def _exported(row: Row) -> Conversation | None:
    turns = objects(row.get("messages"))
    if turns is None or not isinstance(row["info"], dict) or not {"parts", "info"} <= turns[0].keys():
        return None
    messages: list[Message] = []
    changes: list[str] = []
    for turn in turns:
        info, parts = one_of(turn, "info"), [part for part in listed(one_of(turn, "parts")) if isinstance(part, dict)]
        if one_of(info, "error"):
            changes.append("other-branches")
        elif one_of(info, "summary") is True or any(part.get("type") == "compaction" for part in parts):
            changes.append("program-notes")  # what was said before, summed up; it stands in the export as it was
        elif one_of(info, "role") == "user":
            texts = [part for part in parts if part.get("type") == "text" and not part.get("ignored")]
            if any(part.get("type") == "file" and not part.get("synthetic") for part in parts) and not texts:
                raise RowRefused("unsupported-content", "a message that is only a file")
            messages.append(Message("user", "\n".join(str(part.get("text", "")) for part in texts)))
        else:
            messages += _steps(parts)
    answered = [message for message in messages if not is_lone_thought(message, silent=True)]
    changes += [] if len(answered) == len(messages) else ["lone-thought"]
    return conversation_of("opencode", answered, changed=tuple(dict.fromkeys(changes)))


def _steps(parts: list[dict[str, Any]]) -> list[Message]:
    """Return an answer step by step: reasoning and text, the calls, then their results."""
    messages: list[Message] = []
    content: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in [*parts, {"type": "step-start"}]:
        kind, state = part.get("type"), part.get("state")
        is_after = bool(results) and kind in ("text", "reasoning")  # the result was known when this was said
        if is_after or (kind == "step-start" and (content or results)):
            messages += read_turn({"role": "assistant", "content": content})
            messages += [m for result in results for m in read_turn({"role": "tool", "content": [result]})]
            content, results = [], []
        if kind in ("text", "reasoning"):
            content.append({"type": kind, "text": part.get("text")})
        elif kind == "tool" and isinstance(state, dict):
            call_id = part.get("callID")
            content.append({"type": "tool_use", "id": call_id, "name": part.get("tool"), "input": state.get("input")})
            output = one_of(state, "output", "error") or ""
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": output})
    return messages


FORMAT = Log("opencode", lambda head: _HEAD.match(head.data) is not None, rows)
EXPORT_FORMAT = Format("opencode-export", _exported, needs=("info", "messages"), reads=frozenset(("info", "messages")))
