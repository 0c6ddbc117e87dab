"""A row of the store that is no text any more costs itself alone."""

from contextlib import closing
from pathlib import Path

import pytest

from hivetune.base.database import database_path, open_database
from hivetune.data.files.rows import read_rows
from hivetune.data.intake.interactions import Batch, Delivery, commit_batch
from hivetune.data.raw import RawRow, Source
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused


@pytest.fixture
def store(own_home: Path) -> Path:
    """Three rows, f:1 to f:3."""
    rows = [
        Delivery("f", f"f:{n}", {"task": f"ask {n}", "output": "yes", "success": True, "timestamp": 5 + n})
        for n in (1, 2, 3)
    ]
    with closing(open_database()) as database:
        commit_batch(database, Batch("f", rows))
    return database_path()


def stored(path: Path) -> list[RawRow]:
    return list(read_rows(Source(str(path), "store", "store", size=100)))


def test_rows_as_they_were_stored_are_read(store: Path) -> None:
    assert [row.problem for row in stored(store)] == [None, None, None]


def test_bytes_that_are_no_text_cost_their_own_row_alone(store: Path) -> None:
    with closing(open_database()) as database:
        for name in ("review", "corrected", "unapproved"):  # they read the JSON, and a flipped bit asks no index
            database.execute(f"DROP INDEX interactions_{name}")
        database.execute("UPDATE interactions SET row = CAST(x'7bff7d' AS TEXT) WHERE source = 'f:2'")
    first, second, third = stored(store)
    assert parse_row(first.payload) and parse_row(third.payload)
    with pytest.raises(RowRefused):
        parse_row(second.payload)
