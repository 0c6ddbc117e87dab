"""Anthropic's Messages API, which Claude Code uses. Thoughts, texts, calls and results are blocks of one turn there."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hivetune.serve.dialects import base
from hivetune.serve.dialects.base import Given, Stage
from hivetune.serve.request import Block, Dialect, Read, Recall

MESSAGES = "/v1/messages"
_NAMES = {
    **{name: name for name in ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")},
    **{"stop": "stop_sequences", "user": "metadata.user_id", "reasoning_effort": "output_config.effort"},
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking")}
_PLACES = {"enable_thinking": "thinking", "response_format": "output_config.format"}
# Claude Code's first system text numbers its requests, so each would begin with other tokens than the one before.
_BILL = "x-anthropic-billing-header:"


def read(document: Mapping[str, Any], recall: Recall) -> Read:
    """Return the request to answer, or the request whose tokens are to be counted."""
    given = Given(document)
    chat = given.fields(_NAMES) | {"tools": given.tools("custom", "input_schema")}
    chat["stop"] = chat["stop"] or None
    choice, thinking = given.inner("tool_choice"), given.inner("thinking")
    kind = choice.one_of("type", "auto", "any", "tool", "none")
    named = {"type": "function", "function": {"name": choice.take("name")}}
    chat["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
    chat["parallel_tool_calls"] = False if choice.take("disable_parallel_tool_use", bool) else None
    kind = thinking.one_of("type", "enabled", "disabled", "adaptive")
    chat["enable_thinking"] = {"enabled": True, "disabled": False}.get(kind)
    thinking.hints("budget_tokens", "display")
    form = given.inner("output_config").inner("format")
    if form.one_of("type", "json_schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.take("schema")}}
    given.hints("cache_control", "context_management", "service_tier")
    system = given.text("system")
    if system.startswith(_BILL):
        _, _, system = system.partition("\n")
        given.ignored["system[0]"] = None
    turns = [{"role": "system", "content": system}] if system else []
    return base.chat_read(given, chat, [*turns, *_turns(given.each("messages"))], _NAMES | _PLACES)


def _turns(messages: Iterable[Given]) -> Iterator[dict[str, Any]]:
    for message in messages:
        role = message.one_of("role", "user", "assistant", "system")
        if not isinstance(message.peek("content"), list):
            yield {"role": role, "content": message.text("content")}
        for block in message.each("content"):
            kind = block.one_of("type", "text", "thinking", "tool_use", "tool_result")
            block.hints("cache_control", "signature", "is_error")  # an error's text says it too
            if kind == "tool_result":
                yield {"role": "tool", "tool_call_id": block.take("tool_use_id"), "content": block.text("content")}
            elif kind == "tool_use":
                call = base.call_of(block.take("name"), block.take("input", dict), block.take("id"))
                yield {"role": "assistant", "tool_calls": [call]}
            elif kind == "thinking":
                yield {"role": "assistant", "reasoning_content": block.take("thinking", str)}
            else:
                yield {"role": role, "content": block.part()}


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments if text else {}}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


class _Writer(base.BlockWriter):
    def answer(self) -> dict[str, Any]:
        cached, finish = self.said.count("cached_tokens"), self.said.finish
        last = self.request.fields["messages"][-1]
        # The beginning of an answer, which the client has: llama.cpp repeats it in a whole one.
        begun = last.get("content", "") if last["role"] == "assistant" else ""
        texts = [block.text if block.number else block.text.removeprefix(begun) for block in self.said.blocks]
        return {
            "id": self.request.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.label,
            "content": [_block(block, text) for block, text in zip(self.said.blocks, texts, strict=True)],
            "stop_reason": _REASONS.get(finish, "end_turn") if finish else None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self.said.count("prompt_tokens") - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": self.said.count("completion_tokens"),
            },
        }

    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        if stage == "begin":
            return [{"type": "message_start", "message": {**self.answer(), "content": []}}]
        if stage == "open":
            return [{"type": "content_block_start", "index": block.number, "content_block": _block(block, "")}]
        if stage == "grow":
            kind, key = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
            return [{"type": "content_block_delta", "index": block.number, "delta": {"type": kind, key: text}}]
        if stage == "close":
            return [{"type": "content_block_stop", "index": block.number}]
        message = self.answer()
        ending = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": ending, "usage": message["usage"]}, {"type": "message_stop"}]


ANTHROPIC = Dialect(MESSAGES, "messages", read, _Writer, names=_NAMES | {"enable_thinking": "thinking"})
