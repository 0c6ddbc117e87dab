"""Training files of small projects, as a shop, a clinic or a database keeps what it was asked. All words made up."""

import json
from typing import Any

import pytest

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.nest import OWN_TEXT, place_name, place_of_rows, split_record
from hivetune.data.rows.layouts.mapped import map_columns

CASE = "A man of fifty came to the clinic with pain in his knee after a fall from a ladder. " * 3
CALL = """<functioncall> {"name": "get_rate", "arguments": '{"kg": 3}'} <|endoftext|>"""
ROUNDS = [
    f"USER: What does a parcel of three kilos cost?\n\n\nASSISTANT: {CALL}",
    'FUNCTION RESPONSE: {"rate": 4.5}\n\n\nASSISTANT: It costs 4.50 euros. <|endoftext|>',
    "USER: Thank you!\n\n\nASSISTANT: You are welcome. <|endoftext|>",
]


def said(row: dict[str, Any]) -> list[str]:
    return [message.content for message in read_conversation(row).messages]


def test_a_list_of_one_object_is_learned_as_a_list() -> None:
    row = {"instruction": "fetch the red box", "targets": [{"shape": "box", "color": "red"}]}
    assert said(row)[-1] == '[{"shape": "box", "color": "red"}]'
    row = {"instruction": "fetch the red box", "output": {"shape": "box", "color": "red"}}
    assert said(row)[-1] == '{"shape": "box", "color": "red"}'


@pytest.mark.parametrize("mark", ["<|vision_start|>parcels/3.png<|vision_end|>", "<|image_1|>"])
def test_marks_of_a_picture_stand_for_what_is_no_text(mark: str) -> None:
    turns = [{"role": "user", "content": f"{mark} What is this?"}, {"role": "assistant", "content": "A parcel."}]
    with pytest.raises(RowRefused, match="unsupported-content"):
        read_conversation({"messages": turns})


def test_thoughts_beside_a_text_that_a_template_wrote_without_them() -> None:
    row = {"instruction": "Add the numbers.", "input": "3 and 4", "output": "They make seven."}
    text = "Below is a task.### Instruction: Add the numbers.\n### Input: 3 and 4\n### Response: They make seven."
    found = read_conversation({**row, "think": "Three and four are seven, that is plain.", "text": text}).messages
    assert (found[-1].content, found[-1].reasoning) == (
        "They make seven.",
        "Three and four are seven, that is plain.",
    )


@pytest.mark.parametrize("found", [[["Köln"], ["a town in the north"]], '[["Köln"]]', []])
def test_what_a_query_found_is_no_answer_to_the_question(found: Any) -> None:
    row = {"Question": "Which towns are there?", "Query": "SELECT town FROM towns;", "Result": found, "Error": None}
    assert said(row) == [row["Question"], row["Query"]]


def test_what_an_agent_found_before_its_answer_is_still_missed() -> None:
    row = {"question": "Which towns are there?", "answer": "There are two towns.", "results": [["a town in the north"]]}
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_a_number_is_no_answer_to_a_talk() -> None:
    talk = "user: The lamp is dark.\\nassistant: Since when is it dark?\\nuser: Since noon."
    for text in (talk, "User: The lamp is dark."):
        with pytest.raises(RowRefused):
            read_conversation({"text": text, "label": 1})
    assert said({"text": talk, "label": "complaint"})[-1] == "complaint"


def test_the_line_for_a_preference_whose_answers_are_lists_of_one_turn() -> None:
    asked = [{"role": "user", "content": "Where is the lamp?"}]
    better, worse = ([{"role": "assistant", "content": text}] for text in ("In the hall.", "I will not say."))
    with pytest.raises(RowRefused) as refused:
        read_conversation({"prompt": asked, "chosen": better, "rejected": worse})
    assert refused.value.hint.endswith("--columns messages=prompt,completion=chosen")


WHOLE = [{"role": "user", "content": "Where is the lamp?"}, {"role": "assistant", "content": "In the hall."}]


@pytest.mark.parametrize("better", [WHOLE, "\n\nHuman: Where is the lamp?\n\nAssistant: In the hall."])
def test_the_line_for_a_preference_whose_answers_hold_their_question(better: Any) -> None:
    row = {"prompt": "Where is the lamp?", "chosen": better, "rejected": "I will not say."}
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.hint.endswith("--columns messages=chosen")
    read = read_conversation(dict(map_columns(row, {"messages": "chosen"})), mapped=True).messages
    assert [(one.role, one.content) for one in read] == [(one["role"], one["content"]) for one in WHOLE]


def cases(text: str) -> list[dict[str, Any]]:
    asked = [{"question": "What does this man have?", "answer": "A sprained knee."}]
    asked.append({"question": "What should he do?", "answer": "He should rest for a week."})
    return [{"id": n, "title": f"Case {n}", "description": f"{n}. {text}", "qa_pairs": asked} for n in range(3)]


def test_a_case_that_each_record_tells_is_given_with_each_question() -> None:
    records = cases(CASE)
    place = place_of_rows(records)
    assert (place[0], place_name(place)) == (OWN_TEXT, "qa_pairs[]")
    rows = [row for record in records for row in split_record(record, place)]
    assert said(rows[2])[0] == f"What does this man have?\n{records[1]['description']}"
    assert said(rows[3])[-1] == "He should rest for a week."


def test_notes_of_a_reader_are_not_given() -> None:
    records = [{**record, "notes": record["description"], "description": "Knees."} for record in cases(CASE)]
    rows = [row for record in records for row in split_record(record, place_of_rows(records))]
    assert said(rows[0])[0] == "What does this man have?"


def test_a_description_of_a_kind_of_questions_is_not_given_with_them() -> None:
    records = cases("Questions about knees.")
    rows = [row for record in records for row in split_record(record, place_of_rows(records))]
    assert said(rows[0])[0] == "What does this man have?"
    rows = split_record(records[0] | {"description": CASE}, place_of_rows([records[0] | {"description": CASE}]))
    assert said(rows[0])[0] == "What does this man have?"


@pytest.mark.parametrize("between", ["\n\n\n", " "])
def test_rounds_with_calls_of_functions(between: str) -> None:
    system = "SYSTEM: You may call this function:\n" + json.dumps({"name": "get_rate", "description": "What it costs"})
    messages = read_conversation({"system": system, "chat": between.join(ROUNDS)}).messages
    assert [one.role for one in messages] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert messages[0].content.startswith("You may call")
    assert messages[2].tool_calls[0]["function"] == {"name": "get_rate", "arguments": {"kg": 3}}
    assert (messages[3].content, messages[4].content) == ('{"rate": 4.5}', "It costs 4.50 euros.")


@pytest.mark.parametrize("rounds", [[CALL], [*ROUNDS[:2], "It costs more today. <|endoftext|>"]])
def test_rounds_of_which_one_has_no_speaker_are_refused(rounds: list[str]) -> None:
    with pytest.raises(RowRefused):
        read_conversation({"system": "You are a clerk.", "chat": "\n\n\n".join(rounds)})


def test_a_call_that_is_no_json_is_refused() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"system": "You are a clerk.", "chat": " ".join(ROUNDS).replace('{"kg": 3}', "{kg: 3}")})


def test_two_answers_to_choose_from_are_no_two_turns() -> None:
    """Joined to one, the worse would be learned with the better."""
    turns = [
        {"from": "human", "value": "What is a comet made of?"},
        {"from": "chosen_gpt", "value": "Ice, dust and some rock."},
        {"from": "rejected_gpt", "value": "Cheese."},
    ]
    with pytest.raises(RowRefused, match="preference-row") as refused:
        read_conversation({"conversations": turns})
    assert refused.value.hint == "a turn of 'chosen_gpt': put the two answers in columns chosen and rejected"
