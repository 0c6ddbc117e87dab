"""What LangSmith's client sends: runs that began (`post`), what came of each later (`patch`), joined by their id.

https://docs.smith.langchain.com/observability/how_to_guides/trace_with_api
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects
from hivetune.data.pieces.spans import joined_by_id


def recognise(record: Row) -> bool:
    begun, ended = objects(record.get("post")) or [], objects(record.get("patch")) or []
    return (
        bool(begun + ended)
        and all("inputs" in run for run in begun)
        and all("id" in run or "outputs" in run for run in ended)
    )


def rows(record: Row) -> Iterator[Row]:
    """Yield the runs. The end of one that began in another record has no input, and one that has not ended no
    output.
    """
    begun, ended = objects(record.get("post")) or [], objects(record.get("patch")) or []
    for run in joined_by_id([*begun, *ended]):
        yield {"inputs": None, "outputs": None, **run}


FORMAT = Format("langsmith-batch", recognise, rows, "batch", frozenset(("post",)))
