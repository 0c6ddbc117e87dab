"""OpenCode's export of a session (`opencode export`): `info` of the session, `messages` of info and parts; a
tool's call and result are one part.

https://opencode.ai/docs/cli/#export
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, listed, objects, one_of
from hivetune.data.pieces.session import is_lone_thought
from hivetune.data.pieces.turns import in_order, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def recognise(row: Row) -> bool:
    turns = objects(row.get("messages"))
    return turns is not None and isinstance(row.get("info"), dict) and "parts" in turns[0] and "info" in turns[0]


def rows(row: Row) -> Conversation:
    messages: list[Message] = []
    left: list[str] = []
    for turn in row["messages"]:
        info, parts = one_of(turn, "info"), [part for part in listed(one_of(turn, "parts")) if isinstance(part, dict)]
        if one_of(info, "error"):
            left.append("other-branches")
        elif one_of(info, "summary") is True or any(part.get("type") == "compaction" for part in parts):
            left.append("program-notes")  # what was said before, summed up; it stands in the export as it was
        elif one_of(info, "role") == "user":
            texts = [part for part in parts if part.get("type") == "text" and not part.get("ignored")]
            if any(part.get("type") == "file" and not part.get("synthetic") for part in parts) and not texts:
                raise RowRefused("unsupported-content", "a message that is only a file")
            messages.append(Message("user", "\n".join(str(part.get("text", "")) for part in texts)))
        else:
            messages += _answer(parts)
    answered = [message for message in messages if not is_lone_thought(message, silent=True)]
    ordered, changed = in_order(answered)
    left += [] if len(answered) == len(messages) else ["lone-thought"]
    return Conversation("opencode", ordered, changed=(*dict.fromkeys(left), *changed))


def _answer(parts: list[dict[str, Any]]) -> list[Message]:
    """Return an answer step by step: what was thought and said, the calls, then their results."""
    messages: list[Message] = []
    content: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in [*parts, {"type": "step-start"}]:
        kind, state = part.get("type"), part.get("state")
        said_after = bool(results) and kind in ("text", "reasoning")  # the result was known when this was said
        if said_after or (kind == "step-start" and (content or results)):
            messages += read_turn({"role": "assistant", "content": content})
            messages += [m for result in results for m in read_turn({"role": "tool", "content": [result]})]
            content, results = [], []
        if kind in ("text", "reasoning"):
            content.append({"type": kind, "text": part.get("text")})
        elif kind == "tool" and isinstance(state, dict):
            call_id = part.get("callID")
            content.append({"type": "tool_use", "id": call_id, "name": part.get("tool"), "input": state.get("input")})
            output = one_of(state, "output", "error") or ""
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": output})
    return messages


FORMAT = Format("opencode-export", recognise, rows, needs=frozenset(("info",)))
