"""Rows of two texts of which one is made of the other, by their names; and pieces of a question that are no answers."""

import json
from typing import Any

import pytest

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.asking.advice import lines_for
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.read import RawRow, read_example

TEXT, SHORT = "The Seine flows through the middle of the city of Paris.", "A river in a city."


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row).messages]


@pytest.mark.parametrize(
    "row",
    [
        {"context": TEXT, "target": SHORT},
        {"Content": TEXT, "Summary": SHORT},
        {"summary": SHORT, "text": TEXT, "id": "ab12"},
        {"fname": "train_664", "dialogue": TEXT, "summary": SHORT, "topic": "rivers"},
        {"examples": TEXT, "ground_truth": SHORT},
        {"article": TEXT, "highlights": SHORT, "id": 7, "published": "2024-01-05"},
        {"document": TEXT, "summary": SHORT, "url": "https://example.org/a"},
        {"title": "Rivers of France in short", "paper": TEXT, "abstract": SHORT},
        {"source": TEXT, "target": SHORT, "target_lang": "de"},
        {"source_text": TEXT, "target_text": SHORT},
        {"text": TEXT, "label": 1, "label_text": SHORT},
        {"text": TEXT, "completion": SHORT},
        {"headlines": SHORT, "text": TEXT},
        {"translation": {"en": TEXT, "ro": SHORT}, "id": 4},
        {"": "1", "English": TEXT, "Hindi": SHORT},
        {"en_sentence": TEXT, "zh_cn": SHORT, "source": "web"},
        {"#src": TEXT, "target": SHORT},
        {"src": TEXT, "tgt": SHORT},
        {"source": TEXT, "target": SHORT},
        {"model_type": "big", "context": TEXT, "ref_text": SHORT, "sample": "It flows through a city, says a model."},
    ],
)
def test_two_texts_of_which_one_is_made_of_the_other(row: dict[str, Any]) -> None:
    assert said(row) == [("user", TEXT), ("assistant", SHORT)]
    if row.keys() == {"source", "target"}:
        return  # one word may be a node of a graph
    short = json.loads(json.dumps(row).replace(json.dumps(SHORT), '"rivers"'))
    assert said(short)[-1] == ("assistant", "rivers"), "the names decide, and not what one row says"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"text": TEXT, "label": "positive"}, "positive"),
        ({"label": "1", "review": TEXT}, "1"),
        ({"": "17", "text": TEXT, "label": "none of these", "Unnamed: 0": "17"}, "none of these"),
        ({"text": TEXT, "target": "positive"}, "positive"),
        ({"text": TEXT, "label": 0, "label_name": "a river", "idx": 3}, "a river"),
        ({"text": TEXT, "label": 1}, "1"),
        ({"query": "fares to Paris", "intent": "fare"}, "fare"),
        ({"Tweet": "so sad", "Sentiment Label": "negative", "date": "2024-01-05"}, "negative"),
        ({"Category": "ham", "Message": TEXT}, "ham"),
        ({"statement": TEXT, "label": "false", "speaker_id": 3}, "false"),
        ({"text": TEXT, "label": "a", "text_clean": "seine flows middle city"}, "a"),
        ({"text": TEXT, "label": "city"}, "city"),  # any text may hold the word of its class
    ],
)
def test_a_text_and_its_class(row: dict[str, Any], answer: str) -> None:
    asked = next(value for value in row.values() if value in (TEXT, "fares to Paris", "so sad"))
    assert said(row) == [("user", asked), ("assistant", answer)]


def test_the_class_of_two_sentences() -> None:
    row = {"sentence1": TEXT, "sentence2": SHORT, "label": "1", "id": 4}
    assert said(row) == [("user", f"{TEXT}\n{SHORT}"), ("assistant", "1")]


def test_a_class_that_is_false_is_no_verdict_on_its_answer() -> None:
    read = read_example(RawRow("f:2", json.dumps({"text": TEXT, "label": "false"}).encode()), {})
    assert (read.example.success, read.example.lesson) == (None, "sft")
    failed = {"prompt": TEXT, "completion": SHORT, "label": "false"}
    assert read_example(RawRow("f:2", json.dumps(failed).encode()), {}).example.success is False


@pytest.mark.parametrize(
    "row",
    [
        {"text": TEXT, "sentiment": "positive", "emotion": "joy"},  # which of them?
        {"text": TEXT, "aspect": "width", "label": "positive"},  # the class of both
        {"text": TEXT, "aspect": "", "label": "positive"},  # the names decide
        {"text": TEXT, "entities": ["Seine"], "label": "river"},
        {"text": TEXT, "start": 4, "end": 9, "label": "river"},  # of a part of the text
        {"content": TEXT, "category": "rivers"},  # a document with its topic
        {"prompt": TEXT, "category": "rivers"},  # a question without its answer
        {"question_id": 4, "text": TEXT, "label": "good"},
        {"translation": {"en": TEXT, "ro": SHORT, "de": SHORT}},
        {"en": TEXT, "ro": SHORT, "de": SHORT},
        {"en": TEXT, "fr": SHORT, "label": "1"},
        {"de": TEXT, "notes": SHORT},
        {"source": "Paris", "target": "Seine"},  # of a graph
        {"source": TEXT, "target": SHORT, "comment": "translated by a machine of ours"},
        {"article": TEXT, "highlights": SHORT, "summary": "Paris and its river."},
        {"text": TEXT, "summary": SHORT, "prompt_style": "As a poet would say it."},
        {"text": TEXT, "sql": "SELECT 1", "schema": "CREATE TABLE rivers"},
        {"premise": TEXT, "hypothesis": SHORT},
        {"question_id": 4, "text": TEXT, "translation": SHORT},  # its answer stands elsewhere
        {
            "dialogue": "User: Where does it flow?\nAssistant: Through Paris.",
            "summary": SHORT,
        },  # to learn may be either
    ],
)
def test_what_else_may_be_meant_is_asked_about(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_what_was_thought_in_between_tells_that_a_context_is_the_question() -> None:
    row = {"context": f"{TEXT} Find its width.", "answer": "40", "chain_of_thought": "It is 40 m wide.", "category": 2}
    assert said(row) == [("user", row["context"]), ("assistant", "40")]
    with pytest.raises(RowRefused):
        read_conversation({"context": TEXT, "answer": "40"})  # to a question that nobody wrote down


@pytest.mark.parametrize("empty", ["", None])
def test_a_text_whose_summary_is_missing_is_not_learned_whole(empty: str | None) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation({"text": TEXT, "summary": empty})
    assert refused.value.reason == "empty-answer"
    assert "--columns text=text" in refused.value.hint


def test_a_piece_of_the_question_is_no_answer() -> None:
    described = {"code": "05", "title": "Rivers", "prompt": "### Rivers\n* Code: 05\n* Description: what flows"}
    with pytest.raises(RowRefused):
        read_conversation(described)
    others = [{**described, "code": f"{n}", "prompt": f"### Rivers\n* Code: {n}\n* Description: it"} for n in range(9)]
    assert lines_for([described, *others]) == []
    with pytest.raises(RowRefused):
        read_conversation({"customer_message": f"Hello. {TEXT}", "agent_reply": TEXT})
    passage = {"user_message": "Which river?", "context": TEXT, "agent_reply": "The Seine"}
    assert said(passage)[-1] == ("assistant", "The Seine"), "an answer may stand in what was given"


@pytest.mark.parametrize("name", ["error", "exception", "error_message", "traceback", "run_status"])
def test_what_became_of_a_run_is_never_proposed_as_its_answer(name: str) -> None:
    rows = [{"question": f"{TEXT} {n}?", "route": "sql", name: f"Timeout in stage {n} of the run"} for n in range(9)]
    assert lines_for(rows) == []


def test_doubtful_classes_are_proposed() -> None:
    rows = [{"review": f"{TEXT} {n}", "sentiment": "good", "emotion": "joy", "maker": "A"} for n in range(9)]
    answers = ("sentiment", "emotion")
    assert [line.columns for line in lines_for(rows)][:2] == [{"prompt": "review", "completion": n} for n in answers]
    rows = [{"text": f"{TEXT} {n}", "gloss": f"river {n} city middle", "category": "rivers"} for n in range(9)]
    assert lines_for(rows)[0].columns == {"prompt": "text", "completion": "gloss"}


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("premise", "hypothesis", "label"), 0),
        (("premise", "hypothesis", "gold_label"), "neutral"),
    ],
)
def test_a_hypothesis_is_judged_on_its_premise(names: tuple[str, str, str], label: str | int) -> None:
    row = dict(zip(names, (TEXT, SHORT, label), strict=True))
    assert said(row) == [("user", f"{TEXT}\n{SHORT}"), ("assistant", str(label))]
