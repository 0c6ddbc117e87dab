"""The line of the config that a refusal prints: it reads the rows, and where nobody can tell there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.rows.find.parcel_talk import ANSWERED, ASKED, TALK, columns_for, said, turns

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.asking.advice import lines_for
from hivetune.data.rows.layouts.mapped import map_columns


def test_of_numbered_answers_none_is_proposed() -> None:
    row = {"label": 1, "prompt": ASKED, "response 1": ANSWERED, "response 2": "I do not know where it is."}
    assert columns_for(row) is None


def test_the_line_that_is_advised_reads_the_row() -> None:
    row = {"thread": turns("senderWorkerId", "text", 0, 1), "meta": {"id": 1}}
    columns = columns_for(row)
    assert columns == {"messages": "thread", "user_role": "0", "assistant_role": "1"}
    assert said(dict(map_columns(row, columns)), mapped=True) == TALK
    assert columns_for({"a": 1, "b": "two"}) is None


QUESTIONS = ("Where is the parcel?", "Who has the letter?", "When is it open?", "Why is it late?")


def rows_of(**columns: str) -> list[dict[str, Any]]:
    """Rows with these columns; `{}` in a text is the number of the row."""
    return [
        {"question_text": asked} | {k: v.format(i) for k, v in columns.items()} for i, asked in enumerate(QUESTIONS)
    ]


@pytest.mark.parametrize(
    ("rows", "answered"),
    [
        (rows_of(sagt="It is on shelf {}."), "sagt"),
        (rows_of(sagt="It is on shelf {}.", made="2026-01-0{}T10:00:00", link="https://a.example/{}"), "sagt"),
        (rows_of(sagt="It is on the shelf."), None),  # constant
        (rows_of(sagt="It is on shelf {}.", lisa="Nobody knows {} at all"), "sagt lisa"),  # which of the two
        (rows_of(gt_text="It is on shelf {}.", content="I do not know {}, sorry."), "gt_text"),
        (rows_of(body="The shelf {} holds it.", content="It is on shelf {}."), "content"),
        (rows_of(expected_output="page_{}"), None),
    ],
)
def test_lines_are_tried_on_a_whole_sample(rows: list[dict[str, Any]], answered: str | None) -> None:
    lines = lines_for(rows)
    assert [line.columns["completion"] for line in lines] == (answered.split() if answered else [])
    given = "body" in rows[0]
    assert all(("body" in line.columns["prompt"]) == given for line in lines), "what was given would be lost"
    if lines and not given:
        assert (lines[0].question, lines[0].answer, lines[0].read) == (QUESTIONS[0], "It is on shelf 0.", 4)


def test_a_line_reads_rows_inside_records_and_is_printed_with_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rows = [{"küsimus": asked, "vastus": f"It is on shelf {i}, ask ada@firma.de"} for i, asked in enumerate(QUESTIONS)]
    path.write_text(json.dumps({"shelves": rows, "count": 4}))
    report = check(DataConfig(path=str(path))).document
    [[line, *_]] = report["unclear"].values()
    assert (report["usable"], line["line"]) == (0, "--columns prompt=küsimus,completion=vastus")
    assert (line["question"], line["answer"]) == (QUESTIONS[0], "It is on shelf 0, ask [EMAIL]")
    columns = {"prompt": "küsimus", "completion": "vastus"}
    assert check(DataConfig(path=str(path), columns=columns)).document["usable"] == 4


def test_a_sheet_in_any_other_language_is_asked_about_with_the_line_that_reads_it() -> None:
    row = {"nr": "1", "küsimus": ASKED, "vastus": ANSWERED}
    with pytest.raises(RowRefused):
        said(row)
    assert columns_for(row) == {"prompt": "küsimus", "completion": "vastus"}
    assert columns_for({**row, "lisa": "Something else that somebody wrote"}) is None, "three: nobody can tell"


def test_a_line_never_makes_a_class_of_a_number_of_choices() -> None:
    rows = [{"context": ASKED, "query": f"Who is {n}?", "option_0": "A dog", "label": n % 2} for n in range(9)]
    assert lines_for(rows) == []


def test_the_line_for_a_list_of_answers_keeps_what_belongs_to_the_question() -> None:
    row = {"instruction": "Write a question about this text:", "input": ANSWERED, "output": [ASKED, "Who has it all?"]}
    with pytest.raises(RowRefused) as refused:
        said(row)
    assert "--columns instruction=instruction,input=input,completion=output.0" in str(refused.value.hint)
    columns = {"instruction": "instruction", "input": "input", "completion": "output.0"}
    assert said(dict(map_columns(row, columns)), mapped=True)[0][1] == f"{row['instruction']}\n{ANSWERED}"
    assert not any(line.columns["prompt"] == "instruction" for line in lines_for([row] * 3))


def test_of_numbered_turns_none_is_proposed() -> None:
    row = {"talk": {f"turn_{n}": {"Human": f"{ASKED} {n}", "Tool Responses": f"{ANSWERED} {n}"} for n in (1, 2)}}
    assert lines_for([row] * 3) == []
    assert lines_for([{"tool_input": {"query": ASKED}, "tool_output": f"{ANSWERED} {n}"} for n in range(3)]) == []


def test_numbers_that_count_something_are_no_parties() -> None:
    replies = [{"type": "done", "text": text, "written": 5 + n % 2} for n, (_, text) in enumerate(TALK)]
    assert lines_for([{"results": replies}]) == []


def test_a_preference_whose_question_is_a_list_of_turns_is_told_a_whole_line() -> None:
    better, worse = [{"role": "assistant", "content": ANSWERED}], [{"role": "assistant", "content": "Who knows?"}]
    asked = {"messages": [{"role": "user", "content": ASKED}]}
    row = {"input": asked, "preferred_output": better, "non_preferred_output": worse}
    with pytest.raises(RowRefused) as refused:
        said(row)
    assert refused.value.hint.endswith("--columns prompt=input.messages,completion=preferred_output")
    columns = {"prompt": "input.messages", "completion": "preferred_output"}
    assert said(dict(map_columns(row, columns)), mapped=True) == TALK[:2]


@pytest.mark.parametrize("better", [{"from": "gpt", "value": ANSWERED}, ANSWERED])
def test_a_preference_behind_turns_is_told_a_whole_line(better: Any) -> None:
    row = {"conversations": [{"from": "human", "value": ASKED}], "chosen": better, "rejected": "Who knows?"}
    with pytest.raises(RowRefused) as refused:
        said(row)
    assert refused.value.hint.endswith("--columns messages=conversations,completion=chosen")
    columns = {"messages": "conversations", "completion": "chosen"}
    assert said(dict(map_columns(row, columns)), mapped=True) == TALK[:2]


def test_no_line_is_printed_twice() -> None:
    rows = [
        {"question": asked, "answer": f"It is on shelf {i}, by the door.", "completion": f"I guess {i}.", "acc": False}
        for i, asked in enumerate(QUESTIONS)
    ]
    assert [line.columns for line in lines_for(rows)] == [{"prompt": "question", "completion": "answer"}]
