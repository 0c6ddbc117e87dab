"""Rows inside one record: what goes along with each of them, and what that costs."""

from typing import Any

import pytest

from hivetune.data.rows.find.leaves import nodes
from hivetune.data.rows.find.nest import place_of_rows, split_record

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
