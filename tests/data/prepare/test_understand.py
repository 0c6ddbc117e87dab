"""What the report says that a file was read as: no text is called unread that is learned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

COMMAND = "find . -name '*.py' | xargs grep -n deprecated"


def understood(path: Path) -> dict[str, Any]:
    [found] = check(DataConfig(path=str(path))).document["understood"][str(path)]
    return dict(found)


def test_arguments_of_calls_and_thoughts_are_read(write_rows: Callable[..., Path]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": {"command": COMMAND}}}
    turns = [
        {"role": "user", "content": "What is deprecated in this project?"},
        {"role": "assistant", "content": "", "reasoning": "I have to look for that word.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py:3: # deprecated since 2.1"},
        {"role": "assistant", "content": "One function in a.py, line 3."},
    ]
    found = understood(write_rows([{"messages": turns}]))
    assert found["left_out"] == []
    assert "messages[].tool_calls[].function.arguments.command" in found["answer"]
    assert "messages[].reasoning" in found["answer"]


def test_a_path_that_is_read_in_one_row_is_not_called_unread(write_rows: Callable[..., Path]) -> None:
    """Turns after the last answer are left out of a row, and said as that."""
    turns = [
        {"role": "user", "content": "Where is the invoice of March?"},
        {"role": "assistant", "content": "Below Billing, Invoices."},
        {"role": "user", "content": "Great, that worked. Thank you!"},
    ]
    assert understood(write_rows([{"messages": turns}]))["left_out"] == []


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Where is the invoice of March?", "completion": "Below Billing, Invoices.<|endoftext|>"},
        {"prompt": "[|Human|]:Where is the invoice of March?\n[|AI|]:", "completion": "Below Billing, Invoices."},
    ],
)
def test_columns_whose_marks_are_taken_off_are_read(write_rows: Callable[..., Path], row: dict[str, Any]) -> None:
    found = understood(write_rows([row]))
    assert (found["question"], found["answer"], found["left_out"]) == (["prompt"], ["completion"], [])
