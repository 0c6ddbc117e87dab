"""Rows that are nested in a file's records are the same rows wherever a file of rows is named."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from data.intake.collecting import collect_now, query

from hivetune.base.database import open_database
from hivetune.config import DataConfig, EvalConfig
from hivetune.data.forget import forget
from hivetune.data.frozen import own_questions
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused
from hivetune.judge.rows import prompts_of_rows
from hivetune.train.plan.run import count_rows

QUESTIONS = [f"What does part {number} of the machine do?" for number in range(5)]


@pytest.fixture
def nested(tmp_path: Path) -> str:
    """Five rows below the one record of a file."""
    path = tmp_path / "nested.json"
    rows = [{"question": asked, "answer": f"It turns wheel {number}."} for number, asked in enumerate(QUESTIONS)]
    path.write_text(json.dumps({"version": "1.1", "data": rows}))
    return str(path)


def test_check_and_plan(nested: str) -> None:
    assert check(DataConfig(path=nested)).document["rows_in"] == 5
    assert count_rows(DataConfig(path=nested, validation=0, test=0)).rows == 5


def test_compare(nested: str) -> None:
    found, refused = prompts_of_rows([nested], EvalConfig())
    assert [prompt.messages[-1]["content"] for prompt in found] == QUESTIONS and refused == {}


def test_frozen_questions(nested: str) -> None:
    found = own_questions([nested], {"name": "regex", "pattern": "."})
    assert [one.messages[-1].content for one in found] == QUESTIONS


def test_a_line_of_a_log_that_holds_rows(tmp_path: Path) -> None:
    log = tmp_path / "batches.jsonl"
    rows = [{"prompt": asked, "completion": f"It turns wheel {number}."} for number, asked in enumerate(QUESTIONS)]
    log.write_text("".join(json.dumps({"data": rows[i : i + 2]}) + "\n" for i in range(0, 5, 2)))
    assert check(DataConfig(path=str(log))).document["usable"] == 5
    collect_now(str(log))
    assert check(DataConfig(path="store")).document["usable"] == 5


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """They were stored as Infinity and NaN, and the store's row was refused then."""
    log, asked = tmp_path / "log.jsonl", {"prompt": "What is it?", "completion": "A test."}
    log.write_text(json.dumps(asked)[:-1] + ', "score": 1e999}\n')
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE chats (prompt TEXT, completion TEXT, score REAL, notes TEXT)")
        database.execute("INSERT INTO chats VALUES ('And this?', 'A table.', 9e999, '{\"a\": NaN}')")
    collect_now(str(log), f"sqlite:{tmp_path / 'app.db'}?table=chats")
    assert all("Infinity" not in text for text in query("SELECT row FROM interactions"))
    report = check(DataConfig(path="store")).document
    assert (report["usable"], report["rejected"]) == (2, {})


def test_a_row_that_is_nested_deep_is_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"question": ' + '{"a":' * 700 + "1" + "}" * 700 + "}\n")
    assert prompts_of_rows([str(path)], EvalConfig())[1] == {"unknown-layout": 1}
    with pytest.raises(DataRefused, match=r"deep\.jsonl:2: unknown-layout"):
        own_questions([str(path)], {"name": "regex", "pattern": "."})


def test_collect_and_forget(nested: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(Path(nested).read_text() + "\n")
    collect_now(str(log))
    assert [json.loads(text)["question"] for text in query("SELECT row FROM interactions ORDER BY rowid")] == QUESTIONS
    assert check(DataConfig(path="store")).document["rows_in"] == 5
    with closing(open_database()) as database:
        forget(database, "row", f"{log}:1")
    again = tmp_path / "again.json"
    again.write_text(Path(nested).read_text())
    report = check(DataConfig(path=str(again))).document
    assert report["set_aside"] == {"forgotten": 5}
