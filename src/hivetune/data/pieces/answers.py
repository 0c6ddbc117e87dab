"""What a model's API was asked and what it answered, whoever's API it is: requests and responses as they are logged.

OpenAI (chat, completions, Responses, batch), Anthropic, Ollama, Gemini, Bedrock, Cohere, Hugging Face, LangChain.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.pieces.parts import calls_in_text, read_call, read_tools
from hivetune.data.pieces.rendered import rendered_turns
from hivetune.data.pieces.said import Tools, all_texts, listed, objects, one_of, parsed
from hivetune.data.pieces.streams import DATA_KEY, pieces_in, refuse_guarded, starts_events, whole_response
from hivetune.data.pieces.turns import ROLE_KEYS, THOUGHT_KEYS, is_item, read_messages, read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_CUT_OFF = frozenset(
    ("length", "max_tokens", "max_output_tokens", "max_length", "model_context_window_exceeded", "pause_turn", "limit")
)
_STOPPED = frozenset(
    (
        *("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "error", "cancelled"),
        *("refusal", "guardrail_intervened", "content_filtered", "malformed_function_call"),
    )
)
# Where a response says how it ended.
ENDS = {"stop_reason", "stopReason", "done_reason", "finish_reason", "finishReason", "completionReason", "stop_type"}
_SYSTEMS = ("system", "systemInstruction", "system_instruction", "instructions", "preamble", "system_prompt")
_PROMPTS = (
    *("messages", "contents", "input", "prompt", "message"),
    *("inputText", "question", "query", "inputs", "text_input"),
)
_ANSWERED = (
    *("answer", "output", "output_text", "response", "completion", "text", "result", "generated_text", "generation"),
    *("outputText", "text_output"),
)
_PROVIDER_STATE = ("previous_response_id", "conversation", "cachedContent", "cached_content")  # what stood before
_WRAPPERS = ("body", DATA_KEY, "kwargs", "json", "data", "outputBodyJson", "inputBodyJson", "body_raw", "payload")
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
    value = _unwrapped(parsed(value))
    if isinstance(value, str):
        return Request([Message("user", value)], ())
    if isinstance(value, list):
        turns = _flat(value)
        contents = [one_of(turn, "content") for turn in turns]
        tools = [c for c in contents if isinstance(one_of(c, "function"), dict)]  # Langfuse: turns of a tool
        turns = [turn for turn, c in zip(turns, contents, strict=True) if c not in tools] if tools else turns
        return Request(read_messages(turns, None), read_tools(tools))
    if not isinstance(value, dict):
        raise RowRefused("wrong-type", "the request: an object, a list of messages or a text")
    if one_of(value, *_PROVIDER_STATE) is not None:
        raise RowRefused("earlier-turns-missing")
    if isinstance(one_of(value.get("prompt"), "id"), str):
        raise RowRefused("earlier-turns-missing", "the prompt is kept by the provider: log its text with the request")
    request = _request_turns(value)
    config = one_of(value, "config", "generationConfig")
    system = one_of(value, *_SYSTEMS) or one_of(config, *_SYSTEMS)
    if isinstance(request, str):
        spoken = rendered_turns(request, whole=False) or [{"role": "user", "content": request}]
        history = listed(parsed(one_of(value, "chat_history", "history")))
        before = read_messages(history, None) if history else []
        messages = [*read_system(system), *before, *read_messages(spoken, None)]
    else:
        messages = read_messages(request, system)
    tools = one_of(value, "tools", "functions", "toolConfig", "tool_config") or one_of(config, "tools")
    return Request(messages, read_tools(tools))


def _request_turns(value: Mapping[str, Any]) -> Any:
    """Return the turns of a request, or its text."""
    request = next((parsed(value[key]) for key in _PROMPTS if value.get(key) not in (None, "", [])), None)
    if isinstance(request, dict) and isinstance(request.get("text"), str) and "tokens" in request:  # AI21
        return request["text"]
    if isinstance(request, dict) and not any(key in request for key in (*ROLE_KEYS, "parts")):
        return _request_turns(request)
    if isinstance(request, str):
        return request
    if not isinstance(request, list | dict):
        raise RowRefused("unknown-layout", "the request holds no messages")
    turns: list[Any] = []
    given = _flat(request) if isinstance(request, list) else [request]
    for turn, following in zip(given, [*given[1:], None], strict=False):
        between = one_of(turns[-1] if turns else None, "type"), one_of(following, "type")
        if between == ("function_call", "function_call_output") and one_of(turn, "content") == "":
            continue  # a program's empty turn between a call and its result
        without_role = isinstance(turn, dict) and "parts" in turn and turn.get("role") is None  # Gemini's user
        turns.append({**turn, "role": "user"} if without_role else turn)
    return unlearn_hidden_calls(turns)


def _flat(turns: list[Any]) -> list[Any]:
    """Return the only list of a list of lists: LangChain and LangSmith log a batch of one conversation."""
    return turns[0] if len(turns) == 1 and isinstance(turns[0], list) else turns


def is_response(value: Any) -> bool:
    """Return whether a value has the shape of some API's response. An answer that is JSON has not."""
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list) and pieces_in(value) is not None:
        return True
    if isinstance(value, list):
        items = objects(_flat(value))
        keys = ("role", "lc", "from", "generated_text", "message", "toolName")
        are_outputs = (any(k in i for k in keys) or is_item(i) or _is_output_message(i) for i in items or ())
        return items is not None and all(are_outputs)
    if not isinstance(value, dict):
        return False
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
    text = value.get("text")  # vLLM's own API answers with a list of one
    if isinstance(one_of(value, "generated_text", "text_output"), str) or (all_texts(text) and len(text) == 1):
        return True
    return _is_text_output(value) or any(end in value for end in (*ENDS, "done", "results", "promptFeedback", "lc"))


def _is_text_output(value: Mapping[str, Any]) -> bool:
    """Return whether an object is Mistral's response on Bedrock."""
    return all(isinstance(output.get("text"), str) for output in objects(value.get("outputs")) or [{}])


def _is_output_message(item: Any) -> bool:
    """Return whether an item is a message of LM Studio's own API, which names no role."""
    return isinstance(item, dict) and item.get("type") == "message" and "content" in item and "role" not in item


def continues_request(value: Any) -> bool:
    """Return whether a response is Anthropic's: its API continues a last turn of the assistant without a break."""
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list):
        return any(item.get("type") == "message_start" for item in pieces_in(value) or ())
    return isinstance(value, dict) and isinstance(value.get("content"), list) and "stop_reason" in value


def has_completions(value: Mapping[str, Any]) -> bool:
    """Return whether an object is AI21's response: a list of completions, each with its `data`."""
    return all(isinstance(completion.get("data"), dict) for completion in objects(value.get("completions")) or [{}])


def read_answer(value: Any) -> Answer:
    """Return the answer, of a text, a turn or a response object.

    Raise RowRefused: failed, cut-off-answer, unknown-layout, or the problem with a turn.
    """
    if isinstance(value, str) and not is_response(value):
        return [_text_answer(value)], ()  # an answer may be JSON itself
    value = _unwrapped(parsed(value))
    if isinstance(value, str | list) and (pieces := pieces_in(value)) is not None:
        value = whole_response(pieces)
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str):
            return [_text_answer(value[0])], ()
        outputs = objects(_flat(value))
        if outputs is None:
            raise RowRefused("wrong-type", "the response: an object, a list of messages or a text")
        if isinstance(outputs[0].get("generated_text"), str):
            return [_text_answer(outputs[0]["generated_text"])], ("other-answers",) if len(outputs) > 1 else ()
        if all("toolName" in output for output in outputs):  # the AI SDK
            return [Message("assistant", "", tool_calls=tuple(map(read_call, outputs)))], ()
        if "message" in outputs[0] and "index" in outputs[0]:
            return _choices(list(outputs))
        _refuse_cut(
            next((end for output in outputs if (end := one_of(output, "finish_reason"))), None)
        )  # OpenTelemetry
        return read_messages(outputs, None), ()
    if not isinstance(value, dict):
        raise RowRefused("no-answer", "the response is empty")
    _refuse_failure(value)
    for key in ("choices", "candidates", "completions", "generations"):
        answers = value.get(key)
        if isinstance(answers, list) and (key != "completions" or has_completions(value)):
            if not answers:
                raise RowRefused("no-answer", f"{key} is empty")
            return _generations(answers) if key == "generations" else _choices(answers)
    if isinstance(value.get("output"), list):
        items = [{**item, "role": "assistant"} if _is_output_message(item) else item for item in value["output"]]
        return read_messages(items, None), ()
    if isinstance(value.get("messages"), list):
        return read_messages(_flat(value["messages"]), None), ()
    if isinstance(value.get("message"), dict):
        return read_turn(value["message"]), ()
    if isinstance(value.get("results"), list) and value["results"]:
        return read_answer(value["results"][0])
    if _is_text_output(value):
        return read_answer(value["outputs"][0])
    return _of_message(value)


def _of_message(value: Mapping[str, Any]) -> Answer:
    """Return an object that is the answer's message itself, or holds the answer as a text."""
    if any(key in value for key in ("role", "lc", "from")) or value.get("type") in ("message", "ai", "AIMessage"):
        return read_turn({"role": "assistant", **value} if "role" not in value and "content" in value else value), ()
    inner, content = parsed(one_of(value, *_ANSWERED)), value.get("content")
    inner = inner[0] if all_texts(inner) and len(inner) == 1 else inner
    if isinstance(inner, str) and inner[:1] == " " and not inner[1:2].isspace():
        inner = inner[1:]  # between the prompt and a completion of it
    calls = listed(one_of(value, "tool_calls", "toolCalls"))
    if calls and isinstance(inner, str | None):
        thoughts = {name: value[name] for name in THOUGHT_KEYS if isinstance(value.get(name), str)}
        text = content if inner is None else inner
        return read_turn({"role": "assistant", "content": text, "tool_calls": calls, **thoughts}), ()
    if isinstance(inner, str) or (inner is not None and is_response(inner)):
        messages, changed = read_answer(inner)
        if isinstance(value.get("thinking"), str) and not messages[-1].reasoning:
            messages[-1] = replace(messages[-1], reasoning=value["thinking"])
        return messages, changed
    if isinstance(content, dict) and "parts" in content:
        return read_turn({"role": "assistant", **content}), ()
    if isinstance(content, list | str):
        return read_turn({"role": "assistant", "content": content}), ()
    raise RowRefused("unknown-layout", f"the response has only {', '.join(str(key)[:30] for key in list(value)[:6])}")


def _text_answer(text: str) -> Message:
    rest, calls = calls_in_text(text)
    return Message("assistant", rest, tool_calls=calls)


def _unwrapped(value: Any) -> Any:
    """Return the body that batch files, proxies and Bedrock's log keep one level deeper."""
    while isinstance(value, dict):
        bodies = (parsed(value.get(key)) for key in _WRAPPERS)
        bodies = (b for b in bodies if isinstance(b, dict | list) or (isinstance(b, str) and starts_events(b)))
        if (inner := next(bodies, None)) is None or any(
            key in value for key in ("choices", "messages", "role", "candidates", "type")
        ):
            return value
        _refuse_status(value.get("status_code"))
        value = inner
    return value


def _refuse_status(status: Any) -> None:
    if isinstance(status, int) and status >= 400:
        raise RowRefused("failed", f"the call failed with status {status}")


def _refuse_failure(value: Mapping[str, Any]) -> None:
    """Raise RowRefused for a failed call, and for an incomplete answer."""
    _refuse_status(one_of(value, "status_code", "statusCode"))
    if value.get("error"):
        raise RowRefused("failed", f"the call failed: {str(one_of(value['error'], 'message') or value['error'])[:80]}")
    if (blocked := one_of(value.get("promptFeedback"), "blockReason")) is not None:
        raise RowRefused("failed", f"the request was blocked: {str(blocked)[:40]}")
    refuse_guarded(value)
    if value.get("status") == "incomplete":
        _refuse_cut(one_of(value.get("incomplete_details"), "reason") or "max_output_tokens")
    if value.get("status") in ("failed", "cancelled"):
        raise RowRefused("failed", f"the call is {value['status']}")
    refuse_cut_row(value)
    _refuse_cut(one_of(value.get("details"), "finish_reason"))
    if value.get("done") is False:
        raise RowRefused("cut-off-answer", "one piece of a stream (done is false)")


def refuse_cut_row(row: Mapping[str, Any]) -> None:
    """Raise RowRefused for a row that reports an incomplete answer."""
    for name in ENDS & row.keys():
        _refuse_cut(row[name])


def _refuse_cut(reason: Any) -> None:
    """Raise RowRefused if an answer was cut at a length limit or was stopped."""
    word = reason.lower().rpartition(".")[2] if isinstance(reason, str) else ""  # Python: FinishReason.MAX_TOKENS
    if word in _CUT_OFF:
        raise RowRefused("cut-off-answer", f"the answer ended by {reason}, not by itself")
    if word in _STOPPED:
        raise RowRefused("failed", f"the answer was stopped: {reason}")


def _choices(choices: list[Any]) -> Answer:
    """Return the first choice; others answer the same question."""
    choice = choices[0]
    if not isinstance(choice, dict):
        raise RowRefused("wrong-type", "choices: a list of objects")
    ended = one_of(choice, "finish_reason", "finishReason")
    _refuse_cut(one_of(ended, "reason") or ended)
    text = one_of(choice, "message", "content", "text", "data")
    text = one_of(text, "text") if isinstance(text, dict) and "role" not in text and "text" in text else text
    if not isinstance(text, str | dict):
        raise RowRefused("no-answer", "the choice holds no message")
    messages = [_text_answer(text)] if isinstance(text, str) else read_turn({"role": "assistant", **text})
    return messages, ("other-answers",) if len(choices) > 1 else ()


def _generations(generations: list[Any]) -> Answer:
    """Read Cohere's answers, or LangChain's LLMResult: a list of prompts, each with a list of answers."""
    several = generations[0] if isinstance(generations[0], list) else generations
    if not several or not isinstance(several[0], dict):
        raise RowRefused("no-answer", "generations is empty")
    first = several[0]
    for generation in (first, one_of(first, "generation_info", "generationInfo")):  # Cohere, LangChain
        if isinstance(generation, dict):
            refuse_cut_row(generation)
    changed = ("other-answers",) if len(several) > 1 else ()
    if isinstance(first.get("message"), dict):
        return read_turn(first["message"]), changed
    if isinstance(first.get("text"), str):
        return [_text_answer(first["text"])], changed
    raise RowRefused("no-answer", "the generation holds no message")


def joined(question: list[Message], answer: list[Message]) -> list[Message]:
    """Return question and answer; agents answer with the whole conversation, the question included."""
    num_asked = len(question)
    same = [(m.role, m.content) for m in question] == [(m.role, m.content) for m in answer[:num_asked]]
    return answer if same and len(answer) > num_asked else [*question, *answer]


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
