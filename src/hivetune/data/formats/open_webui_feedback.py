"""Open WebUI's export of feedback: a rating with the chat that it is about.

https://docs.openwebui.com/features/evaluation/
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, one_of


def recognise(record: Row) -> bool:
    return one_of(one_of(one_of(record, "snapshot"), "chat"), "chat") is not None


def rows(record: Row) -> Iterator[Row]:
    yield {**record["snapshot"]["chat"], "rating": one_of(record.get("data"), "rating")}


FORMAT = Format("open-webui-feedback", recognise, rows, "batch", frozenset(("snapshot",)), rank=10)
