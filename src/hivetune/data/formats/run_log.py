"""LangSmith's runs as its client sends them, one operation a line: a run is posted when it begins and patched when it
ends. Both are one row, at the place of the first.

https://docs.smith.langchain.com/reference/data_formats/run_data_format
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, broken, events
from hivetune.data.pieces.said import Row
from hivetune.data.pieces.spans import MODEL_RUNS

_OPERATIONS = ("post", "patch")


@dataclass(slots=True)
class _Waiting:
    """Runs that haven't ended, by their id, and first runs of a trace in which no call of a model was seen yet, each
    with its place and size. `traces`: with calls of a model.
    """

    runs: dict[str, tuple[int, int, Row]] = field(default_factory=dict)
    traces: set[Any] = field(default_factory=set)
    size: int = 0


def recognise(head: Head) -> bool:
    return _are_operations(head.events)


def _are_operations(sample: Sequence[Row]) -> bool:
    """Return whether all of these rows post or patch a run of a trace."""
    return bool(sample) and all(
        row.get("operation") in _OPERATIONS and isinstance(row.get("id"), str) and "trace_id" in row for row in sample
    )


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each run. In a trace that holds calls of a model the other runs repeat these, and lose what
    they say.

    When the runs that wait get too large, the oldest is given out as it is.
    """
    waiting = _Waiting()
    for number, run, text in events(lines):
        if run is None or not _are_operations([run]):
            yield broken(number, text)
            continue
        if run.get("run_type") in MODEL_RUNS:
            waiting.traces.add(run["trace_id"])
        begun, size, known = waiting.runs.pop(run["id"], (number, 0, {}))
        said: Row = {**known, **{key: value for key, value in run.items() if value is not None}}
        waiting.size -= size
        if run["operation"] == "patch" and not _may_be_all(said, waiting.traces):
            yield begun, _row(said, waiting.traces)
            continue
        waiting.runs[run["id"]] = (begun, size + len(text), said)
        waiting.size += size + len(text)
        while waiting.size > MAX_KEPT_CHARS:
            begun, size, oldest = waiting.runs.pop(next(iter(waiting.runs)))
            waiting.size -= size
            yield begun, _row(oldest, waiting.traces)
    for begun, _, said in waiting.runs.values():
        yield begun, _row(said, waiting.traces)


def _may_be_all(run: Row, traces: set[Any]) -> bool:
    """Return whether a run may be all that its trace says of a conversation: its calls of a model may come later."""
    return run.get("run_type") == "chain" and run.get("parent_run_id") is None and run["trace_id"] not in traces


def _row(run: Row, traces: set[Any]) -> str:
    """Return the run as an export of LangSmith has it; without a side that it lacks, it is set aside."""
    told = {key: value for key, value in run.items() if key != "operation"}
    repeats = run.get("run_type") not in MODEL_RUNS and run["trace_id"] in traces
    sides = {} if repeats else {key: run[key] for key in ("inputs", "outputs") if key in run}
    return json.dumps({"run_type": None, **told, "inputs": None, "outputs": None, **sides})


FORMAT = Format("run-log", recognise, rows, "file", rank=1)
