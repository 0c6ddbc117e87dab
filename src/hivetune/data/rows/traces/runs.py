"""Steps of traces: runs of LangSmith and LangChain, observations of Langfuse, spans of OpenAI's agents.

A trace holds many steps that are no model's answer (tools, retrievers, chains around a call); they are set aside.
"""

from hivetune.data.pieces.answers import is_response
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    RowLayout,
    names,
    one_of,
    parsed,
)
from hivetune.data.pieces.spans import MODEL_RUNS
from hivetune.data.pieces.steps import OUTPUTS, step_said
from hivetune.data.reasons import RowRefused

MODEL_STEPS = ("GENERATION", "TRACE")
# As they are written by those who rebuild Langfuse's records.
OTHER_STEPS = names("span event tool agent chain retriever embedding evaluator guardrail")


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
