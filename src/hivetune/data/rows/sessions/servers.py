"""What llama.cpp's and vLLM's servers print: requests and responses among everything else.

llama-server prints both as JSON when it is verbose; vLLM prints the prompt as the template wrote it, and the answer
where it is told to log outputs. A request without its answer is a row without an answer, so that it is counted.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.logs import PlacedRow, conversation
from hivetune.data.pieces.rendered import is_rendered, turns_of

_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
SERVER_REQUEST = re.compile(
    rb"Received request \S+: prompt: ['\"]|Request \S+ details: prompt: ['\"]|log_server_r: +request: +\{"
)
_VLLM_PROMPT = re.compile(r"(?:Received request|Request) (\S+?):? (?:details: )?prompt: " + _LITERAL)
_VLLM_ANSWER = re.compile(
    r"Generated response (\S+?)(?: \([^()]*\))?: output: "
    + _LITERAL
    + r"(?:(?!Generated resp).)*?finish_reason: '?(\w+)'?"
)
_LLAMA = re.compile(r"log_server_r: +(request|response): +(\{.*)")
_MAX_OPEN = 10_000  # requests that wait for their answer; the oldest is given up


def server_rows(lines: Iterator[tuple[int, str]]) -> Iterator[PlacedRow]:
    """One row for each request, when its answer is there or the log ends."""
    prompts: dict[str, tuple[int, str]] = {}
    open_request: tuple[int, Any] | None = None
    for number, line in lines:
        if found := _VLLM_PROMPT.search(line):
            prompts[found.group(1)] = (number, str(ast.literal_eval(found.group(2))))
            if len(prompts) > _MAX_OPEN:
                oldest = next(iter(prompts))
                yield from prompted(*prompts.pop(oldest), None, None)
        elif found := _VLLM_ANSWER.search(line):
            asked = prompts.pop(found.group(1), None)
            if asked is not None:
                yield from prompted(*asked, str(ast.literal_eval(found.group(2))), found.group(3))
        elif (said := _llama(line)) is not None:
            kind, value = said
            if kind == "request":
                if open_request is not None:
                    yield from _llama_row(*open_request, None)
                open_request = (number, value)
            elif open_request is not None:
                yield from _llama_row(*open_request, value)
                open_request = None
    if open_request is not None:
        yield from _llama_row(*open_request, None)
    for asked in prompts.values():
        yield from prompted(*asked, None, None)


def _llama(line: str) -> tuple[str, Any] | None:
    """("request" or "response", its JSON) of a line of llama-server, else None."""
    if found := _LLAMA.search(line):
        try:
            return found.group(1), json.JSONDecoder().raw_decode(found.group(2))[0]
        except (ValueError, RecursionError):
            return None
    return None


def _llama_row(place: int, request: Any, response: Any) -> Iterator[PlacedRow]:
    if not isinstance(request, dict) or not ("messages" in request or "prompt" in request):
        return  # an embedding, a tokenization: no conversation
    row = {"request": request, "response": response if response else {"choices": []}}
    yield place, row


def prompted(place: int, prompt: str, answer: str | None, finish: str | None) -> Iterator[PlacedRow]:
    turns = turns_of(prompt)
    if turns is None:
        turns = [{"role": "user", "content": prompt}] if not is_rendered(prompt) else None
    if turns is None:
        yield place, {"prompt_of_unknown_template": prompt, "completion": answer}
        return
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    if finish is not None and finish not in ("stop", "tool_calls", "None"):
        response = {"choices": [{"message": turns[-1], "finish_reason": finish}]}
        yield place, {"request": {"messages": turns[:-1]}, "response": response}
        return
    yield from conversation("vllm", place, turns, ())
