"""An observation or a trace of Langfuse, an item of one of its data sets, and the batch of events that its client
sends. Observations that are no model's answer are set aside.

https://langfuse.com/docs/observability/data-model
https://api.reference.langfuse.com/#tag/ingestion/POST/api/public/ingestion
"""

from collections.abc import Iterator

from hivetune.data.pieces.answers import is_response
from hivetune.data.pieces.format import Batch, Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.spans import OUTPUTS, SHARED, joined_by_id, read_step
from hivetune.data.reasons import RowRefused

_MODEL_STEPS = ("GENERATION", "TRACE")
# As they are written by those who rebuild Langfuse's records.
_OTHER_STEPS = names("span event tool agent chain retriever embedding evaluator guardrail")
_SENT = {"trace": "TRACE", "generation": "GENERATION", "span": "SPAN", "event": "EVENT"}


def _is_observation(row: Row) -> bool:
    if "input" not in row or not any(column in row for column in OUTPUTS[1:3]):
        return isinstance(row.get("input"), dict) and isinstance(row.get("expected"), str | dict)  # a data set's item
    traced = "trace_id" in row or "observation_type" in row or row.get("type") in (*_MODEL_STEPS, "SPAN", "EVENT")
    free = isinstance(row["input"], dict) and not is_response(row.get("output"))  # a data set's item
    return traced or free or isinstance(row.get("expected_output"), dict)


def _read(row: Row) -> Conversation | None:
    if not _is_observation(row):
        return None
    kind = one_of(row, "type", "observation_type")
    if isinstance(kind, str) and (kind.isupper() or kind in _OTHER_STEPS) and kind not in _MODEL_STEPS:
        raise RowRefused("not-a-model-call", f"an observation of type {kind[:40]}")
    if row.get("level") == "ERROR":
        raise RowRefused("failed", f"the call failed: {str(row.get('status_message'))[:80]}")
    return read_step("langfuse", row, row.get("model_parameters"), is_call=str(kind).upper() == "GENERATION")


def _observations_sent(record: Row) -> Iterator[Row]:
    """Yield the calls of a model, joined by their ids. A trace is a row only if it has no call, since it repeats its
    calls.
    """
    sent = objects(record["batch"]) or []
    if not all(isinstance(event.get("type"), str) and isinstance(event.get("body"), dict) for event in sent):
        return
    observations = [{**event["body"], "type": _SENT.get(event["type"].partition("-")[0])} for event in sent]
    steps = joined_by_id([observation for observation in observations if observation["type"] is not None])
    traces = {step.get("id"): step for step in steps if step["type"] == "TRACE"}
    if any(step["type"] == "GENERATION" for step in steps):
        steps = [step for step in steps if step["type"] != "TRACE"]
    for step in steps:
        trace = traces.get(step.get("traceId"), {})
        yield {"input": None, "output": None, **{key: trace[key] for key in SHARED if key in trace}, **step}


_BESIDE = names("metadata model_parameters")
FORMAT = Format("langfuse", _read, needs=names("input"), rank=13, explains=_BESIDE)
SENT_FORMAT = Batch("langfuse-ingestion", _observations_sent, needs=names("batch"))
