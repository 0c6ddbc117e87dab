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
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, is_json_text, objects, one_of, parsed
from hivetune.data.pieces.session import BESIDE, TEXT_ANSWERS, ordered_conversation
from hivetune.data.pieces.spans import joined
from hivetune.data.pieces.streams import starts_events
from hivetune.records import Message

NAME = "request-response"
# Keys of a request or a response that lies flat in its row.
FLAT = (
    *("messages", "contents", "system_instruction", "tool_config", "choices", "candidates", "message", "input"),
    *("instructions", "output", "content", "role", "stop_reason", "type", "prompt", "usage_metadata", "completions"),
)
REQUESTS = (
    *("request", "request_body", "req", "body", "kwargs", "input", "inputs", "params", "payload", "raw_request"),
    *("llm_input", "model_input", "request_json", "full_request", "llm_request", "api_request", "request_payload"),
    "prompt",
)
RESPONSES = (
    *("response", "response_body", "resp", "output", "outputs", "result", "completion", "raw_response"),
    *("llm_output", "model_output", "response_json", "full_response", "llm_response", "api_response"),
    *("request_response", "original_response", "response_payload"),
)
REPEATED_REQUESTS = ("proxy_server_request", "function_kwargs")  # what was asked once more, or only there


def recognise(row: Row) -> bool:
    return _sides(row) is not None


def rows(row: Row) -> Conversation:
    sides = _sides(row)
    assert sides is not None
    asked_column, answered_column = sides
    request = read_request(row if asked_column == "" else row[asked_column])
    said, left_out = read_answer(row if answered_column == "" else row[answered_column])
    asked = [turn for message in request.messages for turn in _observed_apart(message)]
    said = _without_prompt(asked, said)
    used = (asked_column, answered_column, *(FLAT if "" in sides else ()))
    tools = request.tools or read_tools(tools_of(row))
    if continues_request(row if answered_column == "" else row[answered_column]):
        return ordered_conversation(NAME, _continued(asked, said), tools, left_out, used)
    return ordered_conversation(NAME, joined(asked, said), tools, left_out, used)


def _sides(row: Row) -> tuple[str, str] | None:
    """Return (the column of the request, the column of the response), "" for the row itself; None if it is no such
    record.
    """
    if not any(map(_is_structured, row.values())):
        return None  # texts alone, as most rows are: a question and its answer
    answered = _answered(row)
    if answered is None:
        return _listed_and_text(row)
    asked = next((name for name in REQUESTS if name != answered and _is_asked(name, row.get(name))), None)
    if asked is None and _asks_flat(row, answered):
        asked = ""
    if asked is None:
        asked = next((name for name in REPEATED_REQUESTS if _is_asked(name, row.get(name))), None)
    return None if asked is None else (asked, answered)


def _listed_and_text(row: Row) -> tuple[str, str] | None:
    """Return a request that is a list of messages in an object, and its answer as a text or an object with one."""
    asked = next((name for name in REQUESTS if objects(one_of(parsed(row.get(name)), "messages", "contents"))), None)
    if asked is None:
        return None
    answers = (name for name in (*RESPONSES, *TEXT_ANSWERS, "answer", "reply") if name != asked)
    answered = next((name for name in answers if row.get(name) not in (None, "")), None)
    held = None if answered is None else row[answered]
    said = one_of(held, "content", "text") if isinstance(held, dict) else held
    return (asked, answered) if answered is not None and isinstance(said, str) and said.strip() else None


def _answered(row: Row) -> str | None:
    """Return the column of the response, "" for the row itself."""
    found = next((name for name in RESPONSES if _is_structured(row.get(name)) and is_response(row[name])), None)
    if found is None and (_is_list(row.get("choices")) or _is_list(row.get("candidates")) or has_completions(row)):
        return ""
    if found is None and isinstance(row.get("message"), dict) and "messages" in row:
        return ""  # Ollama's answer beside what was asked
    return found


def _asks_flat(row: Row, answered: str) -> bool:
    """Return whether the row itself says what was asked."""
    if any(isinstance(parsed(row.get(key)), list) for key in ("messages", "contents", "input")):
        return True
    if answered in ("", "response", "response_body") and isinstance(row.get("prompt"), str):
        return True
    if answered == "" and isinstance(one_of(row.get("prompt"), "text"), str):
        return True
    return answered == "output" and isinstance(row.get("input"), str) and row.get("object") == "response"


def _is_asked(name: str, value: Any) -> bool:
    if name == "prompt" and not isinstance(value, dict):
        return False  # a list of turns beside a list of turns: prompt-completion
    return isinstance(parsed(value), dict) and is_request(value)


def _is_structured(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and (is_json_text(value) or starts_events(value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


_OBSERVED = re.compile(r"^(Observation:.*?)(?=^(?:Thought|Action|Final Answer):|\Z)", re.M | re.S)


def _observed_apart(message: Message) -> list[Message]:
    """Return what a program observed and wrote into the model's turn of its request, as turns of its own."""
    if message.role != "assistant" or message.tool_calls or _OBSERVED.search(message.content) is None:
        return [message]
    texts = enumerate(map(str.strip, _OBSERVED.split(message.content)))
    return [Message("user", text) if i % 2 else replace(message, content=text) for i, text in texts if text]


def _without_prompt(asked: list[Message], answered: list[Message]) -> list[Message]:
    """Return the answer without the prompt, where an API that completes a text gave it back in front."""
    prompt, text = asked[-1].content, answered[0].content
    if len(asked) != 1 or not prompt.strip() or len(text) <= len(prompt) or not text.startswith(prompt):
        return answered
    return [replace(answered[0], content=text[len(prompt) :].lstrip()), *answered[1:]]


def _continued(asked: list[Message], answered: list[Message]) -> list[Message]:
    """Return an answer whose beginning was given goes on right behind it."""
    begun = asked[-1]
    if begun.role != "assistant" or begun.tool_calls or answered[0].role != "assistant":
        return joined(asked, answered)
    return [*asked[:-1], replace(answered[0], content=begun.content + answered[0].content), *answered[1:]]


FORMAT = Format(
    NAME,
    recognise,
    rows,
    needs=frozenset((*RESPONSES, *TEXT_ANSWERS, "answer", "reply", "choices", "candidates", "completions", "message")),
    rank=14,
    explains=frozenset((*SYSTEM, *TOOLS, "instructions", "request_payload", "response_payload", *REPEATED_REQUESTS)),
    beside=BESIDE,
)
