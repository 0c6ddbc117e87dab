"""What vLLM's server prints: the prompt as the template wrote it, and the answer where it is told to log outputs. A
request without its answer is a row without an answer, so that it is counted.

https://docs.vllm.ai/en/stable/configuration/serve_args.html (`--enable-log-requests`, `--enable-log-outputs`)
"""

import ast
import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.printed import Step, pairing, prints, prompted

_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PROMPT = re.compile(r"(?:Received request|Request) (\S+?):? (?:details: )?prompt: " + _LITERAL)
_ANSWER = re.compile(
    r"Generated response (\S+?)(?: \([^()]*\))?: output: "
    + _LITERAL
    + r"(?:(?!Generated resp).)*?finish_reason: '?(\w+)'?"
)


@pairing(lambda prompt, answered: prompted(prompt, *answered))
def rows(lines: Lines) -> Iterator[Step]:
    for number, line in lines:
        if match := _PROMPT.search(line):
            prompt = str(ast.literal_eval(match[2]))
            yield Step(number, match[1], "asked", prompt, prompted(prompt))
        elif match := _ANSWER.search(line):
            yield Step(number, match[1], "answered", (str(ast.literal_eval(match[2])), match[3]))


_MARK = r"Received request \S+: prompt: ['\"]|Request \S+ details: prompt: ['\"]"
FORMAT = Log("vllm-log", prints(_MARK), rows)
