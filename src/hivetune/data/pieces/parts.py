"""Contents of one turn: a text, or the typed parts of OpenAI, Anthropic, Gemini, Bedrock and agent frameworks.

Calls, and the tools that may be called, are read to OpenAI's form, which templates know.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hivetune.data.pieces.said import Conversation, Tools, all_texts, listed, objects, one_of, parsed, text_of
from hivetune.data.reasons import RowRefused

HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)
_RESPONSE_BEGINS, _RESPONSE_ENDS = "<tool_response>", "</tool_response>"


def read_call(call: Any) -> Mapping[str, Any]:
    """Return a tool call with its arguments as an object: templates write them as JSON, and would quote a string twice.

    Raise RowRefused("bad-tool-call").
    """
    if isinstance(custom := one_of(call, "custom"), dict) and isinstance(custom.get("name"), str):
        return plain_call(custom["name"], {"input": str(custom.get("input") or "")}, call.get("id"))
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, str) and "name" not in call:  # Inspect
        function = {**call, "name": function}
    name = one_of(function, "name", "toolName", "tool_name")
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowRefused("bad-tool-call")
    arguments = parsed(one_of(function, "arguments", "args", "input", "parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowRefused("bad-tool-call", f"the arguments of {name[:40]} are no JSON object")
    return plain_call(name, arguments, one_of(call, "call_id", "id", "toolUseId", "toolCallId", "tool_call_id"))


def plain_call(name: str, arguments: Mapping[str, Any], call_id: Any) -> Mapping[str, Any]:
    """Return a call in OpenAI's form; of a tool that takes plain text (a custom one) the text stands under `input`."""
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call_id, str) and call_id:
        plain["id"] = call_id
    return plain


def calls_in_text(text: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return an answer that holds Hermes' `<tool_call>{...}</tool_call>`: the text around them, and the calls.

    A text where one of them is not JSON stays as it is.
    """
    if "<tool_call>" not in text:
        return text, ()
    calls, rest, end = [], "", 0
    while (begin := text.find("<tool_call>", end)) >= 0:
        match = HERMES_CALL.match(text, begin)
        call = parsed(match.group(1)) if match is not None else None
        if match is None or not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, ()
        calls.append(read_call(call))
        rest, end = rest + text[end:begin], match.end()
    return (rest + text[end:]).strip(), tuple(calls)


def calls_as_text(text: str) -> tuple[Mapping[str, Any], ...]:
    """Return the calls of an answer that a log holds as JSON, OpenAI's list of calls; empty when it is something
    else.
    """
    if '"function"' not in text:
        return ()
    calls = objects(parsed(text))
    if calls is None or not all(call.get("type") == "function" and "id" in call for call in calls):
        return ()
    return tuple(read_call(call) for call in calls)


def result_text(value: Any) -> str:
    """Return the result of a tool, as text: strings and text parts as they are, anything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        bare = value.strip()
        wrapped = bare.startswith(_RESPONSE_BEGINS) and bare.endswith(_RESPONSE_ENDS)
        return bare.removeprefix(_RESPONSE_BEGINS).removesuffix(_RESPONSE_ENDS).strip() if wrapped else value
    if isinstance(value, list) and all(isinstance(one_of(part, "text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    for part in value if isinstance(value, list) else ():
        kind = one_of(part, "type")  # a document of Cohere's is text
        if kind in ("image", "image_url") or (kind == "document" and not isinstance(part.get("document"), dict)):
            raise RowRefused("unsupported-content", "a tool's result holds an image or a file")
    return json.dumps(value, ensure_ascii=False)


def read_tools(tools: Any) -> Tools:
    """Return the tools that a conversation may call, in OpenAI's form: a list, or the same as JSON text.

    Raise RowRefused("wrong-type").
    """
    tools = parsed(tools)
    if isinstance(tools, dict):  # Bedrock's toolConfig, or one tool alone
        tools = tools["tools"] if isinstance(tools.get("tools"), list) else [tools] if tools else None
    if tools is None or tools == "":
        return ()
    if isinstance(tools, list):
        tools = [parsed(tool) for tool in tools]
    if not isinstance(tools, list):
        raise RowRefused("wrong-type", "tools: a list of objects")
    read: list[Mapping[str, Any]] = []
    for tool in tools:
        several = one_of(tool, "functionDeclarations", "function_declarations")  # Gemini
        read += [_tool(entry) for entry in several] if isinstance(several, list) else [_tool(tool)]
    return tuple(_without_nulls(tool) for tool in read)


def _tool(tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise RowRefused("wrong-type", "tools: a list of objects")
    if isinstance(tool.get("function"), dict) and tool.get("type") == "function":
        return tool
    inner = one_of(tool, "function", "toolSpec")
    plain = inner if isinstance(inner, dict) else tool
    if not isinstance(plain.get("name"), str):
        return tool  # a provider's own tool, without a schema: as it came
    schema = one_of(plain, "parameters", "input_schema", "inputSchema", "parametersJsonSchema")
    if isinstance(schema, dict) and isinstance(schema.get("json"), dict):  # Bedrock
        schema = schema["json"]
    function = {"name": plain["name"]}
    function |= {key: plain[key] for key in ("description", "strict") if plain.get(key) is not None}
    if schema is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


_MEANT_NULLS = ("default", "const", "examples", "enum")  # keys of a schema that may hold null


def _without_nulls(schema: Any) -> Any:
    """Return a schema without keys whose value is null: a column of Arrow has every key that any of its rows has."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if value is not None or key in _MEANT_NULLS}
    return {key: value if key in _MEANT_NULLS else _without_nulls(value) for key, value in kept.items()}


def without_padding(conversation: Conversation) -> Conversation:
    """Return the conversation with calls whose arguments are null only where their tool allows it."""
    if not conversation.tools or not any(message.tool_calls for message in conversation.messages):
        return conversation
    schemas = {function["name"]: function.get("parameters") for function in _functions(conversation.tools)}
    messages = []
    for message in conversation.messages:
        calls = [_unpadded(call, schemas) for call in message.tool_calls]
        messages.append(replace(message, tool_calls=tuple(calls)) if calls else message)
    return conversation._replace(messages=tuple(messages))


def _functions(tools: Tools) -> list[Mapping[str, Any]]:
    functions = [tool.get("function") for tool in tools]
    return [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]


def _unpadded(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if function["name"] not in schemas:
        return call
    return {**call, "function": {**function, "arguments": _given(function["arguments"], schemas[function["name"]])}}


def _given(value: Any, schema: Any) -> Any:
    """Return a value without the null fields that its schema does not allow."""
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
    kinds = schema.get("type")
    choices = [*listed(schema.get("anyOf")), *listed(schema.get("oneOf"))]
    return (
        schema.get("nullable") is True
        or kinds == "null"
        or "null" in listed(kinds)
        or None in listed(schema.get("enum"))
        or any(map(_is_nullable, choices))
    )


_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "thought", "reasoning_content")
_CALLS = ("tool_use", "tool_call", "tool-call", "function_call", "toolUse", "functionCall", "toolRequest", "toolCall")
_RESULTS = (
    *("tool_result", "tool-result", "tool_call_response", "function_call_output", "toolResult", "functionResponse"),
    *("toolResponse", "tool-return", "retry-prompt", "custom_tool_call_output"),
)
# Keys below which Gemini, Bedrock and Goose put what a part is.
_INNER = (
    *("functionCall", "functionResponse", "toolUse", "toolCall", "toolResult", "tool_call", "function_call"),
    "function_response",
)
# Parts that say nothing to a model: signatures, hidden reasoning, marks of an agent's steps, what the provider found.
_SILENT = (
    *("redacted_thinking", "step-start", "step-finish", "snapshot", "cachePoint", "redacted_reasoning", "patch"),
    *("web_search", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
)
_SEARCHES = ("web_search", "web_fetch", "tool_search")  # what Anthropic's begin with, which the provider ran
_FILES = ("inlineData", "inline_data", "fileData", "file_data")
# The only key that tells the kind of a part: Gemini and Bedrock name no types; Gemini's names in Python.
_KINDS = {key: key for key in ("text", "functionCall", "functionResponse", "toolUse", "toolResult", "cachePoint")}
_KINDS |= {"function_call": "functionCall", "function_response": "functionResponse"}
_SIDES = (
    *(("input", "output"), ("user", "assistant"), ("question", "answer"), ("human", "assistant"), ("q", "a")),
    *(("user", "agent"), ("user", "bot")),
)
DETAILS = re.compile(r"<details type=\"reasoning\"[^>]*>\s*+(?:<summary>.*?</summary>)?+(.*?)</details>\s*", re.S)


@dataclass(slots=True)
class TurnContent:
    """The content of one turn, by kind. `results`: (text, call id, tool) of tools that answered."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    results: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "\n".join(thought.strip("\n") for thought in self.thoughts if thought.strip())


def read_content(content: Any) -> TurnContent:
    """Return a string, a part or a list of parts. Raise RowRefused: wrong-type, unsupported-content, bad-tool-call."""
    if isinstance(content, str):
        return TurnContent([content])
    if isinstance(content, dict) and ("type" in content or "text" in content):
        content = [content]
    if content is not None and not isinstance(content, list):
        raise RowRefused("wrong-type", "content: a string, or a list of parts")
    if all_texts(content):
        return TurnContent(["\n".join(content)])  # a text as its lines
    read = TurnContent()
    pieces = any(isinstance(part, str) for part in content or ())  # of one text, some of them bold or links
    for part in content or ():
        if pieces and isinstance(one_of(part, "text"), str) and _kind(part) not in _THOUGHTS:
            part = part["text"]
        if isinstance(part, str):
            read.texts.append(part)
        else:
            _add(read, part)
    return read


def _add(read: TurnContent, part: Any) -> None:
    if not isinstance(part, dict):
        raise RowRefused("unsupported-content", f"a part that is {type(part).__name__}: keep the text parts only")
    kind = _kind(part)
    if kind in _TEXTS:
        read.texts.append(_text(part, "text", "refusal", "content", "value"))
    elif kind in _THOUGHTS or str(kind).endswith("ReasoningContent"):  # the last: .NET's
        read.thoughts += _thoughts(part)
    elif kind in _CALLS:
        inner = _inner(part)
        if kind == "tool_use" and "name" in part and one_of(part, "input", "arguments", "args", "parameters") is None:
            hint = f"the log does not hold the input of the call of {str(part['name'])[:40]}"
            raise RowRefused("bad-tool-call", hint)
        read.calls.append(read_call(parsed(inner["value"]) if isinstance(inner.get("value"), str) else inner))
    elif kind == "custom_tool_call":
        text = text_of(part.get("input"), "input")
        read.calls.append(plain_call(str(part.get("name")), {"input": text}, part.get("call_id")))
    elif kind in _RESULTS:
        read.results.append(_result(_inner(part)))
    elif kind == "tool-invocation" or (str(kind).startswith("tool-") and "state" in part):
        inner = one_of(part, "toolInvocation")  # the AI SDK: a call that holds its result
        call = {"toolName": str(kind).removeprefix("tool-"), **(part if inner is None else inner)}
        result, call_id = one_of(call, "result", "output", "errorText"), call.get("toolCallId")
        if result is None:
            raise RowRefused("bad-tool-call", f"the call of {str(call['toolName'])[:40]} has no result")
        read.calls.append(plain_call(str(call["toolName"]), parsed(one_of(call, "args", "input") or {}), call_id))
        read.results.append((result_text(result), call_id if isinstance(call_id, str) else None, None))
    elif kind not in _SILENT:
        read.texts += _texts_within(kind, part)


def parts_in(text: str) -> list[Any] | None:
    """Return the parts of a turn that a table keeps as JSON text; None for any other text."""
    if not text.startswith("[{"):
        return None
    parts = objects(parsed(text))
    kinds = (*_TEXTS, *_THOUGHTS, *_CALLS, *_RESULTS, *_SILENT)
    return parts if parts and all("type" in part and _kind(part) in kinds for part in parts) else None


def has_results(content: Any) -> bool:
    """Return whether a list of parts holds results of tools."""
    return any(isinstance(part, dict) and _kind(part) in _RESULTS for part in listed(content))


def results_text(value: Any) -> str:
    """Return the result that stands beside its call, as text; Gemini's is a list of parts."""
    if has_results(value):
        return "\n".join(_result(_inner(part))[0] for part in value if _kind(part) in _RESULTS)
    return result_text(value)


def are_calls(content: Any) -> bool:
    """Return whether all parts of a content are calls as OpenAI's `tool_calls` hold them."""
    return bool(listed(content)) and all(isinstance(part, dict) and _is_call(part) for part in content)


def _is_call(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "function" and isinstance(part.get("function"), dict)


def _kind(part: Mapping[str, Any]) -> Any:
    """Return the type of a part, or the key that tells it."""
    if part.get("thought") is True and "text" in part:  # Gemini marks what it thought
        return "thought"
    if _is_call(part):
        return "tool_call"
    if "type" in part:
        searched = part["type"] == "server_tool_use" and str(part.get("name")).startswith(_SEARCHES)
        return "web_search" if searched else part["type"]
    if "part_kind" in part:  # Pydantic AI
        return part["part_kind"]
    if "reasoningContent" in part:
        return "reasoning"
    keys = [key for key, value in part.items() if value is not None]  # Python writes all the kinds that it is not
    if named_kind := next((kind for key, kind in _KINDS.items() if key in keys), None):
        return named_kind
    if "name" in keys and ("arguments" in keys or "args" in keys):
        return "tool_call"  # frameworks that give each kind a class and write its fields alone
    if "call_id" in keys or "tool_call_id" in keys:
        return "tool_result"
    return next(iter(keys), None)


def _text(part: Mapping[str, Any], *names: str) -> str:
    value = one_of(part, *names)
    if isinstance(value, dict):  # OpenAI's assistants: {"value": text, "annotations": []}
        value = value.get("value")
    if not isinstance(value, str):
        raise RowRefused("unsupported-content", "a text part without text")
    return value


def _texts_within(kind: Any, part: Mapping[str, Any]) -> list[str]:
    """Return the words of a document that a request holds as text, and of an answer with its sources (Anthropic,
    Bedrock). Raise RowRefused for other parts.
    """
    if isinstance(cited := part.get("citationsContent"), dict):
        return [_text(cited_part, "text") for cited_part in objects(cited.get("content")) or []]
    source = one_of(part.get("document"), "source") or part.get("source") if kind == "document" else None
    text = one_of(source, "data") if one_of(source, "type") == "text" else one_of(source, "text")
    if not isinstance(text, str):
        raise RowRefused("unsupported-content", f"a part of type {str(kind)[:40]!r}: keep the text parts only")
    return [f"{text}\n\n"]


def _thoughts(part: Mapping[str, Any]) -> list[str]:
    """Return thoughts as text, without encrypted ones."""
    inner = part.get("reasoningContent")
    part = inner.get("reasoningText", {}) if isinstance(inner, dict) else part
    if part.get("encrypted_content") or part.get("redacted") is True:
        part = {"summary": part.get("summary")}  # what else is there isn't meant to be seen
    value = one_of(part, "thinking", "reasoning", "text", "content", "summary", "value")
    if isinstance(value, list):
        return [text for item in value if isinstance(text := one_of(item, "text"), str)]
    value = value.get("text") if isinstance(value, dict) else value
    return [value] if isinstance(value, str) else []


def _inner(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part itself, or what stands below a key that names its kind."""
    inner = next((part[key] for key in _INNER if isinstance(part.get(key), dict)), part)
    if inner is not part and "status" in inner and "id" in part:  # Goose's calls and results
        value = inner.get("value", inner.get("error"))
        return {"id": part["id"], **(value if isinstance(value, dict) else {"content": value})}
    return inner


def _result(part: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    call_id = one_of(part, "tool_use_id", "toolUseId", "toolUseID", "tool_call_id", "toolCallId", "call_id", "id")
    name = one_of(part, "toolName", "tool_name", "name")
    if any(one_of(beside, *_FILES) is not None for beside in listed(part.get("parts"))):  # Gemini
        raise RowRefused("unsupported-content", "a tool's result holds an image or a file")
    value = one_of(part, "content", "output", "result", "response", "tool_result")
    if value is None:  # Amp
        value = one_of(part.get("run"), "result", "error")
        value = one_of(value, "output") or value
    if isinstance(value, dict) and "value" in value and value.get("type") in ("text", "json", "error-text"):
        value = value["value"]  # the AI SDK
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and "json" in value[0]:
        value = value[0]["json"]  # Bedrock
    return result_text(value), call_id if isinstance(call_id, str) else None, name if isinstance(name, str) else None


def question_and_answer(turn: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the question and the answer of a turn that holds both, each a text or its lines."""
    for names in _SIDES:
        values = [turn.get(name) for name in names]
        question, answer = ("\n".join(value) if all_texts(value) else value for value in values)
        if isinstance(question, str) and isinstance(answer, str):
            return question, answer
    return None


def split_thoughts(text: str) -> tuple[str, str]:
    """Return (thoughts, the answer itself) of a text in which a page shows the thoughts first, as Open WebUI does."""
    match = DETAILS.match(text.lstrip()) if "<details" in text else None
    if not match:
        return "", text
    lines = [line.removeprefix(">").removeprefix(" ") for line in match.group(1).strip().split("\n")]
    return "\n".join(lines).strip(), match.string[match.end() :]


def plain_parts(content: Any) -> Any:
    """Return a content whose parts are Semantic Kernel's, in .NET or in Python, as the parts that are known here."""
    if not any(isinstance(part, dict) and ("$type" in part or "content_type" in part) for part in listed(content)):
        return content
    parts: list[Any] = []
    for item in content:
        part = {key[:1].lower() + key[1:]: value for key, value in item.items()} if isinstance(item, dict) else {}
        kind = str(one_of(part, "$type", "content_type")).removesuffix("Content").lower().replace("_", "")
        called = one_of(part, "pluginName", "plugin_name"), one_of(part, "functionName", "function_name", "name")
        if kind == "functioncall":
            arguments = parsed(part.get("arguments"))
            named = {"id": part.get("id"), "name": "-".join(filter(None, called)), "input": arguments}
            parts.append({"type": "tool_use", **named})
        elif kind == "functionresult":
            ids = {"tool_use_id": one_of(part, "callId", "id"), "name": "-".join(filter(None, called))}
            parts.append({"type": "tool_result", "content": part.get("result"), **ids})
        else:
            parts.append({**part, "type": kind} if isinstance(item, dict) else item)
    return parts
