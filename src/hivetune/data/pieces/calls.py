"""Tool calls and the tools that may be called: from the forms of each provider to OpenAI's, which templates know."""

import json
import re
from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.said import Tools, objects, one_of, parsed
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
    return tuple(read)


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
