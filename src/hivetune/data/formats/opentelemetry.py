"""Spans: OpenTelemetry's semantic conventions for generative AI, their older forms, OpenInference, MLflow, Logfire.

Jaeger and Zipkin keep the attributes of a span as tags and its events as logs.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and https://arize-ai.github.io/openinference/spec/
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.answers import joined, read_answer, read_request
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, Tools, first_of, listed, objects, one_of, parsed
from hivetune.data.pieces.spans import attributes, decoded
from hivetune.data.pieces.turns import conversation_of, read_messages, read_system
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_PROMPT_KEYS = ("gen_ai.input.messages", "gen_ai.prompt", "ai.prompt.messages", "gen_ai.request.messages", "ai.prompt")
_PLAIN_ANSWERS = ("ai.response.text", "ai.response.object")  # what the model wrote, also where it is JSON
_ANSWER_KEYS = ("gen_ai.output.messages", "gen_ai.completion", "gen_ai.response.messages", *_PLAIN_ANSWERS)
_TOOLS = ("gen_ai.tool.definitions", "gen_ai.request.tools", "ai.prompt.tools", "llm.request.functions")
# Turns as attributes of their own, or as one list; prompts and completions without roles.
_PROMPT_TURNS = ("gen_ai.prompt", "llm.input_messages", "llm.prompts")
_ANSWERED_TURNS = ("gen_ai.completion", "llm.output_messages", "llm.completions", "llm.choices")
# Events that hold attributes of their span; events that Logfire keeps in one attribute.
_OF_SPAN = ("gen_ai.client.inference.operation.details", "gen_ai.content.prompt", "gen_ai.content.completion")
_EVENT_LISTS = ("events", "all_messages_events")
_WHOLE_TALK = "pydantic_ai.all_messages"  # of Logfire's agents: question and answer in one list
# What a span was given and gave back, program by program, and under which name its kind stands.
_MLFLOW_STEP = ("mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.spanType")
_INPUT_STEP = ("input.value", "output.value", "openinference.span.kind")
_STEPS = (_MLFLOW_STEP, _INPUT_STEP, ("request_data", "response_data", ""))
_MODEL_KINDS = ("LLM", "CHAT_MODEL")
# Spans as a table, a column for each attribute, as Phoenix exports them; of rows all names are plain ones.
_TABLE_COLUMNS = {
    f"attributes_{name.replace('.', '_')}": name
    for name in ("llm.input_messages", "llm.output_messages", "input.value", "output.value", "openinference.span.kind")
}
_ATTRIBUTES = ("attributes", "span_attributes", "tags")
_SPAN_COLUMNS = ("span_id", "trace_id", "kind", "events", "context", "start_time")
_NAMESPACES = ("llm", "gen_ai", "input", "output", "openinference")
_EVENT_ROLES = ("system", "user", "assistant", "tool")


def _is_span(row: Row) -> bool:
    name = first_of(row, _ATTRIBUTES)
    if name is None:
        return any(column in row for column in _TABLE_COLUMNS)
    value = parsed(row[name])
    if not isinstance(value, dict | list):
        return False
    if name == "tags":  # the attributes of a span; elsewhere tags describe a row
        pairs, dotted = objects(value), isinstance(value, dict) and any("." in key for key in value)
        if not (all("key" in pair and "value" in pair for pair in pairs) if pairs else dotted):
            return False
    if first_of(row, ("inputs", "input")) and first_of(row, ("outputs", "output")):
        return False  # a step that says beside its attributes what came in and out
    is_span = any(key in row for key in _SPAN_COLUMNS)
    return is_span or any(key.startswith(("gen_ai.", "llm.")) for key in attributes(value))


def read(row: Row) -> Conversation | None:
    """Return the conversation in a span's attributes, else in its events, else as a step."""
    if not _is_span(row):
        return None
    if (source := first_of(row, _ATTRIBUTES)) is not None:
        flat = _dotted(attributes(parsed(row[source])))
    else:
        flat = {name: parsed(row[column]) for column, name in _TABLE_COLUMNS.items() if row.get(column) is not None}
    events = _events(row, flat)
    status = row.get("status")
    status = (status if isinstance(status, str) else one_of(status, "code", "status_code")) or row.get("status_code")
    if status in (2, "STATUS_CODE_ERROR", "ERROR") or flat.get("error.type"):
        raise RowRefused("failed", "the span's status is an error")
    prompt, answered = _from_attributes(flat)
    if not prompt:
        prompt, answered = _from_events(events)
    if not prompt and (turns := objects(parsed(flat.get(_WHOLE_TALK)))):
        prompt = read_messages(turns, None)
    if not prompt:
        return _step(row, flat)
    system = decoded(flat.get("gen_ai.system_instructions"))
    if isinstance(system, list):
        system = [{**part, "text": part.get("content")} if isinstance(part, dict) else part for part in system]
    messages = [*(read_system(system) if prompt[0].role != "system" else []), *prompt, *answered]
    return conversation_of("opentelemetry", messages, _tools(flat))


def _dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nests = isinstance(inner, dict) and name.partition(".")[0] in _NAMESPACES
        flat |= _dotted(inner, f"{name}.") if nests else {name: inner}
    return flat


def _below(flat: Mapping[str, Any], prefix: str) -> Any:
    """Return the attributes below `prefix`, nested by the dots in their names."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if not key.startswith(prefix):
            continue
        node = tree
        *path, last = key.removeprefix(prefix).split(".")
        for step in path:
            inner = node.setdefault(step, {})
            node = inner if isinstance(inner, dict) else node
        node[last] = value
    return _as_lists(tree)


def _as_lists(value: Any) -> Any:
    """Return objects whose keys are 0, 1, 2 ... as lists."""
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_as_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _as_lists(item) for key, item in value.items()}


def _events(row: Row, flat: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a span. Those that hold attributes of it are laid over these."""
    events = list(objects(row.get("events")) or [])
    for log in objects(row.get("logs")) or []:  # Jaeger
        fields = attributes(log.get("fields"))
        events.append({"name": fields.get("event"), "attributes": fields})
    for event in events:
        if str(event.get("name")) in _OF_SPAN:
            flat |= attributes(event.get("attributes"))
    for key in _EVENT_LISTS:
        events += objects(parsed(flat.get(key))) or []
    return events


def _step(row: Row, flat: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a span itself: a call of a model. Of MLflow also the first span of a trace without
    such calls (the others of it hold no inputs then).

    Raise RowRefused: not-a-model-call, or the problem with the step.
    """
    for input_key, output_key, kind in _STEPS:
        if flat.get(input_key) is None or flat.get(output_key) is None:
            continue
        is_call = not kind or _kind(flat, kind) in _MODEL_KINDS
        is_first = not (row.get("parent_id") or row.get("parent_span_id"))
        if is_call or (input_key == _MLFLOW_STEP[0] and is_first):
            request = read_request(decoded(flat[input_key]))
            reply, changed = read_answer(decoded(flat[output_key]))
            messages = joined(request.messages, reply)
            return conversation_of("opentelemetry", messages, request.tools or _tools(flat), changed)
    raise RowRefused("not-a-model-call", "the span holds no messages of a model")


def _kind(flat: Mapping[str, Any], name: str) -> str:
    """Return the kind of a span; MLflow writes it as JSON."""
    return str(decoded(flat.get(name, ""))).upper()


def without_repeats(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spans of a trace of MLflow; spans around calls of a model repeat them, and lose their inputs."""
    flat = [attributes(span.get("attributes")) for span in spans]
    calls = [_kind(attributes_of, _MLFLOW_STEP[2]) in _MODEL_KINDS for attributes_of in flat]
    if not any(calls):
        return spans
    return [
        span if is_call else {**span, "attributes": {key: o[key] for key in o if key != _MLFLOW_STEP[0]}}
        for span, o, is_call in zip(spans, flat, calls, strict=True)
    ]


def _tools(flat: Mapping[str, Any]) -> Tools:
    tools = parsed(next((flat[key] for key in _TOOLS if flat.get(key)), None))
    if tools is None:
        tools = [one_of(one_of(tool, "tool"), "json_schema") for tool in listed(_below(flat, "llm.tools."))]
        tools = tools or _below(flat, "llm.request.functions.")
    return read_tools(tools) if isinstance(tools, list) else ()


def _from_attributes(flat: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    prompt = next((parsed(flat[key]) for key in _PROMPT_KEYS if flat.get(key)), None)
    column = next((key for key in _ANSWER_KEYS if flat.get(key)), "")
    answered = flat.get(column)
    if column not in _PLAIN_ANSWERS or not isinstance(answered, str):
        answered = parsed(answered)
    if prompt is None:
        prompt = _turns(flat, "user", _PROMPT_TURNS)
        answered = answered or _turns(flat, "assistant", _ANSWERED_TURNS)
    if isinstance(calls := parsed(flat.get("ai.response.toolCalls")), list) and calls:
        text = [{"type": "text", "text": answered}] if isinstance(answered, str) and answered else []
        answered = [{"role": "assistant", "content": [*text, *({**call, "type": "tool-call"} for call in calls)]}]
    if not prompt or not answered:
        return [], []
    return read_request(prompt).messages, read_answer(answered)[0]


def _from_events(events: list[dict[str, Any]]) -> tuple[list[Message], list[Message]]:
    """Return one event a message: gen_ai.user.message and so on, then gen_ai.choice."""
    prompt: list[Message] = []
    answered: list[Message] = []
    for event in events:
        kind = str(one_of(event, "name", "event.name"))
        # A message stands in its event, in the attributes (some programs write all of it as one text), or in the body.
        fields = {key: value for key, value in event.items() if key not in ("name", "event.name", "attributes", "body")}
        fields |= attributes(event.get("attributes"))
        if (content := fields.pop("gen_ai.event.content", None)) is not None:
            fields |= whole if isinstance(whole := parsed(content), dict) else {"content": content}
        fields |= event["body"] if isinstance(event.get("body"), dict) else {}
        role = kind.removeprefix("gen_ai.").removesuffix(".message")
        if kind.startswith("gen_ai.") and role in _EVENT_ROLES:
            prompt += read_messages([{**fields, "role": role, "content": parsed(fields.get("content"))}], None)
        elif kind == "gen_ai.choice" and not answered:
            message = parsed(fields.get("message")) or parsed(fields.get("content"))
            fields["message"] = message if isinstance(message, dict) else {"content": message}
            answered += read_answer({"choices": [fields]})[0]
    return (prompt, answered) if answered or any(message.role == "assistant" for message in prompt) else ([], [])


def _turns(flat: Mapping[str, Any], role: str, columns: tuple[str, ...]) -> list[dict[str, Any]] | None:
    """Return turns below one of these names: as attributes of their own (gen_ai.prompt.0.role,
    llm.input_messages.0.message.content), or as one list of objects; a turn without a role gets `role`.
    """
    for name in columns:
        turns = listed(_below(flat, f"{name}."))
        turns = turns or [_below(turn, "") for turn in objects(parsed(flat.get(name))) or []]
        plain: list[dict[str, Any]] = []
        for turn in (turn for turn in turns if isinstance(turn, dict)):
            inner = one_of(turn, "message", "prompt", "completion")
            fields = inner if isinstance(inner, dict) else turn
            calls = [one_of(call, "tool_call") or call for call in listed(fields.get("tool_calls"))]
            contents = [one_of(part, "message_content") or part for part in listed(fields.get("contents"))]
            content = contents or one_of(fields, "content", "text")
            plain.append({"role": role, **fields, "content": content, **({"tool_calls": calls} if calls else {})})
        if turns:
            return plain
    return None


_READS = (
    "events",
    "resource",
    "scope",
    "context",
    "logs",
    "references",
    "process",
    "status",
    "status_code",
    *_ATTRIBUTES,
)
FORMAT = Format(
    "opentelemetry",
    read,
    needs=("|".join((*_ATTRIBUTES, *_TABLE_COLUMNS)),),
    reads=frozenset((*_READS, *_SPAN_COLUMNS, *_TABLE_COLUMNS)),
)
