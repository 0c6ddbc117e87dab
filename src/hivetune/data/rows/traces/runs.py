"""Steps of traces: runs of LangSmith and LangChain, observations of Langfuse, spans of OpenAI's agents.

A trace holds many steps that are no model's answer (tools, retrievers, chains around a call); they are set aside.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from hivetune.data.columns import column_kind, looks_like_content
from hivetune.data.pieces.answers import is_response, read_answer, read_request
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    RowLayout,
    first_of,
    names,
    one_of,
    parsed,
)
from hivetune.data.pieces.spans import MODEL_RUNS
from hivetune.data.pieces.turns import ROLES, in_order
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.records import joined

MODEL_STEPS = ("GENERATION", "TRACE")
# As they are written by those who rebuild Langfuse's records.
OTHER_STEPS = names("span event tool agent chain retriever embedding evaluator guardrail")
INPUTS, OUTPUTS = ("inputs", "input"), ("outputs", "output", "expected_output", "expected")
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
    "system_instruction",
    "instructions",
    "chat_history",
    "history",
)
# An answer among what a step was given: the step judges it.
JUDGED = ("output", "answer", "response", "completion", "prediction", "expected", "actual_output", "submission")


def _run(name: str, row: Row) -> Conversation:
    """LangSmith: `run_type`, `inputs`, `outputs`; its data sets have no type."""
    kind = row.get("run_type")
    if kind is not None and kind not in MODEL_RUNS and (kind != "chain" or row.get("parent_run_id")):
        raise RowRefused("not-a-model-call", f"a run of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the run failed: {str(row['error'])[:80]}")
    return step_said(name, row, row.get("extra"), is_call=kind in MODEL_RUNS)


def _observation(name: str, row: Row) -> Conversation:
    """Langfuse: observations, traces and items of a data set."""
    kind = one_of(row, "type", "observation_type")
    if isinstance(kind, str) and (kind.isupper() or kind in OTHER_STEPS) and kind not in MODEL_STEPS:
        raise RowRefused("not-a-model-call", f"an observation of type {kind[:40]}")
    if row.get("level") == "ERROR":
        raise RowRefused("failed", f"the call failed: {str(row.get('status_message'))[:80]}")
    return step_said(name, row, row.get("model_parameters"), is_call=str(kind).upper() == "GENERATION")


def step_said(name: str, row: Row, settings: Any, *, is_call: bool) -> Conversation:
    """`is_call`: the step is a call of a model, so its input is a request; else a chain with inputs of its own."""
    asked_column, answered_column = first_of(row, INPUTS), first_of(row, OUTPUTS)
    asked = decoded(row[asked_column]) if asked_column else None
    answered = decoded(row[answered_column]) if answered_column else None
    _refuse_half(asked, answered)
    if isinstance(asked, dict) and "role" in asked and "content" in asked:
        asked = [asked]
    if isinstance(asked, dict) and not is_call and len(asked) == 1:
        only = next(iter(asked.values()))
        asked = asked if isinstance(only, dict) else parsed(only)  # {"topic": text}: a chain with one input
    if isinstance(asked, dict):
        _refuse_more(asked, (asked_column, answered_column))
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


def decoded(value: Any) -> Any:
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
    """The turns of messages that were written as one text, as LangChain does: questions and answers in turn, after a
    system prompt.

    Raises RowRefused: of other speakers nobody can tell which of its lines are turns.
    """
    speakers = [name.lower() for name in _SPEAKER.findall(asked)] if isinstance(asked, str) else []
    if not speakers or (len(speakers) == 1 and (ROLES[speakers[0]] != "user" or not _SPEAKER.match(asked))):
        return asked
    roles = [ROLES[name] for name in speakers]
    spoken = roles[1:] if roles[0] == "system" else roles
    in_turn = all(role == ("user", "assistant")[i % 2] for i, role in enumerate(spoken))
    if not in_turn or len(spoken) % 2 == 0 or not _SPEAKER.match(asked):
        raise RowRefused("rendered-text", "the request is one text with several speakers: log its messages as a list")
    texts = _SPEAKER.split(asked)[2::2]
    return [{"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=True)]


_SPEAKER = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.M | re.I)


def _refuse_more(asked: Mapping[str, Any], columns: tuple[str | None, str | None]) -> None:
    """A step that was given more than a question, in the first of these columns: what else stood in its prompt isn't
    known.
    """
    if "messages" in asked or "contents" in asked:
        return
    for key, value in asked.items():
        name = plain_name(key)
        more = name not in SETTINGS and column_kind(name) != "note" and looks_like_content(value)
        if more or (name in JUDGED and isinstance(value, str)):
            raise RowRefused(
                "unexplained-column",
                f"the step was also given {key[:40]!r}: use the call of the model itself, or if all of it is the"
                f" question, --columns prompt={columns[0]},completion={columns[1]}",
            )


def _is_run(row: Row) -> bool:
    if "inputs" not in row or "outputs" not in row:
        return (
            "inputs" in row and {"run_type", "dotted_order"} <= row.keys()
        )  # it has begun, and its end stands elsewhere
    sides = parsed(row["inputs"]), parsed(row["outputs"])
    return "run_type" in row or (isinstance(sides[0], dict) and isinstance(sides[1], dict | str))


def _is_observation(row: Row) -> bool:
    if "input" not in row or not any(column in row for column in OUTPUTS[1:3]):
        return isinstance(row.get("input"), dict) and isinstance(row.get("expected"), str | dict)  # a data set's item
    traced = "trace_id" in row or "observation_type" in row or row.get("type") in (*MODEL_STEPS, "SPAN", "EVENT")
    free = isinstance(row["input"], dict) and not is_response(row.get("output"))  # a data set's item
    return traced or free or isinstance(row.get("expected_output"), dict)


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
    return step_said(name, {key: data.get(key) for key in ("input", "output")}, None, is_call=True)


def _datadog_span(name: str, row: Row) -> Conversation:
    """A span of Datadog's LLM observability: its kind, input and output, in `meta`, or as its API gives them."""
    said = _said_by_datadog(row)
    kind = one_of(said, "span_kind", "span.kind", "kind")
    is_call = kind == "llm"
    if not is_call and (kind not in ("workflow", "agent") or row.get("parent_id") not in (None, "", "undefined", "0")):
        raise RowRefused("not-a-model-call", f"a span of kind {str(kind)[:40]}")
    if row.get("status") == "error":
        raise RowRefused("failed", "the span's status is an error")
    step = {side: one_of(said[side], "messages", "value") for side in ("input", "output")}
    return step_said(name, step, {"tools": said.get("tool_definitions")}, is_call=is_call)


def _braintrust_span(name: str, row: Row) -> Conversation:
    """A span or a row of an experiment of Braintrust. What was expected goes before what was answered."""
    kind = row["span_attributes"]["type"]
    if kind != "llm" and (kind not in ("task", "eval", "function") or not _is_root(row)):
        raise RowRefused("not-a-model-call", f"a span of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the span failed: {str(row['error'])[:80]}")
    expected = one_of(row, "expected")
    answer = "output" if expected is None else "expected"
    said = step_said(name, {"input": row["input"], "output": row.get(answer)}, None, is_call=kind == "llm")
    changed = said.changed if expected is None or row.get("output") is None else (*said.changed, "other-answers")
    return said._replace(changed=changed, explained=("input", "output", "expected"))


def _is_root(row: Row) -> bool:
    return row.get("is_root") is True or not row.get("span_parents")


def _is_braintrust_span(row: Row) -> bool:
    return "input" in row and one_of(row.get("span_attributes"), "type") is not None


def _said_by_datadog(row: Row) -> dict[str, Any]:
    held = one_of(row, "meta", "attributes")
    return held if isinstance(held, dict) and one_of(held, "span_kind", "span.kind", "kind") else {}


def _is_datadog_span(row: Row) -> bool:
    said = _said_by_datadog(row)
    return all(one_of(said.get(side), "messages", "value") is not None for side in ("input", "output"))


AGENTS_SPAN = RowLayout(
    "openai-agents",
    frozenset(("span_data",)),
    lambda row: isinstance(row.get("span_data"), dict),
    _agents_span,
    frozenset(("span_data",)),
)
BRAINTRUST_SPAN = RowLayout(
    "braintrust",
    frozenset(("span_attributes",)),
    _is_braintrust_span,
    _braintrust_span,
    frozenset(("input", "output", "expected", "context")),
)
DATADOG_SPAN = RowLayout(
    "datadog",
    frozenset(("meta", "attributes")),
    _is_datadog_span,
    _datadog_span,
    frozenset(("meta", "attributes")),
)
