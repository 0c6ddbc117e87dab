"""Logs of LangChain's callbacks, one event a line: a call of a model as it starts, and its answer as it ends.

Start and end belong together by the id of their run; where the log has none, a start belongs to the end that follows,
unless another call starts in between. What belongs to nothing stays a row of its own, which is refused.

https://python.langchain.com/api_reference/core/callbacks.html
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.fields import SESSION, TIME, plain_name
from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, events
from hivetune.data.pieces.printed import Step, paired
from hivetune.data.pieces.said import Row, objects, one_of

_CALL = re.compile(
    r"(?:on_|handle_)?(?:llm|chat|chat_model|model)_(?:(?P<starts>start|started|begin)|(?P<fails>error)|(?P<ends>end|ended|complete|completed|finish|finished))"
)
_ASKED = ("messages", "prompts", "prompt", "inputs", "input", "text", "content")
_ANSWERED = ("generations", "response", "outputs", "output", "completion", "text", "content")
_IDS = ("run_id", "call_id", "request_id")


def recognise(head: Head) -> bool:
    """Return whether all the first rows of a file are events of runs, and some of them of a model."""
    found = [event_in(row) for row in head.events]
    return len(found) > 1 and all(found) and any(_CALL.fullmatch(event or "") for event in found)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each call of a model; what else happened is set aside by its type."""
    return paired((_step(*event) for event in events(lines)), _row)


def _step(number: int, row: Row | None, text: str) -> Step:
    name = None if row is None else event_in(row)
    call = None if name is None else _CALL.fullmatch(name)
    if row is None or name is None:
        return Step(number, "", "", alone=text)
    if call is None:
        return Step(number, "", "", alone={"run_type": name, "inputs": None, "outputs": None})
    said = _plain(row)
    run = str(one_of(said, *_IDS) or "")
    return Step(number, run, "asked" if call["starts"] else "answered", (said, bool(call["fails"])), text)


def _row(asking: tuple[Row, bool], answering: tuple[Row, bool]) -> dict[str, Any]:
    """Return the call as a run of LangSmith's."""
    (asked, _), (answered, failed) = asking, answering
    metadata = asked["metadata"] if isinstance(asked.get("metadata"), dict) else {}
    known = {**metadata, **asked}
    about = {name: known[name] for name in (*SESSION, *TIME) if known.get(name) is not None}
    failure = {"error": one_of(answered, "error", "text", "message") or "an error"} if failed else {}
    inputs, outputs = _only(one_of(asked, *_ASKED)), _generations(one_of(answered, *_ANSWERED))
    return {**about, "run_type": "llm", "inputs": inputs, "outputs": outputs, **failure}


def _generations(answered: Any) -> Any:
    """Return answers as LangChain gives them, a list of those to each prompt; some logs keep those to the only one."""
    found = answered if isinstance(answered, list) else one_of(answered, "generations")
    if objects(found) is None or not all("text" in one or "message" in one for one in found):
        return {"generations": answered} if isinstance(answered, list) else answered
    return {"generations": [found]}


def _only(asked: Any) -> Any:
    """Return the only prompt of a list of one; callbacks are given a list of prompts."""
    return asked[0] if isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], str | list) else asked


def _plain(row: Row) -> Row:
    """Return what an event says under plain names, with what newer events keep below `data`."""
    said = {plain_name(name): value for name, value in row.items()}
    data = said.get("data")
    return {**said, **{plain_name(name): value for name, value in data.items()}} if isinstance(data, dict) else said


# What happened in the life of a run, in logs with one event a line. Other columns than these hold classes, such as
# "front-end", so there the event says too of what it is one.
_EVENT_COLUMNS = ("event", "event_type", "event_name")
_KIND_COLUMNS = ("type", "kind")
_HAPPENED = "(?:start|started|begin|end|ended|error|complete|completed|finish|finished|delta|chunk|stream|token)"
_EVENT = re.compile(rf"(?:[a-z0-9_]+_)?{_HAPPENED}")
_EVENT_OF_A_RUN = re.compile(
    r"(?:on_|handle_)?(?:llm|chat|chat_model|model|chain|tool|agent|retriever|run|message|response|generation)"
    rf"_(?:new_)?{_HAPPENED}"
)
_MAX_EVENT_CHARS = 60


def event_in(row: Row) -> str | None:
    """Return the plain name of the event of a run that a row is; None: it is no such event."""
    for columns, known in ((_EVENT_COLUMNS, _EVENT), (_KIND_COLUMNS, _EVENT_OF_A_RUN)):
        for column in columns:
            value = row.get(column)
            if isinstance(value, str) and len(value) <= _MAX_EVENT_CHARS and known.fullmatch(name := plain_name(value)):
                return name
    return None


FORMAT = Format("callback-log", recognise, rows, "file", rank=1)
