"""A call of a model with its request and its response, whoever's API it is, in columns of their own or flat in the row.

https://platform.openai.com/docs/api-reference/chat and the pages of other providers; docs/formats.md lists them
"""

import re
from dataclasses import replace
from typing import Any

from hivetune.data.columns import SYSTEM, TOOLS, tools_of
from hivetune.data.pieces.answers import (
    continues_request,
    has_completions,
    is_request,
    is_response,
    read_answer,
    read_request,
)
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, is_json_text, listed, objects, one_of, parsed
from hivetune.data.pieces.session import BESIDE, TEXT_ANSWERS, ordered_conversation
from hivetune.data.pieces.spans import joined
from hivetune.data.pieces.streams import starts_events
from hivetune.records import Message

# Keys of a request or a response that lies flat in its row.
_FLAT = (
    *("messages", "contents", "system_instruction", "tool_config", "choices", "candidates", "message", "input"),
    *("instructions", "output", "content", "role", "stop_reason", "type", "prompt", "usage_metadata", "completions"),
)
_REQUESTS = (
    *("request", "request_body", "req", "body", "kwargs", "input", "inputs", "params", "payload", "raw_request"),
    *("llm_input", "model_input", "request_json", "full_request", "llm_request", "api_request", "request_payload"),
    "prompt",
)
_RESPONSES = (
    *("response", "response_body", "resp", "output", "outputs", "result", "completion", "raw_response"),
    *("llm_output", "model_output", "response_json", "full_response", "llm_response", "api_response"),
    *("request_response", "original_response", "response_payload"),
)
_TEXTS = (*_RESPONSES, *TEXT_ANSWERS, "answer", "reply")
_REPEATED_REQUESTS = ("proxy_server_request", "function_kwargs")  # what was asked once more, or only there
_OBSERVED = re.compile(r"^(Observation:.*?)(?=^(?:Thought|Action|Final Answer):|\Z)", re.M | re.S)


def read(row: Row) -> Conversation | None:
    sides = _sides(row)
    if sides is None:
        return None
    request_value, response_value = (row[column] if column else row for column in sides)
    request = read_request(request_value)
    reply, left_out = read_answer(response_value)
    turns = [turn for message in request.messages for turn in _observed_apart(message)]
    prompt, text = turns[-1].content, reply[0].content
    if len(turns) == 1 and prompt.strip() and len(text) > len(prompt) and text.startswith(prompt):
        # An API that completes a text gave it back in front.
        reply = [replace(reply[0], content=text[len(prompt) :].lstrip()), *reply[1:]]
    begun = turns[-1].role == "assistant" and not turns[-1].tool_calls and reply[0].role == "assistant"
    if begun and continues_request(response_value):
        messages = [*turns[:-1], replace(reply[0], content=prompt + reply[0].content), *reply[1:]]
    else:
        messages = joined(turns, reply)
    used = (*sides, *(_FLAT if "" in sides else ()))
    tools = request.tools or read_tools(tools_of(row))
    return ordered_conversation("request-response", messages, tools, left_out, used)


def _sides(row: Row) -> tuple[str, str] | None:
    """Return (the column of the request, the column of the response), "" for the row itself; None if it is no such
    record.
    """
    if not any(map(_is_structured, row.values())):
        return None  # texts alone, as most rows are: a question and its answer
    response = next((name for name in _RESPONSES if _is_structured(row.get(name)) and is_response(row[name])), None)
    if response is None:  # the row itself has the answer, as Ollama's rows do
        lists = any(objects(listed(row.get(name))[:1]) for name in ("choices", "candidates"))
        if not lists and not has_completions(row) and not (isinstance(row.get("message"), dict) and "messages" in row):
            return _listed_and_text(row)
        response = ""
    request = next((name for name in _REQUESTS if name != response and _is_request(name, row.get(name))), None)
    if request is None and _asks_flat(row, response):
        request = ""
    if request is None:
        request = next((name for name in _REPEATED_REQUESTS if _is_request(name, row.get(name))), None)
    return None if request is None else (request, response)


def _listed_and_text(row: Row) -> tuple[str, str] | None:
    """Return a request that is a list of messages in an object, and its answer as a text or an object with one."""
    request = next((name for name in _REQUESTS if objects(one_of(parsed(row.get(name)), "messages", "contents"))), None)
    if request is None:
        return None
    response = next((name for name in _TEXTS if name != request and row.get(name) not in (None, "")), None)
    value = None if response is None else row[response]
    text = one_of(value, "content", "text") if isinstance(value, dict) else value
    return (request, response) if response is not None and isinstance(text, str) and text.strip() else None


def _asks_flat(row: Row, answered: str) -> bool:
    """Return whether the row itself has the question."""
    if any(isinstance(parsed(row.get(key)), list) for key in ("messages", "contents", "input")):
        return True
    if answered in ("", "response", "response_body") and isinstance(row.get("prompt"), str):
        return True
    if answered == "" and isinstance(one_of(row.get("prompt"), "text"), str):
        return True
    return answered == "output" and isinstance(row.get("input"), str) and row.get("object") == "response"


def _is_request(name: str, value: Any) -> bool:
    if name == "prompt" and not isinstance(value, dict):
        return False  # a list of turns beside a list of turns: prompt-completion
    return isinstance(parsed(value), dict) and is_request(value)


def _is_structured(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and (is_json_text(value) or starts_events(value)))


def _observed_apart(message: Message) -> list[Message]:
    """Return observations that a program wrote into the model's turn, as separate turns."""
    if message.role != "assistant" or message.tool_calls or _OBSERVED.search(message.content) is None:
        return [message]
    texts = enumerate(map(str.strip, _OBSERVED.split(message.content)))
    return [Message("user", text) if i % 2 else replace(message, content=text) for i, text in texts if text]


_NEEDS = frozenset((*_TEXTS, "choices", "candidates", "completions", "message"))
_READ = frozenset((*SYSTEM, *TOOLS, "instructions", "request_payload", "response_payload", *_REPEATED_REQUESTS))
FORMAT = Format("request-response", read, needs=_NEEDS, rank=14, explains=_READ, beside=BESIDE)
