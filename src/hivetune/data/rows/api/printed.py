"""What LM Studio and LangChain print: calls of a model as JSON over many lines, or as texts, among everything else.

LM Studio's server prints a request and then the prediction, whole or in packets; `lms log stream` prints the prompt
as a template wrote it and then the text; LangChain's debug mode the input and the output of each run. Calls that run at
once without naming their run can't be told apart, and are refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.pieces.said import one_of
from hivetune.data.rows.sessions.servers import prompted

_LM_REQUEST = r"Received request: POST to /\S+ with body "
_LANGCHAIN = r"\[llm/(?:start|end|error)\] "
PRINTED_CALL = re.compile(rf"(?:{_LM_REQUEST}+\{{|{_LANGCHAIN}|^type: llm\.prediction\.input\r?$)".encode(), re.M)
_HEADS = re.compile(
    rf"(?P<asked>{_LM_REQUEST})|(?P<answered>Generated prediction: )|(?P<piece>Generated packet: )"
    r"|(?P<ended>Finished streaming response)|(?P<left>Client disconnected)"
    r"|\[llm/(?P<run>start|end|error)\] (?P<crumbs>\[[^][]*\])?(?:(?!\[llm/).)*?(?:input|output|error):"
)
_STREAM_EVENT = re.compile(r"timestamp: [\d./-]+,? .*")
_FIELD = re.compile(r"(type|modelIdentifier|modelPath|input|output|stats):(?: (.*)|)", re.S)
_TEXTS = ("input", "output")  # a line of them may look like a field
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*+"?')
_MAX_JSON_CHARS = 8 << 20


class _Asked(NamedTuple):
    place: int
    request: Any


@dataclass(slots=True)
class _Calls:
    """Calls that wait for their answer, by the run that they name. `mixed`: runs of which several waited at once, until
    all have ended.
    """

    waiting: dict[str, list[_Asked]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)

    def begin(self, run: str, asked: _Asked) -> None:
        self.waiting.setdefault(run, []).append(asked)
        if len(self.waiting[run]) > 1:
            self.mixed.add(run)

    def end(self, run: str) -> tuple[_Asked, bool] | None:
        """(the call that waited longest, whether the answer is its own)"""
        if not self.waiting.get(run):
            return None
        asked = self.waiting[run].pop(0)
        is_sure = run not in self.mixed
        if not self.waiting[run]:
            self.mixed.discard(run)
        return asked, is_sure


def printed_rows(lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """One row for each call, when its answer is there or the log ends."""
    plain = ((number, _COLOUR.sub("", line) if "\x1b" in line else line) for number, line in lines)
    calls, pieces = _Calls(), list[Any]()
    for number, line in plain:
        if _STREAM_EVENT.fullmatch(line):
            yield from _stream_rows(number, plain)
            break
        head = _HEADS.search(line)
        if head is None:
            continue
        kind = head.lastgroup if head["run"] is None else f"run {head['run']}"
        run = head["crumbs"] or ""
        if kind == "asked" or kind == "run start":
            value = _json_from(line[head.end() :], plain)
            calls.begin(run, _Asked(number, value))
            pieces.clear()
        elif kind == "piece":
            pieces.append(_json_from(line[head.end() :], plain))
        elif kind in ("ended", "left"):
            yield from _row(calls.end(run), list(pieces) if kind == "ended" else None)
            pieces.clear()
        elif kind == "run error":
            yield from _row(calls.end(run), {"error": {"message": line[head.end() :].strip() or "an error"}})
        else:
            yield from _row(calls.end(run), _json_from(line[head.end() :], plain))
    for asked in (one for run in calls.waiting.values() for one in run):
        yield from _row((asked, True), None)


def _row(found: tuple[_Asked, bool] | None, answer: Any) -> Iterator[PlacedRow]:
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


def _json_from(text: str, lines: Iterator[tuple[int, str]]) -> Any:
    """The JSON that begins in `text` or on the next line and goes on until its brackets close; None: it is none."""
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


def _stream_rows(number: int, lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """`lms log stream`: a prompt and the text that came of it, each under its fields up to the next time."""
    calls = _Calls()
    for place, event in _stream_events(number, lines):
        kind, model = event.get("type"), event.get("modelIdentifier", "")
        if kind == "llm.prediction.input":
            calls.begin(model, _Asked(place, event.get("input", "") + "\n"))
        elif kind == "llm.prediction.output" and (found := calls.end(model)) is not None:
            (begun, prompt), is_sure = found
            yield from prompted(begun, prompt, event.get("output") if is_sure else None, None)
    for asked in (one for run in calls.waiting.values() for one in run):
        yield from prompted(asked.place, asked.request, None, None)


def _stream_events(number: int, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    held: dict[str, list[str]] = {}
    place, name = number, ""
    for number, line in lines:
        found = _FIELD.fullmatch(line)
        if _STREAM_EVENT.fullmatch(line):
            yield place, {key: _stream_text(value) for key, value in held.items()}
            held, place, name = {}, number, ""
        elif found is not None and (name == "output" if found[1] == "stats" else name not in _TEXTS):
            name = found[1]
            held[name] = [found[2]] if found[2] is not None else []
        elif name:
            held[name].append(line)
    yield place, {key: _stream_text(value) for key, value in held.items()}


def _stream_text(lines: list[str]) -> str:
    """A text as it was printed; older programs put it into quotes."""
    text = "\n".join(lines).rstrip("\n")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
