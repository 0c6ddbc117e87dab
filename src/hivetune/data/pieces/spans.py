"""What the formats of traces share: typed attributes, and what a trace says of all its spans."""

import json
from typing import Any

from hivetune.data.pieces.said import listed, objects, one_of, parsed

# What a trace says of all its steps.
SHARED = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
_OF_SPANS = ("spans", "resourceSpans", "batches")


def without_wrapper(record: dict[str, Any]) -> dict[str, Any]:
    """Return the spans that Tempo keeps below `trace` and MLflow below `data`, with the fields of the trace."""
    inner = next((record[key] for key in ("trace", "data") if isinstance(record.get(key), dict)), None)
    if inner is None or not any(objects(inner.get(key)) for key in _OF_SPANS):
        return record
    return {key: inner[key] for key in (*_OF_SPANS, *SHARED) if key in inner}


def attributes(value: Any) -> dict[str, Any]:
    """Return attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: typed(pair.get("value")) for pair in pairs}


def typed(value: Any) -> Any:
    """Return a value of OTLP without the name of its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def decoded(value: Any) -> Any:
    """Return decoded JSON text, also nested JSON text, as some exporters write objects."""
    if isinstance(value, str) and value[:1] == '"' and value[-1:] == '"':
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return parsed(value)
