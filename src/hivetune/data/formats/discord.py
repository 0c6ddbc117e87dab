"""DiscordChatExporter: one channel as JSON, `guild`, `channel` and `messages` with their `author`. Who answers is
`--columns assistant=NAME`.

https://github.com/Tyrrrz/DiscordChatExporter
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, read_session


def recognise(record: Row) -> bool:
    return isinstance(record.get("guild"), dict) and "channel" in record and objects(record.get("messages")) is not None


def rows(record: Row) -> Conversation:
    turns = [_turn(one) for one in objects(record["messages"]) or [] if str(one.get("content") or "").strip()]
    return read_session({"hivetune_session": "discord", "messages": turns, ASSISTANT: record.get(ASSISTANT)})


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    return {"speaker": str(one_of(message.get("author"), "name")), "content": message["content"]}


FORMAT = Format("discord", recognise, rows, needs=frozenset(("guild",)))
