"""Turns as OpenAI (chat and Responses), Anthropic, Gemini and Ollama write them, to messages in an order that templates
know. Calls, and the tools that may be called, are read to OpenAI's form.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from hivetune.data.columns import REASONING
from hivetune.data.pieces.format import NOT_HELD, Conversation, Tools
from hivetune.data.pieces.values import all_texts, listed, objects, one_of, parsed, text_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Message, Role

_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the turn is the call, as JSON
_NAMES_OF_ROLES: dict[Role, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "ai", "gpt", "chatgpt", "model", "bot", "chatbot", *_CALL_ROLES),
    "tool": ("tool", "function", "observation", "tool_response", "function_response"),
}
ROLES: dict[str, Role] = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names}
ROLE_KEYS = ("role", "from", "sender", "speaker")
_CONTENT_KEYS = ("content", "value", "parts", "text")
_WEIGHTS = ("weight", "train", "trainable", "loss_weight")  # OpenAI's name, and other programs'
_MEDIA_KEYS = ("images", "image", "audio", "video", "videos", "files", "attachments")
# Kinds of parts: OpenAI's (chat and Responses), Anthropic's, Gemini's, LM Studio's, and those of OpenTelemetry.
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "thought")
_CALLS = ("tool_use", "tool_call", "function_call", "custom_tool_call", "functionCall", "toolCallRequest")
_RESULTS = (
    *("tool_result", "tool_call_response", "function_call_output", "custom_tool_call_output", "functionResponse"),
    "toolCallResult",
)
# Parts that say nothing to a model: hidden thoughts, and searches of the web, of which the answer says what they found.
_SILENT = (
    *("redacted_thinking", "web_search_call", "web_search_tool_result", "web_fetch_tool_result"),
    "tool_search_tool_result",
)
_SEARCHES = ("web_search", "web_fetch", "tool_search")  # what Anthropic's begin with
# Items of OpenAI's Responses that are no messages, but stand among them.
_ITEMS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
# Gemini names no types: the only key that a part has tells its kind, in Python's spelling too.
_KINDS = {"text": "text", "functionCall": "functionCall", "functionResponse": "functionResponse"}
_KINDS |= {"function_call": "functionCall", "function_response": "functionResponse"}
_BETWEEN = "\n\n"  # turns of one role that become one
_HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)


def read_call(call: Any) -> Mapping[str, Any]:
    """Return a tool call in OpenAI's form, with its arguments as an object: templates write them as JSON, and would
    quote a string twice. Raise RowRefused("bad-tool-call").
    """
    custom = one_of(call, "custom")
    function = custom or one_of(call, "function", "functionCall", "function_call") or call
    name = one_of(function, "name")
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowRefused("bad-tool-call")
    arguments = parsed(one_of(function, "arguments", "args", "input", "parameters"))
    if custom or one_of(call, "type") == "custom_tool_call":  # a tool that takes plain text
        arguments = {"input": str(one_of(function, "input") or "")}
    arguments = {} if arguments in (None, "") else arguments
    if not isinstance(arguments, dict):
        raise RowRefused("bad-tool-call", f"the arguments of {name[:40]} are no JSON object")
    call_id = one_of(call, "call_id", "id", "callId", "tool_call_id") or one_of(function, "id")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**plain, "id": str(call_id)} if isinstance(call_id, str | int) and call_id else plain


def calls_in_text(text: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return an answer that holds Hermes' `<tool_call>{...}</tool_call>`: the text around them, and the calls.

    A text where one of them is not JSON stays as it is.
    """
    if "<tool_call>" not in text:
        return text, ()
    calls, rest, end = [], "", 0
    while (begin := text.find("<tool_call>", end)) >= 0:
        match = _HERMES_CALL.match(text, begin)
        call = None if match is None else parsed(match[1])
        if match is None or not isinstance(one_of(call, "name"), str):
            return text, ()
        calls.append(read_call(call))
        rest, end = rest + text[end:begin], match.end()
    return (rest + text[end:]).strip(), tuple(calls)


def result_text(value: Any) -> str:
    """Return the result of a tool, as text: strings and text parts as they are, anything else as JSON.

    Raise RowRefused("unsupported-content") for an image.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(one_of(part, "text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    if any(one_of(part, "type") in ("image", "image_url", "document") for part in listed(value)):
        raise RowRefused("unsupported-content", "a tool's result holds an image or a file")
    return json.dumps(value, ensure_ascii=False)


def read_tools(tools: Any) -> Tools:
    """Return the tools that a conversation may call, in OpenAI's form: a list, or the same as JSON text.

    Raise RowRefused("wrong-type").
    """
    tools = parsed(tools)
    if tools is None or tools in ("", [], {}):
        return ()
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise RowRefused("wrong-type", "tools: a list of objects")
    read: list[Mapping[str, Any]] = []
    for tool in map(parsed, tools):
        if not isinstance(tool, dict):
            raise RowRefused("wrong-type", "tools: a list of objects")
        declared = one_of(tool, "functionDeclarations", "function_declarations")  # Gemini
        read += [_plain_tool(function) for function in (declared if isinstance(declared, list) else [tool])]
    return tuple(map(_without_nulls, read))


def _plain_tool(tool: Any) -> Mapping[str, Any]:
    """Return a tool in OpenAI's form; those of Anthropic, Gemini and the Responses have its fields one level higher."""
    if not isinstance(tool, dict):
        raise RowRefused("wrong-type", "tools: a list of objects")
    plain = tool["function"] if isinstance(tool.get("function"), dict) else tool
    if not isinstance(plain.get("name"), str) or (plain is not tool and tool.get("type") == "function"):
        return tool  # as it is, or a provider's own tool without a schema
    function = {key: plain[key] for key in ("name", "description", "strict") if plain.get(key) is not None}
    if (schema := one_of(plain, "parameters", "input_schema", "inputSchema", "parametersJsonSchema")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


_MEANT_NULLS = ("default", "const", "examples", "enum")  # keys of a schema that may hold null


def _without_nulls(schema: Any) -> Any:
    """Return a schema without keys whose value is null."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if value is not None or key in _MEANT_NULLS}
    return {key: value if key in _MEANT_NULLS else _without_nulls(value) for key, value in kept.items()}


class _Piece(NamedTuple):
    """One thing of a turn: `value` is a text, a call in OpenAI's form, or the message of a tool that answered."""

    kind: Literal["text", "thought", "call", "result"]
    value: Any


def _pieces(content: Any) -> Iterator[_Piece]:
    """Yield what a content holds, in order. Raise RowRefused: wrong-type, unsupported-content, bad-tool-call."""
    if isinstance(content, dict) and ("type" in content or "text" in content):
        content = [content]
    if isinstance(content, str):
        yield _Piece("text", content)
    elif all_texts(content):
        yield _Piece("text", "\n".join(content))  # a text as its lines
    elif content is not None and not isinstance(content, list):
        raise RowRefused("wrong-type", "content: a string, or a list of parts")
    else:
        for part in content or ():
            yield from _pieces_of_part(part)


def _pieces_of_part(part: Any) -> Iterator[_Piece]:
    if isinstance(part, str):
        yield _Piece("text", part)
        return
    kind = _kind(part)
    if kind in _TEXTS:
        text = one_of(part, "text", "refusal", "content")
        if not isinstance(text, str):
            raise RowRefused("unsupported-content", "a text part without text")
        yield _Piece("text", text)
    elif kind in _THOUGHTS:
        yield from (_Piece("thought", text) for text in _thoughts(part))
    elif kind in _CALLS:
        if kind == "tool_use" and one_of(part, "input", "arguments") is None:
            raise RowRefused("bad-tool-call", f"the log does not hold the input of {str(part.get('name'))[:40]}")
        yield _Piece("call", read_call(part))
    elif kind in _RESULTS:
        yield _Piece("result", _result(part))
    elif kind not in _SILENT:
        raise RowRefused("unsupported-content", f"a part of type {str(kind)[:40]!r}: keep the text parts only")


def _kind(part: Any) -> Any:
    """Return the type of a part, or the key that tells it."""
    if not isinstance(part, dict):
        raise RowRefused("unsupported-content", f"a part that is {type(part).__name__}: keep the text parts only")
    if part.get("thought") is True and "text" in part:  # Gemini marks what it thought
        return "thought"
    if part.get("type") == "server_tool_use" and str(part.get("name")).startswith(_SEARCHES):
        return _SILENT[0]
    if "type" in part:
        return part["type"]
    keys = [key for key, value in part.items() if value is not None]  # Python writes all the kinds that it is not
    return next((kind for key, kind in _KINDS.items() if key in keys), next(iter(keys), None))


def _thoughts(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield thoughts as text, without encrypted ones: of these only the summary is meant to be seen."""
    names = ("summary",) if part.get("encrypted_content") else ("thinking", "reasoning", "text", "content", "summary")
    value = next((part[name] for name in names if part.get(name)), None)
    for item in value if isinstance(value, list) else [value]:
        text = one_of(item, "text") if isinstance(item, dict) else item
        if isinstance(text, str):
            yield text


def _result(part: Mapping[str, Any]) -> Message:
    inner = one_of(part, "functionResponse", "function_response") or part
    if inner is not part and inner.get("parts"):
        raise RowRefused("unsupported-content", "a tool's result holds an image or a file")
    value = one_of(inner, "content", "output", "result", "response", "tool_result")
    value = parsed(value) if part.get("type") == "toolCallResult" else value
    if isinstance(value, dict) and value.keys() == {"output"} and isinstance(value["output"], str):
        value = value["output"]  # Gemini's programs
    call_id = one_of(inner, "tool_use_id", "tool_call_id", "callId", "call_id", "id")
    return result_message(result_text(value), call_id, one_of(inner, "name"))


def result_message(text: str, call_id: Any, name: Any) -> Message:
    """Return the message of a tool; an id or a name that is no text is left out."""
    call = str(call_id) if isinstance(call_id, str | int) and call_id else None
    return Message("tool", text, name=name if isinstance(name, str) else None, tool_call_id=call)


def read_messages(turns: Any, system: Any) -> list[Message]:
    """Return every turn of a list, after `system` unless the list has its own. Raise RowRefused."""
    if not isinstance(turns, list):
        raise RowRefused("wrong-type", "messages: a list of objects")
    messages: list[Message] = []
    after_item = False
    for turn in turns:
        if turn is None or one_of(turn, "type") in _SILENT:
            continue
        read, item = read_turn(turn), is_item(turn)
        if (item or after_item) and messages and _belongs(messages[-1], read[0]):  # one answer, item by item
            read = [_joined(messages.pop(), read[0]), *read[1:]]
        messages += read
        after_item = item
    if not messages:
        raise RowRefused("no-answer", "the list of messages is empty")
    return messages if messages[0].role == "system" else [*read_system(system), *messages]


def is_conversation(value: list[Any]) -> bool:
    """Return whether a row that is a list, and no object, is the turns of one conversation."""
    turns = objects(value)
    return turns is not None and all(any(key in turn for key in ROLE_KEYS[:3]) for turn in turns)


def read_system(value: Any) -> list[Message]:
    """Return the system prompt in its own field: a string, text parts or Gemini's content."""
    if value is None or value in ("", [], {}):
        return []
    value = value["parts"] if isinstance(value, dict) and "parts" in value else value
    if isinstance(value, list | dict):
        text = _BETWEEN.join(piece.value for piece in _pieces(value) if piece.kind == "text")
    else:
        text = text_of(value, "system")
    return [Message("system", text)] if text else []


def is_item(turn: Any) -> bool:
    """Return whether a turn of OpenAI's Responses is no message: a call, a result, thoughts, or what the provider
    ran.
    """
    kind = turn.get("type") if isinstance(turn, dict) and "role" not in turn else None
    return isinstance(kind, str) and (kind in _ITEMS or kind.endswith("_call"))


def read_turn(turn: Any) -> list[Message]:
    """Return one turn: mostly one message; a turn that holds tools' results gives one of each. Raise RowRefused."""
    if not isinstance(turn, dict):
        raise RowRefused("wrong-type", "messages: each one an object with role and content")
    plain, text = ROLES.get(str(turn.get("role"))), turn.get("content")
    if plain and len(turn) == 2 and isinstance(text, str) and turn["role"] not in _CALL_ROLES:
        text, calls = calls_in_text(text) if plain == "assistant" else (text, ())
        return [Message(plain, text, tool_calls=calls)]  # the usual turn, at half cost
    if is_item(turn):
        if turn["type"] not in _ITEMS:
            raise RowRefused(NOT_HELD, f"{turn['type']}: the provider ran it; its result is not logged")
        return _messages("assistant", [turn], {key: turn[key] for key in ("weight",) if key in turn})
    speaker = one_of(turn, *ROLE_KEYS)
    name = speaker.strip().lower() if isinstance(speaker, str) else ""
    if name not in ROLES:
        raise RowRefused("role-order", f"role {str(speaker)[:40]!r}: use system, user, assistant or tool")
    if media := next((key for key in _MEDIA_KEYS if turn.get(key)), None):
        raise RowRefused("unsupported-content", f"a message with {media}: only text can be learned")
    content = one_of(turn, *_CONTENT_KEYS)
    if name in _CALL_ROLES and "tool_calls" not in turn:
        called = parsed(content)
        if not isinstance(called, dict | list):
            raise RowRefused("bad-tool-call", f"{name}: not JSON")
        turn, content = {**turn, "tool_calls": called if isinstance(called, list) else [called]}, None
    role = ROLES[name]
    if role == "tool" and not any(_is_result(part) for part in listed(content)):
        return [result_message(result_text(content), turn.get("tool_call_id"), one_of(turn, "name", "tool_name"))]
    return _messages(role, content, turn)


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and _kind(part) in _RESULTS


def _messages(role: Role, content: Any, turn: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a turn. What an assistant says behind a result, it said when it knew the result: it is a
    message of its own. In other turns the results stand first.
    """
    pieces = list(_pieces(content))
    pieces += [_Piece("thought", turn[key]) for key in REASONING if isinstance(turn.get(key), str)][:1]
    if isinstance(turn.get("refusal"), str) and not any(piece.value for piece in pieces):
        pieces.append(_Piece("text", turn["refusal"]))
    results: list[_Piece] = []
    calls = parsed(one_of(turn, "tool_calls", "toolCalls"))
    if calls is None and isinstance(turn.get("function_call"), dict):  # OpenAI's older form
        calls = [turn["function_call"]]
    for call in (call for call in listed(calls) if call != {}):
        pieces.append(_Piece("call", read_call(call)))
        if (result := one_of(call, "result", "output")) is not None:  # Gemini CLI: parts, as of a turn
            parts = [part for part in listed(result) if _is_result(part)]
            text = "\n".join(_result(part).content for part in parts) if parts else result_text(result)
            call_id = pieces[-1].value.get("id")
            results.append(_Piece("result", result_message(text, call_id, None if call_id else one_of(call, "name"))))
    pieces += results
    if role != "assistant":
        if any(piece.kind == "call" for piece in pieces):
            raise RowRefused("role-order", f"a tool call in a turn of {role}")
        answered = [piece.value for piece in pieces if piece.kind == "result"]
        rest = [piece for piece in pieces if piece.kind == "text"]
        said = "".join(piece.value for piece in rest)
        return [*answered, *([_message(role, rest, turn)] if said or not answered else [])]
    messages: list[Message] = []
    for is_result, group in itertools.groupby(pieces, lambda piece: piece.kind == "result"):
        step = list(group)
        messages += [piece.value for piece in step] if is_result else [_message(role, step, turn)]
    return messages or [_message(role, [], turn)]


def _message(role: Role, pieces: Sequence[_Piece], turn: Mapping[str, Any]) -> Message:
    weight = one_of(turn, *_WEIGHTS)
    if weight not in (None, 0, 1):
        raise RowRefused("wrong-type", "a weight is 0 or 1: learn from it, or only read it")
    text = "".join(piece.value for piece in pieces if piece.kind == "text")
    calls = [piece.value for piece in pieces if piece.kind == "call"]
    thoughts = "\n".join(t.value.strip("\n") for t in pieces if t.kind == "thought" and t.value.strip())
    if role == "assistant":
        text, more = calls_in_text(text)
        calls += more
    return Message(
        role,
        text,
        weight=1.0 if weight is None else float(weight),
        name=turn["name"] if isinstance(turn.get("name"), str) else None,
        tool_calls=tuple(calls),
        reasoning=thoughts if thoughts and thoughts.strip() not in text else None,
    )


def conversation_of(
    name: str, messages: Sequence[Message], tools: Tools = (), changed: Sequence[str] = ()
) -> Conversation:
    """Return the conversation of the format `name`, from its first question to its last answer, with consecutive turns
    of one role as one. `changed`: reasons of severity warn.

    Raise RowRefused: no-answer, role-order when nobody asks anything, earlier-turns-missing.
    """
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "assistant"), None)
    if last is None:
        raise RowRefused("no-answer")
    changed = [*changed, *(["trailing-turns"] if last + 1 < len(messages) else [])]
    turns = list(messages[: last + 1])
    start = next(i for i, message in enumerate(turns) if message.role != "system")
    if turns[start].role == "tool":
        raise RowRefused("earlier-turns-missing", "the conversation begins with a tool's result: log all of its turns")
    if turns[start].role == "assistant":
        first_question = next((i for i in range(start, len(turns)) if turns[i].role == "user"), None)
        if first_question is None:
            raise RowRefused("role-order", "an answer, but no question: only `text` is learned without one")
        turns = turns[:start] + turns[first_question:]
        changed.append("leading-answer")
    merged = turns[:1]
    for message in turns[1:]:
        if _belongs(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    if len(merged) < len(turns):
        changed.append("merged-turns")
    return Conversation(name, tuple(merged), tools, changed=tuple(changed))


def _belongs(first: Message, second: Message) -> bool:
    """Return whether two turns are parts of one. A call and a text after it are not: the result is missing between
    them.
    """
    if first.role != second.role or first.role == "tool" or first.weight != second.weight or first.name != second.name:
        return False
    return not first.tool_calls or (bool(second.tool_calls) and not second.content.strip())


def _joined(first: Message, second: Message) -> Message:
    texts = [text for text in (first.content, second.content) if text]
    if first.content == second.content and not first.tool_calls and not second.tool_calls:
        texts = texts[:1]  # the same turn, logged twice
    return replace(
        first,
        content=_BETWEEN.join(texts),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        reasoning=_BETWEEN.join([text for text in (first.reasoning, second.reasoning) if text]) or None,
    )


def without_padding(conversation: Conversation) -> Conversation:
    """Return the conversation with calls whose arguments are null only where their tool allows it: a column of Arrow
    has every key that any of its rows has.
    """
    functions = [tool["function"] for tool in conversation.tools if isinstance(tool.get("function"), dict)]
    schemas = {function["name"]: function.get("parameters") for function in functions if "name" in function}
    if not schemas:
        return conversation

    def given(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        schema = schemas.get(function["name"], _ANYTHING)
        return {**call, "function": {**function, "arguments": _given(function["arguments"], schema)}}

    messages = conversation.messages
    given_calls = (replace(m, tool_calls=tuple(map(given, m.tool_calls))) if m.tool_calls else m for m in messages)
    return conversation._replace(messages=tuple(given_calls))


_ANYTHING = {"nullable": True}  # of a tool that is not listed


def _given(value: Any, schema: Any) -> Any:
    """Return a value without the null fields that its schema does not allow."""
    if schema is _ANYTHING:
        return value
    if isinstance(value, list):
        return [_given(item, one_of(schema, "items")) for item in value]
    if not isinstance(value, dict):
        return value
    properties = one_of(schema, "properties") or {}
    fields = {key: _given(item, properties.get(key)) for key, item in value.items()}
    return {key: item for key, item in fields.items() if item is not None or _is_nullable(properties.get(key))}


def _is_nullable(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, choices = schema.get("type"), [*listed(schema.get("anyOf")), *listed(schema.get("oneOf"))]
    allows = kinds == "null" or "null" in listed(kinds) or None in listed(schema.get("enum"))
    return allows or schema.get("nullable") is True or any(map(_is_nullable, choices))
