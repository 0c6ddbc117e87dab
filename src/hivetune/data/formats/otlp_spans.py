"""Batches of spans as OTLP has them: by resource and scope. Tempo keeps them below `trace`, or as `batches`.

https://opentelemetry.io/docs/specs/otlp/
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of
from hivetune.data.pieces.spans import attributes, without_wrapper

_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")
_RESOURCES = ("resourceSpans", "resource_spans", "batches")


def recognise(record: Row) -> bool:
    return next(rows(record), None) is not None


def rows(record: Row) -> Iterator[Row]:
    """Yield the spans of a batch or of one resource, their attributes as objects, those of the resource below them."""
    inner = without_wrapper(dict(record))
    for resource in objects(one_of(inner, *_RESOURCES)) or [inner]:
        about = attributes(one_of(resource.get("resource"), "attributes"))
        for scope in objects(one_of(resource, *_SCOPES)) or []:
            for span in objects(scope.get("spans")) or []:
                yield {**span, "attributes": {**about, **attributes(span.get("attributes"))}}


FORMAT = Format("otlp-spans", recognise, rows, "batch", frozenset((*_RESOURCES, *_SCOPES, "trace", "data")))
