"""The rows that a plan reckons with: those that the check finds, or what the user states."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data.models import make_model

from hivetune.base.database import open_database
from hivetune.config import DataConfig, parse_config
from hivetune.errors import DataRefused, UsageError
from hivetune.train.plan.run import count_rows, rows_to_train

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
def test_files_are_counted_as_rows_and_not_as_lines(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    KINDS[name](path, 73)
    found = count_rows(DataConfig(path=str(path), validation=0, test=0))
    assert (found.rows, found.words) == (73, "by counting 73 rows")
    assert 20 < found.tokens < 35


def test_what_cannot_be_counted_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "numbers.jsonl").write_text('{"number": 3}\n')
    for path, why in (
        ("none.jsonl", "does not exist"),
        ("empty.jsonl", "contains no rows"),
        ("numbers.jsonl", "none can be trained"),
    ):
        with pytest.raises(UsageError, match=why):
            count_rows(DataConfig(path=str(tmp_path / path)))
    with pytest.raises(UsageError, match="contains no rows"):
        count_rows(DataConfig(path="store"))
    with pytest.raises(UsageError, match="read once, by the training itself"):
        rows_to_train(parse_config({"model": "m", "data": {"path": "-"}}), None)


def test_rows_of_unknown_layout_name_the_mapping_as_training_does(tmp_path: Path) -> None:
    rows = [{"frage": f"Wo ist {n}?", "antwort": f"In {n}."} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config({"model": "m", "data": {"path": str(tmp_path / "rows.jsonl")}})
    with pytest.raises(DataRefused) as refused:
        rows_to_train(config, make_model(tmp_path / "model"))
    assert "--columns prompt=frage,completion=antwort" in refused.value.hint


def test_the_store_is_counted(tmp_path: Path) -> None:
    database = open_database()
    for number in range(7):
        database.execute(
            "INSERT INTO interactions (id, content_id, source, row) VALUES (?, ?, 'here', ?)",
            (str(number), str(number), '{"prompt": "a", "completion": "b"}'),
        )
    database.close()
    write_lines(tmp_path / "rows.jsonl", 5)
    assert count_rows(DataConfig(path="store")).words == "by counting 7 rows"
    both = DataConfig(path=["store", str(tmp_path / "rows.jsonl")], validation=0, test=0)
    assert count_rows(both).rows == 12
