"""Rows that nobody would train on, though they hold a question and a text behind it."""

import json
from typing import Any

import pytest

from hivetune.data.chunks import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def reason_of(row: dict[str, Any]) -> str:
    try:
        read_example(RawRow("log:1", json.dumps(row).encode()), {})
    except RowRefused as refused:
        return refused.reason
    return ""


CUT = {"question": "How are lists sorted in Java?", "answer": "There are two ways. The first one is to call"}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tok_count": 200}, "cut-off-answer"),
        ({"tok_count": "200", "time": "4.7"}, "cut-off-answer"),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 256}}, "cut-off-answer"),
        ({"tok_count": 187}, ""),
        ({"max_tokens": 200}, ""),
        ({}, ""),
    ],
)
def test_as_many_tokens_as_a_limit_in_an_answer_that_ends_inside_a_sentence(more: dict[str, Any], reason: str) -> None:
    assert reason_of(CUT | more) == reason


def test_an_answer_that_ends_is_whole_whatever_was_counted() -> None:
    assert reason_of(CUT | {"answer": "With the method sort.", "tok_count": 200}) == ""


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


def test_two_numbers_ask_nothing() -> None:
    assert reason_of({"input": 5.0, "output": 25.0, "cache_read": 0.5}) == "unknown-layout"
    assert reason_of({"input": "12", "output": "144"}) == "unknown-layout"
    assert reason_of({"instruction": "Square it.", "input": "12", "output": "144"}) == ""


def test_a_text_of_a_retrieval_benchmark_is_not_learned_alone() -> None:
    row = {"_id": "q7", "text": "When was the lighthouse built, and for what purpose?", "metadata": {}}
    assert reason_of(row) == "unexplained-column"
