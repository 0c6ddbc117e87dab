"""DeepSeek's export: the tree of ChatGPT's, without a node that was kept last; a message is a text with its role, or
fragments.

https://chat.deepseek.com (Settings, Data, Export data)
"""

from typing import Any

from hivetune.data.pieces.branches import NotLearned, done, kept_nodes, said_in_chat
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, objects, one_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def recognise(row: Row) -> bool:
    nodes = row.get("mapping")
    messages = [one_of(node, "message") for node in nodes.values()] if isinstance(nodes, dict) else []
    found = [message for message in messages if isinstance(message, dict)]
    return bool(found) and all("fragments" in one or ("role" in one and "author" not in one) for one in found)


def rows(row: Row) -> Conversation:
    nodes, path = kept_nodes(row, "inserted_at")
    messages, cut = said_in_chat([nodes[key].get("message") for key in path], _turn)
    return done("deepseek", messages, sum("message" in nodes[key] for key in nodes if key not in path) // 2, cut)


def _turn(message: Any) -> list[Message]:
    if one_of(message, "files"):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    if not isinstance(message, dict):
        return []
    thoughts = message.get("reasoning_content")
    fragments = objects(message.get("fragments")) or [
        {"type": "THINK", "content": thoughts},
        {"type": "REQUEST" if message.get("role") == "USER" else "RESPONSE", "content": message.get("content")},
    ]
    kinds = [(str(one.get("type")), one.get("content")) for one in fragments if one.get("content")]
    texts = [(_FRAGMENTS.get(kind), content) for kind, content in kinds if "SEARCH" not in kind]
    said = {kind: "\n\n".join(str(text) for one, text in texts if one == kind) for kind, _ in texts}
    if "user" in said:
        return [Message("user", said["user"])]
    answer = Message("assistant", said.get("assistant", ""), reasoning=said.get("thought"))
    if None in said:
        raise NotLearned(RowRefused(NOT_HELD, "DeepSeek's own tools took part"), answer)
    return [answer] if answer.content else []


_FRAGMENTS = {"REQUEST": "user", "RESPONSE": "assistant", "THINK": "thought"}


FORMAT = Format("deepseek", recognise, rows, needs=frozenset(("mapping",)))
