"""DeepSeek's export: the tree of ChatGPT's, without a node that was kept last; a message is a text with its role, or
fragments.

https://chat.deepseek.com (Settings, Data, Export data)
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, objects, one_of
from hivetune.data.pieces.session import NotLearned, branch_nodes, chat_messages, finish_chat
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def read(row: Row) -> Conversation | None:
    given = row["mapping"].values() if isinstance(row["mapping"], dict) else ()
    said = [message for node in given if isinstance(message := one_of(node, "message"), dict)]
    if not said or not all("fragments" in m or ("role" in m and "author" not in m) for m in said):
        return None
    nodes, path = branch_nodes(row, "inserted_at")
    messages, cut = chat_messages([nodes[key].get("message") for key in path], _turn)
    return finish_chat("deepseek", messages, sum("message" in nodes[key] for key in nodes if key not in path) // 2, cut)


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
    kinds = [(str(fragment.get("type")), fragment.get("content")) for fragment in fragments if fragment.get("content")]
    texts = [(_FRAGMENTS.get(kind), content) for kind, content in kinds if "SEARCH" not in kind]
    by_kind = {kind: "\n\n".join(str(text) for k, text in texts if k == kind) for kind, _ in texts}
    if "user" in by_kind:
        return [Message("user", by_kind["user"])]
    answer = Message("assistant", by_kind.get("assistant", ""), reasoning=by_kind.get("thought"))
    if None in by_kind:
        raise NotLearned(RowRefused(NOT_HELD, "DeepSeek's own tools took part"), answer)
    return [answer] if answer.content else []


_FRAGMENTS = {"REQUEST": "user", "RESPONSE": "assistant", "THINK": "thought"}


FORMAT = Format("deepseek", read, needs=frozenset(("mapping",)))
