"""Chats of text-generation-webui: `internal` has what the model was given, pair by pair; `visible` the same as HTML.

https://github.com/oobabooga/text-generation-webui/wiki/01-%E2%80%90-Chat-Tab
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, all_texts, listed, names
from hivetune.data.pieces.session import finish_chat
from hivetune.data.pieces.turns import read_turn
from hivetune.records import Message


def read(row: Row) -> Conversation | None:
    pairs = listed(row["internal"])
    if "visible" not in row or not pairs or not all(all_texts(pair) and len(pair) == 2 for pair in pairs):
        return None
    messages: list[Message] = []
    for question, answered in pairs:
        if question != _GREETS:
            messages.append(Message("user", question))
        messages += read_turn({"role": "assistant", "content": answered})
    return finish_chat("text-generation-webui", messages, 0)


_GREETS = "<|BEGIN-VISIBLE-CHAT|>"  # stands for the user where the character speaks first


FORMAT = Format("text-generation-webui", read, needs=names("internal"))
