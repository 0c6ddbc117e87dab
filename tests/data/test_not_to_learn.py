"""Rows that nobody would train on, though they hold a question and a text behind it."""

import json
from typing import Any

from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def reason_of(row: dict[str, Any]) -> str:
    try:
        read_example(RawRow("log:1", json.dumps(row).encode()), {})
    except RowRefused as refused:
        return refused.reason
    return ""


def test_a_call_whose_input_was_not_logged() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "There."}

    def row(part: dict[str, Any]) -> dict[str, Any]:
        said = [("user", "Where is it?"), ("assistant", [part]), ("user", [result]), ("assistant", "It is there.")]
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    assert reason_of(row(call)) == "bad-tool-call"
    assert reason_of(row(call | {"input": {}})) == ""


def test_a_row_that_tests_a_judge() -> None:
    judged = {"input": "What colour was the door?", "output": "green", "expected": "green"}
    assert reason_of({"input": judged, "expected": 1}) == "wrong-type"
    assert reason_of({"input": judged["input"], "output": "green", "expected": "green"}) == ""


def test_a_text_of_a_retrieval_benchmark_is_not_learned_alone() -> None:
    row = {"_id": "q7", "text": "When was the lighthouse built, and for what purpose?", "metadata": {}}
    assert reason_of(row) == "unexplained-column"
