"""The messages of a thread of OpenAI's assistants, which the API lists with the newest first.

https://platform.openai.com/docs/api-reference/messages/listMessages
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects


def rows(record: Row) -> Iterator[Row]:
    turns = objects(record["data"]) or []
    times = [time for turn in turns if "role" in turn and isinstance(time := turn.get("created_at"), int)]
    if len(set(times)) > 1 and len(times) == len(turns) and times == sorted(times, reverse=True):
        yield {**record, "data": turns[::-1]}


FORMAT = Batch("openai-thread", rows, needs=frozenset(("data",)), rank=10)
