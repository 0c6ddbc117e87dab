"""DiscordChatExporter: one channel as JSON, `guild`, `channel` and `messages` with their `author`. Who answers is
`--columns assistant=NAME`.

https://github.com/Tyrrrz/DiscordChatExporter
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, spoken


def read(record: Row) -> Conversation | None:
    listed = objects(record.get("messages"))
    if not isinstance(record["guild"], dict) or "channel" not in record or listed is None:
        return None
    messages = [message for message in listed if str(one_of(message, "content") or "").strip()]
    turns = [(str(one_of(message.get("author"), "name")), message["content"]) for message in messages]
    return spoken("discord", turns, record.get(ASSISTANT))


FORMAT = Format("discord", read, needs=names("guild"))
