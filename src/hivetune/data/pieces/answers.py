"""Logged requests and responses of model APIs: OpenAI (chat, completions, Responses), Anthropic, Gemini and Ollama. An
entry of formats.toml names the fields of a log that contain them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.format import Tools
from hivetune.data.pieces.rendered import rendered_turns
from hivetune.data.pieces.turns import ROLE_KEYS, is_item, read_messages, read_tools, read_turn
from hivetune.data.pieces.values import all_texts, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_CUT_OFF = ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded", "pause_turn", "limit")
_STOPPED = (
    *("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "error", "cancelled"),
    *("refusal", "malformed_function_call"),
)
# Where a response says how it ended.
_ENDS = frozenset(("stop_reason", "stopReason", "stop_type", "done_reason", "finish_reason", "finishReason"))
_SYSTEMS = ("system", "systemInstruction", "system_instruction", "instructions", "system_prompt")
_PROMPTS = ("messages", "contents", "input", "prompt", "question", "query")
_ANSWERED = ("response", "output", "output_text", "completion", "answer", "text", "result")
_PROVIDER_STATE = ("previous_response_id", "conversation", "cachedContent", "cached_content")  # what stood before
_LISTS = ("choices", "candidates")  # of answers to one question
_OF_RESPONSES = (*_ENDS, "done", "promptFeedback", "error")  # keys that only a response has
_PIECES = ("done", "choices", "delta", "response", "message", "content_block")  # keys of an answer's pieces

Answer = tuple[list[Message], tuple[str, ...]]  # the messages, and what was left out


def read_request(value: Any) -> tuple[list[Message], Tools]:
    """Return all messages before the answer, and the tools, from the request of an API, a list of turns, or a text.

    Raise RowRefused: earlier-turns-missing, empty-turn, or the problem with a turn.
    """
    value = parsed(value)
    if value in ("", []):
        raise RowRefused("empty-turn", "the request is empty: log the whole request")
    if isinstance(value, str | list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RowRefused("wrong-type", "the request must be an object, a list of messages or a text")
    if one_of(value, *_PROVIDER_STATE) is not None or isinstance(one_of(value.get("prompt"), "id"), str):
        hint = "the provider stores a part of the prompt: log the whole conversation"
        raise RowRefused("earlier-turns-missing", hint)
    config = one_of(value, "config", "generationConfig")
    system = one_of(value, *_SYSTEMS) or one_of(config, *_SYSTEMS)
    asked = next((parsed(value[key]) for key in _PROMPTS if value.get(key) not in (None, "", [])), None)
    if isinstance(asked, str):
        asked = rendered_turns(asked, whole=False) or [{"role": "user", "content": asked}]
    elif isinstance(asked, dict):
        if not any(key in asked for key in (*ROLE_KEYS, "parts")):
            return read_request(asked)
        asked = [asked]
    if not isinstance(asked, list):
        raise RowRefused("unknown-layout", "the request has no messages: log the whole request")
    turns = [{"role": "user", **turn} if one_of(turn, "parts") else turn for turn in asked]  # Gemini's user
    return read_messages(turns, system), read_tools(one_of(value, "tools", "functions") or one_of(config, "tools"))


def is_response(value: Any) -> bool:
    """Return whether a value has the shape of some API's response."""
    # An answer may be JSON itself, so that a few keys of it prove nothing.
    value = parsed(value)
    if isinstance(value, list):
        items = objects(value)
        return items is not None and all(is_item(item) or any(key in item for key in ROLE_KEYS) for item in items)
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("output"), list):
        return is_response(value["output"])
    if isinstance(value.get("message"), dict):
        return "role" in value["message"]
    if isinstance(value.get("content"), list | str) and ("role" in value or value.get("type") == "message"):
        return True
    has_list = any(isinstance(value.get(key), list) for key in (*_LISTS, "messages"))
    return has_list or one_of(value, *_OF_RESPONSES) is not None


def read_answer(value: Any) -> Answer:
    """Return the answer, of a text, a turn or a response object.

    Raise RowRefused: failed, cut-off-answer, empty-turn, unknown-layout, or the problem with a turn.
    """
    if isinstance(value, str) and not is_response(value):
        return _said(value), ()
    value = parsed(value)
    if all_texts(value) and len(value) == 1:
        return _said(value[0]), ()
    if (turns := objects(value)) is not None:
        for turn in turns:
            refuse_cut_row(turn)  # OpenTelemetry
        return read_messages(turns, None), ()
    if not isinstance(value, dict):
        raise RowRefused("empty-turn", "the response is empty: log the whole response, or delete the row")
    _refuse_failure(value)
    if isinstance(answers := one_of(value, *_LISTS), list):  # to one question, of which the first is read
        first = answers[0] if answers else None
        refuse_cut_row(first if isinstance(first, dict) else {})
        if not isinstance(said := one_of(first, "message", "content", "text"), str | dict):
            raise RowRefused("empty-turn", "the response has no answer: log the whole response, or delete the row")
        return _said(said), ("other-answers",) if len(answers) > 1 else ()
    for key, whole in (("messages", True), ("output", value.get("object") == "response")):
        if whole and isinstance(value.get(key), list):
            return read_messages(value[key], None), ()
    for key in ("content", "message"):  # of one of Gemini's candidates, and of Ollama's answers
        if isinstance(value.get(key), dict):
            return _said(value[key]), ()
    said = parsed(one_of(value, *_ANSWERED))
    if any(key in value for key in (*ROLE_KEYS, "content")) and not isinstance(said, str):
        return _said(value), ()
    if isinstance(said, str):
        own = {key: value[key] for key in ("thinking", "reasoning_content", "tool_calls") if key in value}
        return _said({**own, "content": said}), ()
    if said is not None and is_response(said):
        return read_answer(said)
    keys = ", ".join(str(key)[:30] for key in list(value)[:6])
    raise RowRefused("unknown-layout", f"the response has no known field of an answer, only {keys}")


def _said(said: str | Mapping[str, Any]) -> list[Message]:
    """Return the assistant's messages in a text or in a turn that may lack a role."""
    return read_turn({"role": "assistant", **({"content": said} if isinstance(said, str) else said)})


def _refuse_failure(value: Mapping[str, Any]) -> None:
    """Raise RowRefused for a failed call, and for an incomplete answer."""
    blocked = one_of(value.get("promptFeedback"), "blockReason")
    if value.get("error") or blocked or value.get("status") in ("failed", "cancelled"):
        why = one_of(value.get("error"), "message") or value.get("error") or blocked or value["status"]
        raise RowRefused("failed", f"the call failed: {str(why)[:80]}")
    if value.get("status") == "incomplete":
        refuse_cut_row({"stop_reason": one_of(value.get("incomplete_details"), "reason") or "max_output_tokens"})
    refuse_cut_row(value)
    if value.get("done") is False:
        raise RowRefused("cut-off-answer", "the row is one piece of a stream (done is false): log the whole response")


def refuse_pieces(text: str) -> None:
    """Raise RowRefused for an answer that was logged as a stream: server-sent events, or one JSON object per piece."""
    lines = [line for line in text.splitlines() if line]
    of_events = all(line.startswith(("data:", "event:", "id:", "retry:")) for line in lines)
    if len(lines) > 1 and (of_events or all(map(_is_piece, map(parsed, lines)))):
        raise RowRefused("unknown-layout", "the answer was logged as pieces of a stream: log the whole response")


def _is_piece(value: Any) -> bool:
    kind = str(one_of(value, "type"))
    return one_of(value, *_PIECES) is not None or kind == "ping" or kind.startswith(("message_", "content_block_"))


def refuse_cut_row(row: Mapping[str, Any]) -> None:
    """Raise RowRefused for a row with a field that marks its answer as cut at a length limit or stopped."""
    for name in _ENDS & row.keys():
        reason = row[name]
        word = reason.lower().rpartition(".")[2] if isinstance(reason, str) else ""  # Python: FinishReason.MAX_TOKENS
        if word in _CUT_OFF:
            raise RowRefused("cut-off-answer", f"the model did not end the answer itself (reason: {reason})")
        if word in _STOPPED:
            raise RowRefused("failed", f"the answer was stopped (reason: {reason})")


def call_of(request: Any, response: Any) -> tuple[list[Message], Tools, tuple[str, ...]]:
    """Return the messages of a request and its response, the request's tools, and why parts were left out."""
    asked, tools = read_request(request)
    reply, changed = read_answer(response)
    before = [(message.role, message.content) for message in asked]
    # Agents answer with the whole conversation, the question included.
    if len(reply) > len(asked) and before == [(message.role, message.content) for message in reply[: len(asked)]]:
        return reply, tools, changed
    last, given = asked[-1], listed(one_of(parsed(request), "messages"))
    # Anthropic continues a last turn of the assistant without a break, as others do where it is marked so.
    is_begun = one_of(parsed(response), "stop_reason") is not None or one_of(given[-1] if given else None, "prefix")
    if last.role == "assistant" and not last.tool_calls and is_begun:
        reply, asked = [replace(reply[0], content=last.content + reply[0].content), *reply[1:]], asked[:-1]
    return [*asked, *reply], tools, changed
