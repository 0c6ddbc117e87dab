"""OpenAI's Responses API, which Codex uses. Thoughts, messages, calls and results are items of one list there."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hivetune.serve.dialects import base
from hivetune.serve.dialects.base import Given, Stage
from hivetune.serve.request import Block, Dialect, Read, Recall, Request

_NAMES = {
    **{name: name for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "user")},
    **{"tool_choice": "tool_choice", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"},
}
_PLACES = {"messages": "input", "response_format": "text.format"}
_HINTS = (
    *("store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("client_metadata", "stream_options"),
)
# What an answer repeats of its request, and what it says where the request does not.
_REPEATED = {
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")),
    **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "truncation": "disabled"},
}


def _read(document: Mapping[str, Any], recall: Recall) -> Read:
    given = Given(document)
    chat = given.fields(_NAMES) | {"tools": given.tools("function", "parameters")}
    if isinstance(named := chat["tool_choice"], dict):
        chat["tool_choice"] = {"type": named.get("type"), "function": {"name": named.get("name")}}
    given.inner("reasoning").hints("summary", "generate_summary")
    given.inner("text").hints("verbosity")
    form = given.inner("text").inner("format")
    kind = form.take("type")
    schema = {key: form.take(key) for key in ("name", "description", "schema", "strict")}
    chat["response_format"] = kind and {"type": kind, **({"json_schema": schema} if kind == "json_schema" else {})}
    if not (chat["metadata"] or chat["user"]) and given.peek("prompt_cache_key"):  # Codex names its session so
        chat["metadata"] = {"session_id": given.take("prompt_cache_key")}
    given.hints(*_HINTS)
    given.one_of("truncation", "disabled")
    given.one_of("background", False)
    given.one_of("include", [], ["reasoning.encrypted_content"])
    instructions, previous = given.take("instructions", str), given.take("previous_response_id", str)
    earlier = recall(previous) if previous else []
    if instructions:
        earlier = [{"role": "system", "content": instructions}, *(t for t in earlier if t["role"] != "system")]
    text = given.take("input") if isinstance(given.peek("input"), str) else None
    said = _turns(given.each("input")) if text is None else [{"role": "user", "content": text}]
    return base.chat_read(given, chat, [*earlier, *said], _NAMES | _PLACES)


def _turns(items: Iterable[Given]) -> Iterator[dict[str, Any]]:
    """Yield items as chat turns; neighbouring thoughts, texts and calls of one role are joined."""
    for item in items:
        kind = item.one_of("type", "message", "function_call", "function_call_output", "reasoning")
        item.take("id")
        item.hints("status", "phase", "encrypted_content")
        if kind == "function_call":
            call = base.call_of(item.take("name"), item.take("arguments"), item.take("call_id"))
            yield {"role": "assistant", "tool_calls": [call]}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.take("call_id"), "content": item.text("output")}
        elif kind == "reasoning":
            yield {"role": "assistant", "reasoning_content": item.text("content") or item.text("summary")}
        else:
            yield {"role": item.take("role"), "content": item.text("content")}


def _item(request: Request, block: Block, *, done: bool = True) -> dict[str, Any]:
    """Return a block as an item. The item has no content before it is `done`."""
    parts = [_part(block, block.text)] if done else []
    item = {"id": f"{request.id}-{block.number}", "status": "completed" if done else "in_progress"}
    if block.kind == "call":
        arguments = block.text if done else ""
        return {**item, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": arguments}
    if block.kind == "thought":
        return {**item, "type": "reasoning", "summary": parts}
    return {**item, "type": "message", "role": "assistant", "content": parts}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "summary_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# Of each kind of block: what its text is called in events, what its part, and the part's number.
_EVENTS = {
    "text": ("output_text", "content_part", "content_index"),
    "thought": ("reasoning_summary_text", "reasoning_summary_part", "summary_index"),
    "call": ("function_call_arguments", "", ""),
}


class _Writer(base.BlockWriter):
    def answer(self, status: str = "") -> dict[str, Any]:
        sent = self.request.document
        status = status or ("incomplete" if self.said.finish == "length" else "completed")
        asked, told = self.said.count("prompt_tokens"), self.said.count("completion_tokens")
        return {
            **_REPEATED,
            **{name: sent[name] for name in _REPEATED if sent.get(name) is not None},
            "id": self.request.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self.request.label,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_item(self.request, block) for block in self.said.blocks],
            "usage": {
                "input_tokens": asked,
                "input_tokens_details": {"cached_tokens": self.said.count("cached_tokens")},
                "output_tokens": told,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": asked + told,
            },
        }

    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        if stage == "begin":
            response = {**self.answer("in_progress"), "output": []}
            return [_event(kind, response=response) for kind in ("created", "in_progress")]
        if stage == "end":
            response = self.answer()
            return [_event(response["status"], response=response)]
        name, part, number = _EVENTS[block.kind]
        place = {"item_id": f"{self.request.id}-{block.number}", "output_index": block.number}
        place |= {number: 0} if number else {}
        if stage == "grow":
            return [_event(f"{name}.delta", **place, delta=text)]
        done = stage == "close"
        step = "done" if done else "added"
        item = _event(f"output_item.{step}", output_index=block.number, item=_item(self.request, block, done=done))
        parts = [_event(f"{part}.{step}", **place, part=_part(block, block.text if done else ""))] if part else []
        whole = {"text" if part else "arguments": block.text}
        return [_event(f"{name}.done", **place, **whole), *parts, item] if done else [item, *parts]

    def written(self, told: list[dict[str, Any]]) -> bytes:
        first = self.num_told - len(told)
        return super().written([{**event, "sequence_number": number} for number, event in enumerate(told, first)])

    def failed(self, message: str) -> dict[str, Any]:
        error = {"code": "server_error", "message": message}
        return _event("failed", response={**self.answer("failed"), "error": error})


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


RESPONSES = Dialect("/v1/responses", "input", _read, _Writer, names=_NAMES)
