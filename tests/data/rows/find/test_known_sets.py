"""Columns as well-known data sets have them: choices in columns of their own, a task with its tests, two questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.asking.advice import lines_for
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.nest import place_of_rows, rows_at
from hivetune.data.rows.read import RawRow, read_example


def said_in(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The question and the answer of each row of a file."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = [example_of(raw).messages for raw in rows_of_files([str(path)])]
    return [(messages[0].content, messages[-1].content) for messages in found]


def said(row: dict[str, Any]) -> tuple[str, str]:
    messages = read_conversation(row).messages
    return messages[0].content, messages[-1].content


CHOICES = ["lift the lid", "turn the key", "pull the rope"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("columns", "tells"),
    [
        (("opa", "opb", "opc"), "cop"),
        (("answerA", "answerB", "answerC"), "label"),
        (("ending0", "ending1", "ending2"), "label"),
        (("sol1", "sol2", "sol3"), "label"),
    ],
)
def test_the_number_of_a_choice_in_a_column_of_its_own(
    tmp_path: Path, columns: tuple[str, ...], tells: str, first: int
) -> None:
    choices = dict(zip(columns, CHOICES, strict=True))
    rows = [{"question": f"How is box {n} opened?", **choices, tells: n % 3 + first} for n in range(9)]
    if columns[0] == "ending0" and first == 1:
        return  # a number that names another column
    numbered = columns[0] == "ending0"  # then the columns are named by what the answer says
    for n, (asked, answer) in enumerate(said_in(tmp_path, rows)):
        name = str(n % 3 + first) if numbered else "ABC"[n % 3]
        assert answer == name
        assert f"{name}. {CHOICES[n % 3]}" in asked


def test_the_number_of_a_lettered_choice_says_nothing_alone() -> None:
    row = {"question": "How is it opened?", "options": dict(zip("ABC", CHOICES, strict=True)), "answer": 1}
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_what_choices_are_made_for_is_asked(tmp_path: Path) -> None:
    rows = [
        {
            "activity_label": "Boats" if n % 3 else "Opening large boxes",
            "ctx_a": f"Somebody stands in front of box {n}.",
            "ctx_b": "They",
            "ctx": f"Somebody stands in front of box {n}. They",
            "endings": CHOICES,
            "label": str(n % 3),
        }
        for n in range(9)
    ]
    asked, answer = said_in(tmp_path, rows)[4]
    assert asked.splitlines() == [
        "Somebody stands in front of box 4. They",
        *(f"{letter}. {text}" for letter, text in zip("ABC", CHOICES, strict=True)),
    ]
    assert answer == "B"


@pytest.mark.parametrize("begun", ["Then they", "They look around and then they"])
def test_what_choices_go_on_is_the_end_of_the_question(tmp_path: Path, begun: str) -> None:
    choices = {f"ending{n}": text for n, text in enumerate(CHOICES)}
    rows = [{"sent1": f"Somebody sees box {n}.", "sent2": begun, **choices, "label": n % 3} for n in range(9)]
    for n, (asked, _) in enumerate(said_in(tmp_path, rows)):
        assert asked.startswith(f"Somebody sees box {n}. {begun}\n")


def test_answers_of_which_a_number_says_the_right_one_are_choices(tmp_path: Path) -> None:
    rows = [{"question": f"How is box {n} opened?", "answers": CHOICES, "correctIndex": n % 3} for n in range(9)]
    assert [answer for _, answer in said_in(tmp_path, rows)] == list("ABC") * 3


def test_a_question_by_its_stem() -> None:
    choices = {"text": CHOICES, "label": ["A", "B", "C"]}
    asked, answer = said({"question_stem": "A chest with a lock opens when people", "choices": choices, "key": "B"})
    assert asked.endswith("B. turn the key\nC. pull the rope")
    assert answer == "B"


def test_two_questions_with_one_label() -> None:
    row = {"question1": "How is a box opened?", "question2": "How does one open boxes?", "label": 1}
    assert said(row) == ("How is a box opened?\nHow does one open boxes?", "1")


def test_a_task_and_its_code_beside_tests() -> None:
    row = {"task_id": 4, "text": "Write a function that doubles a number.", "code": "def double(n):\n    return n + n"}
    assert said({**row, "test_list": ["assert double(2) == 4"]}) == (row["text"], row["code"])
    with pytest.raises(RowRefused):
        read_conversation(row)


@pytest.mark.parametrize("names", [("meaning_representation", "human_reference"), ("mr", "ref")])
def test_data_and_what_it_says(names: tuple[str, str]) -> None:
    texts = ("name[The Mill], food[soup], area[harbour]", "The Mill serves soup at the harbour.")
    assert said(dict(zip(names, texts, strict=True))) == texts


def test_a_text_as_it_was_before_its_words_were_cut_apart() -> None:
    whole = "小李有十二个苹果，给了小王五个，还剩多少个．"
    row = {"id": "3", "segmented_text": " ".join(whole), "original_text": whole, "ans": "7", "equation": "x=12-5"}
    assert said(row) == (whole, "7")


def test_the_answer_beside_what_a_model_said_and_whether_that_is_right() -> None:
    row = {"question": "How many apples are left of twelve after five?", "answer": "12 - 5 = 7, so 7 are left."}
    tested = {"completion": "First I take five away, and eight are left.", "acc": False}
    assert said(row | tested) == (row["question"], row["answer"])


def test_a_reference_answer_is_the_right_one() -> None:
    row = {"question": "What is 4+8?", "answer": "11", "reference_answer": "The answer is 12"}
    assert said(row) == ("What is 4+8?", "The answer is 12")


def test_questions_keep_the_documents_and_the_choices_beside_them() -> None:
    record = {
        "documents": ["The box stands in the cellar.", "It opens with a key."],
        "questions": {"question": ["Where does the box stand?"], "answer": ["the cellar"]},
    }
    for row in rows_at([record] * 3, place_of_rows([record] * 3)):
        assert "stands in the cellar" in said(row)[0]
    record["questions"] = {**record["questions"], "choice": [["the attic", "the cellar"]]}  # type: ignore[dict-item]
    assert place_of_rows([record] * 3) == ()


@pytest.mark.parametrize("label", [0, 1, "0", "1"])
def test_a_label_beside_a_question_and_one_of_its_answers_says_whether_that_is_right(label: Any) -> None:
    row = {"paragraph": "The box stands in the cellar.", "question": "Where is the box?", "answer": "In the attic."}
    found = read_example(RawRow("a:1", json.dumps({**row, "label": label}).encode()), {}).example
    assert found.success is bool(int(label))
    among = {**row, "label": label, "others": ["In the attic.", "In the cellar."]}
    assert read_example(RawRow("a:1", json.dumps(among).encode()), {}).example.success is None


def test_marks_of_questions_and_answers_in_turn_are_no_words() -> None:
    row = {"data": ["问：箱子在哪里？", "答：在地下室里。"]}
    assert said(row) == ("箱子在哪里？", "在地下室里。")


def test_the_end_of_a_text_behind_a_speaker_is_no_word() -> None:
    row = {"chat": "USER: Where is the box?\n\n\nASSISTANT: In the cellar. <|endoftext|>\n\n\n"}
    assert said(row) == ("Where is the box?", "In the cellar.")


def test_answers_of_which_a_label_says_the_right_one_are_choices(tmp_path: Path) -> None:
    rows = [{"context": f"Box {n}.", "question": "How?", "answers": CHOICES, "label": n % 3} for n in range(9)]
    assert [answer for _, answer in said_in(tmp_path, rows)] == list("ABC") * 3


def test_no_line_makes_one_of_two_compared_sentences_the_answer() -> None:
    row = {"sentence1": "How is a box opened?", "sentence2": "How does one open boxes?", "score": 3.5}
    assert lines_for([row] * 3) == []
