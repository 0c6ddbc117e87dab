"""Calls of a model that a program prints as JSON over many lines, among everything else. Calls that run at once without
naming their run can't be told apart, and are refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hivetune.data.pieces.format import Lines
from hivetune.data.pieces.logs import PlacedRow, conversation
from hivetune.data.pieces.rendered import is_rendered, turns_of
from hivetune.data.pieces.said import one_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*+"?')
_MAX_OPEN = 10_000  # calls that wait for their answers
_MAX_JSON_CHARS = 8 << 20


class Asked(NamedTuple):
    place: int
    request: Any


@dataclass(slots=True)
class Calls:
    """Calls that wait for their answer, by the run that they name. `mixed`: runs of which several waited at once, until
    all have ended.
    """

    waiting: dict[str, list[Asked]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    open: int = 0

    def begin(self, run: str, asked: Asked) -> Asked | None:
        """Let a call wait. Return the oldest one where too many do: it is given up."""
        self.waiting.setdefault(run, []).append(asked)
        if len(self.waiting[run]) > 1:
            self.mixed.add(run)
        self.open += 1
        found = self.end(next(iter(self.waiting))) if self.open > _MAX_OPEN else None
        return found[0] if found else None

    def end(self, run: str) -> tuple[Asked, bool] | None:
        """Return (the call that waited longest, whether the answer is its own); None where none waits."""
        if run not in self.waiting:
            return None
        asked = self.waiting[run].pop(0)
        is_sure = run not in self.mixed
        self.open -= 1
        if not self.waiting[run]:
            self.mixed.discard(run)
            del self.waiting[run]
        return asked, is_sure

    def unanswered(self) -> list[Asked]:
        return [asked for run in self.waiting.values() for asked in run]


def without_colours(lines: Lines) -> Lines:
    return ((number, _COLOUR.sub("", line) if "\x1b" in line else line) for number, line in lines)


def call_row(found: tuple[Asked, bool] | None, answer: Any) -> Iterator[PlacedRow]:
    if found is None:
        return
    (place, request), is_sure = found
    if not isinstance(request, dict) or not any(key in request for key in ("messages", "prompt", "input", "prompts")):
        return  # an embedding, a list of models: no conversation
    answer = answer if is_sure and answer else {"choices": []}
    if "prompts" in request or one_of(answer, "generations") is not None:
        outputs = None if answer == {"choices": []} else answer
        yield place, {"run_type": "llm", "inputs": request, "outputs": outputs}
    else:
        yield place, {"request": request, "response": answer}


def json_from(text: str, lines: Iterator[tuple[int, str]]) -> Any:
    """Return the JSON that begins in `text` or on the next line and goes on until its brackets close; None: it is
    none.
    """
    held: list[str] = []
    depth = size = 0
    text = text.strip() or next(lines, (0, ""))[1]
    if text.lstrip()[:1] not in ("{", "["):
        return None
    while True:
        held.append(text)
        size += len(text)
        bare = _STRING.sub("", text)
        depth += sum(map(bare.count, "{[")) - sum(map(bare.count, "}]"))
        if depth <= 0 or size > _MAX_JSON_CHARS:
            break
        following = next(lines, None)
        if following is None:
            break
        text = following[1]
    try:
        return json.loads("\n".join(held))
    except (ValueError, RecursionError):
        return None


# The row of a call whose prompt was printed as a template wrote it.


def prompted(place: int, prompt: str, answer: str | None, finish: str | None) -> Iterator[PlacedRow]:
    turns = turns_of(prompt)
    if turns is None:
        turns = [{"role": "user", "content": prompt}] if not is_rendered(prompt) else None
    if turns is None:
        yield place, {"prompt_of_unknown_template": prompt, "completion": answer}
        return
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    if finish is not None and finish not in ("stop", "tool_calls", "None"):
        response = {"choices": [{"message": turns[-1], "finish_reason": finish}]}
        yield place, {"request": {"messages": turns[:-1]}, "response": response}
        return
    yield from conversation("vllm", place, turns, ())
