"""ChatGPT's export: a conversation is a tree, a `mapping` of nodes with a `current_node`. Two answers that the user
compared stand apart (`model_comparisons.json`).

https://help.openai.com/en/articles/7260999-how-do-i-export-my-chatgpt-history-and-data
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import plain_call
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, one_of, parsed
from hivetune.data.pieces.session import NotLearned, branch_nodes, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# Contents that ChatGPT shows or keeps besides what was said.
_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
_MEMORY = "bio"  # where ChatGPT notes what it learned about the user; no answer rests on it
_SEARCHES = ("web", "browser")  # tools that search the web; the answer says what they found
_THINKER = "a8km123"  # under whose name ChatGPT shows what a model thinks
_CANVAS = "canmore.create_textdoc"  # writes a document beside the conversation: a part of the answer
_SYSTEM_FIELDS = ("model_identity_desc", "instructions", "user_profile", "user_instructions")
_BROKEN_OFF = ("in_progress", "finished_partial_completion")  # states of a message
_SILENT_CONTENT = ("model_editable_context", "reasoning_recap", "app_pairing_content")


def read(row: Row) -> Conversation | None:
    """Return the kept branch of a tree of messages. Other programs write a `mapping` too; ChatGPT's messages have an
    author.
    """
    if not isinstance(row["mapping"], dict):
        return None
    said = [message for node in row["mapping"].values() if isinstance(message := one_of(node, "message"), dict)]
    if said and not any("author" in message for message in said):
        return None
    nodes, path = branch_nodes(row, "create_time")
    messages, cut = chat_messages([nodes[key].get("message") for key in path], _turn)
    others = [key for key in nodes if key not in path and _role(nodes[key].get("message")) == "assistant"]
    return finish_chat("chatgpt", messages, len(others), cut)


def _role(message: Any) -> Any:
    return one_of(one_of(message, "author"), "role")


def _turn(message: Any) -> list[Message]:
    content = one_of(message, "content")
    role = _role(message)
    if not isinstance(content, dict) or role is None:
        return []
    kind = content.get("content_type")
    if kind in ("user_editable_context", "system_content"):  # what stood above the conversation
        texts = [content.get(name) for name in _SYSTEM_FIELDS]
        return [Message("system", text) for text in texts if isinstance(text, str) and text.strip()]
    if kind in _SILENT_CONTENT:
        return []
    if kind == "thoughts":
        thoughts = [str(one_of(item, "content", "summary") or "") for item in listed(content.get("thoughts"))]
        return [Message("assistant", "", reasoning="\n".join(thoughts) or None)]
    if role == "tool" or (role == "assistant" and one_of(message, "recipient") not in (None, "all")):
        return _of_tool(message, content)
    text = _text(content)
    messages = read_turn({"role": role, "content": text}) if text.strip() else []
    if role == "assistant" and _is_unfinished(message):
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *messages)
    return messages


def _of_tool(message: Any, content: Mapping[str, Any]) -> list[Message]:
    tool = str(one_of(one_of(message, "author"), "name") or one_of(message, "recipient"))
    kind = content.get("content_type")
    if tool.partition(".")[0] in _SEARCHES and kind != "system_error":
        return []
    if kind == "execution_output":  # what code printed that the model wrote and that ran: the export holds both
        return [Message("tool", _text(content), name=tool)]
    if kind == "code" and _role(message) == "assistant" and not _is_unfinished(message):
        return [Message("assistant", "", tool_calls=(plain_call(tool, {"input": _text(content)}, None),))]
    if tool == _MEMORY:
        return []
    if tool == _THINKER:
        return [Message("assistant", "", reasoning=_text(content).strip() or None)]
    if tool == _CANVAS and not _is_unfinished(message):
        text = _text(content)
        if document := _document(text):
            return [Message("assistant", document)]
        if "Successfully created" in text:
            return []
    raise NotLearned(RowRefused(NOT_HELD, f"ChatGPT's own tool {tool[:40]} took part"))


def _document(call: str) -> str:
    """Return the text that a call of the canvas writes: code in a fenced block. Empty for other texts."""
    written = parsed(call)
    text, (kind, _, language) = one_of(written, "content"), str(one_of(written, "type")).partition("/")
    if not isinstance(text, str) or "```" in text:
        return ""
    return f"```{language}\n{text.rstrip()}\n```" if kind == "code" else text


def _text(content: Mapping[str, Any]) -> str:
    parts = content.get("parts")
    if parts is None and isinstance(content.get("text"), str):
        parts = [content["text"]]
    if isinstance(parts, list) and any(one_of(part, "content_type") == _SPOKEN for part in parts):
        parts = [str(part.get("text", "")) for part in parts if one_of(part, "content_type") == _SPOKEN]
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
    read, cut = chat_messages([*listed(one_of(question, "messages")), *answer, last], _turn)
    return finish_chat("chatgpt-comparison", read, 1, cut)


_COMPARED = frozenset(("input", "output", "content"))
FORMAT = Format("chatgpt", read, needs=("mapping",), reads=frozenset(("mapping", "current_node")))
COMPARISON_FORMAT = Format("chatgpt-comparison", _preferred, needs=("input|content",), reads=_COMPARED)
