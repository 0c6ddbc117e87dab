"""An instruction with several inputs and outputs of it (`instances`), as self-instruct writes it.

https://github.com/yizhongw/self-instruct
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects


def rows(record: Row) -> Iterator[Row]:
    for instance in objects(record["instances"]) or [] if "instruction" in record else []:
        yield {**record, "instances": None, **instance}


FORMAT = Batch("self-instruct", rows, needs=frozenset(("instances",)), rank=20)
