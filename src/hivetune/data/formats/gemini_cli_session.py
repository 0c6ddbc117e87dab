"""Sessions of Gemini CLI (`~/.gemini/tmp/*/chats/*.json`): turns by `type`, calls with their results and thoughts
beside the text.

https://github.com/google-gemini/gemini-cli/blob/main/docs/cli/session-management.md
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, listed, objects, one_of
from hivetune.data.pieces.turns import in_order, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def recognise(row: Row) -> bool:
    return objects(row.get("messages")) is not None


def rows(row: Row) -> Conversation:
    messages: list[Message] = []
    notes = False
    for turn in row["messages"]:
        kind = one_of(turn, "type")
        if kind in ("info", "error", "warning"):
            notes = True
        elif kind in ("gemini", "model"):
            messages += _answer(turn)
        else:
            messages += read_turn({"role": kind, "content": one_of(turn, "content") or one_of(turn, "parts")})
    ordered, changed = in_order(messages)
    return Conversation("gemini-cli", ordered, changed=(("program-notes",) if notes else ()) + changed)


def _answer(turn: Mapping[str, Any]) -> list[Message]:
    thoughts = [": ".join(_thought(thought)) for thought in listed(turn.get("thoughts"))]
    calls = objects(turn.get("toolCalls")) or []
    said = turn.get("content") or turn.get("parts") or ""
    said = said if isinstance(said, list) else [{"type": "text", "text": said}]
    parts = [*said, *({"functionCall": call} for call in calls)]
    messages = read_turn({"role": "assistant", "content": parts, "reasoning": "\n".join(thoughts)})
    for call in calls:
        result = call.get("result")
        if result is None:
            raise RowRefused("bad-tool-call", f"the call of {str(call.get('name'))[:40]} has no result")
        content = result if isinstance(result, list) else [{"functionResponse": {"response": result}}]
        messages += read_turn({"role": "tool", "content": content})
    return messages


def _thought(thought: Any) -> list[str]:
    return [str(text) for text in (one_of(thought, "subject"), one_of(thought, "description")) if text]


FORMAT = Format("gemini-cli-session", recognise, rows, needs=frozenset(("project_hash",)))
