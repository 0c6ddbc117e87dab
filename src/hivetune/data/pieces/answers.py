"""What a model's API was asked and what it answered, as requests and responses are logged: OpenAI (chat, completions,
Responses, batch), Anthropic, Gemini, Ollama, and LangSmith's results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.pieces.rendered import rendered_turns
from hivetune.data.pieces.said import Tools, all_texts, objects, one_of, parsed
from hivetune.data.pieces.turns import (
    ROLE_KEYS,
    calls_in_text,
    is_item,
    read_messages,
    read_tools,
    read_turn,
)
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_CUT_OFF = frozenset(
    ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded", "pause_turn", "limit")
)
_STOPPED = frozenset(
    (
        *("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "error", "cancelled"),
        *("refusal", "malformed_function_call"),
    )
)
# Where a response says how it ended.
_ENDS = frozenset(("stop_reason", "stopReason", "stop_type", "done_reason", "finish_reason", "finishReason"))
_SYSTEMS = ("system", "systemInstruction", "system_instruction", "instructions", "system_prompt")
_PROMPTS = ("messages", "contents", "input", "prompt", "question", "query")
_ANSWERED = ("response", "output", "output_text", "completion", "answer", "text", "result")
_PROVIDER_STATE = ("previous_response_id", "conversation", "cachedContent", "cached_content")  # what stood before
_BODIES = ("body", "json", "kwargs", "data")  # where batch files and proxies keep a request or a response
_LISTS = ("choices", "candidates", "generations")  # of answers to one question
_PIECES = ("done", "choices", "delta", "response", "message", "content_block")  # keys of an answer's pieces
# Items of OpenAI's Responses: tools that the provider ran itself, of which a log does not hold what they found. A
# search of the web is no such tool: its answer says what was found.
HIDDEN_CALLS = ("file_search_call", "code_interpreter_call")

Answer = tuple[list[Message], tuple[str, ...]]  # the messages, and what was left out


class Request(NamedTuple):
    messages: list[Message]
    tools: Tools


def read_request(value: Any) -> Request:
    """Return everything before the answer: an object of some API, a list of turns, or a text.

    Raise RowRefused: earlier-turns-missing, or the problem with a turn.
    """
    value = _body(parsed(value))
    if isinstance(value, str):
        return Request([Message("user", value)], ())
    if isinstance(value, list):
        return Request(read_messages(_flat(value), None), ())
    if not isinstance(value, dict):
        raise RowRefused("wrong-type", "the request: an object, a list of messages or a text")
    if one_of(value, *_PROVIDER_STATE) is not None or isinstance(one_of(value.get("prompt"), "id"), str):
        raise RowRefused("earlier-turns-missing", "a part of the prompt is kept by the provider")
    config = one_of(value, "config", "generationConfig")
    system = one_of(value, *_SYSTEMS) or one_of(config, *_SYSTEMS)
    asked = next((parsed(value[key]) for key in _PROMPTS if value.get(key) not in (None, "", [])), None)
    if isinstance(asked, str):
        turns: Any = rendered_turns(asked, whole=False) or [{"role": "user", "content": asked}]
    elif isinstance(asked, list):
        turns = [{"role": "user", **turn} if one_of(turn, "parts") else turn for turn in _flat(asked)]  # Gemini's user
    elif isinstance(asked, dict) and any(key in asked for key in (*ROLE_KEYS, "parts")):
        turns = [{"role": "user", **asked}]
    elif isinstance(asked, dict):
        return read_request(asked)
    else:
        raise RowRefused("unknown-layout", "the request holds no messages")
    tools = one_of(value, "tools", "functions") or one_of(config, "tools")
    return Request(read_messages(unlearn_hidden_calls(turns), system), read_tools(tools))


def _flat(turns: list[Any]) -> list[Any]:
    """Return the only list of a list of lists: LangSmith logs a batch of one conversation."""
    return turns[0] if len(turns) == 1 and isinstance(turns[0], list) else turns


def is_response(value: Any) -> bool:
    """Return whether a value has the shape of some API's response. An answer that is JSON has not."""
    value = _body(parsed(value))
    if isinstance(value, list):
        items = objects(_flat(value))
        return items is not None and all(
            is_item(item) or any(key in item for key in (*ROLE_KEYS, "lc")) for item in items
        )
    if not isinstance(value, dict):
        return False
    if any(isinstance(value.get(key), list) for key in (*_LISTS, "messages")) or value.get("error"):
        return True
    if isinstance(value.get("output"), list):
        return is_response(value["output"])
    if isinstance(value.get("message"), dict):
        return "role" in value["message"]
    if isinstance(value.get("content"), list | str) and ("role" in value or value.get("type") == "message"):
        return True
    return not _ENDS.isdisjoint(value) or any(key in value for key in ("done", "promptFeedback", "lc"))


def continues_request(value: Any) -> bool:
    """Return whether a response is Anthropic's: its API continues a last turn of the assistant without a break."""
    value = _body(parsed(value))
    return isinstance(value, dict) and isinstance(value.get("content"), list) and "stop_reason" in value


def read_answer(value: Any) -> Answer:
    """Return the answer, of a text, a turn or a response object.

    Raise RowRefused: failed, cut-off-answer, no-answer, unknown-layout, or the problem with a turn.
    """
    if isinstance(value, str) and not is_response(value):
        return [_text_answer(value)], ()  # an answer may be JSON itself
    value = _body(parsed(value))
    if all_texts(value) and len(value) == 1:
        return [_text_answer(value[0])], ()
    if isinstance(value, list) and (turns := objects(_flat(value))) is not None:
        for turn in turns:
            refuse_cut_row(turn)  # OpenTelemetry
        return read_messages(turns, None), ()
    if not isinstance(value, dict):
        raise RowRefused("no-answer", "the response is empty")
    _refuse_failure(value)
    for key in _LISTS:
        if isinstance(value.get(key), list):
            return _first(_flat(value[key]), key)
    if isinstance(value.get("content"), dict):  # one of Gemini's candidates
        return read_turn({"role": "assistant", **value["content"]}), ()
    inner = parsed(one_of(value, *_ANSWERED))
    if isinstance(value.get("messages"), list):
        return read_messages(_flat(value["messages"]), None), ()
    if isinstance(value.get("message"), dict):
        return read_turn(value["message"]), ()
    if any(key in value for key in (*ROLE_KEYS, "lc", "content")) and not isinstance(inner, str):
        return read_turn({"role": "assistant", **value}), ()
    if isinstance(inner, str):
        own = {key: value[key] for key in ("thinking", "reasoning_content", "tool_calls") if key in value}
        return read_turn({"role": "assistant", **own, "content": inner}), ()
    if inner is not None and is_response(inner):
        return read_answer(inner)
    raise RowRefused("unknown-layout", f"the response has only {', '.join(str(key)[:30] for key in list(value)[:6])}")


def _text_answer(text: str) -> Message:
    rest, calls = calls_in_text(text)
    return Message("assistant", rest, tool_calls=calls)


def _first(answers: Sequence[Any], key: str) -> Answer:
    """Return the first of several answers; others answer the same question."""
    first = answers[0] if answers else None
    if not isinstance(first, dict):
        raise RowRefused("no-answer", f"{key} holds no answer")
    refuse_cut_row(first)
    refuse_cut_row(one_of(first, "generation_info") or {})
    said = one_of(first, "message", "content", "text")
    if not isinstance(said, str | dict):
        raise RowRefused("no-answer", f"{key} holds no answer")
    messages = [_text_answer(said)] if isinstance(said, str) else read_turn({"role": "assistant", **said})
    return messages, ("other-answers",) if len(answers) > 1 else ()


def _body(value: Any) -> Any:
    """Return the body that batch files and proxies keep one level deeper."""
    while isinstance(value, dict) and not any(key in value for key in ("messages", "role", "type", *_LISTS)):
        bodies = (parsed(value.get(key)) for key in _BODIES)
        if (inner := next((body for body in bodies if isinstance(body, dict | list)), None)) is None:
            return value
        _refuse_status(value.get("status_code"))
        value = inner
    return value


def _refuse_status(status: Any) -> None:
    if isinstance(status, int) and status >= 400:
        raise RowRefused("failed", f"the call failed with status {status}")


def _refuse_failure(value: Mapping[str, Any]) -> None:
    """Raise RowRefused for a failed call, and for an incomplete answer."""
    _refuse_status(value.get("status_code"))
    if value.get("error"):
        raise RowRefused("failed", f"the call failed: {str(one_of(value['error'], 'message') or value['error'])[:80]}")
    if (blocked := one_of(value.get("promptFeedback"), "blockReason")) is not None:
        raise RowRefused("failed", f"the request was blocked: {str(blocked)[:40]}")
    if value.get("status") == "incomplete":
        _refuse_cut(one_of(value.get("incomplete_details"), "reason") or "max_output_tokens")
    if value.get("status") in ("failed", "cancelled"):
        raise RowRefused("failed", f"the call is {value['status']}")
    refuse_cut_row(value)
    if value.get("done") is False:
        raise RowRefused("cut-off-answer", "one piece of a stream (done is false)")


def refuse_pieces(text: str) -> None:
    """Raise RowRefused for an answer that is the text of a stream: server-sent events, or lines of JSON with the keys
    of pieces.
    """
    lines = [line for line in text.splitlines() if line]
    of_events = all(line.startswith(("data:", "event:", "id:", "retry:")) for line in lines)
    if len(lines) > 1 and (of_events or all(one_of(parsed(line), *_PIECES) is not None for line in lines)):
        raise RowRefused("unknown-layout", "the answer is the pieces of a stream: log the whole response")


def refuse_cut_row(row: Mapping[str, Any]) -> None:
    """Raise RowRefused for a row that reports an incomplete answer."""
    for name in _ENDS & row.keys():
        _refuse_cut(row[name])


def _refuse_cut(reason: Any) -> None:
    """Raise RowRefused if an answer was cut at a length limit or was stopped."""
    word = reason.lower().rpartition(".")[2] if isinstance(reason, str) else ""  # Python: FinishReason.MAX_TOKENS
    if word in _CUT_OFF:
        raise RowRefused("cut-off-answer", f"the answer ended by {reason}, not by itself")
    if word in _STOPPED:
        raise RowRefused("failed", f"the answer was stopped: {reason}")


def joined(question: list[Message], answer: list[Message]) -> list[Message]:
    """Return question and answer; agents answer with the whole conversation, the question included."""
    num_asked = len(question)
    same = [(m.role, m.content) for m in question] == [(m.role, m.content) for m in answer[:num_asked]]
    return answer if same and len(answer) > num_asked else [*question, *answer]


def call_of(request: Any, response: Any) -> tuple[list[Message], Tools, tuple[str, ...]]:
    """Return the messages of a request and its response, the tools of the request, and what was left out."""
    asked = read_request(request)
    reply, changed = read_answer(response)
    begun = asked.messages[-1]
    if begun.role == "assistant" and not begun.tool_calls and continues_request(response):
        reply = [replace(reply[0], content=begun.content + reply[0].content), *reply[1:]]
        return [*asked.messages[:-1], *reply], asked.tools, changed
    return joined(asked.messages, reply), asked.tools, changed


def is_of_answer(item: dict[str, Any]) -> bool:
    """Return whether the model wrote an item: its words, thoughts and calls."""
    return item.get("role", "assistant") == "assistant" and not str(item.get("type")).endswith("_output")


def unlearn_answer(items: list[dict[str, Any]], end: int) -> None:
    """Give no weight to the answer before `end`, nor to its thoughts and calls."""
    for item in reversed(items[:end]):
        if not is_of_answer(item):
            return
        item["weight"] = 0


def unlearn_hidden_calls(items: list[Any]) -> list[Any]:
    """Return items without hidden calls; the turn of each is read and not learned."""
    if not any(one_of(item, "type") in HIDDEN_CALLS for item in items):
        return items
    items = [{**item} for item in items if isinstance(item, dict)]
    hidden = False
    for index, item in enumerate(items):
        if item.get("type") in HIDDEN_CALLS:
            unlearn_answer(items, index)
            hidden = True
        hidden = hidden and item.get("role") != "user"
        if hidden and is_of_answer(item):
            item["weight"] = 0
    return [item for item in items if item.get("type") not in HIDDEN_CALLS]
