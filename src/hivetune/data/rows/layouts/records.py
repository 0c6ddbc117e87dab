"""Rows that hold a conversation as a list of turns (those of coding agents too), and records of one call: what was
asked, what was answered.
"""

import re
from dataclasses import replace

from hivetune.data.columns import REPLIES, SYSTEM, TOOLS, system_of, tools_of
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
    names,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.session import system_first
from hivetune.data.pieces.steps import joined
from hivetune.data.pieces.turns import THOUGHT_KEYS, in_order, read_messages
from hivetune.data.reasons import RowRefused
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
