"""Where no name tells what is asked and what is answered, a person is asked with a line to paste."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.rows.find.asking.advice import advised, as_option, lines_for

PLACES = ("cellar", "attic", "kitchen", "garden", "hall", "yard")
KINDS = ("water", "light", "door")


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Rows with these columns: `{}` in a text is a place, and of a list each row has the next item."""

    def value(one: Any, n: int) -> Any:
        if isinstance(one, str):
            return one.format(PLACES[n])
        return one[n % len(one)] if isinstance(one, tuple) else one

    return [{name: value(one, n) for name, one in columns.items()} for n in range(len(PLACES))]


def lines(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = lines_for(rows)
    assert all(line.guessed and line.read == len(rows) for line in found)
    return [(line.columns["prompt"], line.columns["completion"]) for line in found]


NOTED = "Somebody wrote that the {} is dark and wet."
MADE = "Send a fitter to the {} before noon."
IDS = tuple(range(9))


@pytest.mark.parametrize(
    ("columns", "first"),
    [
        ({"shop_description": NOTED, "possible_names": (["a.example"], ["b.example", "c"])}, "possible_names.as_json"),
        ({"id": IDS, "rank": ("low", "mid"), "formula": "{} = SUM ( a b )", "explanation": MADE}, "explanation"),
        (
            {"note_text": NOTED, "is_urgent": (True, False), "found": ([{"kind": "water"}], []), "fitter_type": KINDS},
            "is_urgent+found+fitter_type",
        ),
        ({"said_text": NOTED, "shade": KINDS, "sleeve": ("long", "short")}, "shade+sleeve"),
        ({"said_text": NOTED, "sort": KINDS, "id": IDS, "made_at": "2026-01-01"}, "sort"),
        (
            {"id": IDS, "note": NOTED, "fitter_kind": ("pipe_fitter", "lamp_fitter", "none", "a_b", "c_d", "e_f")},
            "fitter_kind",
        ),
        ({"title": "The {} lamp", "parts": "A pipe of the {} and a lamp", "steps_told": MADE}, "steps_told"),
        (
            {"told": NOTED, "risk_level": ("high", "low"), "level": ("a", "b"), "duties": (["pay"], ["keep"])},
            "risk_level+duties",
        ),
        ({"dish": "A soup of {}", "parts": (["salt"], ["oil", "pea"]), "steps": MADE}, "steps"),
        ({"heading": "How is the {} mended?", "told": MADE}, "told"),
        ({"scene": ("a", "b"), "user": NOTED, "formula": MADE}, "formula"),
        ({"title": "{} lamp", "maker": KINDS, "advert": MADE}, "advert"),
        ({"id": IDS, "Prompt": "Write a story about the {} of a house.", "Story": MADE}, "Story"),
    ],
)
def test_the_answer_is_what_stands_behind_the_text(columns: dict[str, Any], first: str) -> None:
    found = lines(rows_of(**columns))
    assert found[0][1] == first


def test_all_texts_are_the_question_where_several_classes_stand_behind_them() -> None:
    rows = rows_of(ticket_id=IDS, subject="The {} is dark", told=NOTED, urgency=("high", "low"), team=KINDS)
    assert lines(rows)[0] == ("subject+told", "urgency+team")


def test_of_two_texts_either_may_be_the_answer() -> None:
    assert lines(rows_of(noted=NOTED, formula=MADE, shade=1)) == [("noted", "formula"), ("formula", "noted")]
    some = lines(rows_of(age=IDS, sex=("f", "m"), told=NOTED, formula=MADE))
    assert some[:2] == [("told", "formula"), ("age+sex+told", "formula")]
    three = lines(rows_of(noted=NOTED, cause="The {} lies below the street.", made=MADE))
    assert three == [("noted+cause", "made"), ("noted", "made")]


def test_a_context_that_stands_behind_is_given() -> None:
    rows = rows_of(
        toy_word=("damp", "dusk", "dew", "rain", "hail", "snow"),
        meaning=NOTED,
        toy_use=MADE,
        context="Of the {} and the rain.",
    )
    assert lines(rows) == [("context", "toy_word+meaning+toy_use")]


def test_a_code_is_explained_by_the_text_behind_it() -> None:
    codes = ("A000", "A001", "A002", "B100", "B101", "B102")
    rows = rows_of(code=codes, short_words=NOTED, long_words=NOTED, left_out="")
    assert lines(rows) == [("code", "long_words")]
    assert lines(rows_of(shelf=codes, short_words=NOTED, long_words=NOTED, left_out="")) == []


def test_nobody_begins_with_an_explanation() -> None:
    rows = rows_of(
        explanation=NOTED, steps=(["a b c"], ["d e f"]), result_said=("one a", "two b", "six c", "d", "e", "f")
    )
    assert lines(rows) == []


def test_a_question_is_answered_by_what_is_asked_for() -> None:
    rows = rows_of(prompt=NOTED, tool=KINDS, args=({"room": "a"}, {"room": "b"}), is_refusal=(True, False), id=IDS)
    assert lines(rows) == [("prompt", "tool+args")]
    assert lines(rows_of(question=NOTED, topic=KINDS, requires_care=(True, False))) == []


def test_an_object_that_was_given_and_one_that_was_made_of_it() -> None:
    given = ({"room": "cellar", "text": "It is wet here."}, {"room": "attic", "text": "It is dark there."})
    rows = rows_of(input=given, output=({"fitter": "a", "cause": "a broken pipe"}, {"fitter": "b", "cause": "no lamp"}))
    assert lines(rows) == [("input.as_json", "output.as_json")]


@pytest.mark.parametrize(
    "columns",
    [
        {"timestamp": "2026-01-01T00:00:00", "level": ("info", "warn"), "message": NOTED},
        {"text": NOTED, "embedding": ([0.1, 0.2], [0.3, 0.4])},
        {"place": "the old {} there", "lat": (1.5, 2.5), "lon": (3.5, 4.5)},
        {"said_text": NOTED, "score": IDS, "class_of": KINDS},
        {"prompt_text": NOTED, "raw_output": MADE, "reward": (0.5, 1.0)},
        {"prompt": NOTED, "risk": KINDS, "expected_markers": (["a"], ["b", "c"], ["d"])},
        {"ip": "10.0.0.{}", "method": ("get", "post"), "path": "/a", "user_agent": NOTED},
        {"search": NOTED, "found": MADE, "relevance": IDS},
        {"query": NOTED, "pos": (["a b c"], ["d e f"]), "neg": (["g h i"], ["k l m"])},
        {"image_path": "{}.png", "caption_text": NOTED},
        {"said_text": NOTED, "link": "https://a.example/{}", "id": IDS},
        {"said_text": NOTED, "year": IDS, "pages_read": (4, 5, 6)},
        {"sentence1": NOTED, "sentence2": MADE, "similarity_of": ("high", "low")},
        {"module": KINDS, "name": "{} lamp", "text": NOTED},
        {"title": "All about the {} of it", "content": NOTED},
        {"description": NOTED, "parameters": ({"properties": {"a": 1}}, {"properties": {"b": 1}})},
        {"goal": NOTED, "sol1": MADE, "sol2": "Leave the {} as it is."},
    ],
)
def test_no_line_where_nobody_would_train(columns: dict[str, Any]) -> None:
    assert lines(rows_of(**columns)) == []


def test_a_line_that_cannot_be_pasted_is_none() -> None:
    assert lines(rows_of(**{"noted, told": NOTED, "formula": MADE, "shade": KINDS})) == [("formula", "shade")]
    [line, *_] = lines_for(rows_of(**{"noted down": NOTED, "formula": MADE, "shade": 1}))
    assert as_option(line.columns) == "--columns 'prompt=noted down,completion=formula'"


def test_a_refusal_that_names_a_line_keeps_it() -> None:
    rows = rows_of(instruction=NOTED, output=(["A fitter", "A lamp of it"], ["Some other fitter", "It is wet"]))
    assert not any(line.guessed for line in lines_for(rows))


def test_a_line_keeps_what_is_said_to_the_model() -> None:
    rows = rows_of(system_prompt="You mend houses.", noted=NOTED, formula=MADE, shade=1)
    assert lines_for(rows)[0].columns == {"prompt": "noted", "completion": "formula", "system": "system_prompt"}


def test_settings_that_name_columns_are_no_row() -> None:
    assert lines_for([{"set": {"file": "a.json", "columns": {"prompt": "query", "response": "reply"}}}]) == []


def test_texts_alone_may_be_learned_whole() -> None:
    [line] = lines_for(rows_of(id=IDS, toy_text=NOTED))
    assert advised(line) == "if each text is to be learned whole: --columns text=toy_text"
    assert lines_for(rows_of(id=IDS, message=NOTED)) == [], "half of something"


def test_one_document_of_settings_is_no_table() -> None:
    assert lines_for(rows_of(noted=NOTED, formula=MADE, shade=KINDS)[:2]) == []


def test_the_refusal_says_that_it_is_a_guess(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = rows_of(note_text=NOTED, shade=KINDS, sleeve=("long", "short"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check(DataConfig(path=str(path))).document
    [[line]] = report["unclear"].values()
    assert line["line"] == "--columns prompt=note_text,completion=shade+sleeve"
    assert line["said"] == f"if the answer is shade and sleeve: {line['line']}"
    assert (line["question"], line["answer"]) == (rows[0]["note_text"], '{"shade": "water", "sleeve": "long"}')
    assert all(each["hint"].endswith(line["said"]) for each in report["problems"])
    columns = {"prompt": "note_text", "completion": "shade+sleeve"}
    assert check(DataConfig(path=str(path), columns=columns)).document["usable"] == len(PLACES)
