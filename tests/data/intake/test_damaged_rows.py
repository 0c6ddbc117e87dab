"""Rows of the store that were changed since they were stored: found by their seals, one by one."""

from contextlib import closing
from pathlib import Path

import pytest

from hivetune.base.database import SEALED_COLUMNS, database_path, open_database, transaction
from hivetune.data.files.rows import read_rows
from hivetune.data.intake.interactions import Batch, Delivery, change_row, commit_batch
from hivetune.data.raw import RawRow, Source


@pytest.fixture
def store(own_home: Path) -> Path:
    """Three rows, f:1 to f:3."""
    rows = [
        Delivery("f", f"f:{n}", f"f:{n}", {"task": f"ask {n}", "output": "yes", "success": True, "timestamp": 5 + n})
        for n in (1, 2, 3)
    ]
    with closing(open_database()) as database:
        commit_batch(database, Batch("f", rows))
    return database_path()


def stored(path: Path) -> list[RawRow]:
    return list(read_rows(Source(str(path), "store", "store", size=100)))


def test_rows_as_they_were_stored_are_read(store: Path) -> None:
    assert [row.problem for row in stored(store)] == [None, None, None]


@pytest.mark.parametrize("column", SEALED_COLUMNS)
def test_a_change_of_any_column_is_told_by_its_row(store: Path, column: str) -> None:
    changed = {"time": "8.25", "feedback": "1", "success": "0"}.get(column, "'f:9'")
    with closing(open_database()) as database:
        database.execute(f"UPDATE interactions SET {column} = {changed} WHERE source = 'f:2'")
    first, second, third = stored(store)
    assert first.problem is None and third.problem is None
    assert second.problem is not None and second.problem.reason == "damaged-row"
    assert second.source in ("f:2", "f:9")


def test_bytes_that_are_no_text_cost_their_own_row_alone(store: Path) -> None:
    with closing(open_database()) as database:
        database.execute("UPDATE interactions SET row = CAST(x'7bff7d' AS TEXT) WHERE source = 'f:2'")
    assert [row.problem is None for row in stored(store)] == [True, False, True]


def test_feedback_seals_its_row_anew(store: Path) -> None:
    with closing(open_database()) as database, transaction(database):
        [(identity,)] = database.execute("SELECT id FROM interactions WHERE source = 'f:2'")
        change_row(database, identity, {"task": "ask 2", "output": "no"}, 1)
    assert [row.problem for row in stored(store)] == [None, None, None]
