"""Exported chats of ChatGPT (a tree: a `mapping` of nodes with a `current_node`) and of Claude (`chat_messages` with
sender, text or content blocks, attachments).

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`). Answers
in which a tool took part (a canvas, an artifact, code, a connector) and those that were stopped are read and not
learned, since the exports lack results, except a search: the answer says what it found.

https://help.openai.com/en/articles/7260999-how-do-i-export-my-chatgpt-history-and-data and
https://support.claude.com/en/articles/9450526-how-can-i-export-my-claude-data
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.format import NOT_HELD, Conversation, Format
from hivetune.data.pieces.sessions import path_to
from hivetune.data.pieces.turns import conversation_of, read_turn, read_turns
from hivetune.data.pieces.values import Row, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# ChatGPT.
_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
# Tools without a part in the answer: a search, of which the answer says what it found, and notes about the user.
_SILENT_TOOLS = ("web", "browser", "bio")
_ABOVE = ("user_editable_context", "system_content")  # what stood above the conversation
_SYSTEM_FIELDS = ("model_identity_desc", "instructions", "user_profile", "user_instructions")
_BROKEN_OFF = ("in_progress", "finished_partial_completion")  # states of a message
_SILENT = ("model_editable_context", "reasoning_recap", "app_pairing_content")
# Where an answer names a source by its number in what was found; some marks hold words of the sentence (a link, a
# name). Today's marks are characters that no text contains; older ones are words in brackets.
_MARK = re.compile(
    r" ?\ue200(\w+)(?:\ue202([^\ue200\ue201]*))?\ue201"
    r"| ?(?::contentReference\[oaicite:\d+\]\{index=\d+\}|\u3010\d+(?::\d+)?\u2020[^\u3010\u3011]*\u3011)"
)
# Claude.
_SILENT_PARTS = ("token_budget", "flag")
_TOOLS = ("tool_use", "tool_result")
_SEARCHES = ("web_search", "web_fetch")


def read_chatgpt(row: Row) -> Conversation | None:
    """Return the kept branch of a tree of messages; None for a tree of another program."""
    nodes = row["mapping"] if isinstance(row["mapping"], dict) else {}
    messages = {key: one_of(node, "message") for key, node in nodes.items()}
    if not any(one_of(message, "author") for message in messages.values()):
        if "current_node" not in row:
            return None
        raise RowRefused(NOT_HELD, "the chat has no messages, so there is nothing to learn")
    parents = {key: one_of(node, "parent") for key, node in nodes.items()}
    found = _chat("chatgpt", messages, parents, str(row.get("current_node")), _chatgpt_turn)
    plain = tuple(map(_without_marks, found.messages))
    marked = () if plain == found.messages else ("source-marks",)
    return found._replace(messages=plain, changed=(*found.changed, *marked))


def read_claude(row: Row) -> Conversation:
    turns = objects(row["chat_messages"])
    if turns is None:
        raise RowRefused(NOT_HELD, "the chat has no messages, so there is nothing to learn")
    by_id = {str(turn.get("uuid")): turn for turn in turns}
    parents = {name: turn.get("parent_message_uuid") for name, turn in by_id.items()}
    leaf = str(row.get("current_leaf_message_uuid"))
    if len(by_id) < len(turns) or by_id.keys().isdisjoint(map(str, parents.values())):  # a list, and no tree
        by_id = {str(number): turn for number, turn in enumerate(turns)}
        parents = {name: str(int(name) - 1) for name in by_id}
    return _chat("claude", by_id, parents, leaf if leaf in by_id else list(by_id)[-1], _claude_turn)


def _chat(
    name: str, nodes: Mapping[str, Any], parents: Mapping[str, Any], leaf: str, read: Callable[[Any], list[Message]]
) -> Conversation:
    """Return the conversation from the root of a tree to `leaf`. An answer is learned only if all of its parts are."""
    path = path_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages name each other as parents in a cycle: export the chat again")
    turns, changed = read_turns((nodes[key] for key in path), read, logged=True)
    messages: list[Message] = []
    for role, turn in itertools.groupby(turns, lambda message: message.role):
        parts = list(turn)
        if role == "assistant" and not all(part.weight for part in parts):
            parts = [replace(part, weight=0) for part in parts if part.content.strip()]
            if not parts:
                changed = ("ends-before-media",)
                break
        messages += parts
    if not any(message.weight for message in messages if message.role == "assistant"):
        raise RowRefused(NOT_HELD, "each answer was stopped, or used a tool whose result is not in the export")
    others = any(_answers(nodes[key]) for key in nodes.keys() - set(path))
    return conversation_of(name, messages, changed=(*(["other-branches"] if others else []), *changed))


def _answers(message: Any) -> bool:
    return "assistant" in (one_of(one_of(message, "author"), "role"), one_of(message, "sender"))


def _without_marks(message: Message) -> Message:
    answers = message.role == "assistant"
    return replace(message, content=_MARK.sub(_words_of_mark, message.content)) if answers else message


def _words_of_mark(mark: re.Match[str]) -> str:
    """Return the words of a mark in its sentence, with the blank before it."""
    kind, fields = mark[1], (mark[2] or "").split("\ue202")
    entity = parsed(fields[0]) if kind == "entity" else None
    words = fields[0] if kind == "url" else str(entity[1]) if isinstance(entity, list) and len(entity) > 1 else ""
    return f" {words}" if words and mark[0].startswith(" ") else words


def _chatgpt_turn(message: Any) -> list[Message]:
    content, author = one_of(message, "content"), one_of(message, "author")
    kind, role, to = one_of(content, "content_type"), one_of(author, "role"), one_of(message, "recipient")
    if not isinstance(content, dict) or role is None or kind in _SILENT:
        return []
    if kind in _ABOVE:
        texts = [content.get(name) for name in _SYSTEM_FIELDS]
        return [Message("system", text) for text in texts if isinstance(text, str) and text.strip()]
    if kind == "thoughts":
        thoughts = [str(one_of(item, "content", "summary") or "") for item in listed(content.get("thoughts"))]
        return [Message("assistant", "", reasoning="\n".join(thoughts) or None)]
    if role == "tool" or (role == "assistant" and to not in (None, "all")):
        tool = str(one_of(author, "name") or to).partition(".")[0]
        return [] if tool in _SILENT_TOOLS and kind != "system_error" else [Message("assistant", "", 0)]
    parts = content.get("parts")
    if spoken := [part for part in listed(parts) if one_of(part, "content_type") == _SPOKEN]:
        parts = [str(part.get("text", "")) for part in spoken]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise RowRefused(NOT_HELD, f"a message has the type {str(kind)[:40]!r}, but only text can be learned")
    if role == "user" and one_of(one_of(message, "metadata"), "attachments"):
        raise RowRefused(NOT_HELD, "a message has files whose text is not in the export")
    text = "\n".join(parts)
    ended = one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")
    if role == "assistant" and (message.get("status") in _BROKEN_OFF or ended in ("max_tokens", "interrupted")):
        return [Message(role, text, 0)]
    return [Message(role, text)] if text.strip() else []


def _claude_turn(turn: Mapping[str, Any]) -> list[Message]:
    answers, attached = turn.get("sender") == "assistant", listed(turn.get("attachments"))
    texts = [one_of(item, "extracted_content") for item in attached]
    files = [*listed(turn.get("files")), *listed(turn.get("files_v2"))]
    known = [one_of(item, "file_name") for item in attached]
    is_held = answers or all(one_of(file, "file_name") in known for file in files)
    if not is_held or not all(isinstance(text, str) for text in texts):
        raise RowRefused(NOT_HELD, "a message has files or an attachment whose text is not in the export")
    content: Any = turn.get("content") or turn.get("text")
    tools = [part for part in listed(content) if one_of(part, "type") in _TOOLS]
    weight = None if all(one_of(part, "name") in _SEARCHES for part in tools) else 0
    if isinstance(content, list):
        content = _paragraphs(part for part in content if one_of(part, "type") not in (*_TOOLS, *_SILENT_PARTS))
    messages = read_turn({"role": turn.get("sender"), "content": content, "weight": weight})
    messages = [message for message in messages if message.content.strip()]
    return messages if answers else [*(Message("user", str(text)) for text in texts), *messages]


def _paragraphs(parts: Iterable[Any]) -> list[Any]:
    joined: list[Any] = []
    for part in parts:
        before = joined[-1] if joined and one_of(joined[-1], "type") == "text" else None
        if before is not None and one_of(part, "type") == "text":
            joined[-1] = {**before, "text": f"{str(before.get('text')).rstrip()}\n\n{str(part.get('text')).lstrip()}"}
        else:
            joined.append(part)
    return joined


FORMAT = Format("chatgpt", read_chatgpt, ("mapping",), frozenset(("mapping", "current_node")))
CLAUDE_FORMAT = Format(
    "claude", read_claude, ("chat_messages",), frozenset(("chat_messages", "current_leaf_message_uuid"))
)
