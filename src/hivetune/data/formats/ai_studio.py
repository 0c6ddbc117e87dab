"""Prompts of Google's AI Studio: `chunkedPrompt` of chunks, thoughts among them.

https://ai.google.dev/gemini-api/docs/ai-studio-quickstart
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, names, one_of, parsed
from hivetune.data.pieces.session import NotLearned, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def read(row: Row) -> Conversation | None:
    if not isinstance(row["chunked_prompt"], dict):
        return None
    messages, cut = chat_messages(listed(row["chunked_prompt"].get("chunks")), _turn)
    return finish_chat("ai-studio", [*read_system(parsed(row.get("system_instruction"))), *messages], 0, cut)


def _turn(chunk: Any) -> list[Message]:
    if one_of(chunk, "text") is None:
        raise RowRefused(NOT_HELD, "a chunk that is no text: only text can be learned")
    messages = read_turn({**chunk, "content": chunk["text"]})
    if chunk.get("finishReason") not in (None, "", "STOP"):
        hint = f"an answer ended by {str(chunk['finishReason'])[:40]}, not by itself"
        raise NotLearned(RowRefused("cut-off-answer", hint), *messages)
    return messages


FORMAT = Format("ai-studio", read, needs=names("chunked_prompt"))
