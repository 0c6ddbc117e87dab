"""Langfuse: the batch of events that its client sends, the calls of a model among them joined by their ids. A trace is
a row only where it holds no call, since it repeats what its calls say.

https://api.reference.langfuse.com/#tag/ingestion/POST/api/public/ingestion
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects
from hivetune.data.pieces.spans import SHARED, joined_by_id

_KINDS = {"trace": "TRACE", "generation": "GENERATION", "span": "SPAN", "event": "EVENT"}


def recognise(record: Row) -> bool:
    sent = objects(record.get("batch")) or []
    return bool(sent) and all(isinstance(one.get("type"), str) and isinstance(one.get("body"), dict) for one in sent)


def rows(record: Row) -> Iterator[Row]:
    told = [{**one["body"], "type": _KINDS.get(one["type"].partition("-")[0])} for one in record["batch"]]
    steps = joined_by_id([one for one in told if one["type"] is not None])
    traces = {step.get("id"): step for step in steps if step["type"] == "TRACE"}
    calls = [step for step in steps if step["type"] != "TRACE"]
    if not any(step["type"] == "GENERATION" for step in calls):
        calls = steps
    for step in calls:
        trace = traces.get(step.get("traceId"), {})
        yield {"input": None, "output": None, **{key: trace[key] for key in SHARED if key in trace}, **step}


FORMAT = Format("langfuse-ingestion", recognise, rows, "batch", frozenset(("batch",)))
