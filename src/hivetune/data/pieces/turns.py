"""The conversion of turns of OpenAI (chat and Responses), Anthropic, Gemini and Ollama to messages. Tool calls, and the
tools that may be called, are converted to OpenAI's form."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from hivetune.data.columns import REASONING
from hivetune.data.pieces.format import NOT_HELD, Conversation, Tools
from hivetune.data.pieces.values import MAX_VALUES, all_texts, listed, objects, one_of, parsed, text_of
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
CONTENT_KEYS = ("content", "value", "parts", "text")
_WEIGHTS = ("weight", "train", "trainable", "loss_weight")  # OpenAI's name, and other programs'
_MEDIA = ("image", "image_url", "input_image", "input_file", "document")  # parts of a tool's result
_MEDIA_KEYS = ("images", "image", "audio", "video", "videos", "files", "attachments")
# Kinds of parts: OpenAI's (chat and Responses), Anthropic's, Gemini's, LM Studio's, and those of OpenTelemetry.
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "thought")
_CALLS = ("tool_use", "tool_call", "function_call", "custom_tool_call", "functionCall", "toolCallRequest")
_RESULTS = (
    *("tool_result", "tool_call_response", "function_call_output", "custom_tool_call_output", "functionResponse"),
    *("function_response", "toolCallResult"),
)
_SEARCHES = ("web_search", "web_fetch", "tool_search")  # what the names of Anthropic's begin with
# Parts that say nothing to a model: hidden thoughts, and searches of the web, of which the answer says what they found.
_SILENT = ("redacted_thinking", "web_search_call", *(f"{name}_tool_result" for name in _SEARCHES))
_UNTYPED = ("text", "functionCall", "functionResponse", "function_call", "function_response")
# Items of OpenAI's Responses that are not messages, but come among them.
ITEMS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
_HIDDEN_ITEMS = ("item_reference", "mcp_list_tools", "compaction")  # of which the provider keeps what the model saw
_THOUGHT_KEYS = ("thinking", "reasoning", "text", "content", "summary")
_BETWEEN = "\n\n"  # turns of one role that become one


def role_of(name: Any) -> Role | None:
    """Return the role that a program calls `name`; None for any other name."""
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


# Calls and tools.


def read_call(call: Any) -> Mapping[str, Any]:
    """Return a tool call in OpenAI's form, with its arguments as an object. Raise RowRefused("bad-tool-call")."""
    custom = one_of(call, "custom")
    function = custom or one_of(call, "function", "functionCall", "function_call") or call
    name = one_of(function, "name")
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowRefused("bad-tool-call")
    # Templates write arguments as JSON, and would quote a string of JSON twice.
    arguments = parsed(one_of(function, "arguments", "args", "input", "parameters"))
    if custom or one_of(call, "type") == "custom_tool_call":  # a tool that takes plain text
        arguments = {"input": str(one_of(function, "input") or "")}
    arguments = {} if arguments in (None, "") else arguments
    if not isinstance(arguments, dict):
        raise RowRefused("bad-tool-call", f"the arguments of {name[:40]} are not a JSON object: complete the call")
    call_id = one_of(call, "call_id", "id", "callId", "tool_call_id") or one_of(function, "id")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**plain, "id": str(call_id)} if isinstance(call_id, str | int) and call_id else plain


def read_tools(tools: Any) -> Tools:
    """Return the tools that a conversation may call, in OpenAI's form: a list, or the same as JSON text.

    Raise RowRefused("wrong-type").
    """
    tools = parsed(tools)
    if tools is None or tools in ("", [], {}):
        return ()
    read: list[Mapping[str, Any]] = []
    for tool in map(parsed, tools if isinstance(tools, list) else [tools]):
        declared = one_of(tool, "functionDeclarations", "function_declarations")  # Gemini
        read += [_plain_tool(function) for function in (declared if isinstance(declared, list) else [tool])]
    return tuple(map(_without_nulls, read))


def _plain_tool(tool: Any) -> Mapping[str, Any]:
    """Return a tool in OpenAI's form; those of Anthropic, Gemini and the Responses have its fields one level higher."""
    if not isinstance(tool, dict):
        raise RowRefused("wrong-type", "tools must be a list of objects")
    plain = tool["function"] if isinstance(tool.get("function"), dict) else tool
    if not isinstance(plain.get("name"), str) or (plain is not tool and tool.get("type") == "function"):
        return tool  # as it is, or a provider's own tool without a schema
    function = {key: plain[key] for key in ("name", "description", "strict") if plain.get(key) is not None}
    if (schema := one_of(plain, "parameters", "input_schema", "inputSchema", "parametersJsonSchema")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


_HOLD_VALUES = ("default", "const", "examples", "enum")  # keys of a schema that hold values and no schemas
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def _without_nulls(schema: Any) -> Any:
    """Return a schema without keys whose value is null, but a default of null where null is allowed."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _HOLD_VALUES else _without_nulls(value)
        for key, value in schema.items()
        if value is not None or (key == "default" and _allow_null(_stood_for([schema], schema)))
    }


def without_padding(conversation: Conversation) -> Conversation:
    """Return the conversation without arguments of calls that are null, except where the tool's schema allows null."""
    # A column of Arrow has every key that any of its rows has, so that calls of one tool have the arguments of all.
    functions = [one_of(tool, "function") for tool in conversation.tools]
    schemas = {name: one_of(one, "parameters") for one in functions if isinstance(name := one_of(one, "name"), str)}

    def given(message: Message) -> Message:
        calls = [dict(call) for call in message.tool_calls]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name in schemas:
                call["function"] = {**call["function"], "arguments": _given(arguments, [schemas[name]], schemas[name])}
        return replace(message, tool_calls=tuple(calls)) if calls else message

    return conversation._replace(messages=tuple(map(given, conversation.messages))) if schemas else conversation


def _given(value: Any, schemas: Sequence[Any], parameters: Any) -> Any:
    """Return a value without the null fields that none of its schemas allows. `parameters`: the tool's whole schema."""
    items = list(value.values()) if isinstance(value, dict) else listed(value)
    if not any(item is None or isinstance(item, list | dict) for item in items):
        return value
    known = _stood_for(schemas, parameters)
    if isinstance(value, list):
        return [_given(item, [one_of(schema, "items") for schema in known], parameters) for item in value]
    own = {key: [one_of(one_of(schema, "properties"), key) for schema in known] for key in value}
    return {
        key: _given(item, own[key], parameters)
        for key, item in value.items()
        if item is not None or _allow_null(_stood_for(own[key], parameters))
    }


def _stood_for(schemas: Sequence[Any], parameters: Any) -> list[Mapping[str, Any]]:
    """Return schemas and those that they stand for: behind `$ref`, and one of several."""
    found: list[Mapping[str, Any]] = [schema for schema in schemas if isinstance(schema, dict)]
    for schema in itertools.islice(found, MAX_VALUES):  # which grows meanwhile, and without an end if one holds itself
        named = reduce(one_of, str(schema.get("$ref", "")).split("/")[1:], parameters) if "$ref" in schema else None
        others = [named, *(one for key in _ALTERNATIVES for one in listed(schema.get(key)))]
        found += [one for one in others if isinstance(one, dict)]
    return found


def _allow_null(schemas: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of these schemas names null among its types or its values."""
    return any(
        schema.get("type") == "null"
        or "null" in listed(schema.get("type"))
        or schema.get("nullable") is True
        or None in listed(schema.get("enum"))
        for schema in schemas
    )


# From a turn to messages: each part of it is read as a message of its own, and these are joined.


def read_turn(turn: Any) -> list[Message]:
    """Return one turn: mostly one message; a turn with tools' results gives one of each. Raise RowRefused."""
    if not isinstance(turn, dict):
        raise RowRefused("wrong-type", "each message must be an object with role and content")
    plain, text = ROLES.get(str(turn.get("role"))), turn.get("content")
    if plain and len(turn) == 2 and isinstance(text, str) and turn["role"] not in _CALL_ROLES:
        return [Message(plain, text)]  # the usual turn, at half cost
    weight = one_of(turn, *_WEIGHTS)
    if weight not in (None, 0, 1):
        raise RowRefused("wrong-type", "weight must be 1 (learn from the message) or 0 (only read it)")
    about: dict[str, Any] = {"weight": 1.0 if weight is None else float(weight)}
    if is_item(turn):
        if turn["type"] not in ITEMS:
            raise RowRefused(NOT_HELD, f"{turn['type']} is with the provider, and what it holds is not in the log")
        role, parts = ROLES["assistant"], [turn]
    else:
        role, parts = _role_and_parts(turn)
        about["name"] = turn["name"] if isinstance(turn.get("name"), str) else None
    read = [message for part in parts for message in _read_part(role, part)]
    if role != "assistant":
        if any(message.tool_calls for message in read):
            raise RowRefused("role-order", f"a turn of the {role} has a tool call: only the assistant can call a tool")
        # Results come first: the user speaks when the tools are done.
        read = sorted((m for m in read if not m.reasoning), key=lambda message: message.role != "tool")
    messages: list[Message] = []
    for message in read or [Message(role, "")]:
        # What an assistant says after a result, it said when it knew the result: it is a message of its own.
        if messages and messages[-1].role == message.role != "tool":
            messages[-1] = _joined(messages[-1], message, "")
        else:
            messages.append(message)
    for i, message in enumerate(messages):
        if message.role != "tool":
            is_repeated = (message.reasoning or "").strip() in message.content  # some programs write thoughts twice
            messages[i] = replace(message, **about, reasoning=None if is_repeated else message.reasoning)
    return messages


def _role_and_parts(turn: Mapping[str, Any]) -> tuple[Role, list[Any]]:
    """Return the role of a turn, and its parts: content, reasoning before it, and calls."""
    speaker, content = one_of(turn, *ROLE_KEYS), one_of(turn, *CONTENT_KEYS)
    name = speaker.strip().lower() if isinstance(speaker, str) else ""
    if name not in ROLES:
        raise RowRefused("role-order", f"unknown role {str(speaker)[:40]!r}: use system, user, assistant or tool")
    if media := next((key for key in _MEDIA_KEYS if turn.get(key)), None):
        raise RowRefused("unsupported-content", f"a message has {media}: keep the text parts only")
    calls = parsed(one_of(turn, "tool_calls", "toolCalls", "function_call"))  # the last: OpenAI's older form, one call
    if calls is None and name in _CALL_ROLES:
        calls, content = parsed(content), None
        calls = calls if isinstance(calls, dict | list) else [calls]
    if ROLES[name] == "tool" and not any(_kind(part) in _RESULTS for part in objects(content) or []):
        result = {"type": "tool_result", "content": content, "name": one_of(turn, "name", "tool_name")}
        return "tool", [{**result, "tool_call_id": turn.get("tool_call_id")}]
    parts = _listed_parts(content)
    if thoughts := next((turn[key] for key in REASONING if isinstance(turn.get(key), str)), ""):
        parts.append({"type": "thinking", "thinking": thoughts})
    for call in [calls] if isinstance(calls, dict) else listed(calls):
        if call != {}:
            parts.append({**(call if isinstance(call, dict) else {}), "type": "tool_call"})
    return ROLES[name], parts


def _listed_parts(content: Any) -> list[Any]:
    """Return the texts and parts of a content as a list. Raise RowRefused("wrong-type")."""
    if isinstance(content, str) or (isinstance(content, dict) and ("type" in content or "text" in content)):
        return [content]
    if all_texts(content):
        return ["\n".join(content)]  # a text as its lines
    if content is not None and not isinstance(content, list):
        raise RowRefused("wrong-type", "content must be a string or a list of parts")
    return list(content or ())


def _read_part(role: Role, part: Any) -> Iterator[Message]:
    """Yield a part as a message, an empty one not at all. Raise RowRefused: unsupported-content, bad-tool-call."""
    kind = "text" if isinstance(part, str) else _kind(part)
    if kind in _TEXTS:
        text = part if isinstance(part, str) else one_of(part, "text", "refusal", "content")
        if not isinstance(text, str):
            raise RowRefused("unsupported-content", "a text part has no text: remove the part")
        yield from [Message(role, text)] if text else []
    elif kind in _THOUGHTS:
        # Of encrypted thoughts only the summary is meant to be seen.
        names = ("summary",) if part.get("encrypted_content") else _THOUGHT_KEYS
        value = next((part[name] for name in names if part.get(name)), None)
        for item in value if isinstance(value, list) else [value]:
            text = one_of(item, "text") if isinstance(item, dict) else item
            if isinstance(text, str) and text.strip():
                yield Message(role, "", reasoning=text.strip("\n"))
    elif kind in _CALLS:
        if kind == "tool_use" and one_of(part, "input", "arguments") is None:
            raise RowRefused("bad-tool-call", f"the log lacks the input of {str(part.get('name'))[:40]}: complete it")
        yield Message(role, "", tool_calls=(read_call(part),))
    elif kind in _RESULTS:
        yield _result(part)
    elif kind not in _SILENT:
        raise RowRefused("unsupported-content", f"a part has the type {str(kind)[:40]!r}: keep the text parts only")


def _kind(part: Any) -> Any:
    """Return the type of a part, or the key that implies it."""
    if not isinstance(part, dict):
        fact = f"a message has a part of type {type(part).__name__}, not a text: keep the text parts only"
        raise RowRefused("unsupported-content", fact)
    if part.get("thought") is True and "text" in part:  # Gemini marks what it thought
        return "thought"
    if part.get("type") == "server_tool_use" and str(part.get("name")).startswith(_SEARCHES):
        return _SILENT[0]
    if "type" in part:
        return part["type"]
    # Gemini names no types: the only key tells the kind. Its library for Python writes the other keys too, with null.
    keys = [key for key, value in part.items() if value is not None]
    return next((key for key in keys if key in _UNTYPED), next(iter(keys), None))


def _result(part: Mapping[str, Any]) -> Message:
    """Return the message of a tool: strings and text parts as they are, anything else as JSON. An id or a name that is
    no text is left out. Raise RowRefused("unsupported-content") for an image.
    """
    inner = one_of(part, "functionResponse", "function_response") or part
    value = one_of(inner, "content", "output", "result", "response", "tool_result")
    value = parsed(value) if part.get("type") == "toolCallResult" else value  # LM Studio writes parts as JSON text
    if any(one_of(item, "type") in _MEDIA for item in listed(value)) or (inner is not part and one_of(inner, "parts")):
        raise RowRefused("unsupported-content", "the result of a tool has an image or a file: keep its text only")
    if isinstance(value, dict) and value.keys() == {"output"}:
        value = value["output"]  # Gemini's programs
    if isinstance(value, list) and all(isinstance(one_of(item, "text"), str) for item in value):
        value = "\n".join(item["text"] for item in value)
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    call_id, name = one_of(inner, "tool_use_id", "tool_call_id", "callId", "call_id", "id"), one_of(inner, "name")
    call = str(call_id) if isinstance(call_id, str | int) and call_id else None
    return Message("tool", text, name=name if isinstance(name, str) else None, tool_call_id=call)


def _joined(first: Message, second: Message, between: str) -> Message:
    thoughts = [text for text in (first.reasoning, second.reasoning) if text]
    return replace(
        first,
        content=between.join(text for text in (first.content, second.content) if text),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        reasoning=(between or "\n").join(thoughts) or None,
    )


# From turns to a conversation.


def read_turns(
    turns: Iterable[Any], read: Callable[[Any], list[Message]] = read_turn, *, logged: bool = False
) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages of all turns, and the changes as keys of REASONS or REWRITTEN.

    `logged`: the turns come from a program's log, not from rows that somebody prepared. Such a conversation ends before
    a turn with an image, a file or a tool that the log lacks, and is set aside if nothing is learned before that turn,
    or if it has no question. Raise RowRefused.
    """
    messages: list[Message] = []
    cut: tuple[str, ...] = ()
    after_item = False
    for turn in turns:
        if turn is None or one_of(turn, "type") in _SILENT:
            continue
        try:
            found, item = read(turn), is_item(turn)
        except RowRefused as refused:
            if not logged or refused.reason not in (NOT_HELD, "unsupported-content"):
                raise
            if not any(message.role == "assistant" and message.weight for message in messages):
                raise RowRefused(NOT_HELD, refused.hint) from None
            cut = ("ends-before-media",)  # what follows rests on what nobody can read
            break
        if (item or after_item) and messages and found and _belongs(messages[-1], found[0]):
            found = [_joined(messages.pop(), found[0], _BETWEEN), *found[1:]]  # one answer, item by item
        messages += found
        after_item = item
    roles = [message.role for message in messages]
    if logged and "user" not in roles:
        raise RowRefused("earlier-turns-missing", "the conversation has no question: log it from its beginning")
    if logged and "assistant" not in roles[roles.index("user") :]:
        raise RowRefused(NOT_HELD, "the conversation has no answer after its first question")
    return messages, cut


def read_messages(turns: Any, system: Any) -> list[Message]:
    """Return every turn of a list, after `system` unless the list has its own. Raise RowRefused."""
    if not isinstance(turns, list):
        raise RowRefused("wrong-type", "messages must be a list of objects")
    return with_system(read_turns(turns)[0], system)


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Return messages after the system prompt (a string, text parts or Gemini's content), unless they begin with their
    own. Raise RowRefused("empty-turn") if there are no messages.
    """
    if not messages:
        raise RowRefused("empty-turn", "the list of messages is empty: fill it in or delete the row")
    if messages[0].role == "system" or not system:
        return messages
    system = system["parts"] if isinstance(system, dict) and "parts" in system else system
    if isinstance(system, list | dict):
        parts = (message for part in _listed_parts(system) for message in _read_part("system", part))
        text = _BETWEEN.join(message.content for message in parts if message.content)
    else:
        text = text_of(system, "system")
    return [Message("system", text), *messages] if text else messages


def is_item(turn: Any) -> bool:
    """Return whether a turn of OpenAI's Responses is a call, a result, thoughts, or a tool run by the provider."""
    kind = turn.get("type") if isinstance(turn, dict) and "role" not in turn else None
    return isinstance(kind, str) and (kind in (*ITEMS, *_HIDDEN_ITEMS) or kind.endswith(("_call", "_call_output")))


def is_conversation(value: list[Any]) -> bool:
    """Return whether a row is a list of turns (instead of an object), and so one conversation."""
    turns = objects(value)
    return turns is not None and all(any(key in turn for key in ROLE_KEYS[:3]) for turn in turns)


def conversation_of(
    name: str, messages: Sequence[Message], tools: Tools = (), changed: Sequence[str] = ()
) -> Conversation:
    """Return the conversation of the format `name`, from its first question to its last answer, with consecutive turns
    of one role joined. `changed`: what was changed, as keys of REASONS or REWRITTEN.

    Raise RowRefused: empty-turn, role-order if there is no question, earlier-turns-missing.
    """
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise RowRefused("empty-turn", "the row has no answer of the assistant: add it, or delete the row")
    end = len(roles) - roles[::-1].index("assistant")
    begin = next(i for i, role in enumerate(roles) if role != "system")
    if roles[begin] == "tool":
        raise RowRefused("earlier-turns-missing", "the conversation begins with a tool's result: log all of its turns")
    if "user" not in roles[:end]:
        raise RowRefused("role-order", "the row has an answer, but no question: add it, or map text=COLUMN")
    turns = [*messages[:begin], *messages[roles.index("user") if roles[begin] == "assistant" else begin : end]]
    joined: list[Message] = []
    for message in turns:
        if not joined or not _belongs(joined[-1], message):
            joined.append(message)
            continue
        is_repeated = message.content == joined[-1].content and not message.tool_calls  # logged twice
        joined[-1] = _joined(joined[-1], replace(message, content="") if is_repeated else message, _BETWEEN)
    warnings = {"trailing-turns": end < len(roles), "leading-answer": roles[begin] == "assistant"}
    warnings["merged-turns"] = len(joined) < len(turns)
    changed = (*changed, *(reason for reason, is_true in warnings.items() if is_true))
    return Conversation(name, tuple(joined), tools, changed=changed)


def _belongs(first: Message, second: Message) -> bool:
    """Return whether two turns are parts of one."""
    if first.role != second.role or first.role == "tool" or first.weight != second.weight or first.name != second.name:
        return False
    # Between a call and a text the result is missing; calls that were made at once are adjacent.
    return not first.tool_calls or (bool(second.tool_calls) and not second.content.strip())
