"""A table with the names of its columns beside its rows, as W&B, MLflow and pandas (`orient="split"`) write it.

https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.to_json.html
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row


def recognise(record: Row) -> bool:
    names, rows = record["columns"], record.get("data")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return False
    return isinstance(rows, list) and bool(rows) and all(isinstance(r, list) and len(r) == len(names) for r in rows)


def rows(record: Row) -> Iterator[Row]:
    for row in record["data"]:
        yield dict(zip(record["columns"], row, strict=True))


FORMAT = Format("split-table", recognise, rows, "batch", needs=frozenset(("columns",)))
