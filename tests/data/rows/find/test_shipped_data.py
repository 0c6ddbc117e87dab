"""Data that projects ship beside their programs: rows that are read alike or not at all, names in front of texts,
answers that break off.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.per_file import doubted_columns, readings
from hivetune.data.rows.read import RawRow, read_example

ASK, SAY = "Where is the depot of the town?", "It stands on the left bank in Bonn."


def said(row: Any) -> list[tuple[str, str]]:
    messages = read_example(RawRow("f:1", json.dumps(row).encode()), {}).example.messages
    return [(m.role, m.content) for m in messages]


def outcomes(rows: list[Any], folder: Path) -> list[str]:
    """The layout of each row of a file, or why it is refused."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = []
    for raw in rows_of_files(str(path)):
        try:
            found.append(read_example(raw, {}).layout)
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def judged(talk: str) -> dict[str, Any]:
    replies = {name: {"response": f"{SAY} {name}", "annotation": {"helps": "Yes"}} for name in ("one", "two")}
    return {"conversation_history": talk, "tutor_responses": replies}


READ, REFUSED = judged("Tutor: How much is it?\n Student: 9"), judged("Tutor: Where was that? I ask \n again.")


def test_rows_of_which_most_are_refused_are_not_read_by_chance(tmp_path: Path) -> None:
    assert said(READ)[0] == ("user", "9")  # alone, nothing tells what it is
    assert outcomes([REFUSED, REFUSED, READ, REFUSED, READ], tmp_path) == ["unknown-layout"] * 5


def test_rows_with_other_columns_are_read(tmp_path: Path) -> None:
    asked = {"client_question": ASK, "clerk_answer": SAY}
    assert outcomes([REFUSED] * 5 + [asked], tmp_path)[-1] == "structure"
    assert doubted_columns(readings([READ] * 3 + [REFUSED] * 2, (), ())) == ()
    assert doubted_columns(readings([READ, REFUSED, REFUSED], (), ())) == ()  # by chance, too


def test_names_in_front_of_texts_are_no_words() -> None:
    texts = [f"Patient:{ASK}", f"Doctor:{SAY}", "Patient:And when?", "Doctor:At noon, as a rule."]
    assert said(texts) == [("user", ASK), ("assistant", SAY), ("user", "And when?"), ("assistant", texts[3][7:])]
    with pytest.raises(RowRefused, match="unknown-role"):
        said([f"Anna:{ASK}", f"Otto:{SAY}"])


@pytest.mark.parametrize(
    "begin", ['```json\n[\n {"town": "Bonn", "banks": ["', '{"town": "Bonn", "year": 19', '[["a", ']
)
def test_an_answer_in_json_that_breaks_off_is_cut(begin: str) -> None:
    with pytest.raises(RowRefused, match="cut-off-answer"):
        said({"question": ASK, "answer": begin})


@pytest.mark.parametrize(
    "answer",
    [
        '```json\n{"town": "Bonn"}\n```',
        '["a", "b"] are they',
        '{"town": "Bonn"} and so on',
        f"[1, {'1' * 5000}] are they",
    ],
)
def test_an_answer_with_json_in_it_is_whole(answer: str) -> None:
    assert said({"question": ASK, "answer": answer})[-1] == ("assistant", answer)


def test_a_puzzle_is_given_with_its_question() -> None:
    row = {"puzzle": "Six people sit at a table. Anna sits beside Otto.", "question": "Who sits there?", "answer": "B"}
    assert said(row) == [("user", f"{row['question']}\n{row['puzzle']}"), ("assistant", "B")]


def test_what_a_model_is_told_is_no_answer() -> None:
    row = {"query": ASK, "system_content": "You know all towns of the Rhine."}
    with pytest.raises(RowRefused, match="unknown-layout"):
        said(row)
    assert said({**row, "response": SAY})[0] == ("system", row["system_content"])


def test_the_short_and_the_whole_answer_of_a_question(tmp_path: Path) -> None:
    row = {
        "body": ASK,
        "documents": ["https://example.org/1"],
        "ideal_answer": [f"No. {SAY}", SAY],
        "exact_answer": "no",
    }
    assert said({**row, "type": "yesno"})[-1] == ("assistant", f"No. {SAY}")


def test_two_answers_as_turns_are_asked_about_with_a_line(tmp_path: Path) -> None:
    ends = [{"from": "chosen_gpt", "value": SAY}, {"from": "rejected_gpt", "value": "I do not know."}]
    row = {"conversations": [{"from": "human", "value": ASK}, *ends]}
    with pytest.raises(RowRefused) as refused:
        said(row)
    assert "--columns messages=conversations,completion=chosen" in refused.value.hint
    raw = RawRow("f:1", json.dumps(row).encode())
    columns = {"messages": "conversations", "completion": "chosen"}
    assert [m.content for m in read_example(raw, columns).example.messages] == [ASK, SAY]
    both = read_example(raw, {}, pairs=True).example
    assert both.messages[-1].content == SAY and both.worse is not None and both.worse.content == "I do not know."


THOUGHT = "A train stops there, and trains stop at depots."


@pytest.mark.parametrize(
    "text",
    [
        f"Question: {ASK}\nReasoning: {THOUGHT}\nAnswer: {SAY}",
        f"### Instruction:\n{ASK}\n\n### Thought:\n{THOUGHT}\n\n### Response:\n{SAY}",
        f"<question>{ASK}</question><reasoning>{THOUGHT}</reasoning><answer>{SAY}</answer>",
    ],
)
def test_what_was_thought_between_a_question_and_its_answer_was_not_asked(text: str) -> None:
    messages = read_example(RawRow("f:1", json.dumps({"text": text}).encode()), {}).example.messages
    assert [(m.role, m.content, m.reasoning) for m in messages] == [("user", ASK, None), ("assistant", SAY, THOUGHT)]


@pytest.mark.parametrize(
    "answer",
    [
        f"Reasoning: {THOUGHT}\nConclusion: {SAY}",
        f"Thought: {THOUGHT}\nAction: look\nThought: That is it.\nFinal Answer: {SAY}",
    ],
)
def test_thoughts_begin_an_answer_without_a_header(answer: str) -> None:
    assert said({"text": f"Question: {ASK}\n{answer}"}) == [("user", ASK), ("assistant", answer)]


def test_an_explanation_behind_an_answer_is_a_part_of_it() -> None:
    text = f"Question: {ASK}\nAnswer: {SAY}\nExplanation: {THOUGHT}"
    assert said({"text": text}) == [("user", ASK), ("assistant", f"{SAY}\nExplanation: {THOUGHT}")]


def test_rounds_and_turns_under_other_names() -> None:
    turns = [("user", ASK), ("assistant", SAY)]
    assert said({"id": 1, "paragraph": [{"q": ASK, "a": ["It stands on the left bank", "in Bonn."]}]})[0] == turns[0]
    assert said({"turns": [{"speaker": who, "utterance": text} for who, text in turns]}) == turns


def test_a_puzzle_alone_is_asked() -> None:
    puzzle = "Two people live on an island. One of them lies, and Anna says that both do."
    assert said({"puzzle": puzzle, "completion": SAY, "n": 2}) == [("user", puzzle), ("assistant", SAY)]


def test_what_thoughts_led_to_is_the_answer() -> None:
    for row in ({"question": ASK, "reasoning": THOUGHT}, {"instruction": ASK, "analysis": THOUGHT}):
        assert said({"id": 3, **row, "decision": SAY}) == [("user", ASK), ("assistant", SAY)]
        assert said({**row, "next_step": "show_map(town='Bonn')"})[-1] == ("assistant", "show_map(town='Bonn')")
        for other in ({"theme": "trains"}, {"decision": SAY, "place": "The left bank of the Rhine."}):
            with pytest.raises(RowRefused, match=r"unknown-layout|unexplained-column"):
                said({**row, **other})
    with pytest.raises(RowRefused, match=r"unknown-layout|unexplained-column"):
        said({"question": ASK, "decision": SAY, "reasoning": THOUGHT})


def test_who_answers_otherwise_may_ask() -> None:
    with pytest.raises(RowRefused, match="unknown-layout"):
        said({"user_question": ASK, "assistant_question": "And how far is it from there?"})
    with pytest.raises(RowRefused, match="unknown-layout"):
        said({"doctor_question": ASK, "patient_answer": SAY})
    assert said({"user_question": ASK, "assistant_answer": SAY}) == [("user", ASK), ("assistant", SAY)]


def test_paragraphs_and_questions_with_numbers_are_no_table_by_name(tmp_path: Path) -> None:
    table = {"uid": "t", "table": [["", "2019"], ["Sold", "12"]]}
    texts = [{"uid": f"p{n}", "order": n, "text": f"In the year {n} the depot was sold."} for n in range(3)]
    asked = [{"uid": "q", "order": 1, "question": ASK, "answer": [SAY], "derivation": "", "scale": ""}]
    rows = [{"table": table, "paragraphs": texts, "questions": asked}] * 3
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    for raw in rows_of_files(str(path)):
        with pytest.raises(RowRefused):
            read_example(raw, {})


@pytest.mark.parametrize("name", ["ground_truth", "solution"])
def test_an_answer_about_several_by_their_letters_is_whole(name: str) -> None:
    row = {"puzzle": "Two people live there. A says that B lies. Who is who?", name: {"A": "knave", "B": "knight"}}
    assert said({**row, "hash": "f74c"})[1] == ("assistant", '{"A": "knave", "B": "knight"}')


def test_choices_by_their_letters_are_no_answer() -> None:
    with pytest.raises(RowRefused):
        said({"question": ASK, "answers": {"A": "In Bonn", "B": "In Ulm"}})


def test_a_row_with_many_lists_of_turns_is_walked_once_for_its_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("hivetune.data.rows.find.row.system_in", lambda row: asked.append(row))
    turns = [{"speaker_is": "user", "said": ASK}, {"speaker_is": "assistant", "said": SAY}]
    with pytest.raises(RowRefused):
        said({f"part_{n}": [{**turn, "said": f"{turn['said']} {n}"} for turn in turns] for n in range(20)})
    assert len(asked) < 10  # a few tries, and no walk for each list
