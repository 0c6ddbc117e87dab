"""Spans of calls of models: OpenTelemetry's semantic conventions for generative AI (messages as attributes of the span
or of its event, or an attribute for each field), and OpenInference. OTLP's batches hold many.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and https://arize-ai.github.io/openinference/spec/
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.answers import call_of, read_answer, read_request
from hivetune.data.pieces.format import Batch, Format
from hivetune.data.pieces.said import Conversation, Row, Tools, listed, objects, one_of, parsed
from hivetune.data.pieces.turns import conversation_of, read_system, read_tools
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_ASKED = ("gen_ai.input.messages", "gen_ai.prompt", "ai.prompt.messages", "ai.prompt")
_PLAIN_ANSWERS = ("ai.response.text", "ai.response.object")  # what the model wrote, also where it is JSON
_ANSWERED = ("gen_ai.output.messages", "gen_ai.completion", *_PLAIN_ANSWERS)
_TOOLS = ("gen_ai.tool.definitions", "ai.prompt.tools", "llm.request.functions")
# An attribute for each field of a turn: gen_ai.prompt.0.role, llm.input_messages.0.message.content.
_ASKED_TURNS, _ANSWERED_TURNS = ("gen_ai.prompt", "llm.input_messages"), ("gen_ai.completion", "llm.output_messages")
_OPERATION = "gen_ai.client.inference.operation.details"  # the event that holds attributes of its span
_NAMESPACES = ("llm", "gen_ai", "input", "output", "openinference")
_ATTRIBUTES = ("attributes", "span_attributes")
_SPAN_COLUMNS = ("span_id", "trace_id", "kind", "events", "context", "start_time")


def attributes(value: Any) -> dict[str, Any]:
    """Return attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: _typed(pair.get("value")) for pair in pairs}


def _typed(value: Any) -> Any:
    """Return a value of OTLP without the name of its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [_typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def read(row: Row) -> Conversation | None:
    """Return the conversation in a span's attributes, else in its input and output.

    Raise RowRefused: failed, not-a-model-call, or the problem with a turn.
    """
    held = parsed(one_of(row, *_ATTRIBUTES))
    if not isinstance(held, dict | list):
        return None
    flat = _dotted(attributes(held))
    if not any(key in row for key in _SPAN_COLUMNS) and not any(key.startswith(("gen_ai.", "llm.")) for key in flat):
        return None
    for event in objects(row.get("events")) or []:
        flat |= attributes(event.get("attributes")) if event.get("name") == _OPERATION else {}
    status = one_of(row.get("status"), "code", "status_code") or row.get("status_code") or row.get("status")
    if status in (2, "STATUS_CODE_ERROR", "ERROR") or flat.get("error.type"):
        raise RowRefused("failed", "the span's status is an error")
    found = _in_attributes(flat)
    if found is None and str(flat.get("openinference.span.kind")).upper() == "LLM" and flat.get("output.value"):
        asked, tools, changed = call_of(_decoded(flat.get("input.value")), _decoded(flat["output.value"]))
        return conversation_of("opentelemetry", asked, tools or _tools(flat), changed)
    if found is None:
        raise RowRefused("not-a-model-call", "the span holds no messages of a model")
    system = _decoded(flat.get("gen_ai.system_instructions"))
    if isinstance(system, list):
        system = [{**part, "text": part.get("content")} if isinstance(part, dict) else part for part in system]
    return conversation_of(
        "opentelemetry", [*(read_system(system) if found[0].role != "system" else []), *found], _tools(flat)
    )


def _dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return attributes with dotted names, where they are nested by these."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nests = isinstance(inner, dict) and name.partition(".")[0] in _NAMESPACES
        flat |= _dotted(inner, f"{name}.") if nests else {name: inner}
    return flat


def _decoded(value: Any) -> Any:
    """Return decoded JSON text, also of JSON text, as some exporters write objects."""
    if isinstance(value, str) and value[:1] == '"' == value[-1:]:
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return parsed(value)


def _tools(flat: Mapping[str, Any]) -> Tools:
    tools = parsed(one_of(flat, *_TOOLS))
    if tools is None:
        tools = [parsed(one_of(one_of(tool, "tool"), "json_schema")) for tool in listed(_below(flat, "llm.tools."))]
    return read_tools(tools) if isinstance(tools, list) else ()


def _in_attributes(flat: Mapping[str, Any]) -> list[Message] | None:
    asked, column = parsed(one_of(flat, *_ASKED)), next((key for key in _ANSWERED if flat.get(key)), "")
    answered = flat.get(column)
    answered = answered if column in _PLAIN_ANSWERS and isinstance(answered, str) else parsed(answered)
    if asked is None:
        asked = _indexed(flat, "user", _ASKED_TURNS)
        answered = answered or _indexed(flat, "assistant", _ANSWERED_TURNS)
    calls = parsed(flat.get("ai.response.toolCalls"))
    if isinstance(calls, list) and calls:
        answered = [{"role": "assistant", "content": answered or "", "tool_calls": calls}]
    if not asked or not answered:
        return None
    return [*read_request(asked).messages, *read_answer(answered)[0]]


def _below(flat: Mapping[str, Any], prefix: str) -> Any:
    """Return the attributes below `prefix`, nested by the dots in their names; objects whose keys are 0, 1, 2 ... as
    lists.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith(prefix):
            node = tree
            *path, last = key.removeprefix(prefix).split(".")
            for step in path:
                inner = node.setdefault(step, {})
                node = inner if isinstance(inner, dict) else node
            node[last] = value
    return _as_lists(tree)


def _as_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_as_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _as_lists(item) for key, item in value.items()}


def _indexed(flat: Mapping[str, Any], role: str, columns: tuple[str, ...]) -> list[dict[str, Any]] | None:
    """Return the turns below one of these names; a turn without a role gets `role`."""
    for name in columns:
        turns: list[dict[str, Any]] = []
        for turn in objects(_below(flat, f"{name}.")) or objects(parsed(flat.get(name))) or []:
            inner = _below(turn, "")
            fields = inner["message"] if isinstance(one_of(inner, "message"), dict) else inner
            calls = [one_of(call, "tool_call") or call for call in listed(fields.get("tool_calls"))]
            contents = [one_of(part, "message_content") or part for part in listed(fields.get("contents"))]
            turns.append({"role": role, **fields, "content": contents or fields.get("content"), "tool_calls": calls})
        if turns:
            return turns
    return None


def _spans(record: Row) -> Iterator[Row]:
    """Yield the spans of a batch, their attributes as objects, with those of their resource as defaults."""
    record = dict(record["trace"] if isinstance(record.get("trace"), dict) else record)  # Tempo
    for resource in objects(one_of(record, "resourceSpans", "batches")) or [record]:
        shared = attributes(one_of(resource.get("resource"), "attributes"))
        for scope in objects(one_of(resource, "scopeSpans")) or []:
            for span in objects(scope.get("spans")) or []:
                events = [
                    {**e, "attributes": attributes(e.get("attributes"))} for e in objects(span.get("events")) or []
                ]
                yield {**span, "attributes": {**shared, **attributes(span.get("attributes"))}, "events": events}


_READS = frozenset(("events", "resource", "scope", "status", "status_code", *_ATTRIBUTES, *_SPAN_COLUMNS))
FORMAT = Format("opentelemetry", read, needs=("|".join(_ATTRIBUTES),), reads=_READS)
SPANS_FORMAT = Batch("otlp-spans", _spans, needs=("resourceSpans", "batches", "scopeSpans", "trace"))
