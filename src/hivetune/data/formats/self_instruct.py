"""An instruction with several inputs and outputs of it (`instances`), as self-instruct writes it.

https://github.com/yizhongw/self-instruct
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects


def recognise(record: Row) -> bool:
    return "instruction" in record and objects(record["instances"]) is not None


def rows(record: Row) -> Iterator[Row]:
    for instance in record["instances"]:
        yield {**record, "instances": None, **instance}


FORMAT = Format("self-instruct", recognise, rows, "batch", needs=frozenset(("instances",)), rank=20)
