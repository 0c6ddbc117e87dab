"""SQLite tables: pages in the order of a cursor, rows taken back, ties, views, and other people's mistakes."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from collecting import collect_now, query, row, stored_numbers, total

from hivetune.base.database import open_database
from hivetune.config import DataConfig
from hivetune.data.intake import tables as source
from hivetune.data.prepare.prepare import check


@pytest.fixture
def app(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's database."""
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE chats (id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT, at REAL, extra)")
        yield database


def add(app: sqlite3.Connection, *numbers: int, at: float = 0.0) -> None:
    rows = [(row(number)["prompt"], row(number)["completion"], at) for number in numbers]
    app.executemany("INSERT INTO chats (prompt, completion, at) VALUES (?, ?, ?)", rows)


def url(tmp_path: Path, options: str = "table=chats") -> str:
    return f"sqlite:{tmp_path / 'app.db'}?{options}"


def test_rows_come_with_their_place(app: sqlite3.Connection, tmp_path: Path) -> None:
    app.execute("INSERT INTO chats VALUES (5, 'q', '[1, 2]', 1.5, NULL)")
    collect_now(url(tmp_path))
    found = query("SELECT source, row FROM interactions")
    expected = '{"id": 5, "prompt": "q", "completion": [1, 2], "at": 1.5, "extra": null}'
    assert found == [(f"{tmp_path / 'app.db'}#chats:5", expected)]


def test_the_rows_of_each_table_are_understood_by_themselves(app: sqlite3.Connection, tmp_path: Path) -> None:
    """Columns were left out of the rows of the store without a word, and no mapping was suggested."""
    add(app, *range(10))
    app.executescript("CREATE TABLE told AS SELECT * FROM chats; CREATE TABLE notes AS SELECT * FROM chats")
    app.execute("UPDATE told SET prompt = 'Where?', extra = 'country ' || id")
    app.execute("ALTER TABLE notes RENAME COLUMN prompt TO ask")
    app.execute("ALTER TABLE notes RENAME COLUMN completion TO note")
    collect_now(*(url(tmp_path, f"table={table}") for table in ("chats", "told", "notes")))
    document = check(DataConfig(path="store", near_duplicates=0)).document
    assert (document["usable"], document["rejected"]) == (10, {"unknown-layout": 10, "unread-column": 10})
    chats, notes, told = sorted(document["understood"])
    assert [column["column"] for column in document["understood"][told][0]["not_read"]] == ["at", "extra"]
    columns = {"prompt": "ask", "completion": "note"}
    assert (document["unclear"][notes]["columns"], chats in document["unclear"]) == (columns, False)
    [hint] = [problem["hint"] for problem in document["problems"] if problem["reason"] == "unread-column"]
    assert "'extra' is not read: read it with --columns prompt=prompt+extra, or" in hint
    mapped = check(DataConfig(path="store", near_duplicates=0, columns=columns)).document
    assert (mapped["usable"], mapped["rejected"]) == (10, {"unknown-layout": 20})


def test_turns_in_the_store_are_not_joined_and_their_hint_says_so(app: sqlite3.Connection, tmp_path: Path) -> None:
    app.execute("CREATE TABLE turns (chat INTEGER, who TEXT, body TEXT)")
    said = [(n // 2, ("Ann", "Ben")[n % 2], f"It is number {n}.") for n in range(12)]
    app.executemany("INSERT INTO turns VALUES (?, ?, ?)", said)
    collect_now(url(tmp_path, "table=turns"))
    document = check(DataConfig(path="store")).document
    assert (document["rejected"], document["unclear"]) == ({"unknown-layout": 12}, {})
    assert "the store joins no turns: write them to a file" in document["problems"][0]["hint"]


def test_a_cell_of_many_conversations_is_many_rows(app: sqlite3.Connection, tmp_path: Path) -> None:
    """Each with what stands beside it, and none of them twice when all is read again."""
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": "yes"}] for q in ("is it?", "why?")]
    app.execute("CREATE TABLE logs (user_id TEXT, data TEXT)")
    app.execute("INSERT INTO logs VALUES ('u1', ?)", (json.dumps([{"messages": turns} for turns in chats]),))
    for table in ("logs", "logs&cursor=user_id"):
        collect_now(url(tmp_path, f"table={table}"))
    found = [json.loads(text) for text in query("SELECT row FROM interactions")]
    assert found == [{"user_id": "u1", "messages": turns} for turns in chats]


@pytest.mark.parametrize("cursor", ["", "&cursor=at"])
def test_pages_go_on_where_they_ended(
    app: sqlite3.Connection, tmp_path: Path, cursor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties of the cursor column lie across the ends of pages."""
    monkeypatch.setattr(source, "PAGE_ROWS", 10)
    for group in range(19):
        add(app, *range(group * 7, group * 7 + 7), at=float(group))
    add(app, *range(133, 160), at=19.0)  # more than a page
    assert total(url(tmp_path) + cursor) == (160, 0, 0, 0)
    assert total(url(tmp_path) + cursor) == (0, 0, 0, 0)
    add(app, 160, at=19.0)  # late, with the newest value once more
    add(app, 161, at=20.0)
    assert total(url(tmp_path) + cursor)[0] == 2
    assert stored_numbers() == list(range(162))


def test_a_rowid_that_is_used_twice_is_two_rows(app: sqlite3.Connection, tmp_path: Path) -> None:
    """Without AUTOINCREMENT a deleted last rowid is given out again."""
    add(app, 1, 2)
    collect_now(url(tmp_path))
    app.execute("DELETE FROM chats WHERE id = 2")
    add(app, 3)
    assert app.execute("SELECT max(id) FROM chats").fetchone() == (2,)
    assert total(url(tmp_path)) == (1, 1, 0, 0)
    assert stored_numbers() == [1, 2, 3]


def test_a_column_that_is_called_rowid_is_not_the_position(app: sqlite3.Connection, tmp_path: Path) -> None:
    """Rows without a value in it were not read, nor those with a smaller one than the last."""
    app.execute("CREATE TABLE logs (rowid TEXT, prompt TEXT, completion TEXT)")
    app.execute("INSERT INTO logs VALUES ('m', 'question 1', 'a'), (NULL, 'question 2', 'b')")
    assert total(url(tmp_path, "table=logs")) == (2, 0, 0, 0)
    app.execute("INSERT INTO logs VALUES ('a', 'question 3', 'c')")
    assert total(url(tmp_path, "table=logs")) == (1, 0, 0, 0)
    assert query("SELECT source FROM interactions") == [f"{tmp_path / 'app.db'}#logs:{n}" for n in (1, 2, 3)]


def test_what_a_refused_row_is_told_to_do_helps(app: sqlite3.Connection, tmp_path: Path) -> None:
    add(app, 1)
    app.execute("UPDATE chats SET extra = x'ff'")
    app.execute("INSERT INTO chats (prompt, completion) VALUES (CAST(x'ff' AS TEXT), 'a')")
    assert total(url(tmp_path)) == (0, 0, 2, 0)
    hint, other = query("SELECT hint FROM refused")
    assert (
        hint.startswith("extra contains bytes") and "?table=VIEW&cursor=COLUMN" in hint and other.startswith("prompt")
    )
    app.execute("CREATE VIEW good AS SELECT id, prompt, completion FROM chats WHERE id = 1")
    assert total(url(tmp_path, "table=good&cursor=id")) == (1, 0, 0, 0)


def test_rows_without_a_cursor_value_are_said(app: sqlite3.Connection, tmp_path: Path) -> None:
    add(app, 1, at=1.0)
    app.execute("INSERT INTO chats (prompt, completion, at) VALUES ('question 2', 'a', NULL)")
    reader = source.SqliteReader(url(tmp_path, "table=chats&cursor=at"))
    with closing(open_database()) as database:
        next(reader.batches(database, False))
    assert reader.notes == [f"{tmp_path / 'app.db'}#chats: 1 rows without a usable at are not read"]


def test_a_writer_is_never_kept_waiting(app: sqlite3.Connection, tmp_path: Path) -> None:
    """In the rollback-journal mode an open read would block the application's commit."""
    add(app, *range(5))
    app.execute("PRAGMA busy_timeout = 0")
    reader = source.SqliteReader(url(tmp_path, "table=chats"))
    with closing(open_database()) as database:
        batches = reader.batches(database, True)
        assert next(batches)
        add(app, 5)
        batches.close()


def test_another_store_is_a_table_whose_rows_are_in_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text('{"prompt": "question 1", "completion": "b", "user": "u"}\n')
    collect_now(str(log))
    here = query("SELECT id, user, row FROM interactions")
    first = query("PRAGMA database_list")[0][2]
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "second"))
    assert total(f"sqlite:{first}?table=interactions&field=row") == (1, 0, 0, 0)
    assert query("SELECT id, user, row FROM interactions") == here
