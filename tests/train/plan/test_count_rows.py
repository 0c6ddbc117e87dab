"""How many rows a plan reckons with: those that `data check` finds, or an estimate that says what it comes from."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hivetune.base.database import open_database
from hivetune.config import DataConfig
from hivetune.train.plan import run
from hivetune.train.plan.run import count_rows

TEXT = "The 5:42 train to Basel leaves from platform 7 today. "


def write_csv(path: Path, rows: int) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows([f"What about {number}?\nTell me.", TEXT] for number in range(rows))


def write_lines(path: Path, rows: int) -> None:
    line = json.dumps({"prompt": "Which platform?", "completion": TEXT})
    path.write_text(f"{line}\n\n" * rows)


def write_document(path: Path, rows: int) -> None:
    path.write_text(json.dumps({"data": [{"prompt": "Which platform?", "completion": TEXT}] * rows}))


def write_parquet(path: Path, rows: int) -> None:
    columns = {"prompt": [f"Row {number}?" for number in range(rows)], "completion": [TEXT] * rows}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "faq.csv": write_csv,
    "rows.jsonl": write_lines,
    "tickets.json": write_document,
    "rows.parquet": write_parquet,
}


@pytest.mark.parametrize("name", KINDS)
def test_small_files_are_counted_as_rows_and_not_as_lines(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    KINDS[name](path, 73)
    found = count_rows(DataConfig(path=str(path)))
    assert (found.rows, found.words) == (73, "73 rows counted")
    assert 20 < found.tokens < 35


@pytest.mark.parametrize("name", ["faq.csv", "rows.jsonl"])
def test_large_files_are_reckoned_from_their_beginning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "COUNTED_BYTES", 40_000)
    monkeypatch.setattr(run, "PART_BYTES", 20_000)
    for number in range(3):
        KINDS[name](tmp_path / f"{number}-{name}", 1000)
    found = count_rows(DataConfig(path=str(tmp_path / f"*{name}")))
    assert 2850 < found.rows < 3150  # numbers get longer, and the header counts once
    assert found.words.startswith(("about 2,900 rows", "about 3,000 rows", "about 3,100 rows"))
    assert found.words.endswith("from the first 20 kB")


def test_a_large_parquet_file_says_how_many_rows_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COUNTED_BYTES", 100)
    write_parquet(tmp_path / "rows.parquet", 5000)
    assert count_rows(DataConfig(path=str(tmp_path))).words == "5,000 rows counted"


def test_what_cannot_be_counted_is_assumed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for path, why in (
        (str(tmp_path / "none.jsonl"), "none.jsonl does not exist"),
        ("-", "standard input and pipes"),
        (str(tmp_path / "empty.jsonl"), "no row was found"),
        ("store", "no row was found"),
    ):
        found = count_rows(DataConfig(path=path))
        assert found.rows == 1500 and found.words.startswith("1,500 rows assumed: ") and why in found.words
    monkeypatch.setattr(run, "COUNTED_BYTES", 100)
    write_document(tmp_path / "tickets.json", 50)  # one record, and its beginning is none
    monkeypatch.setattr(run, "PART_BYTES", 1000)
    assert count_rows(DataConfig(path=str(tmp_path / "tickets.json"))).words == (
        "1,500 rows assumed: no row was found in the first 1 kB"
    )


def test_the_store_is_counted(tmp_path: Path) -> None:
    database = open_database()
    for number in range(7):
        database.execute(
            "INSERT INTO interactions (id, content_id, source, row) VALUES (?, ?, 'here', ?)",
            (str(number), str(number), '{"prompt": "a", "completion": "b"}'),
        )
    database.close()
    write_lines(tmp_path / "rows.jsonl", 5)
    assert count_rows(DataConfig(path="store")).words == "7 rows counted"
    assert count_rows(DataConfig(path=["store", str(tmp_path / "rows.jsonl")])).rows == 12
