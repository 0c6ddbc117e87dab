"""Claude's export: `chat_messages` with sender, text or content blocks, attachments.

Answers in which a tool took part whose results the export lacks (an artifact among them) are read and not learned,
except a search: the answer says what it found.

https://support.claude.com/en/articles/9450526-how-can-i-export-my-claude-data
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hivetune.data.pieces.format import NOT_HELD, Conversation, Format
from hivetune.data.pieces.sessions import NotLearned, branch, chat
from hivetune.data.pieces.turns import read_turn
from hivetune.data.pieces.values import Row, listed, objects, one_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_SILENT = ("token_budget", "flag")
_TOOLS = ("tool_use", "tool_result")
_SEARCHES = ("web_search", "web_fetch")


def read(row: Row) -> Conversation:
    turns = path = objects(row["chat_messages"])
    if turns is None or path is None:
        raise RowRefused("no-answer", "the list of messages is empty")
    by_id = {str(turn.get("uuid")): turn for turn in turns}
    if len(by_id) == len(turns) and any(str(turn.get("parent_message_uuid")) in by_id for turn in turns):
        leaf = str(row.get("current_leaf_message_uuid"))
        parents = {name: turn.get("parent_message_uuid") for name, turn in by_id.items()}
        path = branch(by_id, parents, leaf if leaf in by_id else list(by_id)[-1])
    return chat("claude", path, _turn, len(turns) - len(path))


def _turn(turn: Mapping[str, Any]) -> list[Message]:
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
        content = _joined(part for part in parts if not (lacks and one_of(part, "type") in _TOOLS))
    messages = read_turn({"role": turn.get("sender"), "content": content})
    if lacks or (answers and messages[-1].role != "assistant"):
        raise NotLearned(RowRefused(NOT_HELD, "Claude's own tools took part"), *messages)
    return [*(Message("user", str(text)) for text in texts), *messages]


def _is_silent(part: Any) -> bool:
    kind = one_of(part, "type")
    return kind in _SILENT or (kind in _TOOLS and one_of(part, "name") in _SEARCHES)


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


_READS = frozenset(("chat_messages", "current_leaf_message_uuid"))
FORMAT = Format("claude", read, needs=("chat_messages",), reads=_READS)
