"""Exported chats of ChatGPT (a tree: a `mapping` of nodes with a `current_node`) and of Claude (`chat_messages` with
sender, text or content blocks, attachments).

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`). Answers
in which a tool took part whose results the export lacks (a canvas, an artifact, code, a connector) and those that were
stopped are read and not learned, except a search: the answer says what it found.

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
# name). Today's are no characters of any text; older ones are words in brackets.
_MARK = re.compile(r" ?\ue200(\w+)(?:\ue202([^\ue200\ue201]*))?\ue201")
_OLD_MARK = re.compile(
    r" ?(?::contentReference\[oaicite:\d+\]\{index=\d+\}|\u3010\d+(?::\d+)?\u2020[^\u3010\u3011]*\u3011)"
)
# Claude.
_SILENT_PARTS = ("token_budget", "flag")
_TOOLS = ("tool_use", "tool_result")
_SEARCHES = ("web_search", "web_fetch")


def read_chatgpt(row: Row) -> Conversation | None:
    """Return the kept branch of a tree of messages."""
    if not isinstance(row["mapping"], dict):
        return None
    nodes = {str(key): node for key, node in row["mapping"].items() if isinstance(node, dict)}
    messages = {key: one_of(node, "message") for key, node in nodes.items()}
    # Other programs write a `mapping` too; ChatGPT's messages have an author.
    if not any(one_of(message, "author") for message in messages.values()):
        return None
    parents = {key: node.get("parent") for key, node in nodes.items()}
    kept = _branch(messages, parents, str(row.get("current_node")))
    answers = [sum(_role(message) == "assistant" for message in some) for some in (messages.values(), kept)]
    found = _chat("chatgpt", kept, _chatgpt_turn, answers[0] - answers[1])
    plain = tuple(_without_marks(message) for message in found.messages)
    changed = (*found.changed, "source-marks") if plain != found.messages else found.changed
    return found._replace(messages=plain, changed=changed)


def read_claude(row: Row) -> Conversation:
    turns = path = objects(row["chat_messages"])
    if turns is None or path is None:
        raise RowRefused("no-answer", "the list of messages is empty")
    by_id = {str(turn.get("uuid")): turn for turn in turns}
    parents = {name: turn.get("parent_message_uuid") for name, turn in by_id.items()}
    if len(by_id) == len(turns) and any(str(parent) in by_id for parent in parents.values()):
        leaf = str(row.get("current_leaf_message_uuid"))
        path = _branch(by_id, parents, leaf if leaf in by_id else list(by_id)[-1])
    return _chat("claude", path, _claude_turn, len(turns) - len(path))


def _branch(nodes: Mapping[str, Any], parents: Mapping[str, Any], leaf: str) -> list[Any]:
    """Return the nodes from the root to `leaf`. Raise RowRefused when they go in a circle."""
    path = path_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return [nodes[name] for name in path]


def _chat(name: str, turns: Iterable[Any], read: Callable[[Any], list[Message]], others: int) -> Conversation:
    """Return the conversation of an exported chat; `others` is the number of answers on branches that were given up."""
    turns_read, cut = read_turns(turns, read, to_media=True)
    messages: list[Message] = []
    for is_answer, turn in itertools.groupby(turns_read, lambda message: message.role in ("assistant", "tool")):
        parts = list(turn)
        if is_answer and not all(part.weight for part in parts):
            # Which of its calls have their results nobody can tell: the words are kept, and not learned.
            words = [part for part in parts if part.role == "assistant" and part.content.strip()]
            parts = [replace(part, weight=0, tool_calls=()) for part in words]
            if not parts:
                cut = ("ends-before-media",)
                break
        messages += parts
    answered = any(message.role == "assistant" for message in turns_read)
    if answered and not any(message.weight for message in messages if message.role == "assistant"):
        raise RowRefused(NOT_HELD, "each answer was stopped, or used a tool of which the export lacks the results")
    return conversation_of(name, messages, changed=(*(["other-branches"] if others else []), *cut))


def _unlearned(messages: Iterable[Message]) -> list[Message]:
    """Return the messages of an answer that is read and not learned."""
    found = [replace(message, weight=0) if message.role == "assistant" else message for message in messages]
    return found or [Message("assistant", "", 0)]


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


def _chatgpt_turn(message: Any) -> list[Message]:
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
        is_silent = tool.partition(".")[0] in _SILENT_TOOLS and kind != "system_error"
        return [] if is_silent else _unlearned([])
    text = _text(content)
    messages = [Message(role, text)] if text.strip() else []
    ended = one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")
    broken_off = message.get("status") in _BROKEN_OFF or ended in ("max_tokens", "interrupted")
    return _unlearned(messages) if role == "assistant" and broken_off else messages


def _text(content: Mapping[str, Any]) -> str:
    parts = content.get("parts")
    if spoken := [part for part in listed(parts) if one_of(part, "content_type") == _SPOKEN]:
        parts = [str(part.get("text", "")) for part in spoken]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        kind = str(content.get("content_type"))[:40]
        raise RowRefused(NOT_HELD, f"a message of type {kind!r}: only text can be learned")
    return "\n".join(parts)


def _claude_turn(turn: Mapping[str, Any]) -> list[Message]:
    attached, answers = listed(turn.get("attachments")), turn.get("sender") == "assistant"
    texts = [one_of(item, "extracted_content") for item in attached]
    attached_names = {one_of(item, "file_name") for item in attached}
    files = [*listed(turn.get("files")), *listed(turn.get("files_v2"))]
    if not answers and any(one_of(file, "file_name") not in attached_names for file in files):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    if not all(isinstance(text, str) for text in texts):
        raise RowRefused(NOT_HELD, "an attachment without its text")
    content: Any = turn.get("content") or turn.get("text")
    parts = [part for part in listed(content) if not _is_silent(part)]
    calls = [one_of(part, "name") for part in parts if one_of(part, "type") == "tool_use"]
    lacks = answers and ("artifacts" in calls or _lacks_results(parts))  # an artifact stands beside the conversation
    if isinstance(content, list):
        content = _paragraphs(part for part in parts if not (lacks and one_of(part, "type") in _TOOLS))
    messages = read_turn({"role": turn.get("sender"), "content": content})
    if lacks or (answers and messages[-1].role != "assistant"):
        return _unlearned(messages)
    return [*(Message("user", str(text)) for text in texts), *messages]


def _is_silent(part: Any) -> bool:
    kind = one_of(part, "type")
    return kind in _SILENT_PARTS or (kind in _TOOLS and one_of(part, "name") in _SEARCHES)


def _paragraphs(parts: Iterable[Any]) -> list[Any]:
    """Return the parts with texts that follow each other as paragraphs of one."""
    joined: list[Any] = []
    for part in parts:
        before = joined[-1] if joined and one_of(joined[-1], "type") == "text" else None
        if before is not None and one_of(part, "type") == "text":
            joined[-1] = {**before, "text": f"{str(before.get('text')).rstrip()}\n\n{str(part.get('text')).lstrip()}"}
        else:
            joined.append(part)
    return joined


def _lacks_results(parts: list[Any]) -> bool:
    """Return whether a call of an answer has no result, or one that holds no text."""
    results = [listed(part.get("content")) for part in parts if one_of(part, "type") == "tool_result"]
    in_words = all(texts and all(isinstance(one_of(t, "text"), str) for t in texts) for texts in results)
    return len(results) < sum(one_of(part, "type") == "tool_use" for part in parts) or not in_words


FORMAT = Format("chatgpt", read_chatgpt, ("mapping",), frozenset(("mapping", "current_node")))
CLAUDE_FORMAT = Format(
    "claude", read_claude, ("chat_messages",), frozenset(("chat_messages", "current_leaf_message_uuid"))
)
