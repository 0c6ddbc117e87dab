"""A run of LangSmith with the runs below it (`child_runs`): its calls of a model; what stands above repeats them.

https://docs.smith.langchain.com/reference/data_formats/run_data_format
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects
from hivetune.data.pieces.spans import MODEL_RUNS


def recognise(record: Row) -> bool:
    return next(rows(record), None) is not None


def rows(record: Row) -> Iterator[Row]:
    """Yield the calls of a model among the runs below one."""
    for child in objects(record.get("child_runs")) or []:
        inside = list(rows(child))
        yield from inside
        if not inside and child.get("run_type") in MODEL_RUNS:
            yield {key: value for key, value in child.items() if key != "child_runs"}


FORMAT = Format("langsmith-tree", recognise, rows, "batch", frozenset(("child_runs",)))
