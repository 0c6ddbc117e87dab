"""ChatGPT's export: a conversation is a tree, a `mapping` of nodes with a `current_node`.

Answers in which a tool of ChatGPT took part (a canvas, code, a connector) are read and not learned, except a search:
the answer says what it found.

https://help.openai.com/en/articles/7260999-how-do-i-export-my-chatgpt-history-and-data
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.format import NOT_HELD, Conversation, Format
from hivetune.data.pieces.sessions import NotLearned, branch, chat
from hivetune.data.pieces.values import Row, listed, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
# Tools without a part in the answer: a search, of which the answer says what it found, and notes about the user.
_SILENT_TOOLS = ("web", "browser", "bio")
_ABOVE = ("user_editable_context", "system_content")  # what stood above the conversation
_SYSTEM_FIELDS = ("model_identity_desc", "instructions", "user_profile", "user_instructions")
_BROKEN_OFF = ("in_progress", "finished_partial_completion")  # states of a message
_SILENT = ("model_editable_context", "reasoning_recap", "app_pairing_content")
# Where an answer names a source by its number in what was found; some marks hold words of the sentence (a link, a
# name). Today's are no characters of any text; older ones are words in brackets.
_MARK = re.compile(r" ?\ue200(\w+)(?:\ue202([^\ue200\ue201]*))?\ue201")
_OLD_MARK = re.compile(
    r" ?(?::contentReference\[oaicite:\d+\]\{index=\d+\}|\u3010\d+(?::\d+)?\u2020[^\u3010\u3011]*\u3011)"
)


def read(row: Row) -> Conversation | None:
    """Return the kept branch of a tree of messages. Other programs write a `mapping` too; ChatGPT's messages have an
    author.
    """
    if not isinstance(row["mapping"], dict):
        return None
    nodes = {str(key): node for key, node in row["mapping"].items() if isinstance(node, dict)}
    if not any("author" in (one_of(node, "message") or {}) for node in nodes.values()):
        return None
    parents = {key: node.get("parent") for key, node in nodes.items()}
    kept = branch(nodes, parents, str(row.get("current_node")))
    answers = [sum(_role(node.get("message")) == "assistant" for node in some) for some in (nodes.values(), kept)]
    found = chat("chatgpt", [node.get("message") for node in kept], _turn, answers[0] - answers[1])
    messages = tuple(_without_marks(message) for message in found.messages)
    changed = (*found.changed, "source-marks") if messages != found.messages else found.changed
    return found._replace(messages=messages, changed=changed)


def _without_marks(message: Message) -> Message:
    if message.role != "assistant":
        return message
    return replace(message, content=_OLD_MARK.sub("", _MARK.sub(_words_of_mark, message.content)))


def _words_of_mark(mark: re.Match[str]) -> str:
    """Return the words of a mark in its sentence, with the blank before it."""
    kind, fields = mark[1], (mark[2] or "").split("\ue202")
    entity = parsed(fields[0]) if kind == "entity" else None
    words = fields[0] if kind == "url" else str(entity[1]) if isinstance(entity, list) and len(entity) > 1 else ""
    return f" {words}" if words and mark[0].startswith(" ") else words


def _role(message: Any) -> Any:
    return one_of(one_of(message, "author"), "role")


def _turn(message: Any) -> list[Message]:
    content, role = one_of(message, "content"), _role(message)
    kind = one_of(content, "content_type")
    if not isinstance(content, dict) or role is None or kind in _SILENT:
        return []
    if kind in _ABOVE:
        texts = [content.get(name) for name in _SYSTEM_FIELDS]
        return [Message("system", text) for text in texts if isinstance(text, str) and text.strip()]
    if kind == "thoughts":
        thoughts = [str(one_of(item, "content", "summary") or "") for item in listed(content.get("thoughts"))]
        return [Message("assistant", "", reasoning="\n".join(thoughts) or None)]
    if role == "tool" or (role == "assistant" and one_of(message, "recipient") not in (None, "all")):
        tool = str(one_of(one_of(message, "author"), "name") or one_of(message, "recipient"))
        if tool.partition(".")[0] in _SILENT_TOOLS and kind != "system_error":
            return []
        raise NotLearned(RowRefused(NOT_HELD, f"ChatGPT's own tool {tool[:40]} took part"))
    text = _text(content)
    messages = [Message(role, text)] if text.strip() else []
    ended = one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")
    if role == "assistant" and (message.get("status") in _BROKEN_OFF or ended in ("max_tokens", "interrupted")):
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *messages)
    return messages


def _text(content: Mapping[str, Any]) -> str:
    parts = content.get("parts")
    if parts is None and isinstance(content.get("text"), str):
        parts = [content["text"]]
    if spoken := [part for part in listed(parts) if one_of(part, "content_type") == _SPOKEN]:
        parts = [str(part.get("text", "")) for part in spoken]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        kind = str(content.get("content_type"))[:40]
        raise RowRefused(NOT_HELD, f"a message of type {kind!r}: only text can be learned")
    return "\n".join(parts)


FORMAT = Format("chatgpt", read, needs=("mapping",), reads=frozenset(("mapping", "current_node")))
