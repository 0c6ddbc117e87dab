"""What vLLM's server prints: the prompt as the template wrote it, and the answer where it is told to log outputs. A
request without its answer is a row without an answer, so that it is counted.

https://docs.vllm.ai/en/stable/configuration/serve_args.html (`--enable-log-requests`, `--enable-log-outputs`)
"""

import ast
import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow, begins_with_json
from hivetune.data.pieces.printed import prompted

_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_REQUEST = re.compile(rb"Received request \S+: prompt: ['\"]|Request \S+ details: prompt: ['\"]")
_PROMPT = re.compile(r"(?:Received request|Request) (\S+?):? (?:details: )?prompt: " + _LITERAL)
_ANSWER = re.compile(
    r"Generated response (\S+?)(?: \([^()]*\))?: output: "
    + _LITERAL
    + r"(?:(?!Generated resp).)*?finish_reason: '?(\w+)'?"
)
_MAX_OPEN = 10_000  # requests that wait for their answer; the oldest is given up


def recognise(head: Head) -> bool:
    return not begins_with_json(head.data) and _REQUEST.search(head.data) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each request, when its answer is there or the log ends."""
    prompts: dict[str, tuple[int, str]] = {}
    for number, line in lines:
        if found := _PROMPT.search(line):
            prompts[found.group(1)] = (number, str(ast.literal_eval(found.group(2))))
            if len(prompts) > _MAX_OPEN:
                oldest = next(iter(prompts))
                yield from prompted(*prompts.pop(oldest), None, None)
        elif found := _ANSWER.search(line):
            asked = prompts.pop(found.group(1), None)
            if asked is not None:
                yield from prompted(*asked, str(ast.literal_eval(found.group(2))), found.group(3))
    for asked in prompts.values():
        yield from prompted(*asked, None, None)


FORMAT = Format("vllm-log", recognise, rows, "file")
