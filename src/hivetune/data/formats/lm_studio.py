"""LM Studio's conversation files: each message has versions, of which one is selected.

https://lmstudio.ai/docs/app/basics/chat
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, listed, objects, one_of, parsed
from hivetune.data.pieces.session import NotLearned, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_STOPS = ("userStopped", "maxPredictedTokensReached", "contextLengthReached", "modelUnloaded", "failed")


def read(row: Row) -> Conversation | None:
    listed_turns = objects(row["messages"])
    if listed_turns is None or "versions" not in listed_turns[0]:
        return None
    chosen: list[Any] = []
    others = 0
    for turn in listed_turns:
        versions = objects(one_of(turn, "versions"))
        if versions is None:
            raise RowRefused("wrong-type", "messages: each one an object with versions")
        number = turn.get("currentlySelected")
        chosen.append(versions[number if isinstance(number, int) and 0 <= number < len(versions) else -1])
        others += len(versions) - 1
    turns, cut = chat_messages(chosen, _turn)
    settings = listed(one_of(row.get("per_chat_prediction_config"), "fields"))  # of one chat
    prompts = (one_of(s, "value") for s in settings if one_of(s, "key") == "llm.prediction.systemPrompt")
    return finish_chat(
        "lm-studio", [*read_system(row.get("system_prompt") or next(prompts, None)), *turns], others, cut
    )


def _turn(version: Any) -> list[Message]:
    steps = objects(version.get("steps"))
    if steps is None:
        return read_turn({"role": version.get("role"), "content": version.get("content")})
    messages: list[Message] = []
    for step in (step for step in steps if step.get("type") == "contentBlock"):
        content = [_part(part) for part in listed(step.get("content"))]
        read = read_turn({"role": step.get("roleOverride") or version.get("role", "assistant"), "content": content})
        thinks = one_of(step.get("style"), "type") == "thinking"
        messages += [Message("assistant", "", reasoning=m.content) for m in read] if thinks else read
    ends = [one_of(one_of(step.get("genInfo"), "stats"), "stopReason") for step in steps]
    if stopped := [end for end in ends if end in _STOPS]:
        raise NotLearned(RowRefused("cut-off-answer", f"an answer ended by {stopped[0]}, not by itself"), *messages)
    return messages


def _part(part: Any) -> Any:
    """Return a part of a step; calls and results of tools under the names that others give them."""
    kind, call_id = one_of(part, "type"), str(one_of(part, "callId", "toolCallRequestId"))
    if kind == "toolCallRequest":
        return {"type": "tool_use", "id": call_id, "name": part.get("name"), "input": part.get("parameters")}
    if kind == "toolCallResult":
        return {"type": "tool_result", "tool_use_id": call_id, "content": parsed(part.get("content"))}
    return part


_READS = frozenset(("messages", "system_prompt", "per_chat_prediction_config"))
FORMAT = Format("lm-studio", read, needs=("messages",), reads=_READS)
