"""Records that hold many rows and are of no named format: {"data": [...]}, traces with their observations."""

import json
import re
from collections.abc import Mapping
from typing import Any

from hivetune.data.columns import is_content
from hivetune.data.formats import batch_keys, batch_rows, http_recording
from hivetune.data.pieces.said import objects, one_of
from hivetune.data.pieces.spans import SHARED, without_wrapper
from hivetune.data.pieces.turns import ROLE_KEYS
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
_ALSO = (*_MODEL_SPANS, "method")  # the second: of a request that a proxy kept with its response
_MARK = re.compile(b'"(?:%s)"' % b"|".join(re.escape(key.encode()) for key in (*KEYS, *_ALSO, *batch_keys())))


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
    found = _listed(without_wrapper(record))
    return [json.dumps(row).encode() for row in found] if found else None


def _listed(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if "instruction" in record and objects(record.get("instances")) is not None:  # self-instruct
        return [{**record, "instances": None, **instance} for instance in record["instances"]]
    if (kept := _kept_whole(record)) is not None:
        return kept
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
    shared = {name: trace[name] for name in SHARED if name in trace}
    if all("info" in row and "parts" in row for row in rows):  # the messages of one session of OpenCode
        return [{**shared, "info": {}, "messages": rows}]
    return [{**shared, **_unwrapped(row)} for row in rows]


def _kept_whole(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a recording, a page of messages of which an API lists the newest first, in the order of their times,
    or the chat that a rating in Open WebUI's export of feedback is of.
    """
    if http_recording.recognise(record):
        return [dict(call) for call in http_recording.rows(record)]
    turns = objects(record.get("data")) or []
    times = [time for turn in turns if "role" in turn and isinstance(time := turn.get("created_at"), int)]
    if len(set(times)) > 1 and len(times) == len(turns) and times == sorted(times, reverse=True):
        return [{**record, "data": turns[::-1]}]
    chat = one_of(one_of(record, "snapshot"), "chat")
    rating = one_of(record.get("data"), "rating")
    return [{**chat, "rating": rating}] if isinstance(chat, dict) and "chat" in chat else None


def _model_call(span: dict[str, Any]) -> dict[str, Any]:
    """What a model was asked and what it answered; what else the span says repeats it or counts something."""
    kept = {name: span[name] for name in (*SHARED, "uuid", "startTime", "input", "output", "model") if name in span}
    arguments = one_of(kept.get("input"), "args")
    if isinstance(arguments, list) and len(arguments) == 1:
        kept["input"] = arguments[0]  # a traced function with one argument, the request
    failed = str(span.get("status", "")).upper().startswith("ERR")
    return {**kept, "type": "GENERATION", "level": "ERROR" if failed else "DEFAULT"}


def _unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """The Hub's viewer numbers its rows: {"row_idx": 0, "row": {...}}."""
    inner = row.get("row")
    return inner if isinstance(inner, dict) and "row_idx" in row else row
