"""What LM Studio's server prints: a request, then the prediction, whole or in packets.

https://lmstudio.ai/docs/developer/core/server
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import Step, call_record, json_from, paired, request_step, without_colours

_REQUEST_TEXT = r"Received request: POST to /\S+ with body "
_REQUEST = re.compile(rf"{_REQUEST_TEXT}+\{{".encode())
_HEADS = re.compile(
    rf"(?P<asked>{_REQUEST_TEXT})|(?P<answered>Generated prediction: )|(?P<piece>Generated packet: )"
    r"|(?P<ended>Finished streaming response)|(?P<left>Client disconnected)"
)


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return paired(_steps(without_colours(lines)), call_record)


def _steps(lines: Lines) -> Iterator[Step]:
    pieces: list[Any] = []
    for number, line in lines:
        if (head := _HEADS.search(line)) is None:
            continue
        rest = line[head.end() :]
        if head["piece"]:
            pieces.append(json_from(rest, lines))
        elif head["asked"]:
            pieces = []
            yield request_step(number, "", json_from(rest, lines))
        else:
            whole = json_from(rest, lines) if head["answered"] else None
            yield Step(number, "", "answered", pieces if head["ended"] else whole)
            pieces = []


FORMAT = Format("lm-studio-log", recognise, rows, "file")
