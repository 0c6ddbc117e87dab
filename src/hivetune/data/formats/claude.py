"""Claude's export: `chat_messages` with sender, text or content blocks, attachments.

A document that Claude wrote beside the conversation (an artifact) is a part of its answer. Other tools' calls are read
with their results where the export holds them.

https://support.claude.com/en/articles/9450526-how-can-i-export-my-claude-data
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import result_text
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, objects, one_of
from hivetune.data.pieces.session import NotLearned, branch, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_SILENT = ("token_budget", "flag")
_ENDS = (".", "!", "?", ":", "\u3002", "\uff01", "\uff1f")
_TOOLS = ("tool_use", "tool_result")
_SEARCHES = ("web_search", "web_fetch")  # the answer says what they found
_CODE = "application/vnd.ant.code"
# What a block of code is called that shows an artifact.
_LANGUAGES = {
    "application/vnd.ant.react": "jsx",
    "application/vnd.ant.mermaid": "mermaid",
    "image/svg+xml": "svg",
    "text/html": "html",
}


def read(row: Row) -> Conversation:
    turns = objects(row["chat_messages"])
    if turns is None:
        raise RowRefused("no-messages")
    path = turns
    by_id = {str(turn.get("uuid")): turn for turn in turns}
    if len(by_id) == len(turns) and any(str(turn.get("parent_message_uuid")) in by_id for turn in turns):
        leaf = str(row.get("current_leaf_message_uuid"))
        parents = {name: turn.get("parent_message_uuid") for name, turn in by_id.items()}
        path = [by_id[name] for name in branch(parents, leaf if leaf in by_id else list(by_id)[-1])]
    # What each artifact is, told when it was created and not when it is written again.
    parts = [part for turn in turns for part in listed(turn.get("content")) if one_of(part, "name") == "artifacts"]
    inputs = [part["input"] for part in parts if isinstance(one_of(part, "input"), dict)]
    kinds = {str(value.get("id")): value["type"] for value in reversed(inputs) if isinstance(value.get("type"), str)}
    messages, cut = chat_messages(path, lambda turn: _turn(turn, kinds))
    return finish_chat("claude", messages, len(turns) - len(path), cut)


def _turn(turn: Mapping[str, Any], kinds: Mapping[str, str]) -> list[Message]:
    attached, answers = listed(turn.get("attachments")), turn.get("sender") == "assistant"
    texts = [one_of(item, "extracted_content") for item in attached]
    attached_names = {one_of(item, "file_name") for item in attached}
    files = [*listed(turn.get("files")), *listed(turn.get("files_v2"))]
    if not answers and any(one_of(file, "file_name") not in attached_names for file in files):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    if not all(isinstance(text, str) for text in texts):
        raise RowRefused(NOT_HELD, "an attachment without its text")
    content = turn.get("content") or turn.get("text")
    if isinstance(content, list):
        searches = [one_of(p, "type") in _TOOLS and one_of(p, "name") in _SEARCHES for p in content]
        shown = [part for part, hidden in zip(content, searches, strict=True) if not hidden]
        content = _split([part for part in shown if one_of(part, "type") not in _SILENT])
    parts = objects(content) or []
    if answers and any(part.get("type") in _TOOLS for part in parts):
        messages = _worked(parts, kinds)
    else:
        messages = read_turn({"role": turn.get("sender"), "content": content})
    return [*(Message("user", str(text)) for text in texts), *messages]


def _worked(parts: list[dict[str, Any]], kinds: Mapping[str, str]) -> list[Message]:
    """Return an answer step by step: text, calls, results. Raise NotLearned if a result is missing."""
    said = read_turn({"role": "assistant", "content": _split([b for b in parts if b.get("type") not in _TOOLS])})
    unheld = NotLearned(RowRefused(NOT_HELD, "Claude's own tools took part"), *said)
    messages: list[Message] = []
    content: list[dict[str, Any]] = []
    calls, results = 0, list[Message]()
    for part in [*parts, {"type": "end"}]:
        kind = one_of(part, "type")
        if kind == "tool_result":
            if len(results) < calls:
                texts = listed(one_of(part, "content"))
                if not texts or not all(isinstance(one_of(text, "text"), str) for text in texts):
                    raise unheld
                results.append(Message("tool", result_text(texts)))
            continue  # else of a document, that it was stored
        if results or kind == "end":
            messages += [*(read_turn({"role": "assistant", "content": content}) if content else ()), *results]
            if len(results) < calls:
                raise unheld
            content, calls, results = [], 0, []
        written = _document(part, kinds) if kind == "tool_use" else None
        calls += kind == "tool_use" and written is None
        if kind == "end":
            break
        part = part if written is None else {"type": "text", "text": written, "apart": True}
        before = content[-1] if content and content[-1].get("type") == "text" == part.get("type") else {}
        if before.get("apart") or (before and part.get("apart")):  # a document is a paragraph of its own
            paragraphs = (str(before.get("text")).rstrip(), str(part.get("text")).strip())
            content[-1] = {**part, "text": "\n\n".join(filter(None, paragraphs))}
        else:
            content.append(part)
    if not messages or messages[-1].role != "assistant":
        raise unheld
    return messages


def _document(part: Any, kinds: Mapping[str, str]) -> str | None:
    """Return the text of a call that writes an artifact, as in other answers; None for other calls."""
    call_input = one_of(part, "input")
    text = one_of(call_input, "content")
    kind = one_of(call_input, "type") or kinds.get(str(one_of(call_input, "id")))
    if one_of(part, "name") != "artifacts" or one_of(call_input, "command") not in ("create", "rewrite", None):
        return None
    if not isinstance(text, str) or not isinstance(kind, str):
        return None
    language = one_of(call_input, "language") or _LANGUAGES.get(kind, "")
    if not language and kind != _CODE:
        return text.strip()
    mark = "````" if "```" in text else "```"
    return "\n".join((f"{mark}{language}", text.strip("\n"), mark))


def _split(parts: list[Any]) -> list[Any]:
    """Return the blocks, with an empty line between two of them if one ends a sentence and the next begins without a
    space.
    """
    blocks: list[Any] = []
    for part in parts:
        before, text = (one_of(blocks[-1], "text") if blocks else None), one_of(part, "text")
        if isinstance(before, str) and isinstance(text, str) and before.endswith(_ENDS) and text[:1].strip():
            part = {**part, "text": f"\n\n{text}"}
        blocks.append(part)
    return blocks


FORMAT = Format(
    "claude", read, needs=("chat_messages",), reads=frozenset(("chat_messages", "current_leaf_message_uuid"))
)
