"""What the formats of traces share: ids that join the parts of a step, and what a trace says of all its steps."""

from typing import Any

from hivetune.data.pieces.said import objects

MODEL_RUNS = ("llm", "chat_model", "chat")  # types of LangSmith's runs
# What a trace says of all its steps.
SHARED = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
_OF_SPANS = ("spans", "resourceSpans", "batches")


def without_wrapper(record: dict[str, Any]) -> dict[str, Any]:
    """What Tempo keeps below `trace`, and MLflow below `data`, beside what it says of the whole trace."""
    inner = next((record[key] for key in ("trace", "data") if isinstance(record.get(key), dict)), None)
    if inner is None or not any(objects(inner.get(key)) for key in _OF_SPANS):
        return record
    return {key: inner[key] for key in (*_OF_SPANS, *SHARED) if key in inner}


def joined_by_id(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Objects with one id as one, in the order of the first of each: what comes later goes before, unless it is null.
    What has no id stays alone.
    """
    found: list[dict[str, Any]] = []
    by_id: dict[str, dict[str, Any]] = {}
    for part in parts:
        said = {key: value for key, value in part.items() if value is not None}
        if (known := by_id.get(str(part.get("id")))) is not None and part.get("id") is not None:
            known.update(said)
            continue
        found.append(said)
        by_id[str(part.get("id"))] = said
    return found
