"""Questions and answers that a log holds apart, paired again; and the JSON that a program prints over many lines."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hivetune.data.pieces.format import Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json, conversation
from hivetune.data.pieces.rendered import is_rendered, turns_of
from hivetune.data.pieces.said import one_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*+"?')
_MAX_OPEN = 10_000  # questions that wait for their answers
_MAX_JSON_CHARS = 8 << 20


class Step(NamedTuple):
    """A step of a log. `run`: what a question and its answer have in common. `side`: "asked", "answered", or empty for
    anything else. `alone`: the record of a step without its other half; None: no record.
    """

    place: int
    run: str
    side: str
    value: Any = None
    alone: Any = None


_Steps = Callable[[Lines], Iterable[Step]]


def paired(steps: Iterable[Step], join: Callable[[Any, Any], Any]) -> Iterator[PlacedRow]:
    """Yield the record that `join` makes of each question and its answer, and the records of steps that stay alone.

    If several questions of one run wait at once, their answers can't be told apart: all of them stay alone.
    """
    waiting: dict[str, list[Step]] = {}
    mixed: set[str] = set()
    num_open = 0
    for step in steps:
        run, ends = step.run, step.side == "answered"
        if step.side == "asked":
            if run in waiting:
                mixed.add(run)
            waiting.setdefault(run, []).append(step)
            num_open += 1
            if num_open <= _MAX_OPEN:
                continue
            run = next(iter(waiting))  # the oldest is given up
        elif not ends or run not in waiting:
            yield from _unpaired(step)
            continue
        request, is_sure = waiting[run].pop(0), ends and run not in mixed
        num_open -= 1
        if not waiting[run]:
            mixed.discard(run)
            del waiting[run]
        if not is_sure:
            yield from _unpaired(request, *([step] if ends else []))
        elif (record := join(request.value, step.value)) is not None:
            yield request.place, record
    yield from _unpaired(*itertools.chain.from_iterable(waiting.values()))


def prints(mark: str) -> Callable[[Head], bool]:
    """Return a `recognise` for what a program prints: it does not begin with JSON, and has this mark."""
    pattern = re.compile(mark.encode(), re.M)
    return lambda head: not begins_with_json(head.data) and pattern.search(head.data) is not None


def pairing(join: Callable[[Any, Any], Any]) -> Callable[[_Steps], Callable[[Lines], Iterator[PlacedRow]]]:
    """Make the `rows` of a format from what reads its steps."""

    def decorate(steps: _Steps) -> Callable[[Lines], Iterator[PlacedRow]]:
        return functools.wraps(steps)(lambda lines: paired(steps(lines), join))

    return decorate


def _unpaired(*steps: Step) -> Iterator[PlacedRow]:
    return ((step.place, step.alone) for step in steps if step.alone is not None)


def without_colours(lines: Lines) -> Lines:
    return ((number, _COLOUR.sub("", line) if "\x1b" in line else line) for number, line in lines)


def call_record(request: Any, answer: Any = None) -> dict[str, Any] | None:
    """Return the record of a call; None for an embedding or a list of models, which are no conversation."""
    if not isinstance(request, dict) or not any(key in request for key in ("messages", "prompt", "input", "prompts")):
        return None
    if "prompts" in request or one_of(answer, "generations") is not None:
        return {"run_type": "llm", "inputs": request, "outputs": answer or None}
    return {"request": request, "response": answer or {"choices": []}}


def request_step(number: int, run: str, request: Any) -> Step:
    return Step(number, run, "asked", request, call_record(request))


def json_from(text: str, lines: Lines) -> Any:
    """Return the JSON that begins in `text` or on the next line, up to its last bracket; None if it is none."""
    lines_read: list[str] = []
    depth = size = 0
    text = text.strip() or next(lines, (0, ""))[1]
    if text.lstrip()[:1] not in ("{", "["):
        return None
    for _, line in itertools.chain([(0, text)], lines):
        lines_read.append(line)
        size += len(line)
        bare = _STRING.sub("", line)
        depth += sum(map(bare.count, "{[")) - sum(map(bare.count, "}]"))
        if depth <= 0 or size > _MAX_JSON_CHARS:
            break
    try:
        return json.loads("\n".join(lines_read))
    except (ValueError, RecursionError):
        return None


def prompted(prompt: str, answer: str | None = None, finish: str | None = None) -> Any:
    """Return the record of a call whose prompt was printed as a template wrote it."""
    turns = turns_of(prompt)
    if turns is None and is_rendered(prompt):
        return {"prompt_of_unknown_template": prompt, "completion": answer}
    turns = turns or [{"role": "user", "content": prompt}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    if finish is not None and finish not in ("stop", "tool_calls", "None"):
        response = {"choices": [{"message": turns[-1], "finish_reason": finish}]}
        return {"request": {"messages": turns[:-1]}, "response": response}
    return conversation("vllm", turns)
