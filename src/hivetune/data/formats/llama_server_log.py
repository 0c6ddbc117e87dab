"""What llama.cpp's server prints when it is verbose: requests and responses as JSON, among everything else. A request
without its answer is a row without an answer, so that it is counted.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server (`--verbose`)
"""

import json
import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import Step, call_record, paired, request_step

_REQUEST = re.compile(rb"log_server_r: +request: +\{")
_BODY = re.compile(r"log_server_r: +(request|response): +(\{.*)")


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return paired(_steps(lines), call_record)


def _steps(lines: Lines) -> Iterator[Step]:
    for number, line in lines:
        if (match := _BODY.search(line)) is None:
            continue
        try:
            value = json.JSONDecoder().raw_decode(match[2])[0]
        except (ValueError, RecursionError):
            continue
        if match[1] == "response":
            yield Step(number, "", "answered", value)
        else:  # without these two it asks for numbers
            yield request_step(number, "", value if {"messages", "prompt"} & value.keys() else None)


FORMAT = Format("llama-server-log", recognise, rows, "file")
