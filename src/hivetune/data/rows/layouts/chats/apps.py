"""Conversations of Open WebUI, LM Studio, AI Studio and text-generation-webui."""

from collections.abc import Iterable
from typing import Any

from hivetune.data.pieces.branches import NotLearned, branch, done, said_in_chat
from hivetune.data.pieces.parts import split_thoughts
from hivetune.data.pieces.said import (
    NOT_HELD,
    Conversation,
    Row,
    RowLayout,
    are_two_texts,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.turns import read_system, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


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
    said, cut = said_in_chat(turns, _webui_turn)
    messages = [*read_system(one_of(chat, "system") or one_of(chat.get("params"), "system")), *said]
    return done(name, messages, others, cut)


def _webui_turn(turn: Any) -> list[Message]:
    if one_of(turn, "files"):
        raise RowRefused(NOT_HELD, "a message with files that the export does not hold")
    said = read_turn({"role": one_of(turn, "role"), "content": one_of(turn, "content") or ""})
    if one_of(turn, "error"):
        raise NotLearned(RowRefused("failed", "an answer of the conversation is an error"), *said)
    if one_of(turn, "done") is False and one_of(turn, "role") == "assistant":
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), *said)
    thoughts, rest = split_thoughts(said[0].content)
    if said[0].role != "assistant" or not thoughts:
        return said
    return [Message("assistant", rest, reasoning=thoughts)]


def _lm_studio(name: str, row: Row) -> Conversation:
    """LM Studio: each message has versions, of which one is selected."""
    chosen: list[Any] = []
    for turn in row["messages"]:
        versions = objects(one_of(turn, "versions"))
        if versions is None:
            raise RowRefused("wrong-type", "messages: each one an object with versions")
        number = turn.get("currentlySelected")
        chosen.append(versions[number if isinstance(number, int) and 0 <= number < len(versions) else -1])
    said, cut = said_in_chat(chosen, _lm_studio_turn)
    others = sum(len(turn["versions"]) - 1 for turn in row["messages"])
    system = row.get("system_prompt") or _lm_studio_setting(row, "llm.prediction.systemPrompt")
    return done(name, [*read_system(system), *said], others, cut)


def _lm_studio_turn(version: Any) -> list[Message]:
    steps = objects(version.get("steps"))
    if steps is None:
        return read_turn({"role": version.get("role"), "content": version.get("content")})
    messages: list[Message] = []
    for step in (step for step in steps if step.get("type") == "contentBlock"):
        thinks = one_of(step.get("style"), "type") == "thinking"
        content = [_lm_studio_part(part) for part in listed(step.get("content"))]
        said = read_turn({"role": step.get("roleOverride") or version.get("role", "assistant"), "content": content})
        messages += [Message("assistant", "", reasoning=m.content) for m in said] if thinks else said
    ends = [one_of(one_of(step.get("genInfo"), "stats"), "stopReason") for step in steps]
    if stopped := [end for end in ends if end in _STOPS]:
        raise NotLearned(RowRefused("cut-off-answer", f"an answer ended by {stopped[0]}, not by itself"), *messages)
    return messages


_STOPS = ("userStopped", "maxPredictedTokensReached", "contextLengthReached", "modelUnloaded", "failed")


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
    return done(name, messages, 0)


_GREETS = "<|BEGIN-VISIBLE-CHAT|>"  # stands for the user where the character speaks first


def _is_text_generation_webui(row: Row) -> bool:
    pairs = listed(row.get("internal"))
    return "visible" in row and bool(pairs) and all(map(are_two_texts, pairs))


def _ai_studio(name: str, row: Row) -> Conversation:
    """Prompts of Google's AI Studio: `chunkedPrompt` of chunks, thoughts among them."""
    system = parsed(row.get("system_instruction"))
    messages, cut = said_in_chat(listed(row["chunked_prompt"].get("chunks")), _ai_studio_turn)
    return done(name, [*read_system(system), *messages], 0, cut)


def _ai_studio_turn(chunk: Any) -> list[Message]:
    if one_of(chunk, "text") is None:
        raise RowRefused(NOT_HELD, "a chunk that is no text: only text can be learned")
    said = read_turn({**chunk, "content": chunk["text"]})
    if chunk.get("finishReason") not in (None, "", "STOP"):
        why = f"an answer ended by {str(chunk['finishReason'])[:40]}, not by itself"
        raise NotLearned(RowRefused("cut-off-answer", why), *said)
    return said


def _is_lm_studio(row: Row) -> bool:
    turns = objects(row.get("messages"))
    return turns is not None and "versions" in turns[0]


def _is_open_webui(row: Row) -> bool:
    chat = row.get("chat")
    if chat is None:  # one chat, without what the program knows of it
        return isinstance(one_of(row.get("history"), "messages"), dict) and "currentId" in row["history"]
    return isinstance(chat, dict) and ("history" in chat or "messages" in chat)


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
