"""Rows of no named layout are refused, with the mapping that reads them; nothing is read by a guess."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.report import Report
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.suggest import suggest
from hivetune.errors import DataRefused

TOPICS = ("parcel", "letter", "package", "postcard", "crate", "barrel")


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Rows with these columns; `{}` in a text is the topic of the row."""
    return [{k: v.format(t) if isinstance(v, str) else v for k, v in columns.items()} for t in TOPICS]


def report_of(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Report:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return check(DataConfig(path=str(path), near_duplicates=0, **settings))


UNKNOWN = rows_of(wish="Where is the {} now?", told="The {} is in Bonn.")


def test_an_unknown_layout_is_refused_with_the_mapping_that_reads_it(tmp_path: Path) -> None:
    report = report_of(tmp_path / "rows.jsonl", UNKNOWN)
    assert report.document["rejected"] == {"unknown-layout": 6}
    (lines,) = report.document["unclear"].values()
    assert lines[0]["line"] == "--columns prompt=wish,completion=told"
    assert lines[0]["shown"][0] == {"question": "Where is the parcel now?", "answer": "The parcel is in Bonn."}
    with pytest.raises(DataRefused) as refused:
        report.refuse(0.2)
    assert "--columns prompt=wish,completion=told" in str(refused.value.hint)
    again = report_of(tmp_path / "again.jsonl", UNKNOWN, columns=lines[0]["columns"])
    assert (again.usable, again.document["unclear"]) == (6, {})


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (rows_of(x="Where is the {}?", y="In Bonn, {}."), {"prompt": "x", "completion": "y"}),
        (rows_of(about="The {} is late.", q9="How late is it?", r="Two days, {}."), None),
        (
            [{"log": [{"who": "Ana", "said": f"Where is the {t}?"}, {"who": "Desk", "said": "Here."}]} for t in TOPICS],
            {"messages": "log", "role": "who", "text": "said", "assistant": "Desk"},
        ),
        (
            [{"cases": [{"frage_text": f"Wo ist {t}?", "told": f"Hier, {t}."}] * 2} for t in TOPICS],
            {"rows": "cases[]", "prompt": "frage_text", "completion": "told"},
        ),
        (rows_of(question="Where is the {}?", prediction="Lost.", ground_truth="The {} is here."), None),
        (rows_of(n=3, made="2026-01-01T10:00:00"), {}),
        (
            rows_of(
                name="Ana {}", city="Bonn", about="Ana likes the {} and old towns.", plan="The {} plan, each month."
            ),
            {},
        ),
        (
            rows_of(note="The {} was late by two days.", output={"kind": "delay", "days": 2}),
            {"prompt": "note", "completion": "output"},
        ),
        (rows_of(items=[{"key": 1, "value": "red"}, {"key": 2, "value": "blue"}], made="2026-01-01"), {}),
        (
            rows_of(article="The {} was late by two days.", highlights="late {}"),
            {"prompt": "article", "completion": "highlights"},
        ),
        (
            rows_of(source="The {} was late by two days.", target="zwei Tage, {}"),
            {"prompt": "source", "completion": "target"},
        ),
        (
            rows_of(description="The {} can't be found.", resolution="We sent another {}.", priority="high"),
            {"prompt": "description", "completion": "resolution"},
        ),
        (
            rows_of(query="Where is the {}?", told_gt=["In Bonn.", "Nobody knows."]),
            {"prompt": "query", "completion": "told_gt[0]"},
        ),
        (
            rows_of(task="Which of the numbers fit the {}?", correct_answer=[3, 5]),
            {"prompt": "task", "completion": "correct_answer.as_json"},
        ),
        (
            [
                {
                    "steps": [
                        {"who": {"type": "user"}, "data": {"text": f"Where is the {topic}?"}},
                        {"who": {"type": "assistant"}, "data": {"text": f"The {topic} is in Bonn."}},
                    ]
                }
                for topic in TOPICS
            ],
            {"messages": "steps", "role": "who.type", "text": "data.text"},
        ),
        (
            [{"log": [{"is_user": who, "mes": f"The {t}, if it is there."} for who in (True, False)]} for t in TOPICS],
            {"messages": "log", "role": "is_user", "text": "mes", "assistant": "False"},
        ),
        (
            [
                {
                    "canary": "Not for training at all.",
                    "about": "Say where each town lies.",
                    "cases": [{"x": 1}, {"x": 2}],
                }
            ],
            {},
        ),
    ],
)
def test_the_likeliest_mapping(rows: list[dict[str, Any]], columns: dict[str, str] | None) -> None:
    found = suggest(rows)
    assert len(found) <= 3
    if columns is not None:
        assert (found[0].columns if found else {}) == columns
    elif "prediction" in rows[0]:
        assert found[0].columns["completion"] == "ground_truth", "what was expected, not what a model said"
    else:
        assert "about" in found[0].columns["prompt"], "what the question is about is not lost"


def test_a_column_that_tells_equal_questions_apart_is_never_left_out_in_silence(tmp_path: Path) -> None:
    """Any short value beside a question was dropped: country, tone, level, number."""
    rows = [
        {"question": "What is the capital?", "answer": f"{town}.", "land": land}
        for land, town in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Peru", "Lima"))
    ]
    report = report_of(tmp_path / "rows.jsonl", rows)
    assert report.document["rejected"] == {"unread-column": 4}
    assert "'land'" in report.document["problems"][0]["hint"]
    assert "--columns prompt=question+land,completion=answer" in report.document["problems"][0]["hint"]
    columns = {"prompt": "question+land", "completion": "answer"}
    assert report_of(tmp_path / "again.jsonl", rows, columns=columns).usable == 4


def test_other_columns_are_told_and_counted(tmp_path: Path) -> None:
    rows = rows_of(question="Where is the {}?", answer="In Bonn, {}.", tone="formal")
    report = report_of(tmp_path / "rows.jsonl", rows)
    assert (report.usable, report.document["changed"]) == (6, {"left-out-columns": 6})
    (kinds,) = report.document["understood"].values()
    assert kinds[0]["left_out"] == ["tone"]


@pytest.mark.parametrize(
    "outcome", [{"correct": False}, {"outcome": "failure"}, {"stars": 1}, {"label": "bad"}, {"correct": "no"}]
)
def test_an_outcome_column_says_that_an_answer_failed(outcome: dict[str, Any], tmp_path: Path) -> None:
    rows = rows_of(question="Where is the {}?", answer="In Bonn, {}.")
    report = report_of(tmp_path / "rows.jsonl", [{**row, **outcome} for row in rows[:3]] + rows[3:])
    assert (report.usable, report.document["set_aside"]) == (3, {"failed": 3})


def test_other_values_of_such_columns_say_nothing(tmp_path: Path) -> None:
    rows = rows_of(question="Where is the {}?", answer="In Bonn, {}.", stars=5, label="billing", outcome="2026")
    assert report_of(tmp_path / "rows.jsonl", rows).usable == 6


def test_a_pair_of_message_lists_keeps_the_context_and_no_image(tmp_path: Path) -> None:
    answers = {
        "chosen": [{"role": "assistant", "content": "In the depot of Bonn, on its second shelf."}],
        "rejected": [{"role": "assistant", "content": "I don't know it."}],
    }
    row = {"question": "Where is it?", "context": "The parcel is in Bonn.", **answers}
    raw = RawRow("a:1", json.dumps(row).encode())
    asked = read_example(raw, {}, pairs=True).example.messages[0].content
    assert asked == "Where is it?\nThe parcel is in Bonn."
    with pytest.raises(RowRefused, match="unsupported-content"):
        read_example(RawRow("a:1", json.dumps({**row, "images": ["a.png"]}).encode()), {}, pairs=True)
