"""A run of LangSmith: `run_type`, `inputs`, `outputs`; an example of its data sets has no type. Runs of tools, of
retrievers and of chains around a call are set aside.

https://docs.smith.langchain.com/reference/data_formats/run_data_format
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, parsed
from hivetune.data.pieces.spans import MODEL_RUNS, step_said
from hivetune.data.reasons import RowRefused


def recognise(row: Row) -> bool:
    if "outputs" not in row:  # the run has begun, and its end stands elsewhere
        return "inputs" in row and {"run_type", "dotted_order"} <= row.keys()
    asked, answered = parsed(row.get("inputs")), parsed(row["outputs"])
    return "inputs" in row and ("run_type" in row or (isinstance(asked, dict) and isinstance(answered, dict | str)))


def rows(row: Row) -> Conversation:
    kind = row.get("run_type")
    if kind is not None and kind not in MODEL_RUNS and (kind != "chain" or row.get("parent_run_id")):
        raise RowRefused("not-a-model-call", f"a run of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the run failed: {str(row['error'])[:80]}")
    return step_said("langsmith", row, row.get("extra"), is_call=kind in MODEL_RUNS)


FORMAT = Format(
    "langsmith",
    recognise,
    rows,
    needs=frozenset(("inputs",)),
    rank=12,
    explains=frozenset(("extra", "events", "serialized")),
)
