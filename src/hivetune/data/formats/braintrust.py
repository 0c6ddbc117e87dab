"""A span or a row of an experiment of Braintrust. The expected answer takes precedence.

https://www.braintrust.dev/docs/guides/traces
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, one_of
from hivetune.data.pieces.spans import read_step
from hivetune.data.reasons import RowRefused


def read(row: Row) -> Conversation | None:
    kind = one_of(row["span_attributes"], "type")
    if "input" not in row or kind is None:
        return None
    is_root = row.get("is_root") is True or not row.get("span_parents")
    if kind != "llm" and (kind not in ("task", "eval", "function") or not is_root):
        raise RowRefused("not-a-model-call", f"a span of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the span failed: {str(row['error'])[:80]}")
    expected = one_of(row, "expected")
    answer = "output" if expected is None else "expected"
    step = read_step("braintrust", {"input": row["input"], "output": row.get(answer)}, None, is_call=kind == "llm")
    changed = step.changed if expected is None or row.get("output") is None else (*step.changed, "other-answers")
    return step._replace(changed=changed, explained=("input", "output", "expected"))


_BESIDE = names("span_attributes context metadata metrics scores")
FORMAT = Format("braintrust", read, needs=names("span_attributes"), rank=10, explains=_BESIDE)
