"""Forgetting: out of the store and of its bytes, kept out of later collections, and every taint named."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from data.intake.collecting import collect_now, query, total

from hivetune.base.database import open_database
from hivetune.base.disk import home
from hivetune.cli import rows as commands
from hivetune.cli.output import MODE
from hivetune.config import DataConfig, RunConfig
from hivetune.data.forget import ForgetKind, Forgotten, forget
from hivetune.data.prepare.prepare import check, prepare
from hivetune.data.snapshot import ROWS_SCHEMA
from hivetune.errors import UsageError


def write(log: Path, *rows: dict[str, Any]) -> None:
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def said(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": "an answer", **fields}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Five rows of two users in a log, all collected."""
    log = tmp_path / "chat.jsonl"
    write(
        log,
        said("one", user_id="alice", session_id="s1"),
        said("two", user_id="bob", session_id="s2"),
        said("three", user_id="alice", session_id="s3"),
        said("four", user_id="bob", session_id="s3"),
        said("five"),
    )
    collect_now(str(log))
    return log


def forgotten(kind: ForgetKind, value: str) -> Forgotten:
    with closing(open_database()) as database:
        return forget(database, kind, value)


def prompts() -> list[str]:
    return [json.loads(text)["prompt"] for text in query("SELECT row FROM interactions ORDER BY rowid")]


def test_a_home_may_have_the_signs_of_addresses(tmp_path: Path, chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite reads # and ? in the address of a file as the end of its name, and %20 as a space."""
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "my home#1%20?"))
    log = tmp_path / "chat.jsonl"
    write(log, *(said(f"question {n}", user_id=f"user {n % 3}") for n in range(12)))
    collect_now(str(log))
    snapshot = prepare(RunConfig(model="m", data=DataConfig(path="store")), chatml)
    assert {snapshot.info(row).user for row in range(snapshot.num_rows)} == {"user 0", "user 1", "user 2"}
    assert [taint.rows for taint in forgotten("user", "user 1").taints] == [4]
    assert {path.name for path in tmp_path.iterdir()} == {"chat.jsonl", "my home#1%20?"}


@pytest.mark.parametrize(
    ("kind", "value", "left"),
    [
        ("user", "alice", ["two", "four", "five"]),
        ("session", "s3", ["one", "two", "five"]),
        ("row", "LOG:2", ["one", "three", "four", "five"]),
        ("source", "LOG", []),
    ],
)
def test_rows_go_and_stay_away(log: Path, kind: ForgetKind, value: str, left: list[str]) -> None:
    value = value.replace("LOG", str(log))
    assert forgotten(kind, value).interactions == 5 - len(left)
    assert prompts() == left
    with closing(open_database()) as database:
        database.execute("DELETE FROM cursors")  # the same file once more, from its start
    assert total(str(log)) == (0, len(left), 0, 5 - len(left))
    assert prompts() == left
    assert forgotten(kind, value).interactions == 0


def test_a_copy_of_a_forgotten_row_goes_too(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    write(copy, said("five"), said("six"))
    collect_now(str(copy))
    assert forgotten("row", f"{log}:5").interactions == 1  # equal rows are stored once
    again = tmp_path / "again.jsonl"
    write(again, said("five"))
    assert total(str(again)) == (0, 0, 0, 1)


def test_rows_of_a_forgotten_user_in_other_sources_stay_away(log: Path, tmp_path: Path) -> None:
    forgotten("user", "alice")
    other = tmp_path / "other.jsonl"
    write(other, said("seven", userName="alice"), said("eight"))
    assert total(str(other)) == (1, 0, 0, 1)


def test_a_table_by_its_file_or_its_name(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE chats (prompt TEXT, completion TEXT)")
        database.execute("INSERT INTO chats VALUES ('a', 'b')")
    collect_now(f"sqlite:{path}?table=chats")
    assert forgotten("source", f"{path}#chat").interactions == 0
    assert forgotten("source", str(path)).interactions == 1
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO chats VALUES ('c', 'd')")
    assert total(f"sqlite:{path}?table=chats") == (0, 0, 0, 1)


def test_the_name_is_nowhere_left_in_the_store(tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(json.dumps(said("secret-text", user_id="alice-in-full")) + '\n{"user_id": "alice-in-full", oops\n')
    collect_now(str(log))
    result = forgotten("user", "alice-in-full")
    assert (result.interactions, result.refused) == (1, 1)
    for path in (path for path in home().rglob("*") if path.is_file()):
        assert b"alice-in-full" not in path.read_bytes()
        assert b"secret-text" not in path.read_bytes()


def test_a_broken_copy_does_not_come_back_through_refused(tmp_path: Path) -> None:
    """Broken rows have no columns: by their words they are a forgotten user's, by their bytes a forgotten row."""
    log = tmp_path / "chat.jsonl"
    broken = [
        '{"user_id": "alice b", "prompt": "x", oops',
        '{"userId": 77, "prompt":',
        '{"n": "Zo\\u00eb", oops',
        "{oops 4",
    ]
    log.write_text("\n".join(broken) + "\n")
    assert total(str(log)) == (0, 0, 4, 0)
    for user in ("alice b", "77", "Zoë"):
        assert forgotten("user", user).refused == 1
    assert forgotten("row", f"{log}:4").refused == 1
    assert query("SELECT count(*) FROM refused") == [0]
    again = tmp_path / "again.jsonl"
    again.write_text(
        "\n".join([*broken, '{"user": "alice b", "prompt": "y"', '{"user": "alice bb", "prompt": "y"']) + "\n"
    )
    assert total(str(again)) == (0, 0, 1, 5)
    assert [raw for raw in query("SELECT raw FROM refused")] == [b'{"user": "alice bb", "prompt": "y"']
    document = check(DataConfig(path=str(again))).document
    assert (document["set_aside"], document["rejected"]) == ({"forgotten": 5}, {"bad-json": 1})


def test_a_file_is_known_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "chat.jsonl"
    write(log, said("one"), said("two"))
    collect_now(str(log))
    monkeypatch.chdir(tmp_path)
    snapshot(tmp_path / "a", "mine", users=[None], ids=[None])
    with closing(sqlite3.connect(tmp_path / "a" / "rows.sqlite")) as rows, rows:
        rows.execute("UPDATE rows SET source = 'logs/chat.jsonl:4'")
    found = forgotten("source", "./logs/../logs/chat.jsonl")
    assert (found.interactions, [taint.snapshot for taint in found.taints]) == (2, ["mine"])


def test_duplicates_that_were_left_out_taint_a_snapshot_too(tmp_path: Path) -> None:
    snapshot(tmp_path / "a", "mine", users=["bob"], ids=[None])
    pair = {"kind": "near", "source": "f.jsonl:9", "session": None, "user": "alice", "interaction_id": None}
    (tmp_path / "a" / "duplicates.jsonl").write_text(json.dumps(pair) + "\n")
    assert [(taint.snapshot, taint.rows) for taint in forgotten("user", "alice").taints] == [("mine", 1)]


def test_an_unknown_row_is_a_usage_error(log: Path) -> None:
    with pytest.raises(UsageError, match="no stored row has the id or the source nope"):
        forgotten("row", "nope")


def snapshot(folder: Path, name: str, *, users: list[str | None] = (), ids: list[str | None] = ()) -> None:  # type: ignore[assignment]
    """The rows of a snapshot as data prepare writes them, and a run on it."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "rows.sqlite")) as rows, rows:
        rows.executescript(ROWS_SCHEMA)
        for number, (user, identity) in enumerate(zip(users, ids, strict=True)):
            rows.execute(
                "INSERT INTO rows (row, id, interaction_id, source, split, group_id, user, length, trained, messages)"
                " VALUES (?, ?, ?, ?, 'train', ?, ?, 1, 1, '[]')",
                (number, f"content{number}", identity, f"file.jsonl:{number}", number, user),
            )
    with closing(open_database()) as database:
        database.execute("INSERT INTO snapshots VALUES (?, ?, 1)", (name, str(folder)))
        database.execute("INSERT INTO runs VALUES (?, ?, 1, ?)", (f"runs/{name}", name, name))
        database.execute(
            "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, proof, created)"
            " VALUES (?, 1, ?, 'm', '', '', ?, '{}', 1)",
            (name, f"runs/{name}", name),
        )


def test_snapshots_runs_and_releases_are_named(log: Path, tmp_path: Path) -> None:
    ids = query("SELECT id FROM interactions WHERE user = 'alice' ORDER BY rowid")
    snapshot(tmp_path / "a", "by-id", users=[None, None, None], ids=[*ids, None])
    snapshot(tmp_path / "b", "by-user", users=["alice", "bob"], ids=[None, None])
    snapshot(tmp_path / "c", "clean", users=["bob"], ids=[None])
    result = forgotten("user", "alice")
    assert [(taint.snapshot, taint.rows, taint.runs, taint.releases) for taint in result.taints] == [
        ("by-id", 2, (str(home() / "runs/by-id"),), ("by-id@1",)),
        ("by-user", 1, (str(home() / "runs/by-user"),), ("by-user@1",)),
    ]
    (tmp_path / "a" / "rows.sqlite").unlink()
    again = forgotten("user", "alice")  # the ids are gone from the store, the taint is not
    assert {taint.snapshot for taint in again.taints} == {"by-id", "by-user"}
    assert again.unchecked == (str(tmp_path / "a"),)
    source = forgotten("source", "file.jsonl")
    assert {taint.snapshot for taint in source.taints} == {"by-user", "clean"}


def test_the_command(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="several things to forget"):
        commands.forget(user="a", session="b", source=None, row=None)
    monkeypatch.setattr(MODE, "json", True)
    commands.forget(user="alice", session=None, source=None, row=None)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": 1,
        "kind": "user",
        "value": "alice",
        "interactions": 2,
        "refused": 0,
        "snapshots": [],
        "runs": [],
        "releases": [],
        "past_wins": 0,
        "unchecked": [],
    }
    monkeypatch.setattr(MODE, "json", False)
    commands.forget(user="bob", session=None, source=None, row=None)
    assert "2 interactions deleted" in capsys.readouterr().err
