"""ChatGPT-Next-Web (NextChat): the backup of its store, `chat-next-store` with `sessions`.

https://github.com/ChatGPTNextWeb/NextChat
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, names, objects, one_of


def rows(record: Row) -> Iterator[Row]:
    for session in objects(one_of(record["chat-next-store"], "sessions")) or []:
        turns = [{key: turn.get(key) for key in ("role", "content")} for turn in objects(session.get("messages")) or []]
        yield {"session_id": session.get("id"), "messages": turns}


FORMAT = Batch("chatgpt-next-web", rows, needs=names("chat-next-store"))
