"""A record that lists rows below a key: {"data": [..]}, a page of the Hub's viewer, a trace with its observations,
spans or runs.

https://huggingface.co/docs/dataset-viewer/rows and https://mlflow.org/docs/latest/genai/tracing/
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.columns import ANSWERS, QUESTIONS
from hivetune.data.formats.opentelemetry import without_repeats
from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects
from hivetune.data.pieces.spans import SHARED, without_wrapper
from hivetune.data.pieces.turns import ROLE_KEYS

_SIDES = frozenset((*QUESTIONS, *ANSWERS, "text", "messages", "conversations"))
_KEYS = ("data", "rows", "examples", "records", "instances", "observations", "spans", "runs")


def rows(record: Row) -> Iterator[Row]:
    record = without_wrapper(dict(record))
    key = _key(record)
    if key is None:
        return
    listed: list[dict[str, Any]] = record[key]
    trace = record["trace"] if isinstance(record.get("trace"), dict) else record
    shared = {name: trace[name] for name in SHARED if name in trace}
    if all("info" in row and "parts" in row for row in listed):  # the messages of one session of OpenCode
        yield {**shared, "info": {}, "messages": listed}
        return
    for row in without_repeats(listed) if key == "spans" else listed:
        inner = row.get("row")  # the Hub's viewer numbers rows: {"row_idx": 0, "row": {...}}
        yield {**shared, **(inner if isinstance(inner, dict) and "row_idx" in row else row)}


def _key(record: Mapping[str, Any]) -> str | None:
    """Return the key of the rows; None without a list, or if the list is the turns of one conversation."""
    for key in _KEYS:
        listed = objects(record.get(key))
        if listed is None or all(any(name in row for name in ROLE_KEYS[:5]) for row in listed):
            continue
        if key != "observations" and not _SIDES.isdisjoint(record):
            return None  # a row that has a list among its columns; a trace repeats what its observations say
        return key
    return None


FORMAT = Batch("row-list", rows, needs=(*_KEYS, "trace"))
