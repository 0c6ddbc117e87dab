"""What two sets of files that nobody had looked at taught: speakers inside a prompt, half rows, names, nested calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.containers import rows_inside
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.nest import place_of_rows
from hivetune.data.rows.read import RawRow, read_example

ASKED = [("user", "Where is it?"), ("assistant", "There.")]


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row).messages]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Human: Where is it? Assistant:", "chosen": "There."},
        {"prompt": "\n\nHuman: Where is it?\n\nAssistant:", "completion": "There."},
        {"input": "Where is it?", "actual_output": "There."},
        {"input": "Where is it?", "expected": "There."},
        {"q": "Where is it?", "a": "There."},
        {"key": "Where is it?", "value": "There it is."},
        {
            "prompt": [{"from": "user", "content": "Where is it?"}],
            "completion": {"from": "assistant", "content": "There."},
        },
        {"traj": [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "There."}]},
        {"paragraph": [{"q": "Where is it?", "a": ["There."]}]},
    ],
)
def test_the_question_and_its_answer(row: dict[str, Any]) -> None:
    assert [(role, text.replace("There it is.", "There.")) for role, text in said(row)] == ASKED


def test_speakers_inside_a_question_are_turns() -> None:
    row = {"instruction": " <user>: Who? <bot>: She. <user>: Where is it?", "output": "There."}
    assert said(row) == [("user", "Who?"), ("assistant", "She."), *ASKED]


def test_a_list_of_lines_keeps_its_breaks() -> None:
    row = {"conversations": [{"from": "user", "value": "Write"}, {"from": "assistant", "value": ["one", "two"]}]}
    assert said(row)[1] == ("assistant", "one\ntwo")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Human: Who? Human: Where? Assistant:", "completion": "There."}, "rendered-text"),
        ({"prompt": "User: Who? Assistant: She is", "completion": "there."}, "rendered-text"),
        ({"question_id": 1, "text": "The answer alone."}, "unexplained-column"),
        ({"input": "Where?", "actual_output": "There", "tools_called": [{"name": "look"}]}, "unexplained-column"),
        ({"messages": [{"role": "user", "content": "Count."}], "expected_answer": "7"}, "no-answer"),
        ({"key": "limit", "value": "the most that may be read"}, "unknown-layout"),
    ],
)
def test_what_is_not_whole_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.reason == reason


def test_the_model_calls_of_a_trace() -> None:
    asked = {"args": [{"model": "m", "messages": [{"role": "user", "content": "Where is it?"}]}]}
    call = {"type": "llm", "status": "SUCCESS", "input": asked, "output": "There.", "prompt": {"alias": "p"}}
    failed = {**call, "status": "ERRORED"}
    rows = rows_inside(json.dumps({"agentSpans": [], "llmSpans": [call, failed], "input": "x", "output": "y"}).encode())
    assert rows is not None
    assert said(json.loads(rows[0])) == ASKED
    with pytest.raises(RowRefused, match="failed"):
        read_conversation(json.loads(rows[1]))


def test_marks_of_speakers_and_a_prompt_with_a_preamble_are_turns() -> None:
    marked = "<|user|> Where is it? <|eos|> <|ai|> There. <|eos|> <|eod|>"
    assert said({"text": marked}) == ASKED
    prompt = "A chat of two.\n### Human: Where is it?\n### Assistant:"
    assert said({"prompt": prompt, "completion": "There."}) == [("system", "A chat of two."), *ASKED]


def test_a_chinese_prompt_that_a_template_wrote() -> None:
    assert said({"query": "<s>问：在哪里？\n答：", "response": "在那里。"}) == [
        ("user", "在哪里？"),
        ("assistant", "在那里。"),
    ]
    with pytest.raises(RowRefused):
        read_conversation({"query": "<s>Where is it?", "response": "There."})


def test_headers_that_a_template_left_in_the_columns() -> None:
    marked = {"instruction": "\n\n### Instruction:\nWhere is it?", "output": "\n### Response:\n\n### Response:\nThere."}
    assert said(marked) == ASKED
    assert read_conversation(marked).changed == ("turns-from-text",)
    assert said({"input": "<_user>Who?<_bot>She.<_user>Where is it?", "output": "There."})[2:] == ASKED


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("[|Human|]:Where is it?\n[|AI|]:", "There."),
        ("[|Human|] Where is it?\n[|AI|]", "[|AI|]: There."),
        ("<|User|>:Where is it?<eoh>\n<|Bot|>:", "There.<eoa>"),
        ("Where is it?", "There.<|endoftext|>"),
        ("Where is it?", "There. </s>\n"),
    ],
)
def test_marks_of_another_model_at_the_ends_of_the_columns(asked: str, answered: str) -> None:
    for row in ({"inputs": asked, "targets": answered}, {"prompt": asked, "completion": answered}):
        assert said(row) == ASKED
        assert read_conversation(row).changed == ("turns-from-text",)
    several = f"[|Human|]:Who?\n[|AI|]:She.\n{asked}" if asked.startswith("[|Human|]:") else asked
    assert said({"inputs": several, "targets": answered})[-2:] == ASKED


def test_a_tag_at_the_end_of_an_answer_stays() -> None:
    for asked, answer in (("Strike it out.", "<s>it</s>"), ("Which mark ends it, </s> or <eos>?", "It is </s>")):
        assert said({"prompt": asked, "completion": answer})[-1] == ("assistant", answer)
    with pytest.raises(RowRefused, match="rendered-text"):
        read_conversation({"prompt": "Where is it?", "completion": "There.\n[|Human|]: And he?"})


def test_a_chatgpt_export_whose_nodes_name_only_their_children() -> None:
    def node(role: str, text: str, *children: str) -> dict[str, Any]:
        content = {"content_type": "text", "parts": [text]}
        return {"message": {"author": {"role": role}, "content": content}, "children": list(children)}

    nodes = {"r": {"children": ["a"]}, "b": node("assistant", "There."), "a": node("user", "Where is it?", "b")}
    assert said({"title": "t", "mapping": nodes}) == ASKED


def test_blocks_of_text_that_end_with_a_sentence_are_paragraphs() -> None:
    blocks = [{"type": "text", "text": text} for text in ("There", " it is.", "Shall I go?", " Or not?")]
    turns = [{"sender": "human", "text": "Where is it?"}, {"sender": "assistant", "text": "", "content": blocks}]
    assert said({"uuid": "u", "chat_messages": turns})[1] == ("assistant", "There it is.\n\nShall I go? Or not?")


def test_the_only_prompt_of_a_run() -> None:
    run = {"run_type": "llm", "outputs": {"generations": [[{"text": "There."}]]}}
    assert said({**run, "inputs": {"prompts": ["Where is it?"]}}) == ASKED
    with pytest.raises(RowRefused, match="unsupported-content"):
        said({**run, "inputs": {"prompts": ["Where is it?", "Where was it?"]}})


def test_messages_of_opencode_below_another_name() -> None:
    records = [
        {"info": {"role": role}, "parts": [{"type": "text", "text": text}]}
        for role, text in (("user", "Where is it?"), ("assistant", "There."))
    ]
    rows = rows_inside(json.dumps({"session_id": "s", "context_limit": 9, "records": records}).encode()) or []
    assert [said(json.loads(row)) for row in rows] == [ASKED]


def test_a_chatgpt_export_that_lost_its_tree() -> None:
    def node(role: str, text: str, time: float | None) -> dict[str, Any]:
        content = {"content_type": "text", "parts": [text]}
        return {"message": {"author": {"role": role}, "content": content, "create_time": time}}

    nodes = {"n": {"message": None}, "b": node("assistant", "There.", 3.0), "a": node("user", "Where is it?", 2.0)}
    assert said({"title": "t", "mapping": nodes}) == ASKED
    untimed = {"a": node("user", "Where is it?", None), "b": node("assistant", "There.", 3.0)}
    assert said({"title": "t", "mapping": untimed}) == ASKED


def test_a_column_without_a_value_is_not_called_missing() -> None:
    def refused(row: dict[str, Any], column: str) -> RowRefused:
        with pytest.raises(RowRefused) as caught:
            read_example(RawRow("f:1", json.dumps(row).encode()), {"prompt": "asked", "completion": column})
        return caught.value

    row = {"asked": "Where is it?", "sql_made": None, "run": {"sql": None}}
    for column in ("sql_made", "run.sql"):
        assert (refused(row, column).reason, refused(row, column).hint) == (
            "empty-answer",
            f"the column {column!r} is empty in this row",
        )
    assert "did you mean 'sql_made'?" in refused(row, "sql_mad").hint


def test_all_that_a_user_said_in_one_list_and_the_references_in_another() -> None:
    row = {"question_id": 1, "turns": ["Where is it?", "And he?"], "reference": ["There.", "Here."]}
    assert said(row) == [*ASKED, ("user", "And he?"), ("assistant", "Here.")]


def test_choices_are_not_found_in_a_question_by_chance() -> None:
    choices = {"A": "one", "B": "two", "C": "two or one"}
    asked = "Of two men one is right, two or one?"
    assert said({"input": asked, **choices, "output": "B"})[0][1] == f"{asked}\nA. one\nB. two\nC. two or one"
    named = f"{asked} A. one B: two C) two or one"
    assert said({"input": named, **choices, "output": "B"})[0][1] == named


@pytest.mark.parametrize(
    "verdict",
    [
        {"hallucination": "yes"},
        {"true": "0.2"},
        {"truthful": 0.0},
        {"is_wrong": 1},
        {"failed_checks": "is_polite"},
        {"failedAssertions": [{"says": "There"}]},
    ],
)
def test_an_answer_that_its_row_calls_wrong_failed(verdict: dict[str, Any]) -> None:
    def success(row: dict[str, Any]) -> bool | None:
        return read_example(RawRow("f:1", json.dumps(row).encode()), {}).example.success

    assert success({"question": "Where is it?", "answer": "There.", **verdict}) is False
    assert success({"question": "Where is it?", "answer": "There.", "hallucination": "no", "true": 0.9}) is None
    for none in ("", "[]", [], None, 0, "none"):
        assert success({"question": "Where is it?", "answer": "There.", "failed_checks": none}) is None


def test_what_came_of_an_action_in_the_text_of_an_answer_is_a_users_turn() -> None:
    acted = 'Thought: I have to look.\nAction: look\nAction Input: {"where": "map"}'
    texts = [("user", "Where is it?"), ("assistant", acted), ("observation", "Observation: there"), ("gpt", "There.")]
    expected = [("user", "Where is it?"), ("assistant", acted), ("user", "Observation: there"), ("assistant", "There.")]
    assert said({"conversations": [{"from": who, "value": text} for who, text in texts]}) == expected
    both = [{"role": "system", "q": "Be brief.", "a": ""}, {"role": "user", "q": "Where is it?", "a": acted}]
    both.append({"role": "observation", "q": "Observation: there", "a": "There."})
    assert said({"id": 1, "paragraph": [both[0], {"q": "Who?", "a": "She."}]})[1:] == [
        ("user", "Who?"),
        ("assistant", "She."),
    ]
    assert said({"id": 1, "paragraph": both}) == [("system", "Be brief."), *expected]


def test_an_action_that_is_only_talked_about_has_no_result() -> None:
    texts = [("user", "Where is it?"), ("assistant", "Action: none."), ("observation", "there"), ("gpt", "There.")]
    assert said({"conversations": [{"from": who, "value": text} for who, text in texts]})[2][0] == "tool"


def test_a_list_of_conversations_as_lists_of_their_texts(tmp_path: Path) -> None:
    talks = [["Where is it?", "There.", "Thanks", "Not at all."], ["Who is it?", "She."], ["When?", "Now.", "Fine."]]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps({"conversations": talks}, indent=1))
    found = [[m.content for m in example_of(raw).messages] for raw in rows_of_files(str(path))]
    assert found == [talks[0], talks[1], talks[2][:2]]
    assert place_of_rows([{"steps": talks}]) == ()
