"""The result of a chat of AutoGen: `chat_history` with names, `cost`.

https://microsoft.github.io/autogen/0.2/docs/reference/agentchat/chat/
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, objects
from hivetune.data.pieces.turns import in_order, read_messages


def recognise(row: Row) -> bool:
    turns = objects(row.get("chat_history"))
    return turns is not None and "cost" in row and all("role" in turn and "name" in turn for turn in turns)


def rows(row: Row) -> Conversation:
    """Return the conversation; the first speaker asks, since each agent writes the roles from its own side."""
    turns = row["chat_history"]
    first = turns[0].get("name")
    sides = [turn if turn["role"] == "tool" else {**turn, "role": _side(turn, first)} for turn in turns]
    messages, changed = in_order(read_messages(sides, None))
    return Conversation("autogen", messages, changed=changed)


def _side(turn: Mapping[str, Any], first: Any) -> str:
    return "user" if turn.get("name") == first else "assistant"


FORMAT = Format("autogen", recognise, rows, needs=frozenset(("chat_history",)))
