"""Runs of LangSmith: `run_type`, `inputs`, `outputs`; an example of its data sets has no type. Runs of tools, of
retrievers and of chains around a call are set aside. Its client sends the beginning and the end of a run apart.

https://docs.smith.langchain.com/reference/data_formats/run_data_format
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch, Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, parsed
from hivetune.data.pieces.spans import joined_by_id, read_step
from hivetune.data.reasons import RowRefused

_MODEL_RUNS = ("llm", "chat_model", "chat")
_OPERATIONS = ("post", "patch")


def _is_run(row: Row) -> bool:
    if "outputs" not in row:  # the run has begun, and its end stands elsewhere
        return "inputs" in row and {"run_type", "dotted_order"} <= row.keys()
    inputs, outputs = parsed(row.get("inputs")), parsed(row["outputs"])
    return "inputs" in row and ("run_type" in row or (isinstance(inputs, dict) and isinstance(outputs, dict | str)))


def _read(row: Row) -> Conversation | None:
    if not _is_run(row):
        return None
    kind = row.get("run_type")
    if kind is not None and kind not in _MODEL_RUNS and (kind != "chain" or row.get("parent_run_id")):
        raise RowRefused("not-a-model-call", f"a run of type {str(kind)[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the run failed: {str(row['error'])[:80]}")
    return read_step("langsmith", row, row.get("extra"), is_call=kind in _MODEL_RUNS)


def _runs_sent(record: Row) -> Iterator[Row]:
    """Yield the runs. A run that began in another record has no input, and an unfinished run has no output."""
    begun, ended = (objects(record.get(operation)) or [] for operation in _OPERATIONS)
    if all("inputs" in run for run in begun) and all("id" in run or "outputs" in run for run in ended):
        for run in joined_by_id([*begun, *ended]):
            yield {"inputs": None, "outputs": None, **run}


def _calls_below(record: Row) -> Iterator[Row]:
    """Yield the calls of a model among the runs below one; runs above repeat them."""
    for child in objects(record.get("child_runs")) or []:
        inside = list(_calls_below(child))
        yield from inside
        if not inside and child.get("run_type") in _MODEL_RUNS:
            yield {key: value for key, value in child.items() if key != "child_runs"}


FORMAT = Format("langsmith", _read, needs=names("inputs"), rank=12, explains=names("extra events serialized"))
SENT_FORMAT = Batch("langsmith-batch", _runs_sent, needs=names("post"))
TREE_FORMAT = Batch("langsmith-tree", _calls_below, needs=names("child_runs"))
