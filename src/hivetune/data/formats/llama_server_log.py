"""What llama.cpp's server prints when it is verbose: requests and responses as JSON, among everything else. A request
without its answer is a row without an answer, so that it is counted.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server (`--verbose`)
"""

import json
import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.printed import Step, call_record, pairing, prints, request_step

_BODY = re.compile(r"log_server_r: +(request|response): +(\{.*)")


@pairing(call_record)
def rows(lines: Lines) -> Iterator[Step]:
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


FORMAT = Log("llama-server-log", prints(r"log_server_r: +request: +\{"), rows)
