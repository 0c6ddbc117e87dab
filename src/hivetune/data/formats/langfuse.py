"""An observation or a trace of Langfuse, or an item of one of its data sets. Observations that are no model's answer
are set aside.

https://langfuse.com/docs/observability/data-model
"""

from hivetune.data.pieces.answers import is_response
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, one_of
from hivetune.data.pieces.spans import OUTPUTS, step_said
from hivetune.data.reasons import RowRefused

_MODEL_STEPS = ("GENERATION", "TRACE")
# As they are written by those who rebuild Langfuse's records.
_OTHER_STEPS = names("span event tool agent chain retriever embedding evaluator guardrail")


def recognise(row: Row) -> bool:
    if "input" not in row or not any(column in row for column in OUTPUTS[1:3]):
        return isinstance(row.get("input"), dict) and isinstance(row.get("expected"), str | dict)  # a data set's item
    traced = "trace_id" in row or "observation_type" in row or row.get("type") in (*_MODEL_STEPS, "SPAN", "EVENT")
    free = isinstance(row["input"], dict) and not is_response(row.get("output"))  # a data set's item
    return traced or free or isinstance(row.get("expected_output"), dict)


def rows(row: Row) -> Conversation:
    kind = one_of(row, "type", "observation_type")
    if isinstance(kind, str) and (kind.isupper() or kind in _OTHER_STEPS) and kind not in _MODEL_STEPS:
        raise RowRefused("not-a-model-call", f"an observation of type {kind[:40]}")
    if row.get("level") == "ERROR":
        raise RowRefused("failed", f"the call failed: {str(row.get('status_message'))[:80]}")
    return step_said("langfuse", row, row.get("model_parameters"), is_call=str(kind).upper() == "GENERATION")


FORMAT = Format(
    "langfuse",
    recognise,
    rows,
    needs=frozenset(("input",)),
    rank=13,
    explains=frozenset(("metadata", "model_parameters")),
)
