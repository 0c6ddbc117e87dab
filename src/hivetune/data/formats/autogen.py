"""The result of a chat of AutoGen: `chat_history` with names, `cost`.

https://microsoft.github.io/autogen/0.2/docs/reference/agentchat/chat/
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects
from hivetune.data.pieces.turns import conversation_of, read_messages


def read(row: Row) -> Conversation | None:
    """Return the conversation; the first speaker asks, since each agent writes the roles from its own side."""
    turns = objects(row["chat_history"])
    if turns is None or "cost" not in row or not all("role" in turn and "name" in turn for turn in turns):
        return None
    sides = ["user" if turn.get("name") == turns[0].get("name") else "assistant" for turn in turns]
    spoken = [t if t["role"] == "tool" else {**t, "role": side} for t, side in zip(turns, sides, strict=True)]
    return conversation_of("autogen", read_messages(spoken, None))


FORMAT = Format("autogen", read, needs=names("chat_history"))
