"""Rows inside one record: what goes along with each of them, and what that costs."""

from typing import Any

import pytest
from data.rows.find.parcel_talk import ANSWERED, ASKED, turns

from hivetune.data.rows.find.leaves import nodes
from hivetune.data.rows.find.nest import place_name, place_of_rows, split_record

PLACE = ("items", "[]")


def record(size: int, beside: Any) -> dict[str, Any]:
    rows = [{"input": f"How many apples are {i} and 1?", "output": f"There are {i + 1} of them."} for i in range(size)]
    return {"source": "a book", "items": rows, "beside": beside}


def work(size: int) -> int:
    """How many parts all the rows of a record have that holds a table of another length beside them."""
    table = [{"kind": "sum", "level": i} for i in range(size + 50)]
    return sum(1 for row in split_record(record(size, table), PLACE) for _ in nodes(row))


def test_a_row_does_not_take_along_a_table_that_grows_with_the_rows() -> None:
    assert work(400) == 4 * work(100)


def test_rows_beside_another_table_are_found() -> None:
    assert place_of_rows([record(100, [{"kind": "sum", "level": i} for i in range(120)])]) == PLACE


@pytest.mark.parametrize("size", [2, 100])
def test_what_was_written_beside_rows_goes_along(size: int) -> None:
    written = [{"text": f"Sentence {i} of the book about apples."} for i in range(40)]
    assert all(row["beside"] == written for row in split_record(record(size, written), PLACE))


def test_many_rows_beside_thousands_of_written_texts_are_no_rows() -> None:
    written = [{"text": f"Sentence {i} of the book about apples."} for i in range(2000)]
    assert place_of_rows([record(100, written)]) == ()


def asked(name: str, size: int) -> list[dict[str, str]]:
    return [
        {"query": f"Where does {name} walk on day {i}?", "response": f"Along the river, part {i}."} for i in range(size)
    ]


def people(key: str, sizes: list[int]) -> dict[str, Any]:
    """Lists of questions with their answers, by date, for each of three people."""
    days = {f"2023-04-{day:02}": asked(f"person {day}", size) for day, size in enumerate(sizes, 1)}
    return {name: {"name": name, key: days} for name in ("Ann", "Bo", "Cy")}


@pytest.mark.parametrize("sizes", [[3, 2, 4], [3, 1, 1, 2, 1], [2, 1]])
def test_the_questions_of_a_day_are_a_conversation_where_a_name_says_so_else_rows_and_none_is_lost(
    sizes: list[int],
) -> None:
    """One list of one item among longer ones once lost all of the longer ones."""
    for key, expected in (("history", 3 * len(sizes)), ("items", 3 * sum(sizes))):
        record = people(key, sizes)
        rows = split_record(record, place_of_rows([record]))
        assert len(rows) == expected
        assert sum(len(row.get("messages", [row])) for row in rows) == 3 * sum(sizes)


EXAMPLE = {"question": ASKED, "answer": ANSWERED}
SQUAD = {"context": "The depot is in Bonn.", "qas": [{"question": ASKED, "answers": [{"text": ANSWERED}]}]}


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"meta": 1, "cases": [{"q": {"question": ASKED}, "a": {"answer": ANSWERED}}] * 3}, "cases[]"),
        ({"one": EXAMPLE, "two": {"question": "Who is it?", "answer": "She is."}}, "[]"),
        ({"set": [SQUAD]}, "set[].qas[]"),
        ({"cases": [EXAMPLE, {"question": "Who is it?", "answer": "She is."}]}, "cases[]"),
        ({"id": [1, 2], "question": [ASKED, "Who is it?"], "truth": [ANSWERED, "It is her."]}, "{columns}"),
        ({"conversation": turns("role", "content", "user", "assistant")}, ""),
        ({"query": ASKED, "response": {"answer": ANSWERED, "sources": [{"n": 1}, {"n": 2}]}}, ""),  # one row, not two
        ({"conversation": [{"user": ASKED, "image": "a.png", "reply": ANSWERED}] * 3}, ""),  # no turn is a row alone
        ({"description": "Some questions of ours", "cases": [EXAMPLE] * 2}, "cases[]"),
        ({"parcels": [EXAMPLE] * 2, "letters": [EXAMPLE] * 2, "statistics": {"n": 4}}, "[][]"),
        ({"data": {"train": [EXAMPLE] * 2, "test": [EXAMPLE] * 2}}, "data[][]"),  # questions, and no conversations
        ({"one": EXAMPLE, "two": {"question": "Who is it?", "answer": "She is."}, "version": 3}, "[]"),
    ],
)
def test_where_the_rows_of_a_record_are(record: dict[str, Any], place: str) -> None:
    assert place_name(place_of_rows([record])) == place


def test_a_row_takes_along_what_stands_beside_it() -> None:
    record = {"title": "t", "cases": [EXAMPLE]}
    assert split_record(record, ("cases", "[]")) == [{"title": "t", **EXAMPLE}]


def test_nothing_among_the_rows_of_tables_by_name() -> None:
    assert place_of_rows([{"prompt": [{"role": [{}], "tool_calls": [None, {}]}]}]) == ()
