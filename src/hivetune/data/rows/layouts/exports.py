"""Conversations as chat programs export them: one record a conversation, often a tree of edits.

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.parts import split_thoughts
from hivetune.data.rows.layouts.said import (
    NOT_HELD,
    Conversation,
    Row,
    RowLayout,
    before_media,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.rows.layouts.turns import in_order, read_system, read_turn
from hivetune.records import Message

# Contents that ChatGPT shows or keeps besides what was said.
_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
_MEMORY = "bio"  # where ChatGPT notes what it learned about the user; no answer rests on it
_SILENT_CONTENT = ("model_editable_context", "reasoning_recap", "app_pairing_content")


def branch(parents: Mapping[str, str | None], leaf: str) -> list[str]:
    """The nodes from the root to `leaf`. Raises RowRefused when they go in a circle."""
    path: list[str] = []
    seen: set[str] = set()
    node: str | None = leaf
    while isinstance(node, str) and node in parents:
        if node in seen:
            raise RowRefused("wrong-type", "the messages' parents go in a circle")
        seen.add(node)
        path.append(node)
        node = parents[node]
    return path[::-1]


def _done(name: str, messages: list[Message], left_out: int, cut: tuple[str, ...] = ()) -> Conversation:
    ordered, changed = in_order(messages)
    return Conversation(name, ordered, changed=(("other-branches",) if left_out else ()) + cut + changed)


def _said(turns: Iterable[Any], read: Callable[[Any], list[Message]]) -> tuple[list[Message], tuple[str, ...]]:
    """(messages, reasons of severity warn) of turns: an answer for which the program used a tool, whose results no
    export holds, or that broke off is read and not learned. `read` raises _NotLearned for such a turn.
    """
    why: list[RowRefused] = []

    def read_or_note(turn: Any) -> list[Message]:
        try:
            return read(turn)
        except _NotLearned as noted:
            why.append(noted.refused)
            return noted.messages

    spoken, cut = before_media(list(turns), read_or_note)
    found, ends = _with_whole_answers_unlearned(itertools.chain.from_iterable(spoken))
    if why and not any(message.role == "assistant" and message.weight for message in found):
        raise why[0]
    return found, ("ends-before-media",) if ends else cut


def _with_whole_answers_unlearned(messages: Iterable[Message]) -> tuple[list[Message], bool]:
    """(`messages` without weight in each answer of which a part has none, whether they end before one of which nothing
    else is there).
    """
    found: list[Message] = []
    for asks, turn in itertools.groupby(messages, lambda message: message.role in ("user", "system")):
        answer = list(turn)
        if not asks and not all(message.weight for message in answer):
            answer = [replace(message, weight=0) for message in answer if message.content.strip()]
            if not answer:
                return found, True
        found += answer
    return found, False


class _NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        self.messages = [replace(message, weight=0) for message in messages] or [Message("assistant", "", 0)]


def _chatgpt(name: str, row: Row) -> Conversation:
    """A tree: `mapping` of nodes, `current_node`."""
    mapping = row["mapping"]
    nodes = {key: node for key, node in mapping.items() if isinstance(node, dict)}
    if not any(node.get("parent") or node.get("children") for node in nodes.values()):
        nodes = _in_a_row(nodes)
    parents = {str(child): key for key, node in nodes.items() for child in listed(node.get("children"))}
    parents |= {key: node["parent"] for key, node in nodes.items() if node.get("parent")}
    parents = {key: parents.get(key) for key in nodes}
    leaf = str(row.get("current_node"))
    if leaf not in nodes:
        leaves = [key for key, node in nodes.items() if not node.get("children")]
        leaf = max(leaves, key=lambda key: one_of(nodes[key].get("message"), "create_time") or 0, default="")
    path = branch(parents, leaf)
    messages, cut = _said([nodes[key].get("message") for key in path], _chatgpt_turn)
    spoken = [key for key in nodes if key not in path and _chatgpt_role(nodes[key].get("message")) == "assistant"]
    return _done(name, messages, len(spoken), cut)


def _in_a_row(nodes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Nodes that lost their tree, one behind the other: by their times where all have one, else as they stand."""
    spoken = [key for key, node in nodes.items() if isinstance(node.get("message"), dict)]
    times = {key: nodes[key]["message"].get("create_time") for key in spoken}
    if all(isinstance(time, int | float) for time in times.values()):
        spoken.sort(key=times.__getitem__)
    below = {key: [other] for key, other in itertools.pairwise(spoken)}
    above = {other: key for key, other in itertools.pairwise(spoken)}
    return {key: {**nodes[key], "parent": above.get(key), "children": below.get(key)} for key in spoken}


def _chatgpt_role(message: Any) -> Any:
    return one_of(one_of(message, "author"), "role")


def _chatgpt_turn(message: Any) -> list[Message]:
    content = one_of(message, "content")
    role = _chatgpt_role(message)
    if not isinstance(content, dict) or role is None:
        return []
    kind = content.get("content_type")
    if kind == "user_editable_context":  # what the user told ChatGPT about themselves stood above the conversation
        texts = [content.get("user_profile"), content.get("user_instructions")]
        return [Message("system", text) for text in texts if isinstance(text, str) and text.strip()]
    if kind in _SILENT_CONTENT:
        return []
    if kind == "thoughts":
        thoughts = [str(one_of(item, "content", "summary") or "") for item in listed(content.get("thoughts"))]
        return [Message("assistant", "", reasoning="\n".join(thoughts) or None)]
    if _is_of_tool(message, role):
        tool = one_of(one_of(message, "author"), "name") or one_of(message, "recipient")
        if tool == _MEMORY:
            return []
        raise _NotLearned(RowRefused(NOT_HELD, f"ChatGPT's own tool {str(tool)[:40]} took part"))
    text = _chatgpt_text(content)
    said = read_turn({"role": role, "content": text}) if text.strip() else []
    if role == "assistant" and _is_unfinished(message):
        raise _NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *said)
    return said


def _chatgpt_text(content: Mapping[str, Any]) -> str:
    parts = content.get("parts")
    if parts is None and isinstance(content.get("text"), str):
        parts = [content["text"]]
    if isinstance(parts, list) and any(one_of(part, "content_type") == _SPOKEN for part in parts):
        parts = [str(part.get("text", "")) for part in parts if one_of(part, "content_type") == _SPOKEN]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        kind = str(content.get("content_type"))[:40]
        raise RowRefused(NOT_HELD, f"a message of type {kind!r}: only text can be learned")
    return "\n".join(parts)


def _is_of_tool(message: Any, role: Any) -> bool:
    return role == "tool" or (role == "assistant" and one_of(message, "recipient") not in (None, "all"))


def _is_unfinished(message: Any) -> bool:
    return one_of(message, "status") == "in_progress" or _finish(message) in ("max_tokens", "interrupted")


def _finish(message: Any) -> Any:
    return one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")


def _claude(name: str, row: Row) -> Conversation:
    """Claude's export: `chat_messages` with sender, text or content blocks, attachments."""
    turns = objects(row["chat_messages"])
    if turns is None:
        raise RowRefused("no-messages")
    ids = [str(turn.get("uuid")) for turn in turns]
    path = turns
    by_id = dict(zip(ids, turns, strict=True))
    if len(by_id) == len(turns) and any(str(turn.get("parent_message_uuid")) in by_id for turn in turns):
        leaf = str(row.get("current_leaf_message_uuid"))
        kept = branch({i: by_id[i].get("parent_message_uuid") for i in by_id}, leaf if leaf in by_id else ids[-1])
        path = [by_id[one] for one in kept]
    messages, cut = _said(path, _claude_turn)
    return _done(name, messages, len(turns) - len(path), cut)


def _claude_turn(turn: Mapping[str, Any]) -> list[Message]:
    if turn.get("sender") != "assistant" and (turn.get("files") or turn.get("files_v2")):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    texts = [one_of(item, "extracted_content") for item in listed(turn.get("attachments"))]
    if not all(isinstance(text, str) for text in texts):
        raise RowRefused(NOT_HELD, "an attachment without its text")
    content = turn.get("content") or turn.get("text")
    used_tools = isinstance(content, list) and any(one_of(part, "type") in _CLAUDE_TOOLS for part in content)
    if isinstance(content, list):
        silent = ("token_budget", "flag", *_CLAUDE_TOOLS)
        content = _apart([part for part in content if one_of(part, "type") not in silent])
    said = read_turn({"role": turn.get("sender"), "content": content})
    if used_tools:
        raise _NotLearned(RowRefused(NOT_HELD, "Claude's own tools took part"), *said)
    if not texts:
        return said
    return [*(Message("user", str(text)) for text in texts), *said]


def _apart(parts: list[Any]) -> list[Any]:
    """Blocks of text of which one ends a sentence and the next begins without a space are paragraphs."""
    found: list[Any] = []
    for part in parts:
        before, text = (one_of(found[-1], "text") if found else None), one_of(part, "text")
        if isinstance(before, str) and isinstance(text, str) and before.endswith(_ENDS) and text[:1].strip():
            part = {**part, "text": f"\n\n{text}"}
        found.append(part)
    return found


_CLAUDE_TOOLS = ("tool_use", "tool_result")
_ENDS = (".", "!", "?", ":", "\u3002", "\uff01", "\uff1f")


def _open_webui(name: str, row: Row) -> Conversation:
    """Open WebUI: `chat` with `history` (a tree) or, when older, only `messages`."""
    chat = row.get("chat", row)
    history = chat.get("history")
    nodes = one_of(history, "messages")
    turns: Iterable[Any]
    others = 0
    if isinstance(nodes, dict) and str(one_of(history, "currentId")) in nodes:
        parents = {key: one_of(node, "parentId") for key, node in nodes.items()}
        path = branch(parents, str(history["currentId"]))
        turns, others = (
            [nodes[key] for key in path],
            sum(one_of(node, "role") == "assistant" for key, node in nodes.items() if key not in path),
        )
    else:
        turns = listed(chat.get("messages"))
    said, cut = _said(turns, _webui_turn)
    messages = [*read_system(one_of(chat, "system") or one_of(chat.get("params"), "system")), *said]
    return _done(name, messages, others, cut)


def _webui_turn(turn: Any) -> list[Message]:
    if one_of(turn, "files"):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    said = read_turn({"role": one_of(turn, "role"), "content": one_of(turn, "content") or ""})
    if one_of(turn, "error"):
        raise _NotLearned(RowRefused("failed", "an answer of the conversation is an error"), *said)
    if one_of(turn, "done") is False and one_of(turn, "role") == "assistant":
        raise _NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *said)
    thoughts, rest = split_thoughts(said[0].content)
    if said[0].role != "assistant" or not thoughts:
        return said
    return [Message("assistant", rest, reasoning=thoughts)]


def _lm_studio(name: str, row: Row) -> Conversation:
    """LM Studio: each message has versions, of which one is selected."""
    messages = read_system(row.get("system_prompt") or _lm_studio_setting(row, "llm.prediction.systemPrompt"))
    others = 0
    for turn in row["messages"]:
        versions = objects(one_of(turn, "versions"))
        if versions is None:
            raise RowRefused("wrong-type", "messages: each one an object with versions")
        chosen = turn.get("currentlySelected")
        chosen = chosen if isinstance(chosen, int) and 0 <= chosen < len(versions) else -1
        others += len(versions) - 1
        version = versions[chosen]
        steps = objects(version.get("steps"))
        if steps is None:
            messages += read_turn({"role": version.get("role"), "content": version.get("content")})
            continue
        for step in steps:
            if step.get("type") == "contentBlock":
                thinks = one_of(step.get("style"), "type") == "thinking"
                content = [_lm_studio_part(part) for part in listed(step.get("content"))]
                role = step.get("roleOverride") or version.get("role", "assistant")
                said = read_turn({"role": role, "content": content})
                messages += [Message("assistant", "", reasoning=m.content) for m in said] if thinks else said
    return _done(name, messages, others)


def _lm_studio_setting(row: Row, key: str) -> Any:
    """A setting of one chat."""
    settings = listed(one_of(row.get("per_chat_prediction_config"), "fields"))
    return next((one_of(setting, "value") for setting in settings if one_of(setting, "key") == key), None)


def _lm_studio_part(part: Any) -> Any:
    """A part of a step; calls and results of tools under the names that others give them."""
    kind, call_id = one_of(part, "type"), str(one_of(part, "callId", "toolCallRequestId"))
    if kind == "toolCallRequest":
        return {"type": "tool_use", "id": call_id, "name": part.get("name"), "input": part.get("parameters")}
    if kind == "toolCallResult":
        return {"type": "tool_result", "tool_use_id": call_id, "content": parsed(part.get("content"))}
    return part


def _text_generation_webui(name: str, row: Row) -> Conversation:
    """text-generation-webui: `internal` has what the model was given, pair by pair; `visible` the same as HTML."""
    messages: list[Message] = []
    for asked, answered in row["internal"]:
        if asked != _GREETS:
            messages.append(Message("user", asked))
        messages += read_turn({"role": "assistant", "content": answered})
    return _done(name, messages, 0)


_GREETS = "<|BEGIN-VISIBLE-CHAT|>"  # stands for the user where the character speaks first


def _is_text_generation_webui(row: Row) -> bool:
    pairs = listed(row.get("internal"))
    return "visible" in row and bool(pairs) and all(map(_is_pair, pairs))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _ai_studio(name: str, row: Row) -> Conversation:
    """Prompts of Google's AI Studio: `chunkedPrompt` of chunks, thoughts among them."""
    system = parsed(row.get("system_instruction"))
    messages, cut = _said(listed(row["chunked_prompt"].get("chunks")), _ai_studio_turn)
    return _done(name, [*read_system(system), *messages], 0, cut)


def _ai_studio_turn(chunk: Any) -> list[Message]:
    if one_of(chunk, "text") is None:
        raise RowRefused(NOT_HELD, "a chunk that is no text: only text can be learned")
    said = read_turn({**chunk, "content": chunk["text"]})
    if chunk.get("finishReason") not in (None, "", "STOP"):
        why = f"an answer ended by {str(chunk['finishReason'])[:40]}, not by itself"
        raise _NotLearned(RowRefused("cut-off-answer", why), *said)
    return said


def _is_lm_studio(row: Row) -> bool:
    turns = objects(row.get("messages"))
    return turns is not None and "versions" in turns[0]


def _is_open_webui(row: Row) -> bool:
    chat = row.get("chat")
    if chat is None:  # one chat, without what the program knows of it
        return isinstance(one_of(row.get("history"), "messages"), dict) and "currentId" in row["history"]
    return isinstance(chat, dict) and ("history" in chat or "messages" in chat)


CHATGPT = RowLayout(
    "chatgpt",
    frozenset(("mapping",)),
    lambda row: isinstance(row.get("mapping"), dict),
    _chatgpt,
    frozenset(("mapping",)),
)
CLAUDE = RowLayout(
    "claude",
    frozenset(("chat_messages",)),
    lambda row: "chat_messages" in row,
    _claude,
    frozenset(("chat_messages",)),
    frozenset(("summary",)),
)
OPEN_WEBUI = RowLayout(
    "open-webui",
    frozenset(("chat", "history")),
    _is_open_webui,
    _open_webui,
    frozenset(("chat", "history", "messages", "system")),
)
TEXT_GENERATION_WEBUI = RowLayout(
    "text-generation-webui",
    frozenset(("internal",)),
    _is_text_generation_webui,
    _text_generation_webui,
    frozenset(("internal", "visible", "metadata")),
)
AI_STUDIO = RowLayout(
    "ai-studio",
    frozenset(("chunked_prompt",)),
    lambda row: isinstance(row.get("chunked_prompt"), dict),
    _ai_studio,
    frozenset(("chunked_prompt", "system_instruction")),
)
LM_STUDIO = RowLayout(
    "lm-studio", frozenset(("messages",)), _is_lm_studio, _lm_studio, frozenset(("messages", "system_prompt", "notes"))
)
