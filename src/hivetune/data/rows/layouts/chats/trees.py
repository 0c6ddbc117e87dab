"""Exports of ChatGPT and DeepSeek: trees of messages."""

import itertools
from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.branches import NotLearned, branch, done, said_in_chat
from hivetune.data.pieces.calls import free_call
from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.said import (
    NOT_HELD,
    Conversation,
    Row,
    RowLayout,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.turns import read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# Contents that ChatGPT shows or keeps besides what was said.
_SPOKEN = "audio_transcription"  # what was said, beside the sound itself
_MEMORY = "bio"  # where ChatGPT notes what it learned about the user; no answer rests on it
_SEARCHES = ("web", "browser")  # tools that search the web; the answer says what they found
_THINKER = "a8km123"  # under whose name ChatGPT shows what a model thinks
_CANVAS = "canmore.create_textdoc"  # writes a document beside the conversation: a part of the answer
_TOLD = ("model_identity_desc", "instructions", "user_profile", "user_instructions")  # of a system prompt in fields
_SILENT_CONTENT = ("model_editable_context", "reasoning_recap", "app_pairing_content")


def _chatgpt(name: str, row: Row) -> Conversation:
    """A tree: `mapping` of nodes, `current_node`."""
    nodes, path = _kept_nodes(row, "create_time")
    messages, cut = said_in_chat([nodes[key].get("message") for key in path], _chatgpt_turn)
    others = [key for key in nodes if key not in path and _chatgpt_role(nodes[key].get("message")) == "assistant"]
    return done(name, messages, len(others), cut)


def _compared(name: str, row: Row) -> Conversation:
    """Two answers of ChatGPT to one question, compared by the user: the conversation with the one that was preferred,
    the new one where they are the same (the user asked for it because the first was cut, or no better), the first one
    where they did not compare them.
    """
    asked, compared = _comparison(row)
    better = "original" if one_of(compared, "completion_comparison_rating") in ("original", "skip") else "new"
    *answer, last = listed(one_of(compared, f"{better}_turn")) or [None]
    if one_of(last, "end_turn") is False:  # nothing follows that could end it
        last = {**last, "status": "in_progress"}
    read, cut = said_in_chat([*listed(one_of(asked, "messages")), *answer, last], _chatgpt_turn)
    return done(name, read, 1, cut)


def _comparison(row: Row) -> tuple[Any, Any]:
    """(the conversation, how its answers were compared); newer exports have both in `content`."""
    record = row.get("content", row)
    return one_of(one_of(record, "input"), "prompt_convo"), one_of(one_of(record, "output"), "feedback_step_2")


def _kept_nodes(row: Row, time: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(the nodes of a tree, those of the branch that was kept)."""
    nodes = {key: node for key, node in row["mapping"].items() if isinstance(node, dict)}
    if not any(node.get("parent") or node.get("children") for node in nodes.values()):
        nodes = _in_a_row(nodes)
    parents = {str(child): key for key, node in nodes.items() for child in listed(node.get("children"))}
    parents |= {key: node["parent"] for key, node in nodes.items() if node.get("parent")}
    leaf = str(row.get("current_node"))
    if leaf not in nodes:
        leaves = [key for key, node in nodes.items() if not node.get("children")]
        leaf = max(leaves, key=lambda key: as_time(one_of(nodes[key].get("message"), time)) or 0, default="")
    return nodes, branch({key: parents.get(key) for key in nodes}, leaf)


def _deepseek(name: str, row: Row) -> Conversation:
    """The same tree without a node that was kept last; a message is a text with its role, or fragments."""
    nodes, path = _kept_nodes(row, "inserted_at")
    messages, cut = said_in_chat([nodes[key].get("message") for key in path], _deepseek_turn)
    return done(name, messages, sum("message" in nodes[key] for key in nodes if key not in path) // 2, cut)


def _deepseek_turn(message: Any) -> list[Message]:
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


def _is_deepseek(row: Row) -> bool:
    nodes = row.get("mapping")
    messages = [one_of(node, "message") for node in nodes.values()] if isinstance(nodes, dict) else []
    found = [message for message in messages if isinstance(message, dict)]
    return bool(found) and all("fragments" in one or ("role" in one and "author" not in one) for one in found)


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
    if kind in ("user_editable_context", "system_content"):  # what stood above the conversation
        texts = [content.get(name) for name in _TOLD]
        return [Message("system", text) for text in texts if isinstance(text, str) and text.strip()]
    if kind in _SILENT_CONTENT:
        return []
    if kind == "thoughts":
        thoughts = [str(one_of(item, "content", "summary") or "") for item in listed(content.get("thoughts"))]
        return [Message("assistant", "", reasoning="\n".join(thoughts) or None)]
    if _is_of_tool(message, role):
        return _of_tool(message, content)
    text = _chatgpt_text(content)
    said = read_turn({"role": role, "content": text}) if text.strip() else []
    if role == "assistant" and _is_unfinished(message):
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *said)
    return said


def _of_tool(message: Any, content: Mapping[str, Any]) -> list[Message]:
    tool = str(one_of(one_of(message, "author"), "name") or one_of(message, "recipient"))
    kind = content.get("content_type")
    if tool.partition(".")[0] in _SEARCHES and kind != "system_error":
        return []
    if kind == "execution_output":  # what code printed that the model wrote and that ran: the export holds both
        return [Message("tool", _chatgpt_text(content), name=tool)]
    if kind == "code" and _chatgpt_role(message) == "assistant" and not _is_unfinished(message):
        return [Message("assistant", "", tool_calls=(free_call(tool, _chatgpt_text(content), None),))]
    if tool == _MEMORY:
        return []
    if tool == _THINKER:
        return [Message("assistant", "", reasoning=_chatgpt_text(content).strip() or None)]
    if tool == _CANVAS and not _is_unfinished(message):
        text = _chatgpt_text(content)
        if document := _document(text):
            return [Message("assistant", document)]
        if "Successfully created" in text:
            return []
    raise NotLearned(RowRefused(NOT_HELD, f"ChatGPT's own tool {tool[:40]} took part"))


def _document(call: str) -> str:
    """What a call of the canvas writes: code between marks, as it stands in other answers. Empty for other texts."""
    written = parsed(call)
    text, (kind, _, language) = one_of(written, "content"), str(one_of(written, "type")).partition("/")
    if not isinstance(text, str) or "```" in text:
        return ""
    return f"```{language}\n{text.rstrip()}\n```" if kind == "code" else text


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
    return one_of(message, "status") in _BROKEN_OFF or _finish(message) in ("max_tokens", "interrupted")


_BROKEN_OFF = ("in_progress", "finished_partial_completion")


def _finish(message: Any) -> Any:
    return one_of(one_of(one_of(message, "metadata"), "finish_details"), "type")


CHATGPT = RowLayout(
    "chatgpt",
    frozenset(("mapping",)),
    lambda row: isinstance(row.get("mapping"), dict),
    _chatgpt,
    frozenset(("mapping",)),
)
CHATGPT_COMPARISON = RowLayout(
    "chatgpt-comparison",
    frozenset(("input", "content")),
    lambda row: None not in _comparison(row),
    _compared,
    frozenset(("input", "output", "content")),
)
DEEPSEEK = RowLayout("deepseek", frozenset(("mapping",)), _is_deepseek, _deepseek, frozenset(("mapping",)))
