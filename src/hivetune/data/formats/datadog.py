"""A span of Datadog's LLM observability: its kind, input and output, in `meta`, or as its API gives them.

https://docs.datadoghq.com/llm_observability/instrumentation/api/
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, one_of
from hivetune.data.pieces.spans import read_step
from hivetune.data.reasons import RowRefused


def read(row: Row) -> Conversation | None:
    span = one_of(row, "meta", "attributes")
    kind = one_of(span, "span_kind", "span.kind", "kind")
    step = {side: one_of(one_of(span, side), "messages", "value") for side in ("input", "output")}
    if not kind or None in step.values():
        return None
    is_call = kind == "llm"
    if not is_call and (kind not in ("workflow", "agent") or row.get("parent_id") not in (None, "", "undefined", "0")):
        raise RowRefused("not-a-model-call", f"a span of kind {str(kind)[:40]}")
    if row.get("status") == "error":
        raise RowRefused("failed", "the span's status is an error")
    return read_step("datadog", step, {"tools": span.get("tool_definitions")}, is_call=is_call)


_COLUMNS = names("meta attributes")
FORMAT = Format("datadog", read, needs=_COLUMNS, rank=10, explains=_COLUMNS | names("metrics tags"))
