"""A table with the names of its columns beside its rows, as W&B, MLflow and pandas (`orient="split"`) write it.

https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.to_json.html
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, all_texts, listed


def rows(record: Row) -> Iterator[Row]:
    names, data = record["columns"], listed(record.get("data"))
    if all_texts(names) and all(isinstance(row, list) and len(row) == len(names) for row in data):
        for row in data:
            yield dict(zip(names, row, strict=True))


FORMAT = Batch("split-table", rows, needs=frozenset(("columns",)))
