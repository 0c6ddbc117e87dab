"""Rows as public sets for fine-tuning have them: what to do apart from a text, calls, marks and words for nothing."""

from typing import Any

import pytest

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation

ASK, SAY = "Which river is it?", "It is the Seine, I think."
TOLD = [("user", ASK), ("assistant", SAY)]


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row).messages]


@pytest.mark.parametrize(
    "row",
    [
        {"Comment": ASK, "Response": SAY},
        {"subject": "River", "body": ASK, "answer": SAY, "queue": "IT", "priority": "high"},
        {"Description": "Q. A river that nobody knows?", "Patient": ASK, "Doctor": SAY},
        {"data": [f"问：{ASK}", f"答：{SAY}"]},
        {"instruction": ASK, "input": "<noinput>", "output": SAY},
        {"instruction": ASK, "input": "None", "output": SAY},
        {"prompt": f"### Instruction:\n{ASK}\n\n### Response:\n", "completion": SAY},
        {"prompt": f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n", "completion": f"{SAY}<|im_end|>"},
        {"instruction": f"[Round 1]\n\n问：{ASK}\n\n答：", "output": SAY},
    ],
)
def test_the_question_and_its_answer_without_what_is_beside_them(row: dict[str, Any]) -> None:
    assert said(row) == TOLD


def test_rounds_in_front_of_a_question_are_turns() -> None:
    asked = f"[Round 1]\n\n问：{ASK}\n\n答：{SAY}\n\n[Round 2]\n\n问：Is it long?\n\n答："
    assert said({"instruction": asked, "output": "Rather."}) == [
        *TOLD,
        ("user", "Is it long?"),
        ("assistant", "Rather."),
    ]


def test_what_to_do_and_the_text_to_do_it_with() -> None:
    row = {"instruction": "Find the names.", "text": "Ann met Bob in Lima.", "output": "Ann, Bob"}
    assert said(row) == [("user", "Find the names.\nAnn met Bob in Lima."), ("assistant", "Ann, Bob")]


def test_a_prompt_beside_both_parties_is_the_system_prompt() -> None:
    assert said({"prompt": "Be kind.", "user": ASK, "assistant": SAY}) == [("system", "Be kind."), *TOLD]


@pytest.mark.parametrize("column", ["function_call", "tool_calls"])
def test_calls_in_a_column_answer_the_question(column: str) -> None:
    call = {"name": "find", "arguments": {"river": 1}}
    row = {"question": ASK, column: call if column == "function_call" else [call]}
    assert read_conversation(row).messages[-1].tool_calls[0]["function"] == call


def test_speakers_in_brackets_take_turns() -> None:
    row = {"query": ASK, "laws": ["Rivers are free to all."], "history": [f"[客户] {ASK}", f"[律师] {SAY}"]}
    assert said(row) == TOLD


def test_a_comment_beside_an_answer_is_about_it() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"comment": "That was well put.", "answer": SAY})


@pytest.mark.parametrize("answers", [["No."], ["It is the Rhine and no other.", "The Rhine."]])
def test_a_body_that_asks_beside_its_ideal_answers(answers: list[str]) -> None:
    row = {"body": "Is the Elbe the river of Bonn?", "ideal_answer": answers, "exact_answer": "no", "type": "yesno"}
    assert [m.content for m in read_conversation(row).messages] == [row["body"], answers[0]]
