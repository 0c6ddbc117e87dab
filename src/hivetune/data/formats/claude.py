"""Claude's export: `chat_messages` with sender, text or content blocks, attachments. A document that Claude wrote
beside the conversation (an artifact) is a part of its answer.

https://support.claude.com/en/articles/9450526-how-can-i-export-my-claude-data
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, objects, one_of
from hivetune.data.pieces.session import NotLearned, branch, chat
from hivetune.data.pieces.turns import read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_SILENT = ("token_budget", "flag")
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
    turns = path = objects(row["chat_messages"])
    if turns is None:
        raise RowRefused("no-answer", "the list of messages is empty")
    by_id = {str(turn.get("uuid")): turn for turn in turns}
    if len(by_id) == len(turns) and any(str(turn.get("parent_message_uuid")) in by_id for turn in turns):
        leaf = str(row.get("current_leaf_message_uuid"))
        parents = {name: turn.get("parent_message_uuid") for name, turn in by_id.items()}
        path = [by_id[name] for name in branch(parents, leaf if leaf in by_id else list(by_id)[-1])]
    kinds: dict[str, str] = {}  # what each artifact is: told when it is created and not when it is written again
    for part in (part for turn in turns for part in listed(turn.get("content"))):
        if one_of(part, "name") == "artifacts" and isinstance(kind := one_of(one_of(part, "input"), "type"), str):
            kinds.setdefault(str(part["input"].get("id")), kind)
    return chat("claude", path or [], lambda turn: _turn(turn, kinds), len(turns) - len(path or []))


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
    parts = _parts(content, kinds) if isinstance(content, list) else content
    unheld = isinstance(parts, list) and answers and _lacks_results(parts)
    said = _joined(part for part in listed(parts) if one_of(part, "type") not in _TOOLS) if unheld else parts
    messages = read_turn({"role": turn.get("sender"), "content": said})
    if unheld or (answers and messages[-1].role != "assistant"):
        raise NotLearned(RowRefused(NOT_HELD, "Claude's own tools took part"), *messages)
    return [*(Message("user", str(text)) for text in texts), *messages]


def _parts(content: list[Any], kinds: Mapping[str, str]) -> list[Any]:
    """Return the blocks of a turn without searches; an artifact is a paragraph of the text."""
    parts: list[Any] = []
    for part in content:
        kind, name = one_of(part, "type"), one_of(part, "name")
        document = _document(part, kinds) if kind == "tool_use" else None
        stored = kind == "tool_result" and one_of(parts[-1] if parts else None, "type") != "tool_use"
        if document is not None:
            part = {"type": "text", "text": document}
        elif kind in _SILENT or stored or (kind in _TOOLS and name in _SEARCHES):
            continue
        parts.append(part)
    return _joined(parts)


def _joined(parts: Iterable[Any]) -> list[Any]:
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


_READS = frozenset(("chat_messages", "current_leaf_message_uuid"))
FORMAT = Format("claude", read, needs=("chat_messages",), reads=_READS)
