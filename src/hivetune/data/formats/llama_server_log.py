"""What llama.cpp's server prints when it is verbose: requests and responses as JSON, among everything else. A request
without its answer is a row without an answer, so that it is counted.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server (`--verbose`)
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json

_REQUEST = re.compile(rb"log_server_r: +request: +\{")
_SAID = re.compile(r"log_server_r: +(request|response): +(\{.*)")


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each request, when its answer is there or the log ends."""
    asked: tuple[int, Any] | None = None
    for number, line in lines:
        if (said := _said(line)) is None:
            continue
        side, value = said
        if side == "response" and asked is not None:
            yield from _row(*asked, value)
            asked = None
        elif side == "request":
            if asked is not None:
                yield from _row(*asked, None)
            asked = number, value
    if asked is not None:
        yield from _row(*asked, None)


def _said(line: str) -> tuple[str, Any] | None:
    """Return ("request" or "response", its JSON) of a line, else None."""
    if found := _SAID.search(line):
        try:
            return found.group(1), json.JSONDecoder().raw_decode(found.group(2))[0]
        except (ValueError, RecursionError):
            return None
    return None


def _row(place: int, request: Any, response: Any) -> Iterator[PlacedRow]:
    if isinstance(request, dict) and ("messages" in request or "prompt" in request):  # else it asks for numbers
        yield place, {"request": request, "response": response if response else {"choices": []}}


FORMAT = Format("llama-server-log", recognise, rows, "file")
