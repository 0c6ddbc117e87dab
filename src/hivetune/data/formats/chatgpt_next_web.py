"""ChatGPT-Next-Web (NextChat): the backup of its store, `chat-next-store` with `sessions`.

https://github.com/ChatGPTNextWeb/NextChat
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, names, objects, one_of


def recognise(record: Row) -> bool:
    return objects(one_of(record.get("chat-next-store"), "sessions")) is not None


def rows(record: Row) -> Iterator[Row]:
    for session in objects(record["chat-next-store"]["sessions"]) or []:
        turns = [{key: turn.get(key) for key in ("role", "content")} for turn in objects(session.get("messages")) or []]
        yield {"session_id": session.get("id"), "messages": turns}


FORMAT = Format("chatgpt-next-web", recognise, rows, "batch", needs=names("chat-next-store"))
