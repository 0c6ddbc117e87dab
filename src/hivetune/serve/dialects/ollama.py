"""Ollama's chat and generate APIs, with its lists of models. Answers are streams by default, of one JSON object
a line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from hivetune.serve.dialects import base
from hivetune.serve.dialects.base import Given, Stage
from hivetune.serve.request import Block, Dialect, Read, Recall

# Of the API that is spoken here: clients ask for it, and some refuse older ones.
VERSION = "0.13.0"
GENERATE = "/api/generate"
_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    "stop",
)
_NAMES = {name: f"options.{name}" for name in _OPTIONS} | {"max_tokens": "options.num_predict", "stream": "stream"}
_THINK = {"enable_thinking": "think", "reasoning_effort": "think", "response_format": "format"}
_TEXTS = {"text": "content", "thought": "thinking"}
# Settings of Ollama's own runner; what is served here is loaded already.
_RUNNER = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock"),
)


def _read(document: Mapping[str, Any], recall: Recall) -> Read:
    given = Given(document)
    chat, form, think = given.fields(_NAMES), given.take("format"), given.take("think")
    given.inner("options").hints(*_RUNNER)
    given.hints("keep_alive")
    chat["model"] = (given.take("model", str) or "").removesuffix(":latest")
    chat["stream"] = True if chat["stream"] is None else chat["stream"]
    chat["stop"] = chat["stop"] or None
    chat["max_tokens"] = None if chat["max_tokens"] == -1 else chat["max_tokens"]  # no limit
    if form:
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        chat["response_format"] = {"type": "json_object"} if form == "json" else schema
    chat["enable_thinking" if isinstance(think, bool) else "reasoning_effort"] = think
    if given.peek("messages") is not None:
        chat["tools"] = given.tools("function", "parameters", "function")
        return base.chat_read(given, chat, _turns(given.each("messages")), _NAMES | _THINK)
    given.one_of("raw", False)
    for empty in ("suffix", "template", "images"):
        given.one_of(empty, "", [])
    said = (("system", given.take("system", str)), ("user", given.take("prompt", str)))
    turns = [{"role": role, "content": text} for role, text in said if text]
    return base.chat_read(given, chat, turns, _NAMES | _THINK | {"messages": "prompt"})


def _turns(messages: Iterable[Given]) -> Iterator[dict[str, Any]]:
    """Yield chat turns. Ollama's calls have no ids, so they get numbers of nine digits, as some templates require."""
    num_calls = num_results = 0
    for message in messages:
        message.one_of("images", [])
        turn = {"role": message.take("role"), "content": message.take("content", str)}
        turn["reasoning_content"] = message.take("thinking", str)
        if turn["role"] == "tool":
            turn |= {"name": message.take("tool_name"), "tool_call_id": f"call{num_results:05}"}
            num_results += 1
        calls = []
        for call in message.each("tool_calls"):
            function = call.inner("function")
            call.hints("id", "type")
            function.hints("index")
            calls.append(base.call_of(function.take("name"), function.take("arguments", dict), f"call{num_calls:05}"))
            num_calls += 1
        turn["tool_calls"] = calls or None
        yield {key: value for key, value in turn.items() if value is not None}


class _Writer(base.BlockWriter):
    def line(self, **said: Any) -> dict[str, Any]:
        """Return one object of a streamed answer. `said`: its fields content, thinking and tool_calls."""
        head = {"id": self.request.id, "model": self.request.label, "created_at": datetime.now(UTC).isoformat()}
        if "messages" in self.request.document:
            return {**head, "done": False, "message": {"role": "assistant", "content": "", **said}}
        return {**head, "done": False, "response": said.pop("content", ""), **said}

    def parts(self) -> dict[str, Any]:
        """Return the blocks as fields of an Ollama message. Calls have no id."""
        found: dict[str, Any] = {}
        for block in self.said.blocks:
            if block.kind == "call":
                call = {"function": {"name": block.name, "arguments": block.arguments}}
                found["tool_calls"] = [*found.get("tool_calls", ()), call]
            else:
                name = _TEXTS[block.kind]
                found[name] = found.get(name, "") + block.text
        return found

    def answer(self) -> dict[str, Any]:
        return self.ending(**self.parts())

    def ending(self, **said: Any) -> dict[str, Any]:
        asked_ns, told_ns = (int(1e6 * self.said.totals.get(name, 0)) for name in ("prompt_ms", "predicted_ms"))
        return {
            **self.line(**said),
            "done": True,
            "done_reason": "length" if self.said.finish == "length" else "stop",
            "total_duration": asked_ns + told_ns,
            "load_duration": 0,
            "prompt_eval_count": self.said.count("prompt_tokens"),
            "prompt_eval_duration": asked_ns,
            "eval_count": self.said.count("completion_tokens"),
            "eval_duration": told_ns,
        }

    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        if stage == "grow" and block.kind != "call":
            return [self.line(**{_TEXTS[block.kind]: text})]
        calls = self.parts().get("tool_calls") if stage == "end" else None
        called = [self.line(tool_calls=calls)] if calls else []
        return [*called, self.ending()] if stage == "end" else []

    def written(self, told: list[dict[str, Any]]) -> bytes:
        return b"".join(json.dumps(line).encode() + b"\n" for line in told)


_DETAILS = {"format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
_AGE = {"modified_at": "1970-01-01T00:00:00Z", "details": _DETAILS}


def tags(names: Iterable[str]) -> dict[str, Any]:
    """Return the list of models. The size of each is 0, since all share the file of their base."""
    return {"models": [{"name": name, "model": name, "size": 0, "digest": "", **_AGE} for name in names]}


def show(template: str, context_tokens: int, *, takes_tools: bool) -> dict[str, Any]:
    """Return the model description (/api/show) that clients request before they use a model."""
    able = ["completion", *(["tools"] if takes_tools else []), *(["thinking"] if "enable_thinking" in template else [])]
    info = {"general.architecture": "hivetune", "hivetune.context_length": context_tokens}
    return {"modelfile": "", "parameters": "", "template": template, "capabilities": able, "model_info": info, **_AGE}


OLLAMA = tuple(
    Dialect(path, field, _read, _Writer, "application/x-ndjson", _THINK)
    for path, field in (("/api/chat", "messages"), (GENERATE, "prompt"))
)
