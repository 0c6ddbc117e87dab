"""An answer in the pieces in which an API sends it, put together to the response that it would have sent whole.

OpenAI (chat, completions, Responses), Anthropic, Gemini, Ollama, Bedrock, Cohere, llama.cpp. The pieces are a list, the
text of server-sent events, or lines of JSON.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.parts import read_content
from hivetune.data.pieces.said import all_texts, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused

StreamPieces = Sequence[Mapping[str, Any]]
Response = dict[str, Any]
_Joiner = Callable[[StreamPieces], Response | None]  # None: the last piece is missing
_EVENT_HEADS = ("data:", "event:", ": ", "id:")
_EVENT_MARK = "data:"
_EVENT_LINE = re.compile(r"(?:data|event|id|retry)?:")
_BEGINNINGS = (*_EVENT_HEADS, "retry:", "{")
# Where pieces of unknown APIs say of themselves what they are.
_KINDS = ("event_type", "event", "type", "object", "kind")
_FINISHED = ("done", "is_finished", "finished", "is_final")
_PIECE = re.compile(r"delta|chunk|token|(?:start|end|stop|done|ping|finish)$", re.I)
DATA_KEY = "__data__"  # of an object that stands beside the name of its class
_OF_GEMINI = ("candidates", "usageMetadata", "promptFeedback", "usage_metadata", "prompt_feedback")
_OF_BEDROCK = frozenset(
    ("messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata")
)
_LONG = ("text", "thinking")  # of a block of Anthropic's, which come piece by piece


def starts_events(text: str) -> bool:
    """Return whether a text may be server-sent events: a quick look."""
    return text.startswith(_EVENT_HEADS)


def pieces_in(value: Any) -> StreamPieces | None:
    """Return the pieces of one answer, from a list of them or from the text that was sent; None for any other value."""
    if all_texts(value):
        value = "\n".join(value)  # a recorder keeps the lines of what was sent
    items = _sent(value) if isinstance(value, str) else objects(value)
    if items and all(DATA_KEY in item for item in items):  # Llama Stack keeps each with the name of its class
        items = objects([item[DATA_KEY] for item in items])
    return items if items and _joiner(items) is not None else None


def whole_response(pieces: StreamPieces) -> Response:
    """Return the response made of these pieces. Raise RowRefused if its end is missing or the call failed."""
    for piece in pieces:
        if piece.get("type") == "error" or (isinstance(piece.get("error"), dict) and piece["error"]):
            error = one_of(piece.get("error"), "message") or piece.get("message") or piece.get("error")
            raise RowRefused("failed", f"the call failed: {str(error)[:80]}")
        refuse_guarded(piece)
    join = _joiner(pieces)
    response = None if join is None else join(pieces)
    if response is None:
        raise RowRefused("cut-off-answer", "the pieces of a stream, without the last")
    return response


def refuse_guarded(response: Mapping[str, Any]) -> None:
    """Raise RowRefused for a response of Bedrock, or a piece of one, whose words a guardrail masked or
    replaced. The model may have ended its turn, so the reason of the end does not tell.
    """
    if response.get("amazon-bedrock-guardrailAction") == "INTERVENED":
        raise RowRefused("failed", "a guardrail intervened: the words are not all the model's")


def _sent(text: str) -> list[dict[str, Any]] | None:
    """Return the objects of server-sent events or of lines of JSON, up to a line that breaks off."""
    text = text.lstrip()
    lines = text.split("\n")
    if starts_events(text):
        lines = [line.removeprefix(_EVENT_MARK) for line in lines if line.startswith(_EVENT_MARK)]
    elif not text.startswith("{") or len(lines) < 2:
        return None
    items: list[dict[str, Any]] = []
    for line in (line.strip() for line in lines):
        if not line or line == "[DONE]":
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(item, dict):
            return None
        items.append(item)
    return items


def refuse_pieces(text: str) -> None:
    """Raise RowRefused for an answer that is the pieces of a stream, of an API that is unknown: what was said stands
    in them, between what was not.
    """
    if not text.startswith(_BEGINNINGS):
        return
    items = json_lines(text)
    kinds = [one_of(item, *_KINDS) for item in items]
    told = all(isinstance(kind, str) for kind in kinds) and any(_PIECE.search(kind) for kind in kinds)
    if is_events(text) or told or (items and all(isinstance(one_of(item, *_FINISHED), bool) for item in items)):
        raise RowRefused("unknown-layout", "the answer is the pieces of a stream, of an API that is not known")


def is_events(text: str) -> bool:
    """Return whether a text is server-sent events."""
    *lines, last = [line for line in text.splitlines() if line.strip()] or [""]
    sent = [line for line in (*lines, last) if line.startswith(_EVENT_MARK)]
    holds = len(sent) > 1 or any(line.removeprefix(_EVENT_MARK).lstrip().startswith(("{", "[DONE]")) for line in sent)
    return holds and all(_EVENT_LINE.match(line) for line in lines)


def json_lines(text: str) -> StreamPieces:
    """Return the objects of a text of several JSON lines; empty for other texts."""
    items = _sent(text) if text.startswith("{") else None
    return items if items and len(items) > 1 else ()


def _joiner(items: StreamPieces) -> _Joiner | None:
    """Return the function that joins these pieces; None if they are not pieces of a stream."""
    kinds = [item.get("type") for item in items]
    choices = [objects(item.get("choices")) or [{}] for item in items]
    # AI21's pieces on Bedrock lack the object's name.
    if any(i.get("object") == "chat.completion.chunk" or "delta" in c[0] for i, c in zip(items, choices, strict=True)):
        return _openai
    if all(item.get("object") == "text_completion" for item in items):
        return _openai_text
    if all(isinstance(kind, str) for kind in kinds):
        if "message_start" in kinds:
            return _anthropic
        if "message-start" in kinds:
            return _cohere
        if "completion" in kinds:  # the API of Anthropic before messages
            return _completions("completion", "stop_reason") if {"completion", "ping"}.issuperset(kinds) else None
        of_responses = all(str(kind).startswith("response.") or kind in ("error", "keepalive") for kind in kinds)
        return _responses if of_responses else None
    if all(isinstance(item.get("event_type"), str) and "is_finished" in item for item in items):
        return _cohere_text
    if all(isinstance(item.get("done"), bool) for item in items):
        return _ollama
    if items[-1] == {} and len(items) > 1 and all(isinstance(item.get("deltaText"), str) for item in items[:-1]):
        return _cody
    if any("candidates" in item for item in items) and all(one_of(item, *_OF_GEMINI) is not None for item in items):
        return _gemini
    if all(_OF_BEDROCK & item.keys() for item in items):
        return _bedrock
    for name in ("generation", "outputText"):  # of models of Meta and Amazon, on Bedrock
        if all(isinstance(item.get(name), str) for item in items):
            return _completions(name, "stop_reason", "completionReason")
    texts = [output for item in items for output in objects(item.get("outputs")) or [{}]]
    if all(isinstance(output.get("text"), str) and "stop_reason" in output for output in texts):
        return _mistral
    is_llama = all(isinstance(item.get("content"), str) and isinstance(item.get("stop"), bool) for item in items)
    return _llama if is_llama else None


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise RowRefused("unsupported-content", "a piece of a stream that is no text")
    return value or ""


def _delta(value: Any) -> dict[str, Any]:
    if value and not isinstance(value, dict):
        raise RowRefused("unsupported-content", "a piece of a stream that is no object")
    return value or {}


def _joined(texts: Iterable[Any]) -> str:
    return "".join(map(_text, texts))


def _completion(texts: Iterable[Any], end: Any) -> Response | None:
    """Return the response of an API that completes a text."""
    return None if end is None else {"completion": _joined(texts), "stop_reason": end}


def _completions(name: str, *ends: str) -> _Joiner:
    """Return what joins the texts below `name` of an API that completes a text."""
    return lambda pieces: _completion((piece.get(name) for piece in pieces), one_of(pieces[-1], *ends))


def _mistral(pieces: StreamPieces) -> Response | None:
    """Join Mistral's texts on Bedrock."""
    texts = [piece["outputs"][0] for piece in pieces]
    return _completion([_joined(output["text"] for output in texts).lstrip(" ")], texts[-1]["stop_reason"])


def _cody(pieces: StreamPieces) -> Response | None:
    """Join what Sourcegraph sends to Cody; the last event is empty."""
    end = next((piece["stopReason"] for piece in reversed(pieces[:-1]) if piece.get("stopReason")), "stop")
    return _completion((piece["deltaText"] for piece in pieces[:-1]), end)


def _llama(pieces: StreamPieces) -> Response | None:
    """Join llama.cpp's own completions."""
    return {**pieces[-1], "content": _joined(p["content"] for p in pieces)} if pieces[-1]["stop"] else None


def _cohere_text(pieces: StreamPieces) -> Response | None:
    """Return the first version of Cohere's API: the last event holds the response whole."""
    whole = one_of(pieces[-1], "response")
    return {"finish_reason": pieces[-1].get("finish_reason"), **whole} if isinstance(whole, dict) else None


def _responses(pieces: StreamPieces) -> Response | None:
    """Return the complete response in the last event."""
    ends = ("response.completed", "response.incomplete", "response.failed")
    whole = next((piece.get("response") for piece in reversed(pieces) if piece.get("type") in ends), None)
    return whole if isinstance(whole, dict) else None


def _openai(pieces: StreamPieces) -> Response | None:
    """Return the first of several choices, whose pieces are interleaved with others."""
    texts = dict.fromkeys(("content", "reasoning_content", "reasoning", "refusal"), "")
    calls: dict[Any, dict[str, Any]] = {}
    end = None
    for choice in _first_choices(pieces):
        delta = _delta(one_of(choice, "delta", "message"))
        end = choice.get("finish_reason") or end
        if isinstance(parts := delta.get("content"), list):  # Mistral thinks in parts of the content
            part = read_content(parts)
            delta = {**delta, "content": part.text, "reasoning_content": "".join(part.thoughts)}
        for name in texts:
            texts[name] += _text(one_of(delta, name))
        _add_calls(calls, objects(one_of(delta, "tool_calls")) or [])
        if isinstance(one_of(delta, "function_call"), dict):
            _add_calls(calls, [{"index": 0, "function": delta["function_call"]}])
    message: Response = {"role": "assistant", **{name: text or None for name, text in texts.items()}}
    if calls:
        message["tool_calls"] = list(calls.values())
    return None if end is None else {"choices": [{"message": message, "finish_reason": end}]}


def _openai_text(pieces: StreamPieces) -> Response | None:
    choices = _first_choices(pieces)
    end = next((choice["finish_reason"] for choice in reversed(choices) if choice.get("finish_reason")), None)
    text = _joined(choice.get("text") for choice in choices)
    return None if end is None else {"choices": [{"text": text, "finish_reason": end}]}


def _first_choices(pieces: StreamPieces) -> list[dict[str, Any]]:
    return [choice for piece in pieces for choice in objects(piece.get("choices")) or [] if not choice.get("index")]


def _add_calls(calls: dict[Any, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add pieces of calls: the first of a call has its name, the others continue with its arguments. Some servers
    number all with 0.
    """
    for piece in pieces:
        key, call_id = str(piece.get("index")), piece.get("id")
        if key in calls and call_id and calls[key]["id"] not in (None, call_id):
            key = str(call_id)
        function = calls.setdefault(key, {"id": call_id, "function": {"name": "", "arguments": ""}})["function"]
        for name in function:
            part = one_of(piece.get("function"), name)
            function[name] += part if isinstance(part, str) else "" if part is None else json.dumps(part)


def _anthropic(pieces: StreamPieces) -> Response | None:
    blocks: dict[Any, dict[str, Any]] = {}
    end = None
    for piece in pieces:
        index, delta = str(piece.get("index")), piece.get("delta")
        if isinstance(piece.get("content_block"), dict):
            blocks[index] = {**piece["content_block"]}
        end = one_of(delta, "stop_reason") or end
        for name in _LONG:
            if isinstance(text := one_of(delta, name), str):
                block = blocks.setdefault(index, {"type": name})
                block[name] = _text(block.get(name)) + text
        if isinstance(text := one_of(delta, "partial_json"), str) and index in blocks:
            before = blocks[index].get("input")
            blocks[index]["input"] = (before if isinstance(before, str) else "") + text
    content = list(blocks.values())
    return None if end is None else {"type": "message", "role": "assistant", "content": content, "stop_reason": end}


def _cohere(pieces: StreamPieces) -> Response | None:
    deltas = [(piece.get("index"), one_of(piece.get("delta"), "message")) for piece in pieces]
    text = _joined(one_of(one_of(delta, "content"), "text") for _, delta in deltas)
    plan = _joined(one_of(delta, "tool_plan") for _, delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    calls: dict[Any, dict[str, Any]] = {}
    for index, delta in deltas:
        if isinstance(call := one_of(delta, "tool_calls"), dict):
            _add_calls(calls, [{"index": index, **call}])
    if calls:
        message |= {"tool_calls": list(calls.values()), "content": text or plan}
    ends = [end for piece in pieces if (end := one_of(piece.get("delta"), "finish_reason"))]
    return {"message": message, "finish_reason": ends[-1]} if ends else None


def _ollama(pieces: StreamPieces) -> Response | None:
    last = pieces[-1]
    if not last.get("done"):
        return None
    if "message" not in pieces[0]:
        texts = {name: _joined(piece.get(name) for piece in pieces) for name in ("response", "thinking")}
        return {**last, "response": texts["response"], "thinking": texts["thinking"] or None}
    messages = [piece["message"] for piece in pieces if isinstance(piece.get("message"), dict)]
    message: dict[str, Any] = {"role": "assistant"}
    message |= {name: _joined(part.get(name) for part in messages) or None for name in ("content", "thinking")}
    if calls := [call for part in messages for call in listed(part.get("tool_calls"))]:
        message["tool_calls"] = calls
    return {**last, "message": message}


def _gemini(pieces: StreamPieces) -> Response | None:
    parts: list[dict[str, Any]] = []
    end = None
    for piece in pieces:
        candidate = next((choice for choice in objects(piece.get("candidates")) or [] if not choice.get("index")), {})
        end = one_of(candidate, "finishReason", "finish_reason") or end
        for part in objects(one_of(candidate.get("content"), "parts")) or []:
            before = parts[-1] if parts else {}
            goes_on = isinstance(part.get("text"), str) and isinstance(before.get("text"), str)
            if goes_on and bool(part.get("thought")) == bool(before.get("thought")):
                parts[-1] = {**before, "text": before["text"] + part["text"]}
            elif part.get("text") != "":
                parts.append({**part})
    content = {"role": "model", "parts": parts}
    return None if end is None else {"candidates": [{"content": content, "finishReason": end}]}


def _bedrock(pieces: StreamPieces) -> Response | None:
    blocks: dict[Any, dict[str, Any]] = {}
    end = None
    for piece in pieces:
        end = one_of(piece.get("messageStop"), "stopReason") or end
        begun, step = piece.get("contentBlockStart"), piece.get("contentBlockDelta")
        if isinstance(call := one_of(one_of(begun, "start"), "toolUse"), dict):
            blocks[str(one_of(begun, "contentBlockIndex"))] = {"toolUse": {"input": "", **call}}
        if step is None:
            continue
        block, delta = blocks.setdefault(str(one_of(step, "contentBlockIndex")), {}), _delta(one_of(step, "delta"))
        if isinstance(text := delta.get("text"), str):
            block["text"] = block.get("text", "") + text
        if isinstance(thought := one_of(delta.get("reasoningContent"), "text"), str):
            content = block.setdefault("reasoningContent", {"reasoningText": {"text": ""}})
            content["reasoningText"]["text"] += thought
        if isinstance(arguments := one_of(delta.get("toolUse"), "input"), str) and "toolUse" in block:
            block["toolUse"]["input"] += arguments
    for block in blocks.values():
        if "toolUse" in block:
            block["toolUse"]["input"] = parsed(block["toolUse"]["input"] or "{}")
    message = {"role": "assistant", "content": list(blocks.values())}
    return None if end is None else {"output": {"message": message}, "stopReason": end}
