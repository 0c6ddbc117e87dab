"""Logs of proxies with a line for a request and a line for its response, which name each other by an id.

https://docs.litellm.ai/docs/proxy/logging and others: each names the sides and the id in its own way.
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.answers import is_request
from hivetune.data.pieces.fields import SESSION, TIME, plain_name
from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import events, is_row
from hivetune.data.pieces.printed import Step, pairing
from hivetune.data.pieces.said import Row, one_of, parsed
from hivetune.data.reasons import RowRefused

_KINDS = ("type", "event", "kind", "direction")
_SIDE = re.compile(r"(?:(?:api|http|llm|proxy)_)?(request|response)")
_IDS = ("request_id", "flow_id", "call_id", "trace_id", "id")
_BODIES = ("body", "payload", "content", "data")


def recognise(head: Head) -> bool:
    """Return whether the first rows of a file contain a request to a model and its response."""
    ids = {_id(row) for row in head.events if _asks_a_model(row)} - {""}
    return bool(ids) and any(_side(row) == "response" and _id(row) in ids for row in head.events)


def _call(request: Row, answered: Row) -> dict[str, Any]:
    columns = {key: request[key] for key in (*SESSION, *TIME) if request.get(key) is not None}
    status, response = one_of(answered, "status_code", "statusCode", "status"), _body(answered)
    if isinstance(status, int) and status >= 400:
        response = {"error": {"message": f"status {status}"}}
    return {**columns, "request": _body(request), "response": response}


@pairing(_call)
def rows(lines: Lines) -> Iterator[Step]:
    """Yield one row for each call of a model with its response. Other events are set aside."""
    for number, row, text in events(lines):
        if row is None or is_row(row):
            yield Step(number, "", "", alone=RowRefused("broken-line") if row is None else text)
        else:
            side = "asked" if _asks_a_model(row) and _id(row) else "answered" if _side(row) == "response" else ""
            yield Step(number, _id(row), side, row, {"run_type": "http", "inputs": None, "outputs": None})


def _side(row: Row) -> str | None:
    """Return whether a row is a request or a response, by what it is called."""
    for column in _KINDS:
        value = row.get(column)
        if isinstance(value, str) and (match := _SIDE.fullmatch(plain_name(value))):
            return match[1]
    return None


def _id(row: Row) -> str:
    identity = one_of({plain_name(name): value for name, value in row.items()}, *_IDS)
    return str(identity) if isinstance(identity, str | int) else ""


def _body(row: Row) -> Any:
    body = one_of(row, *_BODIES)
    value = parsed(body)
    return value if isinstance(value, dict) else body


def _asks_a_model(row: Row) -> bool:
    body = _body(row) if _side(row) == "request" else None
    return isinstance(body, dict) and is_request(body)


FORMAT = Log("exchange-log", recognise, rows, rank=1)
