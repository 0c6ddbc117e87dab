"""What stands beside a question and its answer: given with the question, written about the answer, or asked about."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.rows.find.parcel_talk import columns_for

from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.read import RawRow, read_example

ASKED, ANSWERED = "Which town has the depot?", "The depot is in Bonn, on the left bank."
AS_PYTHON = [{"from": "user", "value": "It's where?"}, {"from": "gpt", "value": ANSWERED}]
PLACES = ["Bonn", "Aachen", "Köln"]


def said(row: dict[str, Any]) -> tuple[str, str]:
    asked, answered = read_conversation(row).messages
    return asked.content, answered.content


@pytest.mark.parametrize(
    ("beside", "added"),
    [
        ({"passages": ["The depot is old.", "It is in Bonn."]}, "The depot is old.\nIt is in Bonn."),
        ({"schema": "CREATE TABLE depots", "hint": "Look at towns."}, "CREATE TABLE depots\nLook at towns."),
        ({"options": PLACES}, "Bonn\nAachen\nKöln"),
        ({"choices": {"label": ["A", "B"], "text": PLACES[:2]}}, "A. Bonn\nB. Aachen"),
        ({"options": [{"key": "1", "value": "Bonn"}, {"key": "2", "value": "Aachen"}]}, "1. Bonn\n2. Aachen"),
    ],
)
def test_what_is_given_belongs_to_the_question(beside: dict[str, Any], added: str) -> None:
    assert said({"question": ASKED, **beside, "answer": ANSWERED}) == (f"{ASKED}\n{added}", ANSWERED)


@pytest.mark.parametrize(
    "beside", [{"gold_passages": ["town-guide"]}, {"context": "guides/towns.txt"}, {"options": ["A", "B"]}]
)
def test_what_is_only_named_is_not_written_into_the_question(beside: dict[str, Any]) -> None:
    assert said({"query": f"{ASKED} A or B?", **beside, "truth": ANSWERED}) == (f"{ASKED} A or B?", ANSWERED)


OTHER = "Not found, sorry to say."


@pytest.mark.parametrize(
    "row",
    [
        {"question": ASKED, "truth": ANSWERED, "answer": OTHER},
        {"user_input": ASKED, "retrieved_contexts": [OTHER], "response": OTHER, "reference": ANSWERED, "recall": 0.5},
        {"query": ASKED, "gt_answer": ANSWERED, "model1": {"response": OTHER, "critiques": "It did not look."}},
        {
            "query": ASKED,
            "queries": [ASKED, "Where are letters?"],
            "generation_gt": [ANSWERED],
            "retrieved_docs": [OTHER],
        },
        {"question": ASKED, "truth": ANSWERED, "answer": OTHER, "context": '{"7": {"name": "A depot in the town"}}'},
        {"problem": ASKED, "solution": ANSWERED, "answer": "Bonn"},
        {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ""}], "answer": ANSWERED},
        {"input_column": json.dumps([{"role": "user", "content": ASKED}]), "output_column": json.dumps([ANSWERED])},
        {
            "prompt": [{"role": "user", "content": ASKED}],
            "reward_model": {"ground_truth": "Bonn", "style": "rule"},
            "extra_info": {"answer": ANSWERED, "question": ASKED},
        },
        {"inputs": {"time": "9:00", "prompt": [ASKED]}, "output": ANSWERED},
        {"question": ASKED, "ground_truth_answer": ANSWERED, "model_answer": OTHER},
        {"question": ASKED, "code": ANSWERED, "test": ["assert town()"]},
        {"context": ASKED, "continuation": ANSWERED},
    ],
)
def test_the_true_answer_is_learned(row: dict[str, Any]) -> None:
    assert said(row) == (ASKED, ANSWERED)


def test_ways_to_say_one_answer_and_other_lists() -> None:
    found = read_conversation({"question": ASKED, "answer": ["14 December 1972", "December 1972"]})
    assert (found.messages[-1].content, found.changed) == ("14 December 1972", ("other-answers",))
    for several in (["Bobby Scott", "Bob Russell"], ["One line of a longer text,", "and another one."]):
        with pytest.raises(RowRefused):
            read_conversation({"question": ASKED, "answer": several})


def test_an_answer_that_is_an_object_is_json() -> None:
    found = read_conversation({"instruction": ASKED, "output": {"town": "Köln", "since": 1900}})
    assert (found.messages[-1].content, found.changed) == ('{"town": "Köln", "since": 1900}', ("json-answer",))


def test_a_number_is_an_answer_by_its_name_alone() -> None:
    assert said({"Body": "Seven apples are red.", "Question": "How many?", "Answer": 7.0})[1] == "7.0"
    with pytest.raises(RowRefused):
        read_conversation({"input_text": ASKED, "code": "def town(): ...", "target": -9.5})  # or the program


def test_the_short_form_of_a_text() -> None:
    row = {"id": 1, "dialogue": "Ann: Where do parcels go now?\nBob: To the depot.", "summary": "Ann asks Bob."}
    assert said(row) == (row["dialogue"], "Ann asks Bob.")
    with pytest.raises(RowRefused):
        read_conversation({**row, "skills": ["law"]})


def test_objects_as_a_program_shows_them_are_no_text() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"questions": ASKED, "documents": "[Document(id=1, content='x y')]", "truth": ANSWERED})


def test_a_body_stands_before_its_question() -> None:
    row = {"body": "Seven apples are in the basket.", "question": "How many are red?", "answer": "9 (apples)"}
    assert said(row) == ("Seven apples are in the basket.\nHow many are red?", "9 (apples)")


def test_choices_in_columns_of_their_own() -> None:
    row = {"question": ASKED, "A": "Bonn", "B": "Aachen", "C": "", "answer": "A"}
    assert said(row) == (f"{ASKED}\nA. Bonn\nB. Aachen", "A")
    assert said({"question": ASKED, "option_a": "Bonn", "option_b": "Aachen", "answer": "A"}) == said(row)


def test_choices_get_the_letters_that_the_answer_means() -> None:
    assert said({"question": ASKED, "options": PLACES, "answer": "A"})[0].endswith("A. Bonn\nB. Aachen\nC. Köln")
    assert said({"question": ASKED, "options": [f"A) {PLACES[0]}"], "answer": "A"})[0].endswith("\nA) Bonn")
    with pytest.raises(RowRefused):
        read_conversation({"question": ASKED, "options": PLACES, "answer": 1})  # the first or the second


@pytest.mark.parametrize(
    "row",
    [
        {"question": ASKED, "rationale": "Bonn has one, since 1900.", "answer": ANSWERED},
        {"question": ASKED, "answer": ANSWERED, "test_cases": ["assert town() == 'Bonn'"]},
        {"question": ASKED, "answer": ANSWERED, "how_it_was_made": "by three people in one room"},
    ],
)
def test_what_was_written_about_the_answer_is_left_out_and_counted(row: dict[str, Any]) -> None:
    found = read_conversation(row)
    assert [m.content for m in found.messages] == [ASKED, ANSWERED]
    assert "left-out-columns" in found.changed


@pytest.mark.parametrize(
    "row",
    [
        {"how_it_is_now": "The town hall was moved to Bonn.", "question": ASKED, "answer": ANSWERED},  # in front of it
        {"answer": ANSWERED, "how_it_is_now": "It was moved in May.", "question": ASKED},  # sorted by name
        {"question": ASKED, "answer": ANSWERED, "wikipage": f"Since 1900 {ANSWERED.lower()}"},  # where it comes from
        {"question": ASKED, "answer": "Bonn", "wikipage": "It has been in a town on the Rhine."},
        {"question": ASKED, "answer": ANSWERED, "actions": ["look", "open the map"]},
        {"question": ASKED, "answer": ANSWERED, "knowledge": {"a": {"b": "The depot was moved to the left bank."}}},
    ],
)
def test_other_texts_are_asked_about(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused):
        read_conversation(row)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"title_of_it": ASKED, "response": ANSWERED}, ASKED),
        ({"context": "I have been sad since May.", "response": ANSWERED}, "I have been sad since May."),
        ({"definition": ["Name the town."], "input": "The depot", "output": [ANSWERED]}, "Name the town.\nThe depot"),
        ({"conversations": str(AS_PYTHON)}, "It's where?"),
    ],
)
def test_the_question_by_its_place_and_look(row: dict[str, Any], asked: str) -> None:
    assert said(row) == (asked, ANSWERED)


def test_a_query_answers_its_question() -> None:
    assert said({"question": ASKED, "query": "SELECT town FROM depots", "db": "post"})[1] == "SELECT town FROM depots"


def test_the_class_of_a_text_is_no_answer() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"question": ASKED, "intent": "a question about places", "intent_id": 3})


@pytest.mark.parametrize(
    "row",
    [
        {"question": ASKED, "reference": ANSWERED, "base_pred": "It is in a town.", "rouge": 0.2},
        {"instruction": ASKED, "final": ANSWERED},
        {"legal_question": ASKED, "answer": ANSWERED},
        {"topic": "post", "faq_question": ASKED, "faq_answer": ANSWERED, "url": "https://example.org/7"},
        {"inst": ASKED, "resp": ANSWERED},
        {"questions": ASKED, "true_answers": ANSWERED, "predicted_answers": "It is in a town."},
        {"pregunta": ASKED, "respuesta_esperada": ANSWERED, "respuesta_modelo": "It is in a town."},
        {"question": ASKED, "thinking_trace": "Depots stand in towns.", "answer": ANSWERED},
        {"question": ASKED, "expected_answer": ANSWERED, "facts_missing": ["the name of the street"]},
    ],
)
def test_the_answer_that_is_said_to_be_right_under_more_names(row: dict[str, Any]) -> None:
    assert said(row) == (ASKED, ANSWERED)


def test_names_of_different_things_are_no_pair() -> None:
    """As many words say question and answer, and each of them of something else."""
    for row in (
        {"legal_question": ASKED, "medical_answer": ANSWERED, "topic": "post"},
        {
            "faq_question": ASKED,
            "faq_answer": ANSWERED,
            "tax_question": f"{ASKED} Now?",
            "tax_answer": f"{ANSWERED} Yes.",
        },
    ):
        with pytest.raises(RowRefused):
            read_conversation(row)


def test_a_verdict_is_about_the_answer_that_was_judged() -> None:
    row = {"question": ASKED, "expected_answer": ANSWERED, "model_answer": "It is in a town.", "passed": False}
    assert read_example(RawRow("a:1", json.dumps(row).encode()), {}).example.success is None


@pytest.mark.parametrize(
    ("answer", "learned"),
    [
        ({"town": "Bonn", "abstract": "A depot.", "authors": [{"name": "A", "role": "user"}]}, None),
        ([{"path": "/depots", "params": [{"name": "town"}]}], '{"path": "/depots", "params": [{"name": "town"}]}'),
        ({"type": "depot", "town": "Bonn"}, None),
        ([3, 5], None),
        (True, None),
    ],
)
def test_an_answer_that_is_an_object_is_learned_as_json(answer: Any, learned: str | None) -> None:
    found = read_conversation({"input_text": ASKED, "correct_answer": answer, "level": "easy"})
    assert (found.messages[0].content, found.messages[-1].content) == (ASKED, learned or json.dumps(answer))
    assert "json-answer" in found.changed


def test_an_object_under_query_answers_the_question_beside_it() -> None:
    asked, answered = said({"question": ASKED, "query": [{"method": "GET", "url": "/depots"}]})
    assert (asked, json.loads(answered)) == (ASKED, {"method": "GET", "url": "/depots"})


def test_a_context_that_is_an_object_belongs_to_the_question() -> None:
    row = {"instruction": ASKED, "context": {"town": 'The "old" one', "since": 1900}, "response": ANSWERED}
    assert said(row) == (f'{ASKED}\ntown: The "old" one\nsince: 1900', ANSWERED)


def test_an_answer_that_is_json_text_is_found_as_it_is() -> None:
    answer = '{"name": "The \\"old\\" depot of the town"}'
    assert said({"input": ASKED, "output": answer}) == (ASKED, answer)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"option_0": PLACES[0], "option_1": PLACES[1], "label": 1}, (f"0. {PLACES[0]}\n1. {PLACES[1]}", "1")),
        ({"option1": "Bonn", "option2": "Aachen", "answer": "2"}, ("1. Bonn\n2. Aachen", "2")),
        ({"choice1": "Bonn", "choice2": "Aachen", "answer": "B"}, ("A. Bonn\nB. Aachen", "B")),
    ],
)
def test_choices_in_columns_with_numbers(row: dict[str, Any], expected: tuple[str, str]) -> None:
    assert said({"question": ASKED, **row}) == (f"{ASKED}\n{expected[0]}", expected[1])


@pytest.mark.parametrize("first", [0, 1])
def test_the_number_of_a_choice_counts_as_the_file_shows(tmp_path: Path, first: int) -> None:
    rows = [{"question": f"{ASKED} {n}", "choices": ["2", "4", "Bonn"], "answer": n % 3 + first} for n in range(6)]
    texts = {"rows.jsonl": "\n".join(map(json.dumps, rows)), "rows.json": json.dumps({"data": rows})}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found = [example_of(raw).messages for raw in rows_of_files(str(tmp_path / name))]
        assert [m[1].content for m in found] == list("ABCABC")
        assert found[2][0].content == f"{ASKED} 2\nA. 2\nB. 4\nC. Bonn"
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({**row, "answer": 1}) for row in rows))
    with pytest.raises(RowRefused):
        example_of(next(iter(rows_of_files(str(tmp_path / "few.jsonl")))))


@pytest.mark.parametrize("answer", ["B", "42", "It is in Bonn."])
def test_a_solution_is_learned_whether_or_not_it_names_its_result(answer: str) -> None:
    solution = "The depot lies on the left bank of the river, and so does Bonn."
    found = read_conversation({"problem": ASKED, "solution": solution, "answer": answer})
    assert (found.messages[-1].content, found.changed) == (solution, ("other-answers",))


def test_one_answer_for_each_of_several_questions_is_none_of_one() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"question": ASKED, "answers": [{"input_text": "Bonn", "turn_id": n} for n in (1, 2)]})


def test_a_text_with_its_answer_is_a_question() -> None:
    texts = ("Say where the depot is.", "Where is it?")
    rows = [{"question_id": 1, "text": text, "answer": answer} for text in texts for answer in (ANSWERED, "Bonn")]
    assert [said(row) for row in rows] == [(row["text"], row["answer"]) for row in rows]


def test_what_stands_behind_the_answer_of_a_test_is_about_it() -> None:
    row = {"question": ASKED, "expected_answer": "2", "weak_point_of_it": "Systems that search don't count the towns."}
    assert said(row) == (ASKED, "2")


def test_what_else_a_test_looks_for_is_left_out() -> None:
    found = read_conversation({"query": ASKED, "golden_answer": ANSWERED, "expected_tools": ["search_the_map"]})
    assert (found.messages[-1].content, found.changed) == (ANSWERED, ("left-out-columns",))


def test_a_label_beside_choices_from_one_may_count_from_zero() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"question": ASKED, "choice1": "Bonn", "choice2": "Aachen", "label": 1})


def test_the_best_of_the_correct_answers_and_titled_passages() -> None:
    row = {"Question": ASKED, "Best Answer": ANSWERED, "Correct Answers": f"{ANSWERED}; in a town by the river"}
    assert said(row) == (ASKED, ANSWERED)
    titled = {"question": ASKED, "context": [["Bonn", ["It is a town. ", " It has a depot."]]], "answer": "Bonn"}
    assert said(titled) == (f"{ASKED}\nBonn\nIt is a town. It has a depot.", "Bonn")


def test_lists_of_questions_and_answers_are_rows(tmp_path: Path) -> None:
    asked, choices = [f"{ASKED} {n}" for n in range(3)], [["Bonn", "Aachen"]] * 3
    row = {"article": ANSWERED, "questions": asked, "options": choices, "answers": ["A", "B", "A"], "id": "a.txt"}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
    found = [example_of(raw).messages for raw in rows_of_files(str(tmp_path / "a.json"))]
    assert [m[1].content for m in found] == ["A", "B", "A"]
    assert found[1][0].content == f"{ASKED} 1\n{ANSWERED}\nA. Bonn\nB. Aachen"


SCORES = {"In the north": 0, "By the river": 1, "Nowhere": 0}
TASK = {"canary": "Not for training at all.", "keywords": ["towns"], "task_prefix": "Say where each town lies."}


@pytest.mark.parametrize(
    ("told", "choices"), [({}, "\n" + "\n".join(SCORES)), ({"append_choices_to_input": False}, "")]
)
def test_a_task_whose_choices_have_scores(tmp_path: Path, told: dict[str, Any], choices: str) -> None:
    examples = [{"input": f"{ASKED} {n}", "target_scores": SCORES} for n in range(3)]
    (tmp_path / "task.json").write_text(json.dumps({**TASK, **told, "examples": examples}, indent=1))
    found = [example_of(raw).messages for raw in rows_of_files(str(tmp_path / "task.json"))]
    assert [m[1].content for m in found] == ["By the river"] * 3
    assert found[1][0].content == f"{TASK['task_prefix']}\n{ASKED} 1{choices}"


def test_two_choices_that_are_as_good_are_no_answer() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"input": ASKED, "target_scores": {"Bonn": 1, "Aachen": 1}})


def test_choices_that_are_called_answers() -> None:
    row = {"question": ASKED, "answer_a": "Bonn", "answer_b": "Aachen", "answer_c": "Trier", "correct_answer": "B"}
    assert said(row) == (f"{ASKED}\nA. Bonn\nB. Aachen\nC. Trier", "B")


def test_two_answers_with_a_winner_are_no_choices() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"question": ASKED, "answer_a": ANSWERED, "answer_b": "Nobody knows it.", "winner": "A"})


def test_a_statement_with_its_proof() -> None:
    row = {"informal_prefix": "/-- Two is even. -/", "formal_statement": "theorem t : Even 2 := by", "split": "test"}
    asked = "/-- Two is even. -/\ntheorem t : Even 2 := by"
    assert said({**row, "formal_proof": "  decide"}) == (asked, "  decide")
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_a_good_and_a_bad_answer_are_a_preference() -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation({"instruction": ASKED, "good_res": ANSWERED, "bad_res": "No."})
    assert refused.value.reason == "preference-row"
    assert refused.value.hint.endswith("--columns prompt=instruction,completion=good_res")


def test_the_prompt_that_was_used() -> None:
    assert said({"features": {"a": 1.5}, "prompt_used": ASKED, "llm_response": ANSWERED}) == (ASKED, ANSWERED)


def test_the_line_for_results_of_a_test_learns_the_answer_and_not_what_the_model_said() -> None:
    row = {"question": ASKED, "answer": ANSWERED, "completion": "It lies somewhere in the north.", "acc": False}
    assert columns_for(row) == {"prompt": "question", "completion": "answer"}


def test_a_dialogue_system_answers_its_user() -> None:
    turns = [{"step": n, "user": f"{ASKED} {n}", "system": f"{ANSWERED} {n}"} for n in range(3)]
    found = read_conversation({"dialog_id": "7", "dialog": turns}).messages
    assert [m.role for m in found] == ["user", "assistant"] * 3
    assert found[3].content == f"{ANSWERED} 1"


@pytest.mark.parametrize("judged", [lambda row: row, lambda row: {"input": row, "expected": 0.6}])
def test_what_a_system_said_where_something_else_was_expected_is_not_learned(judged: Any) -> None:
    row = judged({"input": ASKED, "output": "in the north Bonn maybe", "expected": "Bonn"})
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_what_a_system_said_as_it_was_expected_is_learned() -> None:
    assert said({"input": ASKED, "output": "Bonn", "expected": "Bonn"}) == (ASKED, "Bonn")


def test_the_line_for_such_a_row_learns_what_was_expected() -> None:
    row = {"input": ASKED, "output": "Somewhere in the north of it.", "expected": ANSWERED}
    assert columns_for(row) == {"prompt": "input", "completion": "expected"}
