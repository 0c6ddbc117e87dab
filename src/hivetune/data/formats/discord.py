"""DiscordChatExporter: one channel as JSON, `guild`, `channel` and `messages` with their `author`. Who answers is
`--columns assistant=NAME`.

https://github.com/Tyrrrz/DiscordChatExporter
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, spoken


def recognise(record: Row) -> bool:
    return isinstance(record.get("guild"), dict) and "channel" in record and objects(record.get("messages")) is not None


def rows(record: Row) -> Conversation:
    messages = [message for message in record["messages"] if str(one_of(message, "content") or "").strip()]
    turns = [(str(one_of(message.get("author"), "name")), message["content"]) for message in messages]
    return spoken("discord", turns, record.get(ASSISTANT))


FORMAT = Format("discord", recognise, rows, needs=names("guild"))
