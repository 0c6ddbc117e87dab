"""What a home holds that nothing needs: found by who uses it and by its age, deleted only when asked."""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock, write_json
from hivetune.errors import Busy, UsageError
from hivetune.release.prune import MEASURED_DAYS, delete, find_unused, remove_run

DAY_S = 86_400
BASE = "bases/0123456789abcdef-q8_0"
MADE = {
    "snapshots/aa": "snapshot",
    BASE: "base",
    "scores/bb": "losses",
    "answers/cc": "answers",
    "models/.m.9.tmp": "left over",
    "releases/faq/.1.tmp": "left over",
}


@pytest.fixture
def database(own_home: Path) -> Iterator[sqlite3.Connection]:
    """Of a home with one of each, 40 days old."""
    for name in MADE:
        folder = home() / name
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(1000))
        age(folder, 40)
    with closing(open_database()) as opened:
        opened.execute("INSERT INTO snapshots VALUES ('aa', ?, 0)", ("snapshots/aa",))
        yield opened


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def found(database: sqlite3.Connection) -> dict[str, str]:
    return {str(each.path.relative_to(home())): each.what for each in find_unused(database)}


def add_run(database: sqlite3.Connection, record: str | None) -> Path:
    run = home() / "runs" / "one"
    run.mkdir(parents=True)
    if record is not None:
        (run / "run.json").write_text(record)
    database.execute("INSERT INTO runs VALUES (?, 'one', 0, 'aa')", (str(run),))
    return run


def test_what_nothing_uses_is_found_and_only_looked_at(database: sqlite3.Connection) -> None:
    assert found(database) == MADE
    assert all((home() / name / "file").exists() for name in MADE)


def test_what_is_young_may_be_needed_in_a_moment(database: sqlite3.Connection) -> None:
    for name, what in MADE.items():
        age(home() / name, MEASURED_DAYS - 1 if what in ("losses", "answers") else 0.5)
    assert found(database) == {BASE: "base"}


def test_what_a_release_names_stays(database: sqlite3.Connection) -> None:
    database.execute(
        "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, proof, created)"
        " VALUES ('faq', 1, '/gone', 'm', '0123456789abcdef00', '0', 'aa', '{}', 0)"
    )
    database.execute("INSERT INTO moves VALUES (NULL, 'faq', 1, 'promoted', 0, '', '', 0)")
    assert not {"snapshots/aa", BASE} & found(database).keys()


def test_what_a_run_names_stays_whatever_is_damaged_in_it(database: sqlite3.Connection) -> None:
    """With its snapshot gone, no copy of the damaged file would make the run whole again."""
    run = add_run(database, None)
    assert "snapshots/aa" in found(database)  # a person has deleted the run
    (run / "run.json").write_text("{")
    assert "snapshots/aa" not in found(database)


def test_a_snapshot_that_came_into_use_while_a_person_was_asked_stays(database: sqlite3.Connection) -> None:
    (asked,) = (each for each in find_unused(database) if each.what == "snapshot")
    add_run(database, "{}")
    with pytest.raises(UsageError, match="is now in use"):
        delete(database, asked)
    assert (asked.path / "file").exists()


def test_a_snapshot_outside_of_the_home_is_the_users(database: sqlite3.Connection, tmp_path: Path) -> None:
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(10))
    age(outside, 40)
    database.execute("INSERT INTO snapshots VALUES ('ee', ?, 0)", (str(outside),))
    assert outside not in [each.path for each in find_unused(database)]


def test_deleting_all_of_it_leaves_nothing_to_find(database: sqlite3.Connection) -> None:
    for each in find_unused(database):
        delete(database, each)
        assert not each.path.exists()
    assert find_unused(database) == []
    assert database.execute("SELECT count(*) FROM snapshots").fetchone() == (0,)


def test_what_is_deleted_in_a_copied_home_is_the_copys(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run outside of the home has one folder, which both homes name: `rm` in the copy deleted the original's."""
    original = home()
    inside, outside = original / "runs/inside", tmp_path / "outside"
    for run in (inside, outside):
        run.mkdir(parents=True)
        write_json(run / "run.json", {"schema": 1, "home": str(original)} if run == outside else {"schema": 1})
    with closing(open_database()) as database:
        for path in ("runs/inside", str(outside)):
            database.execute("INSERT INTO runs (path, name, created, snapshot) VALUES (?, 'r', 0, 'aa')", (path,))
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    monkeypatch.setenv("HIVETUNE_HOME", str(copy))
    with closing(open_database()) as database:
        with pytest.raises(UsageError, match="belongs to the home"):
            remove_run(database, outside)
        remove_run(database, copy / "runs/inside")
        assert database.execute("SELECT path FROM runs").fetchall() == [(str(outside),)]
    assert outside.is_dir() and inside.is_dir() and not (copy / "runs/inside").exists()
    monkeypatch.setenv("HIVETUNE_HOME", str(original))
    with closing(open_database()) as database:
        remove_run(database, outside)
    assert not outside.exists()


@pytest.mark.parametrize("work", ["eval", "export", "export-check"])
def test_a_run_is_not_deleted_while_it_is_evaluated_or_exported(own_home: Path, work: str) -> None:
    run = home() / "runs/one"
    run.mkdir(parents=True)
    write_json(run / "run.json", {"schema": 1})
    with closing(open_database()) as database:
        with lock(run / work), pytest.raises(Busy, match=work):
            remove_run(database, run)
        assert run.is_dir()
        remove_run(database, run)
    assert not run.exists()
