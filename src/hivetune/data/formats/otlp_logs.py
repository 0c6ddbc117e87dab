"""Batches of log records as OTLP has them: the events of one span together, as a span would hold them.

https://opentelemetry.io/docs/specs/otel/logs/data-model/
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of
from hivetune.data.pieces.spans import attributes, typed

_RESOURCES = ("resourceLogs", "resource_logs")


def recognise(record: Row) -> bool:
    return next(rows(record), None) is not None


def rows(record: Row) -> Iterator[Row]:
    held: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for resource in objects(one_of(record, *_RESOURCES)) or []:
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


FORMAT = Format("otlp-logs", recognise, rows, "batch", frozenset(_RESOURCES))
