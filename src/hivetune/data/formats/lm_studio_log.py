"""What LM Studio's server prints: a request, then the prediction, whole or in packets.

https://lmstudio.ai/docs/developer/core/server
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import Asked, Calls, call_row, json_from, without_colours

_ASKED = r"Received request: POST to /\S+ with body "
_REQUEST = re.compile(rf"{_ASKED}+\{{".encode())
_HEADS = re.compile(
    rf"(?P<asked>{_ASKED})|(?P<answered>Generated prediction: )|(?P<piece>Generated packet: )"
    r"|(?P<ended>Finished streaming response)|(?P<left>Client disconnected)"
)


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each call, when its answer is there or the log ends."""
    plain = without_colours(lines)
    calls, pieces = Calls(), list[Any]()
    for number, line in plain:
        if (head := _HEADS.search(line)) is None:
            continue
        rest = line[head.end() :]
        if head["asked"]:
            if given_up := calls.begin("", Asked(number, json_from(rest, plain))):
                yield from call_row((given_up, True), None)
            pieces.clear()
        elif head["piece"]:
            pieces.append(json_from(rest, plain))
        elif head["answered"]:
            yield from call_row(calls.end(""), json_from(rest, plain))
        else:
            yield from call_row(calls.end(""), list(pieces) if head["ended"] else None)
            pieces.clear()
    for asked in calls.unanswered():
        yield from call_row((asked, True), None)


FORMAT = Format("lm-studio-log", recognise, rows, "file")
