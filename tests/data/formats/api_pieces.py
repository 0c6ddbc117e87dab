"""What providers' APIs answer, whole and in pieces, for the tests that read it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.chunks import RawRow
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import ExaminedRow, read_example
from hivetune.data.reasons import RowRefused

Q, A = "Where do I park my bike?", "Behind the library."
FIRST, SECOND = "Behind ", "the library."
ASKED = {"messages": [{"role": "user", "content": Q}]}
PLAIN = [("user", Q), ("assistant", A)]


def row(record: dict[str, Any]) -> ExaminedRow:
    return read_example(RawRow("f:1", json.dumps(record).encode()), {})


def said(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in row(record).example.messages]


def refused(record: dict[str, Any]) -> str:
    with pytest.raises(RowRefused) as error:
        row(record)
    return error.value.reason


def chunk(delta: dict[str, Any], end: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": delta, "finish_reason": end}]}


def candidate(text: str, **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, **more}]}


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": A}]}
WHOLE = {"object": "response", "status": "completed", "output": [MESSAGE]}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "AI21 on Bedrock": [
        {"id": "c", "choices": [{"index": 0, "delta": {"content": FIRST}, "finish_reason": None}]},
        {"id": "c", "choices": [{"index": 0, "delta": {"content": SECOND}, "finish_reason": "stop"}]},
    ],
    "Mistral on Bedrock": [
        {"outputs": [{"text": f" {FIRST}", "stop_reason": None}]},
        {"outputs": [{"text": SECOND, "stop_reason": None}]},
        {"outputs": [{"text": "", "stop_reason": "stop"}], "amazon-bedrock-invocationMetrics": {}},
    ],
    "OpenAI": [
        {"object": "", "choices": [], "prompt_filter_results": []},  # Azure begins so
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "In front"}, index=1),
        chunk({"content": FIRST}),
        chunk({"content": SECOND}),
        chunk({}, "stop"),
        {"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 4}},
    ],
    "OpenAI's completions": [
        {"object": "text_completion", "choices": [{"index": 0, "text": FIRST, "finish_reason": None}]},
        {"object": "text_completion", "choices": [{"index": 0, "text": SECOND, "finish_reason": "stop"}]},
    ],
    "OpenAI's Responses": [
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_text.delta", "delta": FIRST},
        {"type": "response.completed", "response": WHOLE},
    ],
    "Anthropic": [
        {"type": "message_start", "message": {"role": "assistant", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": FIRST}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": SECOND}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ],
    "Anthropic's text completions": [
        {"type": "completion", "completion": FIRST, "stop_reason": None},
        {"type": "ping"},
        {"type": "completion", "completion": SECOND, "stop_reason": None},
        {"type": "completion", "completion": "", "stop_reason": "stop_sequence"},
    ],
    "Gemini": [candidate(FIRST), candidate(SECOND, finishReason="STOP"), {"usageMetadata": {"totalTokenCount": 9}}],
    "Ollama's chat": [
        {"message": {"role": "assistant", "content": FIRST}, "done": False},
        {"message": {"role": "assistant", "content": SECOND}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"},
    ],
    "Ollama's generate": [
        {"response": FIRST, "done": False},
        {"response": SECOND, "done": False},
        {"response": "", "done": True, "done_reason": "stop", "context": [1]},
    ],
    "Bedrock": [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockDelta": {"delta": {"text": FIRST}, "contentBlockIndex": 0}},
        {"contentBlockDelta": {"delta": {"text": SECOND}, "contentBlockIndex": 0}},
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {"messageStop": {"stopReason": "end_turn"}},
        {"metadata": {"usage": {"inputTokens": 3}}},
    ],
    "Cohere's first version": [
        {"is_finished": False, "event_type": "stream-start", "generation_id": "g"},
        {"is_finished": False, "event_type": "text-generation", "text": FIRST},
        {"is_finished": False, "event_type": "text-generation", "text": SECOND},
        {"is_finished": True, "event_type": "stream-end", "response": {"text": A}, "finish_reason": "COMPLETE"},
    ],
    "Cohere": [
        {"type": "message-start", "delta": {"message": {"role": "assistant", "content": []}}},
        {"type": "content-start", "index": 0, "delta": {"message": {"content": {"type": "text", "text": ""}}}},
        {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": FIRST}}}},
        {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": SECOND}}}},
        {"type": "content-end", "index": 0},
        {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": {}}},
    ],
    "llama.cpp": [
        {"content": FIRST, "stop": False},
        {"content": SECOND, "stop": False},
        {"content": "", "stop": True, "stop_type": "eos"},
    ],
}


def as_events(pieces: Sequence[dict[str, Any]]) -> str:
    return "".join(f"event: x\ndata: {json.dumps(piece)}\r\n\r\n" for piece in pieces) + "data: [DONE]\n\n"


PAGE = {"request": {"method": "GET", "url": "https://h/"}, "response": {"status": 200, "content": {"text": "<p>Hi"}}}


def har(response: dict[str, Any]) -> dict[str, Any]:
    asked = {"method": "POST", "url": "https://h/v1", "postData": {"text": json.dumps(ASKED)}}
    return {"log": {"version": "1.2", "entries": [PAGE, {"request": asked, "response": response}]}}


def outcomes(path: Path) -> list[Any]:
    found: list[Any] = []
    for raw in rows_of_files([str(path)]):
        try:
            found.append([(m.role, m.content) for m in read_example(raw, {}).example.messages])
        except RowRefused as error:
            found.append(error.reason)
    return found
