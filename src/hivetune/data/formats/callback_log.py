"""Logs of LangChain's callbacks, one event a line: a call of a model as it starts, and its answer as it ends.

Start and end belong together by the id of their run; where the log has none, a start belongs to the end that follows,
unless another call starts in between. What belongs to nothing stays a row of its own, which is refused.

https://python.langchain.com/api_reference/core/callbacks.html
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.fields import SESSION, TIME, plain_name
from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, events
from hivetune.data.pieces.printed import Step, paired
from hivetune.data.pieces.said import Row, objects, one_of

_CALL = re.compile(
    r"(?:on_|handle_)?(?:llm|chat|chat_model|model)_(?:(?P<starts>start|started|begin)|(?P<fails>error)|(?P<ends>end|ended|complete|completed|finish|finished))"
)
_PROMPTS = ("messages", "prompts", "prompt", "inputs", "input", "text", "content")
_OUTPUTS = ("generations", "response", "outputs", "output", "completion", "text", "content")
_IDS = ("run_id", "call_id", "request_id")


def recognise(head: Head) -> bool:
    """Return whether all the first rows of a file are events of runs, and some of them of a model."""
    events = [event_in(row) for row in head.events]
    return len(events) > 1 and all(events) and any(_CALL.fullmatch(event or "") for event in events)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each call of a model; other events are set aside by their type."""
    return paired((_step(*event) for event in events(lines)), _row)


def _step(number: int, row: Row | None, text: str) -> Step:
    name = None if row is None else event_in(row)
    call = None if name is None else _CALL.fullmatch(name)
    if row is None or name is None:
        return Step(number, "", "", alone=text)
    if call is None:
        return Step(number, "", "", alone={"run_type": name, "inputs": None, "outputs": None})
    event = {plain_name(name): value for name, value in row.items()}
    if isinstance(data := event.get("data"), dict):  # newer events keep some fields there
        event |= {plain_name(name): value for name, value in data.items()}
    run = str(one_of(event, *_IDS) or "")
    return Step(number, run, "asked" if call["starts"] else "answered", (event, bool(call["fails"])), text)


def _row(asking: tuple[Row, bool], answering: tuple[Row, bool]) -> dict[str, Any]:
    """Return the call as a run of LangSmith's."""
    (request, _), (response, failed) = asking, answering
    metadata = request["metadata"] if isinstance(request.get("metadata"), dict) else {}
    facts = {**metadata, **request}
    columns = {name: facts[name] for name in (*SESSION, *TIME) if facts.get(name) is not None}
    failure = {"error": one_of(response, "error", "text", "message") or "an error"} if failed else {}
    inputs, outputs = one_of(request, *_PROMPTS), one_of(response, *_OUTPUTS)
    if isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], str | list):
        inputs = inputs[0]  # callbacks are given a list of prompts
    answers = outputs if isinstance(outputs, list) else one_of(outputs, "generations")
    if objects(answers) is not None and all("text" in g or "message" in g for g in answers):
        outputs = {"generations": [answers]}  # LangChain gives a list for each prompt; some logs keep only the first
    elif isinstance(outputs, list):
        outputs = {"generations": outputs}
    return {**columns, "run_type": "llm", "inputs": inputs, "outputs": outputs, **failure}


# What happened in the life of a run, in logs with one event a line. Other columns than these hold classes, such as
# "front-end", so there the event says too of what it is one.
_EVENT_COLUMNS = ("event", "event_type", "event_name")
_KIND_COLUMNS = ("type", "kind")
_HAPPENED = "(?:start|started|begin|end|ended|error|complete|completed|finish|finished|delta|chunk|stream|token)"
_EVENT = re.compile(rf"(?:[a-z0-9_]+_)?{_HAPPENED}")
_RUN_EVENT = re.compile(
    r"(?:on_|handle_)?(?:llm|chat|chat_model|model|chain|tool|agent|retriever|run|message|response|generation)"
    rf"_(?:new_)?{_HAPPENED}"
)
_MAX_EVENT_CHARS = 60


def event_in(row: Row) -> str | None:
    """Return the plain name of the event of a run that a row is; None: it is no such event."""
    for columns, kinds in ((_EVENT_COLUMNS, _EVENT), (_KIND_COLUMNS, _RUN_EVENT)):
        for column in columns:
            value = row.get(column)
            if isinstance(value, str) and len(value) <= _MAX_EVENT_CHARS and kinds.fullmatch(name := plain_name(value)):
                return name
    return None


FORMAT = Log("callback-log", recognise, rows, rank=1)
