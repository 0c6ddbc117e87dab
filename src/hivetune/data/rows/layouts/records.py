"""Rows that hold a conversation as a list of turns (those of coding agents too), and records of one call: what was
asked, what was answered.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.answers import (
    continues_request,
    read_answer,
    read_request,
)
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    RowLayout,
    Tools,
    all_texts,
    first_of,
    listed,
    names,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.session import is_lone_thought, system_first
from hivetune.data.pieces.turns import THOUGHT_KEYS, in_order, read_messages, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.columns import REPLIES, SYSTEM, TOOLS, system_of, tools_of
from hivetune.data.rows.layouts.sides import REPEATED_REQUESTS, RESPONSES, TEXT_ANSWERS, request_and_response
from hivetune.records import Message

# Keys of a request or a response that lies flat in its row.
FLAT = (
    *("messages", "contents", "system_instruction", "tool_config", "choices", "candidates", "message", "input"),
    *("instructions", "output", "content", "role", "stop_reason", "type", "prompt", "usage_metadata", "completions"),
)
LISTS = ("conversations", "conversation", "chat", "dialogue", "dialog", "turns", "data", "history")


def _messages(name: str, row: Row) -> Conversation:
    """`messages`, and the answer in a column of its own where the list ends with a question."""
    messages = read_messages(parsed(row["messages"]), system_of(row))
    answer = first_of(row, ("response", *REPLIES, *TEXT_ANSWERS))
    changed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    if messages[-1].role in ("user", "tool") and answer is not None and not _is_told(row, answer, messages[-1].content):
        said, changed = read_answer(row[answer])
        thoughts = next((name for name in THOUGHT_KEYS if isinstance(row.get(name), str) and row[name].strip()), None)
        if thoughts is not None and not said[0].reasoning:
            said = [replace(said[0], reasoning=row[thoughts]), *said[1:]]
        messages, used = [*messages, *said], (answer, *([thoughts] if thoughts else []))
    return _conversation(name, messages, read_tools(one_of(row, *TOOLS, "tool_config")), changed, used)


_MOST_TOLD = 200  # characters of what a question says of its answer


def _is_told(row: Row, column: str, question: str) -> bool:
    """Whether a column says nothing, or what the question says under the column's name: "reach the target 77"."""
    if row[column] in (None, ""):
        return True
    told = str(row[column]).strip()
    said = rf"{column}\W{{1,8}}{re.escape(told)}(?!\w)"
    return len(told) <= _MOST_TOLD and re.search(said, question, re.I) is not None


def _sharegpt(name: str, row: Row) -> Conversation:
    column = _list_column(row)
    assert column is not None
    turns = parsed(row[column])
    if all_texts(turns) and len(turns) > 1:
        turns = _without_marks(turns)
        odd = len(turns) % 2 and column not in _TALKED  # the last one was not answered any more
        named = [_SPEAKER.match(turn) for turn in turns]
        if column == "turns" or odd or all(named) or any(one and one[1] for one in named):
            raise RowRefused("unknown-role", f"{column}: texts that do not say who speaks")
        turns = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return _conversation(name, read_messages(turns, system_of(row)), read_tools(tools_of(row)), (), (column,))


def _without_marks(texts: list[str]) -> list[str]:
    """Texts that begin with a mark of a question and of an answer in turn, as sets of medical talks have them, without
    those.
    """
    marks = [_TURN_MARKS[i % 2].match(text) for i, text in enumerate(texts)]
    return [text[mark.end() :] for text, mark in zip(texts, marks, strict=True) if mark] if all(marks) else texts


def _opencode(name: str, row: Row) -> Conversation:
    """OpenCode: `info` of the session, `messages` of info and parts; a tool's call and result are one part."""
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
            messages += _opencode_answer(parts)
    answered = [message for message in messages if not is_lone_thought(message, silent=True)]
    ordered, changed = in_order(answered)
    left += [] if len(answered) == len(messages) else ["lone-thought"]
    return Conversation(name, ordered, changed=(*dict.fromkeys(left), *changed))


def _opencode_answer(parts: list[dict[str, Any]]) -> list[Message]:
    """Step by step: what was thought and said, the calls, then their results."""
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


def _gemini_cli(name: str, row: Row) -> Conversation:
    """Gemini CLI's sessions: turns by `type`, calls with their results and thoughts beside the text."""
    messages: list[Message] = []
    notes = False
    for turn in row["messages"]:
        kind = one_of(turn, "type")
        if kind in ("info", "error", "warning"):
            notes = True
        elif kind in ("gemini", "model"):
            messages += _gemini_answer(turn)
        else:
            messages += read_turn({"role": kind, "content": one_of(turn, "content") or one_of(turn, "parts")})
    ordered, changed = in_order(messages)
    return Conversation(name, ordered, changed=(("program-notes",) if notes else ()) + changed)


def _gemini_answer(turn: Mapping[str, Any]) -> list[Message]:
    thoughts = [": ".join(_gemini_thought(thought)) for thought in listed(turn.get("thoughts"))]
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


def _gemini_thought(thought: Any) -> list[str]:
    return [str(text) for text in (one_of(thought, "subject"), one_of(thought, "description")) if text]


def _is_opencode(row: Row) -> bool:
    turns = objects(row.get("messages"))
    return turns is not None and isinstance(row.get("info"), dict) and "parts" in turns[0] and "info" in turns[0]


def _contents(name: str, row: Row) -> Conversation:
    """Gemini's tuning rows: contents with parts, the system instruction beside them."""
    system = one_of(row, "system_instruction", *SYSTEM)
    if isinstance(system, dict) and "parts" in system:
        system = system["parts"]
    messages = read_messages(parsed(row["contents"]), parsed(system))
    return _conversation(name, messages, read_tools(tools_of(row)))


def _request_response(name: str, row: Row) -> Conversation:
    sides = request_and_response(row)
    assert sides is not None
    asked_column, answered_column = sides
    request = read_request(row if asked_column == "" else row[asked_column])
    said, left_out = read_answer(row if answered_column == "" else row[answered_column])
    asked = [turn for message in request.messages for turn in _observed_apart(message)]
    said = _without_prompt(asked, said)
    used = (asked_column, answered_column, *(FLAT if "" in sides else ()))
    tools = request.tools or read_tools(tools_of(row))
    if continues_request(row if answered_column == "" else row[answered_column]):
        return _conversation(name, _continued(asked, said), tools, left_out, used)
    return _conversation(name, joined(asked, said), tools, left_out, used)


_OBSERVED = re.compile(r"^(Observation:.*?)(?=^(?:Thought|Action|Final Answer):|\Z)", re.M | re.S)


def _observed_apart(message: Message) -> list[Message]:
    """What a program observed and wrote into the model's turn of its request, as turns of its own."""
    if message.role != "assistant" or message.tool_calls or _OBSERVED.search(message.content) is None:
        return [message]
    texts = enumerate(map(str.strip, _OBSERVED.split(message.content)))
    return [Message("user", text) if i % 2 else replace(message, content=text) for i, text in texts if text]


def _without_prompt(asked: list[Message], answered: list[Message]) -> list[Message]:
    """Without the prompt, where an API that completes a text gave it back in front of the answer."""
    prompt, text = asked[-1].content, answered[0].content
    if len(asked) != 1 or not prompt.strip() or len(text) <= len(prompt) or not text.startswith(prompt):
        return answered
    return [replace(answered[0], content=text[len(prompt) :].lstrip()), *answered[1:]]


def _continued(asked: list[Message], answered: list[Message]) -> list[Message]:
    """An answer whose beginning was given goes on right behind it."""
    begun = asked[-1]
    if begun.role != "assistant" or begun.tool_calls or answered[0].role != "assistant":
        return joined(asked, answered)
    return [*asked[:-1], replace(answered[0], content=begun.content + answered[0].content), *answered[1:]]


def joined(asked: list[Message], answered: list[Message]) -> list[Message]:
    """Agents answer with the whole conversation, what was asked included."""
    known = len(asked)
    same = [(m.role, m.content) for m in asked] == [(m.role, m.content) for m in answered[:known]]
    return answered if same and len(answered) > known else [*asked, *answered]


def _conversation(
    name: str, messages: list[Message], tools: Tools, changed: tuple[str, ...] = (), used: tuple[str, ...] = ()
) -> Conversation:
    ordered, more = in_order(system_first(messages))
    return Conversation(name, ordered, tools, changed=(*changed, *more), explained=used)


def _list_column(row: Row) -> str | None:
    """The column that is a list of turns."""
    told = objects(row.get("paragraph"))
    if told is not None and all({"q", "a"} <= turn.keys() for turn in told):
        return "paragraph"
    for name in LISTS:
        if name in row and (name.startswith("conversation") or isinstance(parsed(row[name]), list)):
            return name if name != "history" or "trajectory" in row else None  # else what came before a question
    return None


_TALKED = ("conversation", "conversations", "dialogue", "dialog")
_TURN_MARKS = (
    re.compile(r"\s*(?:问|問|提问|Q|Question|User|Human)\s*[:：]\s*", re.I),
    re.compile(r"\s*(?:答|回答|A|Answer|Assistant|Bot|AI)\s*[:：]\s*", re.I),
)
_SPEAKER = re.compile(r"\A\s*[^\W\d][\w .-]{0,30}:(\s?)")  # "Amanda: I baked cookies."
BESIDE = names("trajectory replay_config task intent knowledge topic summary description notes note comment comments")
_COMMON = frozenset((*SYSTEM, *TOOLS))
REQUEST_RESPONSE = RowLayout(
    "request-response",
    frozenset((*RESPONSES, *TEXT_ANSWERS, "answer", "reply", "choices", "candidates", "completions", "message")),
    lambda row: request_and_response(row) is not None,
    _request_response,
    _COMMON | {"instructions", "request_payload", "response_payload", *REPEATED_REQUESTS},
    BESIDE,
)
MESSAGES = RowLayout(
    "messages",
    frozenset(("messages",)),
    lambda row: "messages" in row,
    _messages,
    _COMMON | {"messages", "tool_config"},
    BESIDE,
)
CONTENTS = RowLayout(
    "contents",
    frozenset(("contents",)),
    lambda row: "contents" in row,
    _contents,
    _COMMON | {"contents", "system_instruction"},
    BESIDE,
)
SHAREGPT = RowLayout(
    "sharegpt", frozenset((*LISTS, "paragraph")), lambda row: _list_column(row) is not None, _sharegpt, _COMMON, BESIDE
)
GEMINI_CLI = RowLayout(
    "gemini-cli",
    frozenset(("project_hash",)),
    lambda row: objects(row.get("messages")) is not None,
    _gemini_cli,
    frozenset(("messages",)),
    frozenset(("summary",)),
)
OPENCODE = RowLayout("opencode", frozenset(("info",)), _is_opencode, _opencode, frozenset(("messages", "info")))
