"""The layouts in which people keep interactions, each a pure function from one row to its messages.

Detected row by row from the columns alone, in a fixed order; a column map overrides. docs/formats.md shows each.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.fields import AGENT
from hivetune.records import Message, Role

Row = Mapping[str, Any]

QUESTION = ("user_query", "user_request", "input", "query")
RESULT = ("result", "output")
TASK = ("task", "input", "prompt", "query")
PAIRS = ("prompt", "completion", "response", "instruction", "output", "question", "answer", "text")
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names that servers give it, within a turn
TURNS = ("messages", "conversations", "conversation", "command", "tool_used", "tool")
CONTENT = frozenset((*PAIRS, *TURNS, *QUESTION, *RESULT, *TASK))

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class Conversation(NamedTuple):
    """What a row says. `untrusted`: a tool or a web page wrote the answer."""

    layout: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    untrusted: bool = False


def read_conversation(row: Row) -> Conversation:
    """The messages of `row`. Raises RowRefused: unknown-layout or what is wrong with it."""
    for name, known, convert in LAYOUTS:
        if known(row):
            return convert(name, row)
    if "chosen" in row and "rejected" in row:
        raise RowRefused("preference-row")
    columns = ", ".join(str(key)[:30] for key in list(row)[:8])
    raise RowRefused("unknown-layout", f"columns {columns}: name yours with --columns prompt=...,completion=...")


def map_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """`row` with our field names for the user's columns (`a.b` reaches into an object).

    Who maps one column of the conversation maps them all: others that we would know are not looked at.
    """
    hidden = CONTENT if CONTENT & columns.keys() else frozenset()
    mapped = {key: value for key, value in row.items() if key not in columns.values() and key not in hidden}
    for field, column in columns.items():
        value: Any = row
        for part in (column,) if column in row else tuple(column.split(".")):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            mapped[field] = value
    return mapped


def _messages(name: str, row: Row) -> Conversation:
    return Conversation(name, read_messages(_parsed(row["messages"]), row.get("system")), read_tools(row.get("tools")))


def _sharegpt(name: str, row: Row) -> Conversation:
    turns = _parsed(row["conversations"] if "conversations" in row else row["conversation"])
    return Conversation(name, read_messages(turns, row.get("system")), read_tools(row.get("tools")))


def _prompt_completion(name: str, row: Row) -> Conversation:
    prompt, answer = _parsed(row["prompt"]), _parsed(row["completion"] if "completion" in row else row["response"])
    if isinstance(prompt, list) or isinstance(answer, list):
        before = read_messages(prompt, None) if isinstance(prompt, list) else _pair_question(row, prompt)
        after = read_messages(answer, None) if isinstance(answer, list) else (_said("assistant", answer, "completion"),)
        return Conversation(name, (*before, *after), read_tools(row.get("tools")))
    return Conversation(name, (*_pair_question(row, prompt), _said("assistant", answer, "completion")))


def _alpaca(name: str, row: Row) -> Conversation:
    question = _text(row["instruction"], "instruction")
    extra = row.get("input")
    if extra is not None and _text(extra, "input").strip():
        question = f"{question}\n{extra}"
    messages = list(_system(row.get("system")))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowRefused("wrong-type", "history: a list of [question, answer] pairs")
    for asked, answered in history:
        messages += [_said("user", asked, "history"), _said("assistant", answered, "history")]
    messages += [Message("user", question), _said("assistant", row["output"], "output")]
    return Conversation(name, tuple(messages))


def _agent(name: str, row: Row) -> Conversation:
    asked = [text for key in TASK if (text := _text(row.get(key), key))]
    if not asked:
        raise RowRefused("unknown-layout", "an agent's row needs a task or input beside its output")
    output = next((row[key] for key in ("output", "result", "response") if row.get(key) is not None), None)
    if output is None:
        raise RowRefused("no-answer", "the row has no output")
    messages = (*_system(row.get("system")), Message("user", "\n".join(asked)), _said("assistant", output, "output"))
    return Conversation(name, messages)


def _tool(name: str, row: Row) -> Conversation:
    """The command is what a model can learn; the result is what a machine said, so it is never trained unasked."""
    asked = next(row[key] for key in QUESTION if row.get(key) is not None)
    command = row.get("command")
    if isinstance(command, str) and command.strip():
        answer, untrusted = command, False
    else:
        answer, untrusted = next((row[key] for key in RESULT if row.get(key) is not None), ""), True
    messages = (*_system(row.get("system")), _said("user", asked, "user_query"), _said("assistant", answer, "result"))
    return Conversation(name, messages, untrusted=untrusted)


def _question_answer(name: str, row: Row) -> Conversation:
    question, answer = row["question"], row["answer"]
    messages = (*_system(row.get("system")), _said("user", question, "question"), _said("assistant", answer, "answer"))
    return Conversation(name, messages)


def _input_output(name: str, row: Row) -> Conversation:
    messages = (*_system(row.get("system")), _said("user", row["input"], "input"))
    return Conversation(name, (*messages, _said("assistant", row["output"], "output")))


def _plain(name: str, row: Row) -> Conversation:
    return Conversation(name, (_said("assistant", row["text"], "text"),))


def read_messages(turns: Any, system: Any) -> tuple[Message, ...]:
    """A list of OpenAI, ChatML or ShareGPT turns. Raises RowRefused."""
    if not isinstance(turns, list):
        raise RowRefused("wrong-type", "messages: a list of objects")
    if not turns:
        raise RowRefused("no-messages")
    first = turns[0]
    own_system = isinstance(first, dict) and ROLES.get(str(first.get("role", first.get("from")))) == "system"
    messages = [] if own_system else list(_system(system))
    for turn in turns:
        messages.append(_turn(turn))
    return tuple(messages)


def _turn(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowRefused("wrong-type", "messages: each one an object with role and content")
    said = turn["role"] if "role" in turn else turn.get("from")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RowRefused("unknown-role", f"role {str(said)[:40]!r}: use system, user, assistant or tool")
    content = turn["content"] if "content" in turn else turn.get("value")
    calls = turn.get("tool_calls")
    weight = 1 if turn.get("weight") is None else turn["weight"]
    if weight not in (0, 1):
        raise RowRefused("bad-weight")
    if said == "function_call" and isinstance(content, str):
        calls, content = [_json_call(content)], ""
    if content is None and calls:
        content = ""
    text = content if isinstance(content, str) else _parts(content)
    if not calls and len(turn) == 2:  # the usual turn, at half the cost
        return Message(role, text)
    name, call_id = turn.get("name"), turn.get("tool_call_id")
    thoughts = [turn[key] for key in REASONING if isinstance(turn.get(key), str) and turn[key].strip()]
    return Message(
        role,
        text,
        weight=float(weight),
        name=name if isinstance(name, str) else None,
        tool_calls=tuple(_call(call) for call in calls) if isinstance(calls, list) else (),
        tool_call_id=call_id if isinstance(call_id, str) else None,
        reasoning=thoughts[0] if thoughts and role == "assistant" else None,
    )


def read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools a conversation may call: a list, or the same as JSON text (ShareGPT)."""
    tools = _parsed(tools)
    if tools is None or tools == "":
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRefused("wrong-type", "tools: a list of objects")
    return tuple(tools)


def _call(call: Any) -> Mapping[str, Any]:
    """A tool call with its arguments as an object: templates write them as JSON, and would quote a string twice."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRefused("bad-tool-call")
    arguments = _parsed(function.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise RowRefused("bad-tool-call", f"the arguments of {function['name'][:40]} are no JSON object")
    plain: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def _json_call(text: str) -> Any:
    call = _parsed(text)
    if not isinstance(call, dict):
        raise RowRefused("bad-tool-call", "function_call: not JSON")
    return call


def _parts(content: Any) -> str:
    if not isinstance(content, list):
        raise RowRefused("wrong-type", "content: a string")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowRefused("unsupported-content", f"a part of type {str(kind)[:40]!r}: keep the text parts only")
        texts.append(part["text"])
    return "".join(texts)


def _parsed(value: Any) -> Any:
    """CSV and Parquet keep lists as JSON text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _pair_question(row: Row, prompt: Any) -> tuple[Message, ...]:
    return (*_system(row.get("system")), _said("user", prompt, "prompt"))


def _system(text: Any) -> tuple[Message, ...]:
    if text is None or text == "":
        return ()
    return (Message("system", _text(text, "system")),)


def _said(role: Role, text: Any, column: str) -> Message:
    return Message(role, _text(text, column))


def _text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, dict | list):
        raise RowRefused(
            "wrong-type", f"{column}: a string, not {'an object' if isinstance(value, dict) else 'a list'}"
        )
    return str(value)


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


def _is_prompt_completion(row: Row) -> bool:
    return "prompt" in row and ("completion" in row or "response" in row)


def _is_agent(row: Row) -> bool:
    named = any(key in row for key in AGENT) and "command" not in row
    return named and ("output" in row or "result" in row or any(row.get(key) is not None for key in TASK))


def _is_tool(row: Row) -> bool:
    named = "tool_used" in row or "tool" in row or "command" in row
    return named and any(row.get(key) is not None for key in QUESTION)


# The order decides where columns fit more than one layout.
LAYOUTS: tuple[tuple[str, Callable[[Row], bool], Callable[[str, Row], Conversation]], ...] = (
    ("messages", _has("messages"), _messages),
    ("sharegpt", lambda row: "conversations" in row or "conversation" in row, _sharegpt),
    (
        "prompt-completion",
        lambda row: "prompt" in row and ("completion" in row or "response" in row),
        _prompt_completion,
    ),
    ("alpaca", _has("instruction", "output"), _alpaca),
    ("agent", _is_agent, _agent),
    ("tool", _is_tool, _tool),
    ("question-answer", _has("question", "answer"), _question_answer),
    ("input-output", _has("input", "output"), _input_output),
    ("text", _has("text"), _plain),
)
