"""Steps of traces: runs of LangSmith and LangChain, observations of Langfuse, spans of OpenTelemetry.

A trace holds many steps that are no model's answer (tools, retrievers, chains around a call); they are set aside.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.layouts.answers import is_response, read_answer, read_request
from hivetune.data.rows.layouts.calls import read_tools
from hivetune.data.rows.layouts.columns import column_kind, looks_like_content
from hivetune.data.rows.layouts.records import joined
from hivetune.data.rows.layouts.said import (
    Conversation,
    Row,
    RowLayout,
    Tools,
    first_of,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.rows.layouts.turns import in_order, read_messages, read_system
from hivetune.records import Message

MODEL_RUNS = ("llm", "chat_model", "chat")
MODEL_STEPS = ("GENERATION", "TRACE")
INPUTS, OUTPUTS = ("inputs", "input"), ("outputs", "output", "expected_output")
# What a step may be given besides its question without changing what is asked.
SETTINGS = (
    "messages",
    "input",
    "prompt",
    "prompts",
    "message",
    "question",
    "query",
    "system",
    "system_prompt",
    "chat_history",
    "history",
)
OTEL_INPUT = ("gen_ai.input.messages", "gen_ai.prompt", "ai.prompt.messages", "gen_ai.request.messages")
OTEL_OUTPUT = ("gen_ai.output.messages", "gen_ai.completion", "ai.response.text", "gen_ai.response.messages")
OTEL_TOOLS = ("gen_ai.tool.definitions", "gen_ai.request.tools", "ai.prompt.tools", "llm.request.functions")
# Spans as a table, a column for each attribute, as Phoenix exports them; of rows all names are plain ones.
TABLE_PREFIX = "attributes_"
TABLE_COLUMNS = {
    f"{TABLE_PREFIX}{name.replace('.', '_')}": name
    for name in ("llm.input_messages", "llm.output_messages", "input.value", "output.value", "openinference.span.kind")
}
EVENT_ROLES = ("system", "user", "assistant", "tool")


def _run(name: str, row: Row) -> Conversation:
    """LangSmith: `run_type`, `inputs`, `outputs`; its data sets have no type."""
    kind = row.get("run_type")
    if kind is not None and kind not in MODEL_RUNS and (kind != "chain" or row.get("parent_run_id")):
        raise RowRefused("not-a-model-call", f"a run of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the run failed: {str(row['error'])[:80]}")
    return _step(name, row, row.get("extra"), is_call=kind in MODEL_RUNS)


def _observation(name: str, row: Row) -> Conversation:
    """Langfuse: observations, traces and items of a data set."""
    kind = one_of(row, "type", "observation_type")
    if isinstance(kind, str) and kind.isupper() and kind not in MODEL_STEPS:
        raise RowRefused("not-a-model-call", f"an observation of type {kind[:40]}")
    if row.get("level") == "ERROR":
        raise RowRefused("failed", f"the call failed: {str(row.get('status_message'))[:80]}")
    return _step(name, row, row.get("model_parameters"), is_call=kind == "GENERATION")


def _step(name: str, row: Row, settings: Any, *, is_call: bool) -> Conversation:
    """`is_call`: the step is a call of a model, so its input is a request; else a chain with inputs of its own."""
    asked_column, answered_column = first_of(row, INPUTS), first_of(row, OUTPUTS)
    asked = _decoded(row[asked_column]) if asked_column else None
    answered = _decoded(row[answered_column]) if answered_column else None
    _refuse_half(asked, answered)
    if isinstance(asked, dict) and "role" in asked and "content" in asked:
        asked = [asked]
    if isinstance(asked, dict) and not is_call and len(asked) == 1:
        only = next(iter(asked.values()))
        asked = asked if isinstance(only, dict) else parsed(only)  # {"topic": text}: a chain with one input
    if isinstance(asked, dict):
        _refuse_more(asked)
        asked = _only_prompt(asked)
    request = read_request(_from_transcript(asked))
    said, changed = read_answer(_only_text(answered))
    tools = request.tools or read_tools(one_of(one_of(settings, "invocation_params"), "tools"))
    messages, more = in_order(joined(request.messages, said))
    columns = (asked_column or "", answered_column or "")
    return Conversation(name, messages, tools, changed=(*changed, *more), explained=columns)


def _only_prompt(asked: Mapping[str, Any]) -> Any:
    """LangChain gives a model that completes texts a list of prompts, mostly of one."""
    prompts = asked.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        return asked
    if len(prompts) != 1:
        raise RowRefused("unsupported-content", f"a call with {len(prompts)} prompts: a row for each is needed")
    return prompts[0]


def _refuse_half(asked: Any, answered: Any) -> None:
    if answered in (None, "", [], {}, "None", "null"):  # Python's and JSON's nothing, as text
        raise RowRefused("not-a-model-call", "the step has no output")
    if asked is None:
        raise RowRefused("not-a-model-call", "the step has no input")


def _decoded(value: Any) -> Any:
    """JSON text, or JSON text within JSON text, as some exporters write objects."""
    if isinstance(value, str) and value[:1] == '"' and value[-1:] == '"':
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return parsed(value)


def _only_text(answered: Any) -> Any:
    """A chain's output is an object with one text under any name."""
    if isinstance(answered, dict) and len(answered) == 1 and not is_response(answered):
        return next(iter(answered.values()))
    return answered


def _from_transcript(asked: Any) -> Any:
    """The turns of messages that were written as one text, where those are a system prompt and one question.

    Raises RowRefused: of more speakers nobody can tell which of its lines are turns.
    """
    speakers = _SPEAKER.findall(asked) if isinstance(asked, str) else []
    if len(speakers) < 2:
        return asked
    if not _SYSTEM_FIRST.match(asked) or [name.lower() for name in speakers[1:]] != ["user"]:
        raise RowRefused("rendered-text", "the request is one text with several speakers: log its messages as a list")
    _, system, question = _SPEAKER_LINE.split(asked)
    return [{"role": "system", "content": system.strip()}, {"role": "user", "content": question.strip()}]


_SPEAKER = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.M | re.I)
_SPEAKER_LINE = re.compile(r"^(?:system|developer|user): ", re.M | re.I)
_SYSTEM_FIRST = re.compile(r"(?:system|developer): ", re.I)


def _refuse_more(asked: Mapping[str, Any]) -> None:
    """A step that was given more than a question: what else stood in its prompt isn't known."""
    if "messages" in asked or "contents" in asked:
        return
    for key, value in asked.items():
        if plain_name(key) not in SETTINGS and column_kind(plain_name(key)) != "note" and looks_like_content(value):
            raise RowRefused(
                "unexplained-column", f"the step was also given {key[:40]!r}: use the call of the model itself"
            )


def _span(name: str, row: Row) -> Conversation:
    """OpenTelemetry's semantic conventions for generative AI, their older forms, OpenInference and the AI SDK."""
    flat = _span_attributes(row)
    events = [event for event in listed(row.get("events")) if isinstance(event, dict)]
    for event in events:
        if str(event.get("name")) in ("gen_ai.client.inference.operation.details", *GEN_AI_CONTENT):
            flat |= attributes(event.get("attributes"))
    status = one_of(row.get("status"), "code", "status_code")
    if status in (2, "STATUS_CODE_ERROR", "ERROR") or flat.get("error.type"):
        raise RowRefused("failed", "the span's status is an error")
    system = _system(flat)
    asked, answered = _from_attributes(flat)
    if not answered:
        asked, answered = _from_events(events)
    if not answered:
        raise RowRefused("not-a-model-call", "the span holds no messages of a model")
    messages, changed = in_order([*(system if not asked or asked[0].role != "system" else []), *asked, *answered])
    columns = tuple(column for column in row if column.startswith(TABLE_PREFIX))
    return Conversation(name, messages, _span_tools(flat), changed=changed, explained=columns)


def _span_attributes(row: Row) -> dict[str, Any]:
    """The attributes of a span under names with dots, however its exporter nests them; of a table those it has."""
    if "attributes" in row:
        return _dotted(attributes(row["attributes"]))
    return {name: parsed(row[column]) for column, name in TABLE_COLUMNS.items() if row.get(column) is not None}


def _dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nests = isinstance(inner, dict) and name.partition(".")[0] in (
            "llm",
            "gen_ai",
            "input",
            "output",
            "openinference",
        )
        found |= _dotted(inner, f"{name}.") if nests else {name: inner}
    return found


GEN_AI_CONTENT = ("gen_ai.content.prompt", "gen_ai.content.completion")


def _span_tools(flat: Mapping[str, Any]) -> Tools:
    tools = parsed(next((flat[key] for key in OTEL_TOOLS if flat.get(key)), None))
    if tools is None:
        tools = [one_of(one_of(tool, "tool"), "json_schema") for tool in listed(_tree(flat, "llm.tools."))]
    return read_tools(tools) if isinstance(tools, list) else ()


def _system(flat: Mapping[str, Any]) -> list[Message]:
    system = _decoded(flat.get("gen_ai.system_instructions"))
    if isinstance(system, list):
        system = [{**part, "text": part.get("content")} if isinstance(part, dict) else part for part in system]
    return read_system(system)


def _from_attributes(flat: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    asked = next((parsed(flat[key]) for key in OTEL_INPUT if flat.get(key)), None)
    answered = next((parsed(flat[key]) for key in OTEL_OUTPUT if flat.get(key)), None)
    if asked is None:
        asked = _turns_of(flat, "gen_ai.prompt", "llm.input_messages")
        answered = answered or _turns_of(flat, "gen_ai.completion", "llm.output_messages")
    if asked is None and answered is None and flat.get("openinference.span.kind") == "LLM":
        asked, answered = parsed(flat.get("input.value")), parsed(flat.get("output.value"))
    if flat.get("ai.response.toolCalls") and isinstance(parsed(flat["ai.response.toolCalls"]), list):
        calls = [{**call, "type": "tool-call"} for call in parsed(flat["ai.response.toolCalls"])]
        text = [{"type": "text", "text": answered}] if isinstance(answered, str) and answered else []
        answered = [{"role": "assistant", "content": [*text, *calls]}]
    if not asked or not answered:
        return [], []
    return read_request(asked).messages, read_answer(answered)[0]


def _from_events(events: list[dict[str, Any]]) -> tuple[list[Message], list[Message]]:
    """One event a message: gen_ai.user.message and so on, then gen_ai.choice."""
    asked: list[Message] = []
    answered: list[Message] = []
    for event in events:
        kind = str(event.get("name"))
        said = {**attributes(event.get("attributes"))}
        if isinstance(event.get("body"), dict):
            said |= event["body"]
        role = kind.removeprefix("gen_ai.").removesuffix(".message")
        if kind.startswith("gen_ai.") and role in EVENT_ROLES:
            asked += read_messages([{"content": said.get("gen_ai.event.content"), **said, "role": role}], None)
        elif kind == "gen_ai.choice" and not answered:
            said["message"] = parsed(said.get("message")) or {"content": said.get("content")}
            answered += read_answer({"choices": [said]})[0]
    return asked, answered


def attributes(value: Any) -> dict[str, Any]:
    """Attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: typed(pair.get("value")) for pair in pairs}


def typed(value: Any) -> Any:
    """A value of OTLP without the name of its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def _turns_of(flat: Mapping[str, Any], *names: str) -> list[dict[str, Any]] | None:
    """Turns below one of these names: as attributes of their own (gen_ai.prompt.0.role,
    llm.input_messages.0.message.content), or as one list of objects.
    """
    for name in names:
        turns = _tree(flat, f"{name}.")
        turns = turns or [_nested(turn, "") for turn in objects(parsed(flat.get(name))) or []]
        if turns:
            return [_turn(turn) for turn in turns if isinstance(turn, dict)]
    return None


def _tree(flat: Mapping[str, Any], prefix: str) -> list[Any] | None:
    """The list whose parts have names that begin with `prefix`; None if there is none."""
    found = _nested(flat, prefix)
    return found if isinstance(found, list) else None


def _nested(flat: Mapping[str, Any], prefix: str) -> Any:
    """What stands below `prefix`, nested as the dots in the names say."""
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
    """Objects whose keys are 0, 1, 2 ... as lists."""
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_as_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _as_lists(item) for key, item in value.items()}


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """OpenInference's names for the parts of a turn."""
    said = turn["message"] if isinstance(turn.get("message"), dict) else turn
    calls = [one_of(call, "tool_call") or call for call in listed(said.get("tool_calls"))]
    contents = [one_of(part, "message_content") or part for part in listed(said.get("contents"))]
    plain = {**said, "content": contents or said.get("content")}
    return {**plain, "tool_calls": calls} if calls else plain


def _is_run(row: Row) -> bool:
    if "inputs" not in row or "outputs" not in row:
        return False
    sides = parsed(row["inputs"]), parsed(row["outputs"])
    return "run_type" in row or (isinstance(sides[0], dict) and isinstance(sides[1], dict | str))


def _is_observation(row: Row) -> bool:
    if "input" not in row or not ("output" in row or "expected_output" in row):
        return False
    traced = "trace_id" in row or "observation_type" in row or row.get("type") in (*MODEL_STEPS, "SPAN", "EVENT")
    free = isinstance(row["input"], dict) and not is_response(row.get("output"))  # a data set's item
    return traced or free or isinstance(row.get("expected_output"), dict)


def _is_span(row: Row) -> bool:
    if "attributes" not in row:
        return any(column in row for column in TABLE_COLUMNS)
    if not isinstance(row["attributes"], dict | list):
        return False
    if first_of(row, INPUTS) and first_of(row, OUTPUTS):
        return False  # a step that says beside its attributes what came in and out
    if any(key in row for key in ("span_id", "trace_id", "kind", "events", "context", "start_time")):
        return True
    return any(key.startswith(("gen_ai.", "llm.")) for key in attributes(row["attributes"]))


RUN = RowLayout("langsmith", frozenset(("inputs",)), _is_run, _run, frozenset(("extra", "events", "serialized")))
OBSERVATION = RowLayout(
    "langfuse", frozenset(("input",)), _is_observation, _observation, frozenset(("metadata", "model_parameters"))
)


def _agents_span(name: str, row: Row) -> Conversation:
    """A span of OpenAI's agents: `span_data` with its type, input and output."""
    data = row["span_data"]
    if data.get("type") not in ("generation", "response"):
        raise RowRefused("not-a-model-call", f"a span of type {str(data.get('type'))[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the call failed: {str(row['error'])[:80]}")
    return _step(name, {key: data.get(key) for key in ("input", "output")}, None, is_call=True)


AGENTS_SPAN = RowLayout(
    "openai-agents",
    frozenset(("span_data",)),
    lambda row: isinstance(row.get("span_data"), dict),
    _agents_span,
    frozenset(("span_data",)),
)
SPAN = RowLayout(
    "opentelemetry",
    frozenset(("attributes", *TABLE_COLUMNS)),
    _is_span,
    _span,
    frozenset(("attributes", "events", "resource", "scope", "context")),
)
