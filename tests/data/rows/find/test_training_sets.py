"""Rows as public sets for fine-tuning have them: templates inside texts, rounds, objects as answers, rows of a test."""

import json
from typing import Any

import pytest

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.read import RawRow, read_example

ASK, SAY = "Which river is it?", "It is the Seine, I think."
TOLD = [("user", ASK), ("assistant", SAY)]
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row).messages]


@pytest.mark.parametrize(
    "text",
    [
        f"{BEGIN}<\uff5cUser\uff5c>{ASK}<\uff5cAssistant\uff5c>{SAY}{END}",
        f"<reserved_106>{ASK}<reserved_107>{SAY}",
        f"<|prompter|>{ASK}<|endoftext|><|assistant|>{SAY}<|endoftext|>",
        f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n{SAY}",
        f"Instruct: {ASK}\nOutput: {SAY}",
        f"USER: {ASK}\n\n\nASSISTANT: {SAY} <|endoftext|>\n\n\n",
    ],
)
@pytest.mark.parametrize("column", ["text", "formatted_row"])
def test_a_template_in_a_text_under_any_name(text: str, column: str) -> None:
    assert said({column: text}) == TOLD


def test_words_in_front_of_the_turns_are_the_system_prompt() -> None:
    text = f"A person talks with a guide.\n[|Human|] {ASK}\n[|AI|] {SAY}\n[|Human|] "
    assert said({"topic": "rivers", "input": text}) == [("system", "A person talks with a guide."), *TOLD]


def test_rounds_of_a_history_alone_are_the_conversation() -> None:
    assert said({"history": [[ASK, SAY], [SAY, ASK]]}) == [*TOLD, ("user", SAY), ("assistant", ASK)]


def test_an_object_is_learned_whole_and_no_part_of_it() -> None:
    wanted = {"summary": "Pays twice each month.", "wishes": ["one", "two"]}
    [_, answer] = said({"input_text": "I pay twice each month, why?", "target": wanted})
    assert json.loads(answer[1]) == wanted


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"findings": "The lungs are clear today.", "impression": "Nothing found."}, "Nothing found."),
        ({"incorrect": "He go to school now.", "correct": "He goes to school now."}, "He goes to school now."),
        ({"original_text": "He go to school now.", "corrected_text": "He goes there."}, "He goes there."),
        ({"invocation": "copy all texts to the backup", "cmd": "cp *.txt backup/"}, "cp *.txt backup/"),
        ({"fact": "A man took a car that was not his.", "accusation": "theft"}, "theft"),
        ({"instruct": "Find the names.", "query": "Text: Ann met Bob.", "answer": "Ann, Bob"}, "Ann, Bob"),
    ],
)
def test_what_was_made_of_a_text(row: dict[str, Any], answer: str) -> None:
    assert said(row)[-1] == ("assistant", answer)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Pick the tone of this mail.", "response": " Worried", "target": "Confident"},
        {"prompt": ASK, "completion_a": SAY, "completion_b": "It is the Rhine, and no other."},
        {"messages": [{"role": "user", "content": "Reach the Target: 77 with 70 and 7"}], "target": "77"},
    ],
)
def test_answers_that_may_be_wrong_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_an_answer_that_a_test_found_wrong_failed() -> None:
    row = {"prompt": ASK, "response": "18 of them", "gold": "18", "result": False}
    assert read_example(RawRow("rows:1", json.dumps(row).encode()), {}).example.success is False
    assert read_conversation({**row, "gold": "20"}).messages[-1].content == "20"


def test_a_role_alone_in_a_list() -> None:
    talk = [{"role": ["user"], "content": "Which river?"}, {"role": ["assistant"], "content": "The Seine."}]
    for name in ("message", "messages"):
        found = read_conversation({name: talk}).messages
        assert [(m.role, m.content) for m in found] == [("user", "Which river?"), ("assistant", "The Seine.")]
