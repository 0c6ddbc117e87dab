"""What LangChain prints in its debug mode: the input and the output of each run.

https://python.langchain.com/api_reference/langchain/globals/langchain.globals.set_debug.html
"""

import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import Step, call_record, json_from, paired, request_step, without_colours

_REQUEST = re.compile(rb"\[llm/(?:start|end|error)\] ")
_HEADS = re.compile(r"\[llm/(?P<event>start|end|error)\] (?P<run>\[[^][]*\])?(?:(?!\[llm/).)*?(?:input|output|error):")


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    return paired(_steps(without_colours(lines)), call_record)


def _steps(lines: Lines) -> Iterator[Step]:
    for number, line in lines:
        if (head := _HEADS.search(line)) is None:
            continue
        run, rest = head["run"] or "", line[head.end() :]
        if head["event"] == "start":
            yield request_step(number, run, json_from(rest, lines))
        elif head["event"] == "error":
            yield Step(number, run, "answered", {"error": {"message": rest.strip() or "an error"}})
        else:
            yield Step(number, run, "answered", json_from(rest, lines))


FORMAT = Format("langchain-debug", recognise, rows, "file")
