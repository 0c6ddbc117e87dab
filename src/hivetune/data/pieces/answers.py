"""What a model's API was asked and what it answered, whoever's API it is: requests and responses as they are logged.

OpenAI (chat, completions, Responses, batch), Anthropic, Ollama, Gemini, Bedrock, Cohere, Hugging Face, LangChain.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.pieces.calls import calls_in_text, read_call, read_tools
from hivetune.data.pieces.rendered import asked_turns, turns_of
from hivetune.data.pieces.said import Tools, listed, objects, one_of, parsed
from hivetune.data.pieces.streams import DATA_KEY, pieces_in, refuse_guarded, starts_events, whole_response
from hivetune.data.pieces.turns import ROLE_KEYS, THOUGHT_KEYS, is_item, read_messages, read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

CUT_OFF = frozenset(
    ("length", "max_tokens", "max_output_tokens", "max_length", "model_context_window_exceeded", "pause_turn", "limit")
)
STOPPED = frozenset(
    (
        *("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "error", "cancelled"),
        *("refusal", "guardrail_intervened", "content_filtered", "malformed_function_call"),
    )
)
# Where a response says how it ended.
ENDS = {"stop_reason", "stopReason", "done_reason", "finish_reason", "finishReason", "completionReason", "stop_type"}
_SYSTEMS = ("system", "systemInstruction", "system_instruction", "instructions", "preamble", "system_prompt")
_ASKED = (
    *("messages", "contents", "input", "prompt", "message"),
    *("inputText", "question", "query", "inputs", "text_input"),
)
_ANSWERED = (
    "answer",
    "output",
    "output_text",
    "response",
    "completion",
    "text",
    "result",
    "generated_text",
    "generation",
    "outputText",
    "text_output",
)
_KEPT_BY_PROVIDER = ("previous_response_id", "conversation", "cachedContent", "cached_content")  # what stood before
_WRAPPERS = ("body", DATA_KEY, "kwargs", "json", "data", "outputBodyJson", "inputBodyJson", "body_raw", "payload")


class Request(NamedTuple):
    messages: list[Message]
    tools: Tools


def is_request(value: Any) -> bool:
    """Return whether an object says what a model was asked."""
    value = _unwrapped(parsed(value))
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("contents"), dict) or any(isinstance(value.get(key), str | list) for key in _ASKED)


def read_request(value: Any) -> Request:
    """Return everything that stood in front of the answer: an object of some API, a list of turns, or a text.

    Raise RowRefused: earlier-turns-missing, or what is wrong with a turn.
    """
    value = _unwrapped(parsed(value))
    if isinstance(value, str):
        return Request([Message("user", value)], ())
    if isinstance(value, list):
        turns, tools = _without_tools(_flat(value))
        return Request(read_messages(turns, None), read_tools(tools))
    if not isinstance(value, dict):
        raise RowRefused("wrong-type", "the request: an object, a list of messages or a text")
    if one_of(value, *_KEPT_BY_PROVIDER) is not None:
        raise RowRefused("earlier-turns-missing")
    if isinstance(one_of(value.get("prompt"), "id"), str):
        raise RowRefused("earlier-turns-missing", "the prompt is kept by the provider: log its text with the request")
    asked = _asked(value)
    config = one_of(value, "config", "generationConfig")
    system = one_of(value, *_SYSTEMS) or one_of(config, *_SYSTEMS)
    if isinstance(asked, str):
        spoken = turns_of(asked) or asked_turns(asked) or [{"role": "user", "content": asked}]
        messages = [*read_system(system), *_history(value), *read_messages(spoken, None)]
    else:
        messages = read_messages(asked, system)
    tools = one_of(value, "tools", "functions", "toolConfig", "tool_config") or one_of(config, "tools")
    return Request(messages, read_tools(tools))


def _asked(value: Mapping[str, Any]) -> Any:
    asked = next((parsed(value[key]) for key in _ASKED if value.get(key) not in (None, "", [])), None)
    if isinstance(asked, list):
        return unlearn_what_rests_on_hidden_calls([_gemini_turn(turn) for turn in without_silent_turns(_flat(asked))])
    if isinstance(asked, dict) and "parts" in asked:
        return [_gemini_turn(asked)]
    if isinstance(asked, dict) and isinstance(asked.get("text"), str) and "tokens" in asked:  # AI21
        return asked["text"]
    if isinstance(asked, dict):
        return [asked] if any(key in asked for key in ROLE_KEYS) else _asked(asked)
    if not isinstance(asked, str):
        raise RowRefused("unknown-layout", "the request holds no messages")
    return asked


def _gemini_turn(turn: Any) -> Any:
    """Return the turn with the role of the user, where Gemini was asked without a role."""
    has_role = not isinstance(turn, dict) or "parts" not in turn or turn.get("role") is not None
    return turn if has_role else {**turn, "role": "user"}


def _history(value: Mapping[str, Any]) -> list[Message]:
    history = parsed(one_of(value, "chat_history", "history"))
    return read_messages(history, None) if isinstance(history, list) and history else []


def _without_tools(turns: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (turns, tools): Langfuse writes the tools that may be called as turns of a tool."""
    tools = [one_of(turn, "content") for turn in turns if isinstance(one_of(one_of(turn, "content"), "function"), dict)]
    return [turn for turn in turns if one_of(turn, "content") not in tools] if tools else turns, tools


def _flat(turns: list[Any]) -> list[Any]:
    """Return the only list of a list of lists: LangChain and LangSmith log a batch of one conversation."""
    return turns[0] if len(turns) == 1 and isinstance(turns[0], list) else turns


def is_response(value: Any) -> bool:
    """Return whether a value has the shape of some API's response. An answer that is JSON itself has not."""
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list) and pieces_in(value) is not None:
        return True
    if isinstance(value, list):
        items = objects(_flat(value))
        keys = ("role", "lc", "from", "generated_text", "message", "toolName")
        known = (any(k in i for k in keys) or is_item(i) or _is_output_message(i) for i in items or ())
        return items is not None and all(known)
    return isinstance(value, dict) and _is_response_object(value)


def says_answer(value: Mapping[str, Any]) -> bool:
    """Return whether an object may be what a model's API answered, and not one that it keeps or counts."""
    return "status_code" in value or is_response(value) or one_of(value, *_ANSWERED, "content") is not None


def _is_response_object(value: Mapping[str, Any]) -> bool:
    if any(isinstance(value.get(key), list) for key in ("choices", "candidates", "generations")):
        return True
    if has_completions(value):
        return True
    if isinstance(value.get("output"), list | dict):
        return is_response(value["output"])
    inner = value.get("message")
    if isinstance(inner, dict) or isinstance(value.get("messages"), list):
        return inner is None or "role" in inner
    if isinstance(value.get("content"), list | str) and ("role" in value or value.get("type") in ("message", "ai")):
        return True
    if isinstance(value.get("error"), dict | str) and value["error"]:
        return True
    return _is_text_response(value)


def _is_text_response(value: Mapping[str, Any]) -> bool:
    """Return whether an object is the response of an API that completes texts, or says how an answer ended."""
    if isinstance(one_of(value, "generated_text", "text_output"), str) or _is_text_output(value):
        return True
    if _is_only_text(value.get("text")):
        return True
    ends = ("done", "done_reason", "stop_reason", "stopReason", "finish_reason", "completionReason", "results")
    return any(end in value for end in (*ends, "stop_type", "promptFeedback", "lc"))


def _is_only_text(value: Any) -> bool:
    """Return whether a value is a list of one text, as vLLM's own API answers."""
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)


def _is_text_output(value: Mapping[str, Any]) -> bool:
    """Return whether an object is Mistral's response on Bedrock."""
    return all(isinstance(one.get("text"), str) for one in objects(value.get("outputs")) or [{}])


def continues_request(value: Any) -> bool:
    """Return whether a response is Anthropic's: its API goes on behind a last turn of the assistant, without a
    break.
    """
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list):
        return any(item.get("type") == "message_start" for item in pieces_in(value) or ())
    return isinstance(value, dict) and isinstance(value.get("content"), list) and "stop_reason" in value


def has_completions(value: Mapping[str, Any]) -> bool:
    """Return whether an object is AI21's response: a list of completions, each with its `data`."""
    return all(isinstance(one.get("data"), dict) for one in objects(value.get("completions")) or [{}])


def read_answer(value: Any) -> tuple[list[Message], tuple[str, ...]]:
    """Return (the messages that were answered, what was left out) of a text, a turn or a response object.

    Raise RowRefused: failed, cut-off-answer, unknown-layout, or what is wrong with a turn.
    """
    if isinstance(value, str) and not is_response(value):
        return [_text_answer(value)], ()  # an answer may be JSON itself
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list) and (pieces := pieces_in(value)) is not None:
        value = whole_response(pieces)
    if isinstance(value, list):
        return _listed(value)
    if not isinstance(value, dict):
        raise RowRefused("no-answer", "the response is empty")
    _refuse_failure(value)
    return _of_object(value)


def _of_object(value: Mapping[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    for key, read in _SEVERAL:
        if key == "completions" and not has_completions(value):
            continue
        if isinstance(value.get(key), list):
            if not value[key]:
                raise RowRefused("no-answer", f"{key} is empty")
            return read(value[key])
    if isinstance(value.get("output"), list):
        return read_messages([_output_item(item) for item in value["output"]], None), ()
    if isinstance(value.get("messages"), list):
        return read_messages(_flat(value["messages"]), None), ()
    if isinstance(value.get("message"), dict):
        return read_turn(value["message"]), ()
    if isinstance(value.get("results"), list) and value["results"]:
        return read_answer(value["results"][0])
    if _is_text_output(value):
        return read_answer(value["outputs"][0])
    return _of_message(value)


def _output_item(item: Any) -> Any:
    """Return the item with a role: LM Studio's own API answers with messages that name none."""
    return {**item, "role": "assistant"} if _is_output_message(item) else item


def _is_output_message(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "message" and "content" in item and "role" not in item


def _of_message(value: Mapping[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Return an object that is the answer's message itself, or holds the answer as a text."""
    if any(key in value for key in ("role", "lc", "from")) or value.get("type") in ("message", "ai", "AIMessage"):
        return read_turn({"role": "assistant", **value} if "role" not in value and "content" in value else value), ()
    inner = _inner_answer(value)
    if listed(one_of(value, "tool_calls", "toolCalls")) and isinstance(inner, str | None):
        return read_turn(_turn_with_calls(value, inner)), ()
    if inner is not None and (isinstance(inner, str) or is_response(inner)):
        thoughts = value.get("thinking") if isinstance(value.get("thinking"), str) else None
        messages, changed = read_answer(inner)
        return [*messages[:-1], _with_thoughts(messages[-1], thoughts)], changed
    content = value.get("content")
    if isinstance(content, dict) and "parts" in content:
        return read_turn({"role": "assistant", **content}), ()
    if isinstance(content, list | str):
        return read_turn({"role": "assistant", "content": content}), ()
    raise RowRefused("unknown-layout", f"the response has only {', '.join(str(key)[:30] for key in list(value)[:6])}")


def _inner_answer(value: Mapping[str, Any]) -> Any:
    inner = parsed(one_of(value, *_ANSWERED))
    inner = inner[0] if _is_only_text(inner) else inner
    if isinstance(inner, str) and inner[:1] == " " and not inner[1:2].isspace():
        return inner[1:]  # between the prompt and a completion of it
    return inner


def _turn_with_calls(value: Mapping[str, Any], text: str | None) -> dict[str, Any]:
    calls = one_of(value, "tool_calls", "toolCalls")
    thoughts = {name: value[name] for name in THOUGHT_KEYS if isinstance(value.get(name), str)}
    content = value.get("content") if text is None else text
    return {"role": "assistant", "content": content, "tool_calls": calls, **thoughts}


def _with_thoughts(message: Message, thoughts: str | None) -> Message:
    return message if thoughts is None or message.reasoning else replace(message, reasoning=thoughts)


def _text_answer(text: str) -> Message:
    rest, calls = calls_in_text(text)
    return Message("assistant", rest, tool_calls=calls)


def _unwrapped(value: Any) -> Any:
    """Return the body that batch files, proxies and Bedrock's log keep one level deeper."""
    while isinstance(value, dict):
        inner = next((body for key in _WRAPPERS if _is_body(body := parsed(value.get(key)))), None)
        if inner is None or any(key in value for key in ("choices", "messages", "role", "candidates", "type")):
            return value
        status = value.get("status_code")
        if isinstance(status, int) and status >= 400:
            raise RowRefused("failed", f"the call failed with status {status}")
        value = inner
    return value


def _is_body(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and starts_events(value))


def _refuse_failure(value: Mapping[str, Any]) -> None:
    """Raise RowRefused for a call that failed, and for an answer that breaks off."""
    status = one_of(value, "status_code", "statusCode")
    if isinstance(status, int) and status >= 400:
        raise RowRefused("failed", f"the call failed with status {status}")
    if value.get("error"):
        raise RowRefused("failed", f"the call failed: {str(one_of(value['error'], 'message') or value['error'])[:80]}")
    if (blocked := one_of(value.get("promptFeedback"), "blockReason")) is not None:
        raise RowRefused("failed", f"the request was blocked: {str(blocked)[:40]}")
    refuse_guarded(value)
    details = value.get("incomplete_details")
    if value.get("status") == "incomplete":
        _refuse_cut(one_of(details, "reason") or "max_output_tokens")
    if value.get("status") in ("failed", "cancelled"):
        raise RowRefused("failed", f"the call is {value['status']}")
    refuse_cut_row(value)
    _refuse_cut(one_of(value.get("details"), "finish_reason"))
    if value.get("done") is False:
        raise RowRefused("cut-off-answer", "one piece of a stream (done is false)")


def refuse_cut_row(row: Mapping[str, Any]) -> None:
    """Raise RowRefused for a row that says that its answer broke off."""
    for name in ENDS & row.keys():
        _refuse_cut(row[name])


def _refuse_cut(reason: Any) -> None:
    """Raise RowRefused where an answer ended by its length or was stopped."""
    word = reason.lower().rpartition(".")[2] if isinstance(reason, str) else ""  # Python: FinishReason.MAX_TOKENS
    if word in CUT_OFF:
        raise RowRefused("cut-off-answer", f"the answer ended by {reason}, not by itself")
    if word in STOPPED:
        raise RowRefused("failed", f"the answer was stopped: {reason}")


def _choices(choices: list[Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the first choice; others answer the same question."""
    choice = choices[0]
    if not isinstance(choice, dict):
        raise RowRefused("wrong-type", "choices: a list of objects")
    ended = one_of(choice, "finish_reason", "finishReason")
    _refuse_cut(one_of(ended, "reason") or ended)
    changed = ("other-answers",) if len(choices) > 1 else ()
    said = one_of(choice, "message", "content", "text", "data")
    said = one_of(said, "text") if isinstance(said, dict) and "role" not in said and "text" in said else said
    if isinstance(said, str):
        return [_text_answer(said)], changed
    if not isinstance(said, dict):
        raise RowRefused("no-answer", "the choice holds no message")
    return read_turn({"role": "assistant", **said}), changed


def _generations(generations: list[Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Read Cohere's answers, or LangChain's LLMResult: a list of prompts, each with a list of answers."""
    several = generations[0] if isinstance(generations[0], list) else generations
    if not several or not isinstance(several[0], dict):
        raise RowRefused("no-answer", "generations is empty")
    first = several[0]
    for told in objects([first, one_of(first, "generation_info", "generationInfo") or {}]) or []:  # Cohere, LangChain
        refuse_cut_row(told)
    changed = ("other-answers",) if len(several) > 1 else ()
    if isinstance(first.get("message"), dict):
        return read_turn(first["message"]), changed
    if isinstance(first.get("text"), str):
        return [_text_answer(first["text"])], changed
    raise RowRefused("no-answer", "the generation holds no message")


# Where an API keeps its answers, and how each is read.
_SEVERAL = (("choices", _choices), ("candidates", _choices), ("completions", _choices), ("generations", _generations))


def _listed(value: list[Any]) -> tuple[list[Message], tuple[str, ...]]:
    items = objects(_flat(value))
    if len(value) == 1 and isinstance(value[0], str):
        return [_text_answer(value[0])], ()
    if items is None:
        raise RowRefused("wrong-type", "the response: an object, a list of messages or a text")
    if isinstance(items[0].get("generated_text"), str):
        return [_text_answer(items[0]["generated_text"])], ("other-answers",) if len(items) > 1 else ()
    if all("toolName" in item for item in items):  # the AI SDK
        return [Message("assistant", "", tool_calls=tuple(read_call(item) for item in items))], ()
    if "message" in items[0] and "index" in items[0]:
        return _choices(list(items))
    if any(one_of(item, "finish_reason") for item in items):  # OpenTelemetry puts it into the message
        _refuse_cut(next(reason for item in items if (reason := one_of(item, "finish_reason"))))
    return read_messages(items, None), ()


# Items of OpenAI's Responses: tools that the provider ran itself, of which a log does not hold what they found, and
# turns that say nothing. A search of the web is no such tool: its answer says what was found.

HIDDEN_CALLS = ("file_search_call", "code_interpreter_call")


def is_of_answer(item: dict[str, Any]) -> bool:
    """Return whether the model wrote an item: its words, thoughts and calls."""
    return item.get("role", "assistant") == "assistant" and not str(item.get("type")).endswith("_output")


def unlearn_answer(items: list[dict[str, Any]], end: int) -> None:
    """Give no weight to the answer in front of `end`, nor to its thoughts and calls."""
    for item in reversed(items[:end]):
        if not is_of_answer(item):
            return
        item["weight"] = 0


def unlearn_what_rests_on_hidden_calls(items: list[Any]) -> list[Any]:
    """Return items without such calls; the turn of each, in front of it and behind, is read and not learned."""
    if not any(one_of(item, "type") in HIDDEN_CALLS for item in items):
        return items
    items = [{**item} for item in items if isinstance(item, dict)]
    hidden = False
    for place, item in enumerate(items):
        if item.get("type") in HIDDEN_CALLS:
            unlearn_answer(items, place)
            hidden = True
        hidden = hidden and item.get("role") != "user"
        if hidden and is_of_answer(item):
            item["weight"] = 0
    return [item for item in items if item.get("type") not in HIDDEN_CALLS]


def without_silent_turns(items: list[Any]) -> list[Any]:
    """Return items without those that a program logs as the user's between a call and its result, empty."""
    kept: list[Any] = []
    for item, following in zip(items, [*items[1:], None], strict=False):
        between = one_of(kept[-1] if kept else None, "type"), one_of(following, "type")
        if between != ("function_call", "function_call_output") or one_of(item, "content") != "":
            kept.append(item)
    return kept
