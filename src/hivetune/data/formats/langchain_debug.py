"""What LangChain prints in its debug mode: the input and the output of each run.

https://python.langchain.com/api_reference/langchain/globals/langchain.globals.set_debug.html
"""

import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import Asked, Calls, call_row, json_from, without_colours

_REQUEST = re.compile(rb"\[llm/(?:start|end|error)\] ")
_HEADS = re.compile(r"\[llm/(?P<event>start|end|error)\] (?P<run>\[[^][]*\])?(?:(?!\[llm/).)*?(?:input|output|error):")


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each call of a model, when its answer is there or the log ends."""
    plain = without_colours(lines)
    calls = Calls()
    for number, line in plain:
        if (head := _HEADS.search(line)) is None:
            continue
        run, rest = head["run"] or "", line[head.end() :]
        if head["event"] == "start":
            if given_up := calls.begin(run, Asked(number, json_from(rest, plain))):
                yield from call_row((given_up, True), None)
        elif head["event"] == "error":
            yield from call_row(calls.end(run), {"error": {"message": rest.strip() or "an error"}})
        else:
            yield from call_row(calls.end(run), json_from(rest, plain))
    for asked in calls.unanswered():
        yield from call_row((asked, True), None)


FORMAT = Format("langchain-debug", recognise, rows, "file")
