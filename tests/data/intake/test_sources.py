"""What every kind of source keeps: each row once, after deaths too, and what is no row aside with its place."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from collecting import collect_now, line, query, row, stored_numbers, total

from hivetune.base.database import open_database
from hivetune.data.intake.collect import parse_sources
from hivetune.data.intake.interactions import commit_batch
from hivetune.data.intake.streams import RedisReader
from hivetune.errors import UsageError


class Source(NamedTuple):
    """A source as the command names it, how it gets rows and something that is none, and the place of its first row."""

    name: str
    give: Callable[..., None]
    spoil: Callable[[], None]
    place: str


def log_of(path: Path) -> Source:
    path.touch()

    def write(more: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(more)

    return Source(str(path), lambda *numbers: write("".join(map(line, numbers))), lambda: write("{oops\n"), f"{path}:1")


def table_of(folder: Path, options: str, *, rowid: str = "") -> Source:
    path = folder / "app.db"
    keys = {"": "id INTEGER PRIMARY KEY", " WITHOUT ROWID": "id TEXT PRIMARY KEY"}[rowid]
    with closing(sqlite3.connect(path)) as app, app:
        app.execute(f"CREATE TABLE chats ({keys}, prompt TEXT, completion TEXT, at REAL){rowid}")
        app.execute("CREATE VIEW good AS SELECT prompt, completion, at FROM chats")

    def insert(identity: object, prompt: object, at: float) -> None:
        with closing(sqlite3.connect(path)) as app, app:
            app.execute("INSERT INTO chats VALUES (?, ?, 'answer', ?)", (identity, prompt, at))

    def give(*numbers: int) -> None:
        for number in numbers:
            insert(f"{number:04}" if rowid else None, row(number)["prompt"], float(number))

    name = options.partition("&")[0].removeprefix("table=")
    first = {"table=chats": "1", "table=good&cursor=at": "1.0", "table=chats&cursor=id": "0001"}.get(options, "1")
    spoil = lambda: insert("0001x" if rowid else None, b"\xff\xfe", 1.5)  # noqa: E731
    return Source(f"sqlite:{path}?{options}", give, spoil, f"{path}#{name}:{first}")


def stream_of(request: pytest.FixtureRequest) -> Source:
    server = request.getfixturevalue("server")
    server.client.xadd("chats", {"data": json.dumps(row(1))}, id="1767323045000-7")

    def give(*numbers: int) -> None:
        server.add("chats", *(number for number in numbers if number != 1))

    return Source(
        f"{server.url}?stream=chats",
        give,
        lambda: server.client.xadd("chats", {"data": "{oops"}) and None,
        "chats:1767323045000-7",
    )


SOURCES: dict[str, Callable[[Path, pytest.FixtureRequest], Source]] = {
    "log": lambda folder, _: log_of(folder / "chat.jsonl"),
    "table": lambda folder, _: table_of(folder, "table=chats"),
    "table-by-cursor": lambda folder, _: table_of(folder, "table=chats&cursor=at"),
    "view": lambda folder, _: table_of(folder, "table=good&cursor=at"),
    "table-without-rowid": lambda folder, _: table_of(folder, "table=chats&cursor=id", rowid=" WITHOUT ROWID"),
    "stream": lambda _, request: stream_of(request),
}


@pytest.fixture(params=[pytest.param(one, marks=[pytest.mark.slow] if one == "stream" else []) for one in SOURCES])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return SOURCES[request.param](tmp_path, request)


def test_only_what_is_new_is_stored(source: Source) -> None:
    source.give(*range(1, 11))
    assert total(source.name) == (10, 0, 0, 0)
    assert total(source.name) == (0, 0, 0, 0)
    source.give(11)
    assert total(source.name)[0] == 1
    assert stored_numbers() == list(range(1, 12))
    assert query("SELECT source FROM interactions ORDER BY rowid LIMIT 1") == [source.place]


def test_what_was_not_stored_comes_again(source: Source) -> None:
    source.give(*range(1, 11))
    with closing(open_database()) as database:
        for _ in range(2):  # dies before its batch is stored; or another collector reads the same
            with closing(parse_sources([source.name])[0].batches(database, False)) as batches:
                batch = next(batches)
                assert batch and len(batch.deliveries) == 10
        tallies = [commit_batch(database, batch) for _ in range(2)]
    assert [(tally.stored, tally.duplicates) for tally in tallies] == [(10, 0), (0, 10)]
    assert total(source.name)[::2] == (0, 0)
    assert stored_numbers() == list(range(1, 11))


def test_what_is_no_row_is_kept_aside(source: Source) -> None:
    source.give(1)
    source.spoil()
    source.give(2)
    collected = collect_now(source.name)
    assert (collected.total().stored, collected.total().refused) == (2, 1)
    assert query("SELECT stored, refused FROM intake") == [(2, 1)]
    [(place, reason)] = query("SELECT source, reason FROM refused")
    assert place.startswith(source.place.rpartition(":")[0]) and collected.total().reasons == {reason: 1}
    assert total(source.name) == (0, 0, 0, 0)
    assert stored_numbers() == [1, 2]


APP = "sqlite:{folder}/app.db?"
SLIPS = {
    "{folder}/nothing.jsonl": "does not exist",
    "{folder}/rows.csv": r"rows\.csv is a complete file, and is not collected",
    "-": "standard input is not collected",
    "sqlite:/nowhere/app.db?table=x": "does not exist",
    f"{APP}": "names no table",
    f"{APP}table=chat": "has no table chat",
    f"{APP}table=chats&field=questions": "has no column questions",
    f"{APP}table=chats&cursor=att": "has no column att",
    f"{APP}table=chats&tables=x": "unknown option tables",
    f"{APP}table=good": "has no rowid",
    "sqlite:{folder}/no.db?table=chats": "not a database",
    "redis://h/0": "names no stream",
    "redis://h/0?streem=a": "unknown option streem",
    "redis://a,b/0?stream=a": "takes one host",
    "kafka://h/t": "kafka:// are unknown",
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_explained(name: str, tmp_path: Path) -> None:
    table_of(tmp_path, "table=chats")
    (tmp_path / "no.db").write_text("no database, but long enough to have a header of one hundred bytes" * 3)
    with pytest.raises(UsageError, match=SLIPS[name]):
        collect_now(name.format(folder=tmp_path))


def test_a_source_that_is_named_twice_is_a_slip(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="named twice"):
        parse_sources([str(tmp_path), str(tmp_path)])


def test_a_password_is_never_shown() -> None:
    for url in ("redis://:secret@host:1/0?stream=s", "redis+cluster://user:secret@a:1,b:2?stream=s"):
        assert "secret" not in RedisReader(url).name
