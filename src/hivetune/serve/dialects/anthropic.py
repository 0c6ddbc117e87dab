"""Anthropic's Messages, which Claude Code speaks. Thoughts, texts, calls and results are blocks of one turn there."""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.serve.dialects import base
from hivetune.serve.dialects.base import Block, Blocks, Given, Named, Read, Recall, Stage

MESSAGES = "/v1/messages"
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_NAMES = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "response_format": "output_config.format",
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking")}
# Claude Code's first system text numbers its requests, so each would begin with other tokens than the one before.
_BILL = "x-anthropic-billing-header:"


def read(document: Mapping[str, Any], recall: Recall) -> Read:
    """Return a request to answer, or to count the tokens of."""
    given = Given(document)
    chat = {name: given.take(name) for name in _SAME}
    chat |= {"stop": given.take("stop_sequences") or None, "user": given.inner("metadata").take("user_id")}
    tools = given.each("tools")
    for tool in tools:
        tool.one_of("type", "custom")
        tool.one_of("defer_loading", False)
        tool.hints("cache_control", "eager_input_streaming")
    chat["tools"] = [tool.function("input_schema") for tool in tools] or None
    choice, thinking, output = (given.inner(name) for name in ("tool_choice", "thinking", "output_config"))
    kind = choice.one_of("type", "auto", "any", "tool", "none")
    named = {"type": "function", "function": {"name": choice.take("name")}}
    chat["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
    chat["parallel_tool_calls"] = False if choice.take("disable_parallel_tool_use", bool) else None
    kind = thinking.one_of("type", "enabled", "disabled", "adaptive")
    chat["enable_thinking"] = {"enabled": True, "disabled": False}.get(kind)
    thinking.hints("budget_tokens", "display")
    chat["reasoning_effort"] = output.take("effort")
    form = output.inner("format")
    if form.one_of("type", "json_schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.take("schema")}}
    given.hints("cache_control", "context_management", "service_tier")
    system = given.text("system")
    if system.startswith(_BILL):
        _, _, system = system.partition("\n")
        given.ignored["system[0]"] = None
    turns = [{"role": "system", "content": system}] if system else []
    turns += (turn for message in given.each("messages") for turn in _turns(message))
    return base.chat_read(given, chat, turns, _NAMES)


def _turns(message: Given) -> Iterator[dict[str, Any]]:
    """Yield a message as chat turns: tools' results first, since what a user says with them comes after them."""
    said: dict[str, Any] = {"role": message.one_of("role", "user", "assistant", "system")}
    texts, thoughts, calls = [], [], []
    is_text = isinstance(message.peek("content"), str)
    for block in () if is_text else message.each("content"):
        kind = block.one_of("type", "text", "thinking", "tool_use", "tool_result")
        block.hints("cache_control")
        if kind == "tool_result":
            block.hints("is_error")  # the text says it too
            yield {"role": "tool", "tool_call_id": block.take("tool_use_id"), "content": block.text("content")}
        elif kind == "tool_use":
            calls.append(base.call_of(block.take("name"), block.take("input", dict), block.take("id")))
        elif kind == "thinking":
            block.hints("signature")
            thoughts.append(block.take("thinking", str) or "")
        else:
            texts.append(block.part())
    said |= {"content": message.text("content")} if is_text else {"content": "\n".join(texts)} if texts else {}
    said |= {"tool_calls": calls} if calls else {}
    said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if len(said) > 1:
        yield said


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments if text else {}}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _message(named: Named, blocks: Blocks) -> dict[str, Any]:
    cached = blocks.count("cached_tokens")
    return {
        "id": named.id,
        "type": "message",
        "role": "assistant",
        "model": named.label,
        "content": [_block(block, block.text) for block in blocks.blocks],
        "stop_reason": _REASONS.get(blocks.finish, "end_turn") if blocks.finish else None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": blocks.count("prompt_tokens") - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": blocks.count("completion_tokens"),
        },
    }


def _whole(document: Mapping[str, Any], named: Named) -> dict[str, Any]:
    blocks = Blocks(document)
    last = named.fields["messages"][-1]
    if last["role"] == "assistant" and blocks.blocks:  # which the client has, and llama.cpp repeats
        blocks.blocks[0].text = blocks.blocks[0].text.removeprefix(last.get("content", ""))
    return _message(named, blocks)


class _Writer(base.BlockWriter):
    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        if stage == "begin":
            return [{"type": "message_start", "message": _message(self.named, Blocks())}]
        if stage == "open":
            return [{"type": "content_block_start", "index": block.number, "content_block": _block(block, "")}]
        if stage == "grow":
            kind, key = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
            return [{"type": "content_block_delta", "index": block.number, "delta": {"type": kind, key: text}}]
        if stage == "close":
            return [{"type": "content_block_stop", "index": block.number}]
        message = _message(self.named, self.blocks)
        ending = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": ending, "usage": message["usage"]}, {"type": "message_stop"}]

    def failed(self, message: str) -> dict[str, Any]:
        return base.error_body(502, message, path=MESSAGES)


ANTHROPIC = base.Dialect(MESSAGES, base.CHAT, "messages", read, _whole, _Writer, names=_NAMES)
