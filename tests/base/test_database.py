"""hive.db that is empty, has lost tables, is of another program or holds odd values; and one on a full disk."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from small_disk import fill

from hivetune.base.database import open_database, transaction
from hivetune.errors import DoesNotFit, UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a run in it."""
    with closing(open_database(tmp_path / "hive.db")) as database:
        database.execute("INSERT INTO runs VALUES ('/a', 'a', 5.0, 'h')")
    return tmp_path / "hive.db"


def spoil(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA foreign_keys=OFF")
        database.execute(statement)


def test_a_new_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """Who is killed before leaves none, so an empty one is never a new one."""
    path = tmp_path / "hive.db"
    with closing(open_database(path)):
        assert path.stat().st_size > 0 and path.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob(".hive.db.*"))


def test_a_new_home_is_opened_while_another_command_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first open changed the journal's mode, which needs the file alone: of two commands one failed."""
    path = tmp_path / "hive.db"
    with monkeypatch.context() as first:  # it has made the file, and reads it before anything else
        first.setattr("hivetune.base.database._connect", lambda path: sqlite3.connect(path, isolation_level=None))
        reader = open_database(path)
    with closing(reader):
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM interactions").fetchall()
        with closing(open_database(path)) as other:
            assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_log_without_its_database_is_said(path: Path) -> None:
    with closing(open_database(path)) as database:
        database.execute("INSERT INTO runs VALUES ('/b', 'b', 5.0, 'h')")
        path.unlink()
        with pytest.raises(UsageError, match=r"is missing, but hive\.db-wal with its newest rows"):
            open_database(path)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DROP TABLE interactions", "damaged: its table 'interactions' is gone"),
        ("DROP TABLE cursors", "damaged: its table 'cursors' is gone"),
        ("PRAGMA user_version = 7", "written by another version of Hivetune"),
    ],
)
def test_what_is_not_as_it_was_made_is_named(path: Path, statement: str, problem: str) -> None:
    spoil(path, statement)
    with pytest.raises(UsageError, match=problem):
        open_database(path)


def test_another_programs_database_and_an_empty_file_are_no_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=f"{path} is damaged: it is empty") as refused:
        open_database(path)
    assert "hivetune collect" in refused.value.hint
    spoil(path, "CREATE TABLE notes (text)")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"another program \(tables: notes\)"):
        open_database(path)
    assert path.read_bytes() == before


def test_a_second_connection_of_a_process_keeps_the_locks_of_the_first(path: Path) -> None:
    """Another process must never take itself for the last one: it would delete the log under us."""
    first = open_database(path)
    open_database(path).close()
    script = "import sys, pathlib, hivetune.base.database as s; s.open_database(pathlib.Path(sys.argv[1])).close()"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    first.execute("UPDATE runs SET name = 'b'")
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT name FROM runs").fetchall() == [("b",)]
    first.close()


def test_a_full_disk_is_read_and_written_to_once_there_is_room(small_disk: Path) -> None:
    path = small_disk / "hive.db"
    with closing(open_database(path)) as database:
        database.execute("INSERT INTO runs VALUES ('/a', 'a', 5.0, 'h')")
    filler = fill(small_disk)
    with closing(open_database(path)) as database:
        assert database.execute("SELECT name FROM runs").fetchall() == [("a",)]
        with pytest.raises(DoesNotFit, match="nothing of this batch"), transaction(database):
            database.execute("DELETE FROM runs")
        filler.unlink()
        with transaction(database):
            database.execute("DELETE FROM runs")
        assert database.execute("SELECT name FROM runs").fetchall() == []
