"""Runs of LangSmith: `run_type`, `inputs`, `outputs`; an example of its data sets has no type. Runs of tools, of
retrievers and of chains around a call are set aside. Its client sends the beginning and the end of a run apart.

https://docs.smith.langchain.com/reference/data_formats/run_data_format
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Batch, Format, Lines, Log
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, events
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


def _are_operations(sample: Sequence[Row]) -> bool:
    """Return whether all of these rows post or patch a run of a trace."""
    return bool(sample) and all(
        row.get("operation") in _OPERATIONS and isinstance(row.get("id"), str) and "trace_id" in row for row in sample
    )


def _logged_runs(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each run of a log of operations, at the place of the first. In a trace that holds calls of a
    model the other runs repeat these, and lose what they say. When the runs that wait get too large, the oldest is
    given out as it is.
    """
    waiting: dict[str, tuple[int, int, Row]] = {}  # runs that may have more to say: place, size, what is known
    traces: set[Any] = set()  # with calls of a model
    size = 0
    for number, run, text in events(lines):
        if run is None or not _are_operations([run]):
            yield number, text
            continue
        if run.get("run_type") in _MODEL_RUNS:
            traces.add(run["trace_id"])
        begun, before, earlier = waiting.pop(run["id"], (number, 0, {}))
        joined: Row = {**earlier, **{key: value for key, value in run.items() if value is not None}}
        # The first run of a trace may be all that it says of a conversation: its calls of a model may come later.
        first = joined.get("run_type") == "chain" and joined.get("parent_run_id") is None
        if run["operation"] == "patch" and not (first and joined["trace_id"] not in traces):
            yield begun, _logged_run(joined, traces)
            size -= before
            continue
        waiting[run["id"]] = (begun, before + len(text), joined)
        size += len(text)
        while size > MAX_KEPT_CHARS:
            begun, before, oldest = waiting.pop(next(iter(waiting)))
            size -= before
            yield begun, _logged_run(oldest, traces)
    for begun, _, joined in waiting.values():
        yield begun, _logged_run(joined, traces)


def _logged_run(run: Row, traces: set[Any]) -> str:
    """Return the run in the form of LangSmith's export. A run that repeats the calls of its trace loses its inputs and
    outputs.
    """
    fields = {key: value for key, value in run.items() if key != "operation"}
    repeats = run.get("run_type") not in _MODEL_RUNS and run["trace_id"] in traces
    sides = {} if repeats else {key: run[key] for key in ("inputs", "outputs") if key in run}
    return json.dumps({"run_type": None, **fields, "inputs": None, "outputs": None, **sides})


FORMAT = Format("langsmith", _read, needs=names("inputs"), rank=12, explains=names("extra events serialized"))
SENT_FORMAT = Batch("langsmith-batch", _runs_sent, needs=names("post"))
TREE_FORMAT = Batch("langsmith-tree", _calls_below, needs=names("child_runs"))
LOG_FORMAT = Log("run-log", lambda head: _are_operations(head.events), _logged_runs, rank=1)
