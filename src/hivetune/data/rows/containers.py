"""Records that hold many rows: {"data": [...]}, OTLP's batches of spans, traces with their observations."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.columns import is_content
from hivetune.data.formats import batch_keys, batch_rows
from hivetune.data.pieces.attributes import attributes, typed
from hivetune.data.pieces.said import objects, one_of
from hivetune.data.pieces.spans import MODEL_RUNS, joined_by_id
from hivetune.data.pieces.turns import ROLE_KEYS
from hivetune.data.rows.api.recorded import METHOD_KEY, NOCK_KEY, RECORDED_KEYS, recorded_calls
from hivetune.data.rows.traces.agent_spans import agent_runs
from hivetune.data.rows.traces.evaluations import EVALUATION_KEYS, evaluated
from hivetune.data.rows.traces.spans import without_what_repeats

# Looked for in the bytes of a row before it is parsed, since nearly no row is a container.
KEYS = (
    "data",
    "rows",
    "examples",
    "records",
    "instances",
    "observations",
    "spans",
    "resourceSpans",
    "batches",
    "runs",
)
_MODEL_SPANS = ("llmSpans", "llm_spans")  # the model's calls of a trace that lists each kind of step apart
_ALSO = (
    "post",
    "child_runs",
    "resourceLogs",
    *_MODEL_SPANS,
    *RECORDED_KEYS,
    NOCK_KEY,
    METHOD_KEY,
    *EVALUATION_KEYS,
)
_MARK = re.compile(b'"(?:%s)"' % b"|".join(re.escape(key.encode()) for key in (*KEYS, *_ALSO, *batch_keys())))
# What a trace says of all its steps.
_SHARED = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")


def may_hold_rows(payload: bytes) -> bool:
    """Whether `rows_inside` is worth a look; a quick no for nearly every row."""
    return payload[:1] == b"{" and _MARK.search(payload) is not None


def rows_inside(payload: bytes) -> list[bytes] | None:
    """The rows that a record holds, in order; None when it is a row itself, or no JSON."""
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "messages" in record:
        return None
    if (known := batch_rows(record)) is not None:
        return [json.dumps(row).encode() for row in known] or None
    record = _without_wrapper(record)
    found = list(_spans(record)) or list(_logged(record)) or _model_runs(record)
    found = found or evaluated(record) or agent_runs(record) or []
    found = found or _listed(record) or []
    return [json.dumps(row).encode() for row in found] if found else None


def _without_wrapper(record: dict[str, Any]) -> dict[str, Any]:
    """What Tempo keeps below `trace`, and MLflow below `data`, beside what it says of the whole trace."""
    inner = next((record[key] for key in ("trace", "data") if isinstance(record.get(key), dict)), None)
    if inner is None or not any(objects(inner.get(key)) for key in _OF_SPANS):
        return record
    return {key: inner[key] for key in (*_OF_SPANS, *_SHARED) if key in inner}


_OF_SPANS = ("spans", "resourceSpans", "batches")


def _listed(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if "instruction" in record and objects(record.get("instances")) is not None:  # self-instruct
        return [{**record, "instances": None, **instance} for instance in record["instances"]]
    if (sent := _sent_runs(record) or _kept_whole(record)) is not None:
        return sent
    for key in _MODEL_SPANS:
        if (calls := objects(record.get(key))) is not None:
            return [_model_call(span) for span in calls]
    for key in KEYS:
        rows = objects(record.get(key))
        if rows is None or all(any(name in row for name in ROLE_KEYS[:5]) for row in rows):
            continue  # nothing, or the turns of one conversation
        if key != "observations" and any(is_content(name, record[name]) for name in record if name != key):
            return None  # a row that has a list among its columns; a trace repeats what its observations say
        return _with_shared(record, without_what_repeats(rows) if key == "spans" else rows)
    return None


def _with_shared(record: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what their record says of all of them."""
    trace = record["trace"] if isinstance(record.get("trace"), dict) else record
    shared = {name: trace[name] for name in _SHARED if name in trace}
    if all("info" in row and "parts" in row for row in rows):  # the messages of one session of OpenCode
        return [{**shared, "info": {}, "messages": rows}]
    return [{**shared, **_unwrapped(row)} for row in rows]


def _sent_runs(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The runs that LangSmith's client sends: those that began, each with what came of it later, joined by their id.

    The end of a run that began in another record has no input, and a run that hasn't ended no output.
    """
    begun, ended = objects(record.get("post")) or [], objects(record.get("patch")) or []
    if not begun + ended or not all("inputs" in run for run in begun) or not all("id" in run for run in ended):
        return None
    return [{"inputs": None, "outputs": None, **run} for run in joined_by_id([*begun, *ended])]


def _kept_whole(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a recording, a page of messages of which an API lists the newest first, in the order of their times,
    or the chat that a rating in Open WebUI's export of feedback is of.
    """
    if (calls := recorded_calls(record)) is not None:
        return calls
    turns = objects(record.get("data")) or []
    times = [time for turn in turns if "role" in turn and isinstance(time := turn.get("created_at"), int)]
    if len(set(times)) > 1 and len(times) == len(turns) and times == sorted(times, reverse=True):
        return [{**record, "data": turns[::-1]}]
    chat = one_of(one_of(record, "snapshot"), "chat")
    rating = one_of(record.get("data"), "rating")
    return [{**chat, "rating": rating}] if isinstance(chat, dict) and "chat" in chat else None


def _model_call(span: dict[str, Any]) -> dict[str, Any]:
    """What a model was asked and what it answered; what else the span says repeats it or counts something."""
    kept = {name: span[name] for name in (*_SHARED, "uuid", "startTime", "input", "output", "model") if name in span}
    arguments = one_of(kept.get("input"), "args")
    if isinstance(arguments, list) and len(arguments) == 1:
        kept["input"] = arguments[0]  # a traced function with one argument, the request
    failed = str(span.get("status", "")).upper().startswith("ERR")
    return {**kept, "type": "GENERATION", "level": "ERROR" if failed else "DEFAULT"}


def _model_runs(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a model among the runs below one; what stands above repeats them."""
    found: list[dict[str, Any]] = []
    for child in objects(run.get("child_runs")) or []:
        inside = _model_runs(child)
        kept = {key: value for key, value in child.items() if key != "child_runs"}
        found += inside or ([kept] if child.get("run_type") in MODEL_RUNS else [])
    return found


def _unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """The Hub's viewer numbers its rows: {"row_idx": 0, "row": {...}}."""
    inner = row.get("row")
    return inner if isinstance(inner, dict) and "row_idx" in row else row


def _logged(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an OTLP batch of logs, those of one span together, as a span would hold them."""
    held: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for resource in objects(one_of(record, "resourceLogs", "resource_logs")) or []:
        for scope in objects(one_of(resource, "scopeLogs", "scope_logs")) or []:
            for event in objects(scope.get("logRecords")) or []:
                said = attributes(event.get("attributes"))
                name = event.get("eventName") or said.get("event.name")
                body = typed(event.get("body"))
                held.setdefault((event.get("traceId"), event.get("spanId")), []).append(
                    {"name": name, "attributes": said, "body": body}
                )
    for (trace, span), events in held.items():
        yield {"traceId": trace, "span_id": span, "attributes": {}, "events": events}


def _spans(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of an OTLP batch or of one resource, their attributes as objects, those of the resource below them."""
    for resource in objects(one_of(record, "resourceSpans", "resource_spans", "batches")) or [record]:
        about = attributes(one_of(resource.get("resource"), "attributes"))
        for scope in objects(one_of(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")) or []:
            for span in objects(scope.get("spans")) or []:
                yield {**span, "attributes": {**about, **attributes(span.get("attributes"))}}
