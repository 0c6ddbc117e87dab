"""Telegram Desktop: one exported chat, `messages` with `from` and a text that may stand in pieces. Who answers is
`--columns assistant=NAME`; in a chat with a bot the bot answers.

https://core.telegram.org/import-export
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, spoken

_KINDS = names("personal_chat private_group private_supergroup public_supergroup bot_chat")


def read(record: Row) -> Conversation | None:
    listed = objects(record["messages"])
    if listed is None or str(record.get("type")) not in _KINDS or "name" not in record:
        return None
    messages = [m for m in listed if m.get("type") == "message" and m.get("from")]
    turns: list[tuple[str, str]] = []
    for message in messages:
        pieces = message["text"] if isinstance(message.get("text"), list) else [message.get("text")]  # bold, or links
        text = "".join(
            str(one_of(piece, "text") or "") if isinstance(piece, dict) else str(piece or "") for piece in pieces
        )
        turns += [(str(message["from"]), text)] if text else []
    answers = record.get(ASSISTANT) or (record["name"] if record["type"] == "bot_chat" else None)
    return spoken("telegram", turns, answers)


FORMAT = Format("telegram", read, needs=names("messages"))
