"""Batches of spans and of log records as OTLP has them, by resource and scope. Tempo keeps spans below `trace`, or as
`batches`.

https://opentelemetry.io/docs/specs/otlp/ and https://opentelemetry.io/docs/specs/otel/logs/data-model/
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects, one_of
from hivetune.data.pieces.spans import attributes, typed, without_wrapper

_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")
_RESOURCES = ("resourceSpans", "resource_spans", "batches")
_RESOURCE_LOGS = ("resourceLogs", "resource_logs")


def _spans(record: Row) -> Iterator[Row]:
    """Yield the spans of a batch or of one resource, their attributes as objects, with the resource's attributes as
    defaults.
    """
    inner = without_wrapper(dict(record))
    for resource in objects(one_of(inner, *_RESOURCES)) or [inner]:
        resource_attributes = attributes(one_of(resource.get("resource"), "attributes"))
        for scope in objects(one_of(resource, *_SCOPES)) or []:
            for span in objects(scope.get("spans")) or []:
                yield {**span, "attributes": {**resource_attributes, **attributes(span.get("attributes"))}}


def _logs(record: Row) -> Iterator[Row]:
    """Yield the events of each span together, as a span would hold them."""
    events_of: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for resource in objects(one_of(record, *_RESOURCE_LOGS)) or []:
        for scope in objects(one_of(resource, "scopeLogs", "scope_logs")) or []:
            for event in objects(scope.get("logRecords")) or []:
                event_attributes = attributes(event.get("attributes"))
                name = event.get("eventName") or event_attributes.get("event.name")
                logged = {"name": name, "attributes": event_attributes, "body": typed(event.get("body"))}
                events_of.setdefault((event.get("traceId"), event.get("spanId")), []).append(logged)
    for (trace, span), events in events_of.items():
        yield {"traceId": trace, "span_id": span, "attributes": {}, "events": events}


_NEEDS = (*_RESOURCES, *_SCOPES, "trace", "data")
FORMAT = Batch("otlp-spans", _spans, needs=_NEEDS)
LOGS_FORMAT = Batch("otlp-logs", _logs, needs=_RESOURCE_LOGS)
