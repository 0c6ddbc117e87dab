"""A trace of DeepEval, which lists each kind of span apart: its calls of a model (`llmSpans`). What else the trace says
repeats them or counts something.

https://deepeval.com/docs/evaluation-llm-tracing
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects, one_of
from hivetune.data.pieces.spans import SHARED

_SPANS = ("llmSpans", "llm_spans")
_FIELDS = (*SHARED, "uuid", "startTime", "input", "output", "model")


def rows(record: Row) -> Iterator[Row]:
    for span in objects(one_of(record, *_SPANS)) or []:
        fields = {name: span[name] for name in _FIELDS if name in span}
        arguments = one_of(fields.get("input"), "args")
        if isinstance(arguments, list) and len(arguments) == 1:
            fields["input"] = arguments[0]  # a traced function with one argument, the request
        failed = str(span.get("status", "")).upper().startswith("ERR")
        yield {**fields, "type": "GENERATION", "level": "ERROR" if failed else "DEFAULT"}


FORMAT = Batch("deepeval", rows, needs=frozenset(_SPANS), rank=12)
