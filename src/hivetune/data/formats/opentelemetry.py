"""Spans: OpenTelemetry's semantic conventions for generative AI, their older forms, OpenInference, MLflow, Logfire.

Jaeger and Zipkin keep the attributes of a span as tags and its events as logs.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and https://arize-ai.github.io/openinference/spec/
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.answers import read_answer, read_request
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    Tools,
    first_of,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.spans import INPUTS, OUTPUTS, attributes, decoded, dotted, nested, step_said, tree_below
from hivetune.data.pieces.turns import in_order, read_messages, read_system
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

NAME = "opentelemetry"
OTEL_INPUT = ("gen_ai.input.messages", "gen_ai.prompt", "ai.prompt.messages", "gen_ai.request.messages", "ai.prompt")
OTEL_OUTPUT = (
    *("gen_ai.output.messages", "gen_ai.completion", "ai.response.text", "gen_ai.response.messages"),
    "ai.response.object",
)
PLAIN_OUTPUT = ("ai.response.text", "ai.response.object")  # what the model wrote, also where it is JSON
OTEL_TOOLS = ("gen_ai.tool.definitions", "gen_ai.request.tools", "ai.prompt.tools", "llm.request.functions")
GEN_AI_CONTENT = ("gen_ai.content.prompt", "gen_ai.content.completion")
# Turns as attributes of their own, or as one list; prompts and completions without roles.
ASKED_TURNS = ("gen_ai.prompt", "llm.input_messages", "llm.prompts")
ANSWERED_TURNS = ("gen_ai.completion", "llm.output_messages", "llm.completions", "llm.choices")
# Events that Logfire keeps in one attribute, and conversations of its agents, question and answer in one list.
EVENT_LISTS = ("events", "all_messages_events")
WHOLE_TALKS = ("pydantic_ai.all_messages",)
# What a span was given and gave back, program by program, and under which name its kind stands.
MLFLOW_STEP = ("mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.spanType")
STEPS = (
    MLFLOW_STEP,
    ("input.value", "output.value", "openinference.span.kind"),
    ("request_data", "response_data", ""),
)
MODEL_KINDS = ("LLM", "CHAT_MODEL")
PARENTS = ("parent_id", "parent_span_id")
# Spans as a table, a column for each attribute, as Phoenix exports them; of rows all names are plain ones.
TABLE_PREFIX = "attributes_"
TABLE_COLUMNS = {
    f"{TABLE_PREFIX}{name.replace('.', '_')}": name
    for name in ("llm.input_messages", "llm.output_messages", "input.value", "output.value", "openinference.span.kind")
}
STATUS = ("code", "status_code")
ATTRIBUTES = ("attributes", "span_attributes", "tags")
SPAN_COLUMNS = ("span_id", "trace_id", "kind", "events", "context", "start_time")
NAMESPACES = ("llm", "gen_ai", "input", "output", "openinference")
EVENT_ROLES = ("system", "user", "assistant", "tool")


def rows(row: Row) -> Conversation:
    flat = _span_attributes(row)
    events = _events(row, flat)
    status = row.get("status") if isinstance(row.get("status"), str) else one_of(row.get("status"), *STATUS)
    status = status or row.get("status_code")
    if status in (2, "STATUS_CODE_ERROR", "ERROR") or flat.get("error.type"):
        raise RowRefused("failed", "the span's status is an error")
    system = _system(flat)
    asked, answered = _from_attributes(flat)
    if not asked:
        asked, answered = _from_events(events)
    if not asked:
        asked = _whole(flat)
    if not asked:
        return _step(row, flat)
    messages, changed = in_order([*(system if asked[0].role != "system" else []), *asked, *answered])
    return Conversation(NAME, messages, _span_tools(flat), changed=changed, explained=_table_columns(row))


def _table_columns(row: Row) -> tuple[str, ...]:
    return tuple(column for column in row if column.startswith(TABLE_PREFIX))


def _span_attributes(row: Row) -> dict[str, Any]:
    """Return the attributes of a span under names with dots, however its exporter nests them; of a table those it
    has.
    """
    held = first_of(row, ATTRIBUTES)
    if held is not None:
        return dotted(attributes(parsed(row[held])), NAMESPACES)
    return {name: parsed(row[column]) for column, name in TABLE_COLUMNS.items() if row.get(column) is not None}


def _events(row: Row, flat: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a span. Those that hold attributes of it are laid over these."""
    events = list(objects(row.get("events")) or [])
    for log in objects(row.get("logs")) or []:  # Jaeger
        fields = attributes(log.get("fields"))
        events.append({"name": fields.get("event"), "attributes": fields})
    for event in events:
        if str(event.get("name")) in ("gen_ai.client.inference.operation.details", *GEN_AI_CONTENT):
            flat |= attributes(event.get("attributes"))
    for key in EVENT_LISTS:
        events += objects(parsed(flat.get(key))) or []
    return events


def _whole(flat: Mapping[str, Any]) -> list[Message]:
    turns = next((found for key in WHOLE_TALKS if (found := objects(parsed(flat.get(key))))), None)
    return read_messages(turns, None) if turns else []


def _step(row: Row, flat: Mapping[str, Any]) -> Conversation:
    """Return what the span says of itself: a call of a model. Of MLflow also the first span of a trace without such
    calls (the others of it hold no inputs then).

    Raise RowRefused: not-a-model-call, or what is wrong with the step.
    """
    for asked, answered, kind in STEPS:
        if flat.get(asked) is None or flat.get(answered) is None:
            continue
        is_call = not kind or span_kind(flat, kind) in MODEL_KINDS
        if is_call or (asked == MLFLOW_STEP[0] and not any(row.get(parent) for parent in PARENTS)):
            found = step_said(NAME, {"input": flat[asked], "output": flat[answered]}, None, is_call=is_call)
            return found._replace(tools=found.tools or _span_tools(flat), explained=_table_columns(row))
    raise RowRefused("not-a-model-call", "the span holds no messages of a model")


def span_kind(flat: Mapping[str, Any], name: str) -> str:
    """Return the kind of a span; MLflow writes it as JSON."""
    return str(decoded(flat.get(name, ""))).upper()


def without_what_repeats(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spans of a trace of MLflow; those around calls of a model repeat them, and lose their inputs."""
    flat = [attributes(span.get("attributes")) for span in spans]
    calls = [span_kind(one, MLFLOW_STEP[2]) in MODEL_KINDS for one in flat]
    if not any(calls):
        return spans
    return [
        span if is_call else {**span, "attributes": {key: one[key] for key in one if key != MLFLOW_STEP[0]}}
        for span, one, is_call in zip(spans, flat, calls, strict=True)
    ]


def _span_tools(flat: Mapping[str, Any]) -> Tools:
    tools = parsed(next((flat[key] for key in OTEL_TOOLS if flat.get(key)), None))
    if tools is None:
        tools = [one_of(one_of(tool, "tool"), "json_schema") for tool in listed(tree_below(flat, "llm.tools."))]
        tools = tools or tree_below(flat, "llm.request.functions.") or []
    return read_tools(tools) if isinstance(tools, list) else ()


def _system(flat: Mapping[str, Any]) -> list[Message]:
    system = decoded(flat.get("gen_ai.system_instructions"))
    if isinstance(system, list):
        system = [{**part, "text": part.get("content")} if isinstance(part, dict) else part for part in system]
    return read_system(system)


def _from_attributes(flat: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    asked = next((parsed(flat[key]) for key in OTEL_INPUT if flat.get(key)), None)
    column = next((key for key in OTEL_OUTPUT if flat.get(key)), "")
    answered = flat.get(column)
    if column not in PLAIN_OUTPUT or not isinstance(answered, str):
        answered = parsed(answered)
    if asked is None:
        asked = _turns_of(flat, "user", *ASKED_TURNS)
        answered = answered or _turns_of(flat, "assistant", *ANSWERED_TURNS)
    if flat.get("ai.response.toolCalls") and isinstance(parsed(flat["ai.response.toolCalls"]), list):
        calls = [{**call, "type": "tool-call"} for call in parsed(flat["ai.response.toolCalls"])]
        text = [{"type": "text", "text": answered}] if isinstance(answered, str) and answered else []
        answered = [{"role": "assistant", "content": [*text, *calls]}]
    if not asked or not answered:
        return [], []
    return read_request(asked).messages, read_answer(answered)[0]


def _from_events(events: list[dict[str, Any]]) -> tuple[list[Message], list[Message]]:
    """Return one event a message: gen_ai.user.message and so on, then gen_ai.choice."""
    asked: list[Message] = []
    answered: list[Message] = []
    for event in events:
        kind = str(one_of(event, "name", "event.name"))
        said = _said_in(event)
        role = kind.removeprefix("gen_ai.").removesuffix(".message")
        if kind.startswith("gen_ai.") and role in EVENT_ROLES:
            asked += read_messages([{**said, "role": role, "content": parsed(said.get("content"))}], None)
        elif kind == "gen_ai.choice" and not answered:
            message = parsed(said.get("message")) or parsed(said.get("content"))
            said["message"] = message if isinstance(message, dict) else {"content": message}
            answered += read_answer({"choices": [said]})[0]
    return (asked, answered) if answered or any(message.role == "assistant" for message in asked) else ([], [])


def _said_in(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event says of its message: in itself, in its attributes (some programs write all of it as one
    text), or in its body.
    """
    said = {key: value for key, value in event.items() if key not in ("name", "event.name", "attributes", "body")}
    said |= attributes(event.get("attributes"))
    content = said.pop("gen_ai.event.content", None)
    whole = parsed(content)
    if content is not None:
        said |= whole if isinstance(whole, dict) else {"content": content}
    return said | (event["body"] if isinstance(event.get("body"), dict) else {})


def _turns_of(flat: Mapping[str, Any], role: str, *names: str) -> list[dict[str, Any]] | None:
    """Return turns below one of these names: as attributes of their own (gen_ai.prompt.0.role,
    llm.input_messages.0.message.content), or as one list of objects; who names no role is `role`.
    """
    for name in names:
        turns = tree_below(flat, f"{name}.")
        turns = turns or [nested(turn, "") for turn in objects(parsed(flat.get(name))) or []]
        if turns:
            return [_turn(turn, role) for turn in turns if isinstance(turn, dict)]
    return None


def _turn(turn: dict[str, Any], role: str) -> dict[str, Any]:
    """Return a turn with the names of OpenInference replaced by the usual ones."""
    inner = one_of(turn, "message", "prompt", "completion")
    said = inner if isinstance(inner, dict) else turn
    calls = [one_of(call, "tool_call") or call for call in listed(said.get("tool_calls"))]
    contents = [one_of(part, "message_content") or part for part in listed(said.get("contents"))]
    plain = {"role": role, **said, "content": contents or one_of(said, "content", "text")}
    return {**plain, "tool_calls": calls} if calls else plain


def recognise(row: Row) -> bool:
    held = first_of(row, ATTRIBUTES)
    if held is None:
        return any(column in row for column in TABLE_COLUMNS)
    value = parsed(row[held])
    if not isinstance(value, dict | list) or (held == "tags" and not _are_attributes(value)):
        return False
    if first_of(row, INPUTS) and first_of(row, OUTPUTS):
        return False  # a step that says beside its attributes what came in and out
    if any(key in row for key in SPAN_COLUMNS):
        return True
    return any(key.startswith(("gen_ai.", "llm.")) for key in attributes(value))


def _are_attributes(tags: Any) -> bool:
    """Return whether tags are what a span says; elsewhere they are words about a row."""
    pairs = objects(tags)
    if pairs is not None:
        return all("key" in pair and "value" in pair for pair in pairs)
    return isinstance(tags, dict) and any("." in key for key in tags)


FORMAT = Format(
    NAME,
    recognise,
    rows,
    needs=frozenset((*ATTRIBUTES, *TABLE_COLUMNS)),
    rank=11,
    explains=frozenset(
        (*ATTRIBUTES, "events", "resource", "scope", "context", "logs", "references", "process", "message")
    ),
)
