"""Collecting as a whole: accounting that adds up, forgotten rows that stay away, full disks, and a clean stop."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from collecting import collect_now, line, query, row, stored_numbers, total, wait_for
from hypothesis import given
from hypothesis import strategies as st

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import home
from hivetune.data.columns import as_feedback, as_success, as_time, extract
from hivetune.data.files.rows import read_rows
from hivetune.data.intake import collect as collect_module
from hivetune.data.intake.collect import parse_sources
from hivetune.data.intake.interactions import Batch, Delivery, commit_batch
from hivetune.data.raw import Source
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused
from hivetune.errors import DoesNotFit, UsageError

HIVETUNE = [sys.executable, "-m", "hivetune"]


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    with closing(open_database()) as database:
        yield database


def delivery(number: int, content: dict[str, Any] | None = None) -> Delivery:
    return Delivery("log", f"log:{number}", content or row(number))


def test_a_batch_adds_up(database: sqlite3.Connection) -> None:
    batch = Batch("log", [delivery(1), delivery(2), delivery(1)])
    tally = commit_batch(database, batch)
    assert (tally.delivered, tally.stored, tally.duplicates) == (3, 2, 1)
    assert commit_batch(database, batch).duplicates == 3
    assert database.execute("SELECT * FROM intake").fetchall() == [("log", 2, 4, 0, 0)]


def test_rows_and_cursor_are_one_transaction(database: sqlite3.Connection) -> None:
    commit_batch(database, Batch("log", [delivery(1)], ("k", "1")))
    with pytest.raises(sqlite3.IntegrityError):
        commit_batch(database, Batch("log", [delivery(2)], ("k", None)))  # type: ignore[arg-type]
    assert database.execute("SELECT count(*) FROM interactions").fetchone() == (1,)
    assert database.execute("SELECT position FROM cursors").fetchall() == [("1",)]
    assert not database.in_transaction


def test_bytes_that_are_no_text_cost_their_own_row_alone(database: sqlite3.Connection) -> None:
    """A flipped bit in the store: its row is refused, and the others are read."""
    commit_batch(database, Batch("log", [delivery(number) for number in (1, 2, 3)]))
    for name in ("review", "corrected", "unapproved"):  # they read the JSON, and a flipped bit asks no index
        database.execute(f"DROP INDEX interactions_{name}")
    database.execute("UPDATE interactions SET row = CAST(x'7bff7d' AS TEXT) WHERE source = 'log:2'")
    first, second, third = read_rows(Source(str(database_path()), "store", "store", last=100))
    assert parse_row(first.payload) == row(1) and parse_row(third.payload) == row(3)
    with pytest.raises(RowRefused):
        parse_row(second.payload)


def test_text_that_is_no_utf8_is_kept_as_it_came(database: sqlite3.Connection) -> None:
    strange = {"prompt": "half \ud83d of it", "user": "\udcff"}
    commit_batch(database, Batch("log", [delivery(1, strange)]))
    text = database.execute("SELECT row FROM interactions").fetchone()[0]
    assert json.loads(text) == strange


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x)))
def test_any_value_in_a_column_is_a_value_or_none(value: Any) -> None:
    row = dict.fromkeys(("session_id", "user", "agent", "category", "timestamp", "success", "rating", "id"), value)
    fields = extract(row)
    assert fields.session is None or isinstance(fields.session, str)
    assert fields.time is None or 0 < fields.time <= 1e11


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1767323045, 1767323045.0),
        (1767323045123, 1767323045.123),
        (1767323045123456, 1767323045.123456),
        ("1767323045", 1767323045.0),
        ("2026-01-02T03:04:05", 1767323045.0),
        ("2026-01-02T04:04:05+01:00", 1767323045.0),
        ("Fri, 2 Jan 2026 04:04:05 +0100", 1767323045.0),  # RFC 2822, as in mails
        ("Fri, 2 Jan 2026 03:04:05 -0000", 1767323045.0),
        ("Fri Jan 02 04:04:05 +0100 2026", 1767323045.0),  # as Twitter wrote it
        ("Fri Jan  2 03:04:05 2026", 1767323045.0),  # ctime
        ("Fri, 2 Jan", None),
        ("yesterday", None),
        (float("nan"), None),
        (-5, None),
        (True, None),
    ],
)
def test_times(value: Any, seconds: float | None) -> None:
    assert as_time(value) == (pytest.approx(seconds, abs=1e-6) if seconds else None)


def test_success_and_feedback() -> None:
    assert [as_success(value) for value in (True, "no", 1, "OK", 2, None)] == [True, False, True, None, None, None]
    assert [as_feedback(value) for value in (True, "👎", "4.5", "up", "x", float("inf"))] == [1, -1, 4.5, 1, None, None]


def test_what_comes_into_a_followed_folder_is_collected(tmp_path: Path) -> None:
    """A file that goes ended the follower."""
    stop = threading.Event()
    readers = parse_sources([str(tmp_path), str(tmp_path / "*.ndjson")])
    follower = threading.Thread(target=collect_module.collect, args=(readers,), kwargs={"follow": True, "stop": stop})
    follower.start()
    try:
        (tmp_path / "0.jsonl").write_text(line(0))
        wait_for(lambda: stored_numbers() == [0], "the row of the first log")
        (tmp_path / "0.jsonl").unlink()
        (tmp_path / "1.ndjson").write_text(line(1))  # of two patterns
        (tmp_path / "2.jsonl").write_text(line(2))
        wait_for(lambda: stored_numbers() == [0, 1, 2], "the rows that came")
        assert follower.is_alive()
    finally:
        stop.set()
        follower.join()


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text("".join(map(line, range(3000))))

    def open_small(path: Path | None = None) -> sqlite3.Connection:
        database = open_database(path)
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages + 60}")
        return database

    with monkeypatch.context() as patch, pytest.raises(DoesNotFit, match="nothing of this batch") as full:
        patch.setattr(collect_module, "open_database", open_small)
        collect_now(str(log))
    assert "free space" in full.value.hint
    before = len(stored_numbers())
    assert total(str(log)) == (3000 - before, 0, 0, 0)
    assert stored_numbers() == list(range(3000))


def test_one_reader_that_fails_stops_the_others_cleanly(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(line(1))
    readers = parse_sources([str(tmp_path / "chat.jsonl"), f"sqlite:{tmp_path / 'none.db'}?table=t"])
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"none\.db does not exist"):
        collect_module.collect(readers, follow=True, stop=threading.Event())
    assert threading.active_count() == before


def test_what_the_store_holds_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(line(1))
    os.umask(0o022)
    with closing(open_database()) as database:
        collect_now(str(tmp_path / "chat.jsonl"))
        database.execute("SELECT count(*) FROM interactions").fetchone()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home().iterdir()}
    assert set(modes) >= {"hive.db", "hive.db-wal"}
    assert set(modes.values()) == {0o600}


def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, JSON documents on stdout, stderr)."""
    done = subprocess.run([*HIVETUNE, "collect", *arguments, "--json"], capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(text) for text in done.stdout.splitlines()], done.stderr


@pytest.mark.slow
def test_the_command_says_what_became_of_every_row(tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(line(1) + "{oops\n" + line(2) + '{"half')
    code, documents, _ = run(str(log))
    assert (code, len(documents)) == (0, 1)
    document = documents[0]
    assert document["schema"] == 1
    counts = {key: document[key] for key in ("delivered", "stored", "duplicates", "refused", "forgotten")}
    assert counts == {"delivered": 3, "stored": 2, "duplicates": 0, "refused": 1, "forgotten": 0}
    assert document["sources"][0]["waiting"] == [f"{log}:4"]
    assert [refused["source"] for refused in document["refused_rows"]] == [f"{log}:2"]
    code, documents, _ = run(str(tmp_path / "none.jsonl"))
    assert (code, documents[0]["error"]["type"]) == (2, "UsageError")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_follower_stops_cleanly_on_a_signal(tmp_path: Path, number: int, code: int) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(line(1))
    command = [*HIVETUNE, "collect", str(log), "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: query("SELECT 1 FROM interactions") == [1], "the first row")
        with open(log, "a", encoding="utf-8") as file:
            file.write(line(2))
        wait_for(lambda: len(query("SELECT 1 FROM interactions")) == 2, "the second row")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    done, stopped = [json.loads(text) for text in out.splitlines()][-2:]
    assert (done["event"], done["stored"], stopped["error"]["type"]) == ("done", 2, "Stopped")
    assert "Traceback" not in err


@pytest.mark.slow
def test_two_commands_into_a_new_home_at_once(tmp_path: Path) -> None:
    """Both create and migrate the database."""
    processes = []
    for number in range(4):
        log = tmp_path / f"{number}.jsonl"
        log.write_text("".join(map(line, range(number * 100, number * 100 + 100))))
        processes.append(subprocess.Popen([*HIVETUNE, "collect", str(log)], stderr=subprocess.PIPE))
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert stored_numbers() == list(range(400))
