"""A question and the calls that answer it, as JSON: the form of data sets for calling functions.

https://huggingface.co/datasets/Salesforce/xlam-function-calling-60k
"""

import itertools
from typing import Any

from hivetune.data.columns import QUESTIONS, SYSTEM, TOOLS, system_of, tools_of
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_call, read_tools
from hivetune.data.pieces.said import Conversation, Row, first_of, objects, parsed, text_of
from hivetune.data.pieces.turns import read_system
from hivetune.records import Message

# The name and the arguments of the one call to be made, where each has a column.
_NAMED = (("tool", "args"), ("tool_name", "tool_input"), ("function_name", "arguments"))
_CALLED = ("answers", "tool_calls", "tool_call", "function_calls", "function_call", "expected_tool_calls")  # to be made


def read(row: Row) -> Conversation | None:
    called, question = _called(row), first_of(row, QUESTIONS)
    if called is None or question is None:
        return None
    messages = [*read_system(system_of(row)), Message("user", text_of(row[question], question))]
    messages.append(Message("assistant", "", tool_calls=tuple(map(read_call, called))))
    return Conversation("calls", tuple(messages), read_tools(tools_of(row)))


def _called(row: Row) -> list[dict[str, Any]] | None:
    """Return the calls in a column, one alone or a list of them; None where no column holds any."""
    for name, arguments in _NAMED:
        if isinstance(row.get(name), str) and isinstance(parsed(row.get(arguments)), dict):
            return [{"name": row[name], "arguments": row[arguments]}]
    for value in (parsed(row.get(name)) for name in _CALLED):
        calls = objects([value] if isinstance(value, dict) else value)
        if calls and all("name" in call or isinstance(call.get("function"), dict) for call in calls):
            return list(calls)
    return None


_NEEDS = frozenset((*_CALLED, *itertools.chain.from_iterable(_NAMED)))
FORMAT = Format("calls", read, needs=_NEEDS, rank=23, explains=_NEEDS.union(SYSTEM, TOOLS))
