"""What LM Studio's server prints: a request, then the prediction, whole or in packets.

https://lmstudio.ai/docs/developer/core/server
"""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.printed import Step, call_record, json_from, pairing, prints, request_step, without_colours

_REQUEST = r"Received request: POST to /\S+ with body "
_HEADS = re.compile(
    rf"(?P<asked>{_REQUEST})|(?P<answered>Generated prediction: )|(?P<piece>Generated packet: )"
    r"|(?P<ended>Finished streaming response)|(?P<left>Client disconnected)"
)


@pairing(call_record)
def rows(lines: Lines) -> Iterator[Step]:
    lines = without_colours(lines)
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


FORMAT = Log("lm-studio-log", prints(rf"{_REQUEST}+\{{"), rows)
