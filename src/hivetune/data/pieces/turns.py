"""A list of turns, as each provider and framework writes them, to messages in an order that templates know."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.parts import (
    TurnContent,
    are_calls,
    calls_as_text,
    calls_in_text,
    has_results,
    parts_in,
    plain_parts,
    question_and_answer,
    read_call,
    read_content,
    result_text,
    results_text,
)
from hivetune.data.pieces.said import NOT_HELD, Conversation, Tools, names, objects, one_of, parsed, text_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Message, Role

CALL_ROLES = ("function_call", "tool_call", "tool_calls")
_NAMES_OF_ROLES: dict[Role, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "prompt"),
    "assistant": ("assistant", "ai", "gpt", "chatgpt", "model", "bot", "chatbot", "response", *CALL_ROLES),
    "tool": (
        *("tool", "ipython", "function", "observation", "environment"),
        *("tool_result", "tool_response", "function_response"),
    ),
}
ROLES: dict[str, Role] = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names}
ROLE_KEYS = ("role", "from", "sender", "speaker", "author", "type")
_CONTENT_KEYS = ("content", "value", "parts", "contentParts", "text", "message", "utterance", "say")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos", "files", "attachments")
# Items of OpenAI's Responses that are no messages, but stand among them.
_ITEMS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
_RESULTS = ("result", "output", "response", "observation")  # of a call that holds its own
_BETWEEN = "\n\n"  # turns of one role that become one
_CURSOR = {1: "user", 2: "assistant"}
_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_ACTED = re.compile(r"^Action:.*\n\s*Action Input:", re.M)
# Words in the name of a turn that is one of two answers to choose from, as `chosen_gpt` and `rejected_gpt`.
_OF_TWO_ANSWERS = names("chosen rejected preferred dispreferred better worse")


def read_messages(turns: Any, system: Any) -> list[Message]:
    """Return every turn of a list, after `system` unless the list has its own. Raise RowRefused."""
    if not isinstance(turns, list):
        raise RowRefused("wrong-type", "messages: a list of objects")
    messages: list[Message] = []
    after_item = False
    called: set[str] = set()
    turns = [turn for turn in turns if turn is not None and not _is_silent(turn)]  # None: not exported
    for end, turn in enumerate(turns, 1):
        role = turn.get("role") if isinstance(turn, dict) else None
        if isinstance(role, str) and role in called:  # LangGraph gives a result the name of its tool
            turn = {**turn, "role": "tool", "name": role}
        read, item = read_turn(turn), is_item(turn)
        if len(read) > 1 and read[0].tool_calls and read[0].content:
            # The calls of this turn have results: its text came after them, unless the next turn continues.
            name = next((one_of(following, *ROLE_KEYS[:3]) for following in turns[end : end + 1]), None)
            if not isinstance(name, str) or ROLES.get(name.strip().lower()) not in ("assistant", "tool"):
                read = [replace(read[0], content=""), *read[1:], Message("assistant", read[0].content)]
        if (item or after_item) and messages and _belongs(messages[-1], read[0]):  # one answer, item by item
            read = [_joined(messages.pop(), read[0]), *read[1:]]
        messages += read
        after_item = item
        called.update(call["function"]["name"] for message in read for call in message.tool_calls)
    if not messages:
        raise RowRefused("no-messages")
    return messages if messages[0].role == "system" else [*read_system(system), *messages]


def is_conversation(value: list[Any]) -> bool:
    """Return whether a row that is a list, and no object, is the turns of one conversation."""
    turns = objects(value)
    return turns is not None and all(any(key in turn for key in ROLE_KEYS[:3]) for turn in turns)


def read_system(value: Any) -> list[Message]:
    """Return the system prompt in its own field: a string, text parts or Gemini's content."""
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, dict) and "parts" in value:
        value = value["parts"]
    if isinstance(value, list | dict):
        text = "\n\n".join(read_content(value).texts)
    else:
        text = text_of(value, "system").removeprefix("SYSTEM: ")
    return [Message("system", text)] if text else []


def read_turn(turn: Any) -> list[Message]:
    """Return one turn: mostly one message; a turn that holds tools' results gives one of each. Raise RowRefused."""
    if not isinstance(turn, dict):
        raise RowRefused("wrong-type", "messages: each one an object with role and content")
    role, content = turn.get("role"), turn.get("content")
    if role is None and content is None:
        role, content = turn.get("from"), turn.get("value")
    named = ROLES.get(role) if isinstance(role, str) else None
    if named and len(turn) == 2 and isinstance(content, str) and role not in CALL_ROLES:  # the usual turn, at half cost
        return _plain_turn(named, content)
    if is_item(turn):
        if _is_silent(turn):
            return []
        if turn["type"] not in _ITEMS:
            hint = f"{turn['type']}: a tool that the provider ran itself; its result is not logged"
            raise RowRefused(NOT_HELD, hint)
        return _messages_of("assistant", read_content([turn]), turn)
    turn = _unwrapped(turn)
    if "from" not in turn and ("role" not in turn or {"q", "a"} <= turn.keys()) and (pair := question_and_answer(turn)):
        asker = ROLES.get(turn.get("role", "user"), "user")  # a tool, or a system that nothing answers
        return [Message(asker, pair[0]), *([Message("assistant", pair[1])] if pair[1] or asker == "user" else [])]
    return _any_turn(turn)


def _is_silent(turn: Any) -> bool:
    """Return whether a turn is not a message, but mini-swe-agent's note on a run's end, or a web search."""
    return isinstance(turn, dict) and (turn.get("role") == "exit" or turn.get("type") == "web_search_call")


def _any_turn(turn: Mapping[str, Any]) -> list[Message]:
    if turn.get("kind") in ("request", "response") and _has_part_kinds(turn.get("parts")):
        return _of_part_kinds(turn, turn["parts"])
    speaker = one_of(turn, *ROLE_KEYS)
    speaker = speaker.get("role") if isinstance(speaker, dict) else speaker
    name = speaker.strip().lower() if isinstance(speaker, str) else ""
    if name not in ROLES:
        if _OF_TWO_ANSWERS.isdisjoint(re.split(r"[\W_]+", str(speaker)[:40].lower())):
            raise RowRefused("unknown-role", f"role {str(speaker)[:40]!r}: use system, user, assistant or tool")
        hint = f"a turn of {str(speaker)[:40]!r}: put the two answers in columns chosen and rejected"
        raise RowRefused("preference-row", hint)
    role = ROLES[name]
    if media := next((key for key in _MEDIA_KEYS if turn.get(key)), None):
        raise RowRefused("unsupported-content", f"a message with {media}: only text can be learned")
    content = plain_parts(one_of(turn, *_CONTENT_KEYS))
    if isinstance(content, str) and (parts := parts_in(content)) is not None:
        content = parts
    if _has_part_kinds(content):
        return _of_part_kinds(turn, content)
    if name in CALL_ROLES and "tool_calls" not in turn:
        called = parsed(content)
        if not isinstance(called, dict | list):
            raise RowRefused("bad-tool-call", f"{name}: not JSON")
        turn, content = {**turn, "tool_calls": called if isinstance(called, list) else [called]}, None
    if role == "assistant" and isinstance(content, str | list) and turn.get("isThought") is True:  # AI Studio
        return [Message(role, "", reasoning=read_content(content).text)]
    if role == "tool" and are_calls(content):  # Koog
        role = "assistant"
    if role == "tool" and not has_results(content):
        call_id = one_of(turn, "tool_call_id", "toolCallId")
        return [_result_message(result_text(content), call_id, one_of(turn, "name", "tool_name"))]
    return _messages_of(role, read_content(content), turn)


def _has_part_kinds(content: Any) -> bool:
    """Return whether a content holds parts as Pydantic AI names them."""
    return isinstance(content, list) and bool(content) and all(one_of(part, "part_kind") for part in content)


def _of_part_kinds(turn: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a request or a response of Pydantic AI: a request may hold a system prompt, a question and results."""
    messages: list[Message] = []
    answer: list[Mapping[str, Any]] = []
    for part in parts:
        if part["part_kind"] == "system-prompt":
            messages += read_system(part.get("content"))
        elif part["part_kind"] == "user-prompt":
            question = Message("user", read_content(part.get("content")).text)
            messages += [*read_system(turn.get("instructions")), question]
        elif has_results([part]):
            messages += _messages_of("tool", read_content([part]), {})
        else:
            answer.append(part)
    return [*messages, *(_messages_of("assistant", read_content(answer), {}) if answer else [])]


def is_item(turn: Any) -> bool:
    """Return whether a turn of OpenAI's Responses is no message: a call, a result, thoughts, or what the provider
    ran.
    """
    kind = turn.get("type") if isinstance(turn, dict) and "role" not in turn else None
    return isinstance(kind, str) and (kind in _ITEMS or kind.endswith("_call"))


def _plain_turn(role: Role, text: str) -> list[Message]:
    if role in ("assistant", "tool") and (calls := calls_as_text(text)):
        return [Message("assistant", "", tool_calls=calls)]
    if text.startswith("[{") and (parts := parts_in(text)) is not None:
        return _messages_of(role, read_content(parts), {})
    if role == "assistant" and "<tool_call>" in text:
        text, calls = calls_in_text(text)
        return [Message(role, text, tool_calls=calls)]
    return [Message(role, result_text(text) if role == "tool" else text)]


def _messages_of(role: Role, read: TurnContent, turn: Mapping[str, Any]) -> list[Message]:
    """Return the results of tools, then the role's own text with its calls."""
    own_calls, own_results = _own_calls(turn)
    text, calls, reasoning = read.text, [*read.calls, *own_calls], None
    if role == "assistant":
        if text == "" and isinstance(turn.get("refusal"), str):
            text = turn["refusal"]
        if more := calls_as_text(text):
            text = ""
        else:
            text, more = calls_in_text(text)
        calls += more
        thoughts = [read.reasoning, *(value for key in THOUGHT_KEYS if isinstance(value := turn.get(key), str))]
        reasoning = next((t for t in thoughts if t.strip() and t.strip() not in read.text), None)
    elif calls:
        raise RowRefused("role-order", f"a tool call in a turn of {role}")
    answers = [_result_message(*result) for result in (*read.results, *own_results)]
    if answers and not text and not calls and not reasoning:
        return answers
    name = turn["name"] if isinstance(turn.get("name"), str) and turn.get("type") not in _ITEMS else None
    weight = one_of(turn, "weight", "train", "trainable", "loss", "loss_weight")  # OpenAI's name, and other programs'
    if weight not in (None, 0, 1):
        raise RowRefused("bad-weight")
    weight = 1.0 if weight is None else float(weight)
    message = Message(role, text, weight=weight, name=name, tool_calls=tuple(calls), reasoning=reasoning)
    return [message, *answers] if role == "assistant" else [*answers, message]


def _result_message(text: str, call_id: Any, name: Any) -> Message:
    tool, call = (value if isinstance(value, str) else None for value in (name, call_id))
    return Message("tool", text, name=tool, tool_call_id=call)


def _own_calls(turn: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[tuple[str, Any, Any]]]:
    """Return (`tool_calls` of a turn or OpenAI's older `function_call`, their results if the calls have them)."""
    calls = parsed(one_of(turn, "tool_calls", "toolCalls", "tool_invocations", "toolInvocations"))
    if calls is None and isinstance(turn.get("function_call"), dict):
        calls = [turn["function_call"]]
    if calls is None and isinstance(turn.get("additional_kwargs"), dict):
        return _own_calls(turn["additional_kwargs"])
    if not isinstance(calls, list):
        return [], []
    calls_with_results = [(read_call(call), one_of(call, *_RESULTS)) for call in calls if call != {}]
    read = [call for call, _ in calls_with_results]
    if all(result is None for _, result in calls_with_results):
        return read, []
    missing = next((call["function"]["name"] for call, result in calls_with_results if result is None), None)
    if missing is not None:
        raise RowRefused("bad-tool-call", f"the call of {missing[:40]} has no result, others of its turn have one")
    names = (None if "id" in call else call["function"]["name"] for call in read)
    return read, [(results_text(result), call.get("id"), next(names)) for call, result in calls_with_results]


def _unwrapped(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message under the usual names, from the forms of LangChain, Cursor and Semantic Kernel, or from below
    `message`.
    """
    kind = turn.get("type")
    if isinstance(turn.get("kwargs"), dict) and isinstance(turn.get("id"), list) and turn["id"]:
        kind = str(turn["id"][-1]).removesuffix("Chunk").removesuffix("Message").lower()
        return {**turn["kwargs"], "role": _LANGCHAIN.get(kind, kind)}
    if isinstance(kind, str) and kind in _LANGCHAIN and "role" not in turn:
        inner = turn["data"] if isinstance(turn.get("data"), dict) else turn
        return {**inner, "role": _LANGCHAIN[kind]}
    if "bubbleId" in turn and isinstance(kind, int) and kind in _CURSOR:
        return {**turn, "role": _CURSOR[kind], "content": turn.get("text")}
    inner = turn.get("message")
    if isinstance(inner, dict) and "role" in inner:
        return inner
    items = objects(one_of(turn, "items", "Items"))
    if items is None or turn.get("content"):
        return turn
    role = one_of(turn, "role", "Role")
    return {**turn, "role": one_of(role, "Label", "label") or role, "content": items}


def conversation_of(
    name: str, messages: Sequence[Message], tools: Tools = (), changed: Sequence[str] = ()
) -> Conversation:
    """Return the conversation of the format `name`, from its first question to its last answer, with consecutive turns
    of one role as one. `changed`: reasons of severity warn.

    Raise RowRefused: no-answer, role-order when nobody asks anything, earlier-turns-missing.
    """
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "assistant"), None)
    if last is None:
        raise RowRefused("no-answer")
    changed = [*changed, *(["trailing-turns"] if last + 1 < len(messages) else [])]
    turns = list(messages[: last + 1])
    for i, (before, message) in enumerate(itertools.pairwise(messages[: last + 1]), 1):
        # What came of an action that an answer's text holds (ReAct) is a user's: a tool's has a call.
        answered = message.role == "tool" and before.role == "assistant" and not before.tool_calls
        if answered and _ACTED.search(before.content):
            turns[i] = replace(message, role="user")
    start = next(i for i, message in enumerate(turns) if message.role != "system")
    if turns[start].role == "tool":
        raise RowRefused("earlier-turns-missing", "the conversation begins with a tool's result: log all of its turns")
    if turns[start].role == "assistant":
        first_question = next((i for i in range(start, len(turns)) if turns[i].role == "user"), None)
        if first_question is None:
            raise RowRefused("role-order", "an answer, but no question: only `text` is learned without one")
        turns = turns[:start] + turns[first_question:]
        changed.append("leading-answer")
    merged = turns[:1]
    for message in turns[1:]:
        if _belongs(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    if len(merged) < len(turns):
        changed.append("merged-turns")
    return Conversation(name, tuple(merged), tools, changed=tuple(changed))


def _belongs(first: Message, second: Message) -> bool:
    """Return whether two turns are parts of one. A call and a text after it are not: the result is missing between
    them.
    """
    if first.role != second.role or first.role == "tool" or first.weight != second.weight or first.name != second.name:
        return False
    return not first.tool_calls or (bool(second.tool_calls) and not second.content.strip())


def _joined(first: Message, second: Message) -> Message:
    texts = [text for text in (first.content, second.content) if text]
    if first.content == second.content and not first.tool_calls and not second.tool_calls:
        texts = texts[:1]  # the same turn, logged twice
    return replace(
        first,
        content=_BETWEEN.join(texts),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        reasoning=_BETWEEN.join([text for text in (first.reasoning, second.reasoning) if text]) or None,
    )
