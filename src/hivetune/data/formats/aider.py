"""Aider's chat history, one Markdown file of many sessions: `####` lines are what the user says, quoted lines what the
program says, all others what the model says.

https://aider.chat/docs/faq.html (`.aider.chat.history.md`)
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Lines, Log
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
    kind = ""  # who says a line: user, assistant, note, or nobody
    has_ends = any(line.startswith(_QUESTION_MARK) and line.endswith(_END) for line in lines)
    asks = [line.startswith(_QUESTION_MARK) or line.rstrip() == _QUESTION_MARK.rstrip() for line in lines]
    note_until = 0
    for at, line in enumerate(lines):
        if at < note_until:
            continue
        in_answer, before = kind == "assistant", kind
        if asks[at] and (not in_answer or not has_ends or line.endswith(_END)):
            kind = "user"
        elif _NOTE.match(line) and (not in_answer or line.endswith(_END)):
            kind, some_left = "note", True
            # Aider quotes the first line of a note only, and ends its last one.
            ends = (n for n in range(at, len(lines)) if lines[n].endswith(_END))
            begins = (n for n in range(at + 1, len(lines)) if asks[n] or _NOTE.match(lines[n]))
            end = next(ends, len(lines))
            note_until = (end if end < next(begins, len(lines)) else at) + 1 if before == "note" else at
        elif in_answer or line.strip():
            kind = "assistant"
        else:
            kind = ""  # what is asked after an empty line is another question, or that of a command again
        if kind in ("user", "assistant"):
            text = line if kind == "assistant" else line[len(_QUESTION_MARK) :].rstrip()
            if kind == before:
                turns[-1]["content"] += f"\n{text}"
            else:
                turns.append({"role": kind, "content": text})
    cleaned = [_cleaned(turn["role"], str(turn["content"])) for turn in turns]
    spoken = [turn for turn, after in itertools.zip_longest(cleaned, cleaned[1:]) if turn["content"] and turn != after]
    return spoken, some_left or [turn["content"].strip() for turn in turns] != [turn["content"] for turn in spoken]


def _cleaned(role: str, text: str) -> dict[str, Any]:
    """Return a question without the command before it, empty for other commands; an answer without the notes at its
    end, with its reasoning in a field of its own.
    """
    if role == "user":
        command = _COMMAND.match(text)
        asked = text if command is None else text[command.end() :] if command.group(1) in _ASKS else ""
        return {"role": role, "content": asked.strip()}
    lines = text.split("\n")
    while lines and (_NOTE.match(lines[-1]) or not lines[-1].strip()):
        lines.pop()
    text = "\n".join(lines).strip()
    if (match := _THOUGHTS.match(text)) is None:
        return {"role": role, "content": text}
    thoughts = (match["tagged"] or match["titled"] or "").strip()
    return {"role": role, "content": text[match.end() :].strip(), "reasoning_content": thoughts}


FORMAT = Log("aider", lambda head: head.data.lstrip().startswith(b"# aider chat started at "), rows)
