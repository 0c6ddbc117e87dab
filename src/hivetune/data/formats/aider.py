"""Aider's chat history, one Markdown file of many sessions: `####` lines are what the user says, quoted lines what the
program says, all others what the model says.

https://aider.chat/docs/faq.html (`.aider.chat.history.md`)
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, conversation

_STARTED = re.compile(r"# aider chat started at (\S+ \S+)\s*\Z")
_LAST = "# aider chat started at - -"  # ends the last session
_QUESTION_MARK = "#### "
_NOTE = re.compile(r"> |>\Z")  # and not `>>>>>>> REPLACE`, which ends an edit
_END = "  "  # behind what Aider itself writes, a question or a note, and not behind a heading or quotation of the model
# By the tag that Aider gives a model's thoughts, or as it shows them. What was stopped while it thought has no end.
_THOUGHTS = re.compile(
    r"\s*(?:<(?P<tag>thinking-content-[0-9a-f]{32}|think)>(?P<tagged>.*?)(?:</(?P=tag)>|\Z)"
    r"|-+\n► \*\*THINKING\*\*\n(?P<titled>.*?)(?:\n-+\n► \*\*ANSWER\*\*|\Z))",
    re.DOTALL,
)
_COMMAND = re.compile(r"/(\w[\w-]*)\s*")
_ASKS = ("ask", "code", "architect", "chat-mode", "context", "help")  # commands whose rest is a question


def recognise(head: Head) -> bool:
    return head.data.lstrip().startswith(b"# aider chat started at ")


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each session in which somebody asked something."""
    begin, time, session = 1, "", list[str]()
    for number, line in itertools.chain(lines, [(0, _LAST)]):
        if (started := _STARTED.match(line)) is None:
            session.append(line)
            continue
        turns, some_left = _turns(session)
        if any(turn["role"] == "user" for turn in turns):
            yield begin, conversation("aider", turns, ["program-notes"] if some_left else [], timestamp=time)
        begin, time, session = number, started.group(1), []


def _turns(lines: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """Return (text, whether the program spoke too)."""
    turns: list[dict[str, Any]] = []
    some_left = False
    kind = ""
    has_ends = any(line.startswith(_QUESTION_MARK) and line.endswith(_END) for line in lines)
    note_until = 0
    for at, line in enumerate(lines):
        if at < note_until:
            continue
        now = _whose(line, kind, has_ends=has_ends)
        if now == "note":
            note_until = _end_of_note(lines, at) if kind == "note" else at
            some_left = True
        elif now:
            text = line if now == "assistant" else line[len(_QUESTION_MARK) :].rstrip()
            if now == kind:
                turns[-1]["content"] += f"\n{text}"
            else:
                turns.append({"role": now, "content": text})
        kind = now
    cleaned = [_question(turn) if turn["role"] == "user" else _answer(turn) for turn in turns]
    spoken = [turn for turn, after in itertools.zip_longest(cleaned, cleaned[1:]) if turn["content"] and turn != after]
    return spoken, some_left or [turn["content"].strip() for turn in turns] != [turn["content"] for turn in spoken]


def _whose(line: str, before: str, *, has_ends: bool) -> str:
    """Return who says a line after one of `before`: user, assistant, note, or nobody: what is asked after an empty line
    is another question, or that of a command again.
    """
    in_answer = before == "assistant"
    if _asks(line) and (not in_answer or not has_ends or line.endswith(_END)):
        return "user"
    if _NOTE.match(line) and (not in_answer or line.endswith(_END)):
        return "note"
    return "assistant" if in_answer or line.strip() else ""


def _asks(line: str) -> bool:
    return line.startswith(_QUESTION_MARK) or line.rstrip() == _QUESTION_MARK.rstrip()


def _end_of_note(lines: Sequence[str], at: int) -> int:
    """Return where the note that begins at `at` ends: Aider quotes its first line only, and ends its last one."""
    for number, line in enumerate(lines[at:], at):
        if number > at and (_asks(line) or _NOTE.match(line)):
            break
        if line.endswith(_END):
            return number + 1
    return at + 1


def _question(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the user's question without the command before it; empty for other commands."""
    text = str(turn["content"])
    if command := _COMMAND.match(text):
        text = text[command.end() :] if command.group(1) in _ASKS else ""
    return {**turn, "content": text.strip()}


def _answer(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the turn without the notes at its end, with its reasoning in a field of its own."""
    lines = str(turn["content"]).split("\n")
    while lines and (_NOTE.match(lines[-1]) or not lines[-1].strip()):
        lines.pop()
    text = "\n".join(lines).strip()
    if (match := _THOUGHTS.match(text)) is None:
        return {**turn, "content": text}
    thoughts = (match["tagged"] or match["titled"] or "").strip()
    return {**turn, "content": text[match.end() :].strip(), "reasoning_content": thoughts}


FORMAT = Format("aider", recognise, rows, "file")
