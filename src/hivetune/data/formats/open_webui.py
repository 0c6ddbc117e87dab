"""Open WebUI's export: `chat` with `history` (a tree) or, when older, only `messages`; and its export of feedback, a
rating with the chat that it is about.

https://docs.openwebui.com/features/chat-features/ and https://docs.openwebui.com/features/evaluation/
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Batch, Format
from hivetune.data.pieces.parts import split_thoughts
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, one_of
from hivetune.data.pieces.session import NotLearned, branch, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def read(row: Row) -> Conversation | None:
    chat: Any = row if row.get("chat") is None else row["chat"]
    if not isinstance(chat, dict) or not {"history", "messages"} & chat.keys():
        return None
    history: Any = chat.get("history")
    nodes = one_of(history, "messages")
    if chat is row and not (isinstance(nodes, dict) and "currentId" in history):
        return None  # one chat, without what the program knows of it, has a tree
    turns, others = listed(chat.get("messages")), 0
    if isinstance(nodes, dict) and str(one_of(history, "currentId")) in nodes:
        path = branch({key: one_of(node, "parentId") for key, node in nodes.items()}, str(history["currentId"]))
        turns = [nodes[key] for key in path]
        others = sum(one_of(node, "role") == "assistant" for key, node in nodes.items() if key not in path)
    spoken, cut = chat_messages(turns, _turn)
    messages = [*read_system(one_of(chat, "system") or one_of(chat.get("params"), "system")), *spoken]
    return finish_chat("open-webui", messages, others, cut)


def _turn(turn: Any) -> list[Message]:
    if one_of(turn, "files"):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    messages = read_turn({"role": one_of(turn, "role"), "content": one_of(turn, "content") or ""})
    if one_of(turn, "error"):
        raise NotLearned(RowRefused("failed", "an answer of the conversation is an error"), *messages)
    if one_of(turn, "done") is False and one_of(turn, "role") == "assistant":
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *messages)
    thoughts, rest = split_thoughts(messages[0].content)
    if messages[0].role != "assistant" or not thoughts:
        return messages
    return [Message("assistant", rest, reasoning=thoughts)]


def _rated_chat(record: Row) -> Iterator[Row]:
    if one_of(chat := one_of(record["snapshot"], "chat"), "chat") is not None:
        yield {**chat, "feedback": one_of(record.get("data"), "rating")}


FORMAT = Format("open-webui", read, needs=("chat|history",), reads=frozenset(("chat", "history", "current_id")))
FEEDBACK_FORMAT = Batch("open-webui-feedback", _rated_chat, needs=("snapshot",))
