"""What LangChain prints in its debug mode: the input and the output of each run.

https://python.langchain.com/api_reference/langchain/globals/langchain.globals.set_debug.html
"""

import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.printed import Step, call_record, json_from, pairing, prints, request_step, without_colours

_HEADS = re.compile(r"\[llm/(?P<event>start|end|error)\] (?P<run>\[[^][]*\])?(?:(?!\[llm/).)*?(?:input|output|error):")


@pairing(call_record)
def rows(lines: Lines) -> Iterator[Step]:
    lines = without_colours(lines)
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


FORMAT = Log("langchain-debug", prints(r"\[llm/(?:start|end|error)\] "), rows)
