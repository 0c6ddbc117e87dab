"""ChatGPT's export: a conversation is a tree, a `mapping` of nodes with a `current_node`. Two answers that the user
compared stand apart (`model_comparisons.json`).

https://help.openai.com/en/articles/7260999-how-do-i-export-my-chatgpt-history-and-data
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, one_of, parsed
from hivetune.data.pieces.session import NotLearned, branch, chat
from hivetune.data.pieces.turns import plain_call
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
# Tools without a part in the answer: a search, of which the answer says what it found, and notes about the user.
_SILENT_TOOLS = ("web", "browser", "bio")
_THINKER = "a8km123"  # under whose name ChatGPT shows what a model thinks
_CANVAS = "canmore.create_textdoc"  # writes a document beside the conversation: a part of the answer
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
    parents = {str(child): key for key, node in nodes.items() for child in listed(node.get("children"))}
    parents |= {key: node["parent"] for key, node in nodes.items() if node.get("parent")}
    leaf = str(row.get("current_node"))
    if leaf not in nodes:
        leaves = [key for key, node in nodes.items() if not node.get("children")]
        times = {key: as_time(one_of(nodes[key].get("message"), "create_time")) or 0 for key in leaves}
        leaf = max(leaves, key=times.__getitem__, default="")
    path = branch({key: parents.get(key) for key in nodes}, leaf)
    others = sum(_role(nodes[key].get("message")) == "assistant" for key in nodes if key not in path)
    return _chat("chatgpt", [nodes[key].get("message") for key in path], others)


def _chat(name: str, turns: Iterable[Any], others: int) -> Conversation:
    read = chat(name, turns, _turn, others)
    messages = tuple(_without_marks(m) if m.role == "assistant" else m for m in read.messages)
    changed = (*read.changed, "source-marks") if messages != read.messages else read.changed
    return read._replace(messages=messages, changed=changed)


def _without_marks(message: Message) -> Message:
    text = _MARK.sub(_words_of_mark, message.content) if "\ue200" in message.content else message.content
    text = _OLD_MARK.sub("", text) if "oaicite" in text or "\u2020" in text else text
    return message if text == message.content else replace(message, content=text)


def _words_of_mark(mark: re.Match[str]) -> str:
    """Return the words of a mark in its sentence, with the blank before it."""
    kind, fields = mark[1], (mark[2] or "").split("\ue202")
    entity = parsed(fields[0]) if kind == "entity" else None
    words = fields[0] if kind == "url" else str(entity[1]) if isinstance(entity, list) and len(entity) > 1 else ""
    return f" {words}" if words and mark[0].startswith(" ") else words


def _role(message: Any) -> Any:
    return one_of(one_of(message, "author"), "role")


def _turn(message: Any) -> list[Message]:
    content = one_of(message, "content")
    role = _role(message)
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
        return _of_tool(message, content)
    text = _text(content)
    messages = [Message(role, text)] if text.strip() else []
    if role == "assistant" and _is_unfinished(message):
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *messages)
    return messages


def _of_tool(message: Any, content: Mapping[str, Any]) -> list[Message]:
    tool = str(one_of(one_of(message, "author"), "name") or one_of(message, "recipient"))
    kind = content.get("content_type")
    if kind == "execution_output":  # what code printed that the model wrote and that ran: the export holds both
        return [Message("tool", _text(content), name=tool)]
    if tool.partition(".")[0] in _SILENT_TOOLS and kind != "system_error":
        return []
    if tool == _THINKER:
        return [Message("assistant", "", reasoning=_text(content).strip() or None)]
    if kind == "code" and _role(message) == "assistant" and not _is_unfinished(message):
        return [Message("assistant", "", tool_calls=(plain_call(tool, {"input": _text(content)}, None),))]
    if tool == _CANVAS and not _is_unfinished(message):
        written = parsed(_text(content))
        text, (kind, _, language) = one_of(written, "content"), str(one_of(written, "type")).partition("/")
        if isinstance(text, str) and "```" not in text:
            return [Message("assistant", f"```{language}\n{text.rstrip()}\n```" if kind == "code" else text)]
        if isinstance(written, str) and "Successfully created" in written:
            return []
    raise NotLearned(RowRefused(NOT_HELD, f"ChatGPT's own tool {tool[:40]} took part"))


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


def _is_unfinished(message: Any) -> bool:
    ended = one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")
    return one_of(message, "status") in _BROKEN_OFF or ended in ("max_tokens", "interrupted")


def _preferred(row: Row) -> Conversation | None:
    """Return the conversation with the preferred answer: the new one if both are rated equally (the user asked for it),
    the first one without a comparison.
    """
    record = row.get("content", row)  # of newer exports
    question = one_of(one_of(record, "input"), "prompt_convo")
    compared = one_of(one_of(record, "output"), "feedback_step_2")
    if question is None or compared is None:
        return None
    better = "original" if one_of(compared, "completion_comparison_rating") in ("original", "skip") else "new"
    *answer, last = listed(one_of(compared, f"{better}_turn")) or [None]
    if one_of(last, "end_turn") is False:  # nothing follows that could end it
        last = {**last, "status": "in_progress"}
    return _chat("chatgpt-comparison", [*listed(one_of(question, "messages")), *answer, last], 1)


_COMPARED = frozenset(("input", "output", "content"))
FORMAT = Format("chatgpt", read, needs=("mapping",), reads=frozenset(("mapping", "current_node")))
COMPARISON_FORMAT = Format("chatgpt-comparison", _preferred, needs=("input|content",), reads=_COMPARED)
