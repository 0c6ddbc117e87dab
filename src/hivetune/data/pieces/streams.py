"""An answer in the pieces in which an API sends it, put together to the response that it would have sent whole.

Of OpenAI's chat completions, which most servers send too, of its Responses, and of Anthropic's messages.

The pieces are a list, the text of server-sent events, or lines of JSON. The pieces of other APIs are refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.said import all_texts, objects, one_of
from hivetune.data.reasons import RowRefused

StreamPieces = Sequence[Mapping[str, Any]]
Response = dict[str, Any]
_Joiner = Callable[[StreamPieces], Response | None]  # None: the last piece is missing
_EVENT_HEADS = ("data:", "event:", ": ", "id:", "retry:")
_ENDS = ("response.completed", "response.incomplete", "response.failed")  # of OpenAI's Responses


def starts_events(text: str) -> bool:
    """Return whether a text may be server-sent events: a quick look."""
    return text.startswith(_EVENT_HEADS)


def pieces_in(value: Any) -> StreamPieces | None:
    """Return the pieces of one answer, from a list of them or from the text that was sent; None for any other value."""
    if all_texts(value):
        value = "\n".join(value)  # a recorder keeps the lines of what was sent
    items = _sent(value) if isinstance(value, str) else objects(value)
    return items if items and _joiner(items) is not None else None


def whole_response(pieces: StreamPieces) -> Response:
    """Return the response made of these pieces. Raise RowRefused if its end is missing or the call failed."""
    for piece in pieces:
        if piece.get("type") == "error" or (isinstance(piece.get("error"), dict) and piece["error"]):
            error = one_of(piece.get("error"), "message") or piece.get("message") or piece.get("error")
            raise RowRefused("failed", f"the call failed: {str(error)[:80]}")
    join = _joiner(pieces)
    response = None if join is None else join(pieces)
    if response is None:
        raise RowRefused("cut-off-answer", "the pieces of a stream, without the last")
    return response


def refuse_pieces(text: str) -> None:
    """Raise RowRefused for an answer that is the pieces of a stream of another API: events, or Ollama's lines."""
    lines = [line for line in text.splitlines() if line]
    in_events = sum(line.startswith("data:") for line in lines) > 1 and all(map(starts_events, lines))
    pieces = _sent(text) if text.startswith("{") else None
    if in_events or (pieces and all(isinstance(piece.get("done"), bool) for piece in pieces)):
        raise RowRefused("unknown-layout", "the answer is the pieces of a stream, of an API that is not known")


def _sent(text: str) -> list[dict[str, Any]] | None:
    """Return the objects of server-sent events or of lines of JSON, up to a line that breaks off."""
    text = text.lstrip()
    lines = text.split("\n")
    if starts_events(text):
        lines = [line.removeprefix("data:") for line in lines if line.startswith("data:")]
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


def _joiner(items: StreamPieces) -> _Joiner | None:
    """Return the function that joins these pieces; None if they are not pieces of a stream."""
    kinds = [str(item.get("type")) for item in items]
    if any("delta" in choice for choice in _first_choices(items)):
        return _openai
    if "message_start" in kinds or "content_block_delta" in kinds:
        return _anthropic
    return _responses if all(kind.startswith("response.") or kind == "error" for kind in kinds) else None


def _joined(texts: Iterable[Any]) -> str:
    given = [text for text in texts if text is not None]
    if not all(isinstance(text, str) for text in given):
        raise RowRefused("unsupported-content", "a piece of a stream that is no text")
    return "".join(given)


def _responses(pieces: StreamPieces) -> Response | None:
    """Return the complete response in the last event."""
    whole = next((piece.get("response") for piece in reversed(pieces) if piece.get("type") in _ENDS), None)
    return whole if isinstance(whole, dict) else None


def _first_choices(pieces: StreamPieces) -> list[dict[str, Any]]:
    """Return the pieces of the first of several answers, which are interleaved with those of others."""
    return [choice for piece in pieces for choice in objects(piece.get("choices")) or [] if not choice.get("index")]


def _openai(pieces: StreamPieces) -> Response | None:
    choices = _first_choices(pieces)
    deltas = [delta for choice in choices if isinstance(delta := choice.get("delta"), dict)]
    message: Response = {"role": "assistant"}
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        message[name] = _joined(delta.get(name) for delta in deltas) or None
    calls: dict[Any, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in objects(delta.get("tool_calls")) or []):
        key, call_id = str(call.get("index")), call.get("id")
        if key in calls and call_id and calls[key]["id"] not in (None, call_id):
            key = str(call_id)  # some servers number all with 0
        function = calls.setdefault(key, {"id": call_id, "function": {"name": "", "arguments": ""}})["function"]
        for name in function:  # the first piece of a call has its name, the others continue its arguments
            function[name] += _joined([one_of(call.get("function"), name)])
    if calls:
        message["tool_calls"] = list(calls.values())
    end = next((end for choice in reversed(choices) if (end := choice.get("finish_reason"))), None)
    return None if end is None else {"choices": [{"message": message, "finish_reason": end}]}


def _anthropic(pieces: StreamPieces) -> Response | None:
    blocks: dict[Any, dict[str, Any]] = {}
    end = None
    for piece in pieces:
        index, delta = str(piece.get("index")), piece.get("delta")
        if isinstance(piece.get("content_block"), dict):
            blocks[index] = {**piece["content_block"]}
        end = one_of(delta, "stop_reason") or end
        for name in ("text", "thinking"):
            if (text := one_of(delta, name)) is not None:
                block = blocks.setdefault(index, {"type": name})
                block[name] = _joined([block.get(name), text])
        if isinstance(text := one_of(delta, "partial_json"), str) and index in blocks:
            before = blocks[index].get("input")
            blocks[index]["input"] = (before if isinstance(before, str) else "") + text
    content = list(blocks.values())
    return None if end is None else {"type": "message", "role": "assistant", "content": content, "stop_reason": end}
