"""Transcripts of OpenCode (`/export`), Markdown with one session: what was said below `## User` and `## Assistant`, the
calls of an answer behind its words.

Nothing in a transcript divides a thought from the words behind it. Only a thought of one paragraph in front of a call
is told apart; any other answer with a thought is read and not learned.

https://opencode.ai/docs/tui/#export
"""

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation
from hivetune.data.reasons import RowRefused

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


def recognise(head: Head) -> bool:
    return _HEAD.match(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    text, place = "", 1
    for _, line in lines:
        text += f"{line}\n"
        if len(text) > MAX_KEPT_CHARS:
            yield place, RowRefused("line-too-large", f"a session of more than {MAX_KEPT_CHARS >> 20} MiB")
            return
    messages: list[dict[str, Any]] = []
    for who, said in _turns(text):
        turns = [{"role": "user", "content": said}] if who == "User" else _answer(said)
        messages += [turn for turn in turns if turn["content"] or turn.get("tool_calls")]
    name = _ID.search(text)
    if messages:
        yield from conversation("opencode", place, messages, (), session_id=name.group(1) if name else None)


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


def _answer(said: str) -> list[dict[str, Any]]:
    """Return the turns of an answer and of the tools that it called."""
    tools = list(_TOOL.finditer(said))
    words = said[: tools[0].start()] if tools else said
    turn: dict[str, Any] = {"role": "assistant", "content": words.strip(), "tool_calls": []}
    thought = words.strip().removeprefix(_THOUGHT).strip()
    if words.lstrip().startswith(_THOUGHT) and tools and "\n\n" not in thought:
        turn |= {"content": "", "reasoning_content": thought}
    elif _THOUGHT in words:
        turn["weight"] = 0
    results = []
    for number, (tool, after) in enumerate(zip_longest(tools, tools[1:])):
        held = said[tool.end() : after.start() if after else len(said)]
        given = _INPUT.match(held)
        if given is None:
            return [_HIDDEN]
        try:
            arguments = json.loads(given.group(1))
        except ValueError:
            return [_HIDDEN]
        call = {"id": str(number), "type": "function", "function": {"name": tool.group(1), "arguments": arguments}}
        turn["tool_calls"].append(call)
        result, shown = _RESULT.search(held, given.end() - 1), held.rstrip()
        if result is not None and shown.endswith(_RESULT_ENDS, result.end()):
            content = shown[result.end() :].removesuffix(_RESULT_ENDS)
            results.append({"role": "tool", "tool_call_id": str(number), "content": content})
    return [turn if tools else {**turn, "tool_calls": None}, *results]


FORMAT = Format("opencode", recognise, rows, "file")
