"""kill -9 at random moments of intake, from each source: every acknowledged row exactly once, none lost."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from collecting import (
    Collector,
    RedisCluster,
    RedisServer,
    collect_now,
    integrity,
    kill_again_and_again,
    line,
    query,
    row,
    stored_numbers,
    wait_for,
)

COUNTS = [
    pytest.param(1_000, 6, id="1000-rows-6-kills", marks=pytest.mark.slow),
    pytest.param(10_000, 50, id="10000-rows-50-kills", marks=pytest.mark.proof),
]
CLUSTER_COUNTS = [
    pytest.param(300, 3, id="300-rows-3-kills", marks=pytest.mark.slow),
    pytest.param(10_000, 50, id="10000-rows-50-kills", marks=pytest.mark.proof),
]
RESTARTS = [
    pytest.param(600, 3, id="600-rows-3-restarts", marks=pytest.mark.slow),
    pytest.param(10_000, 20, id="10000-rows-20-restarts", marks=pytest.mark.proof),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path / "cluster")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_lines_through_rotation(tmp_path: Path, rows: int, kills: int) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(line(-1))
    collect_now(str(log))  # what was rotated away before the first collection is nobody's promise
    rounds = iter(range(10 * kills))

    def give(numbers: list[int]) -> None:
        turn = next(rounds)
        if turn % 5 == 3:
            log.rename(tmp_path / f"chat.jsonl.{turn}")
        elif turn % 5 == 1:
            shutil.copyfile(log, tmp_path / f"chat.jsonl.{turn}")
            log.write_bytes(b"")
        with open(log, "a", encoding="utf-8") as file:
            for number in numbers:
                file.write(line(number))
                if number % 3 == 0:
                    file.flush()  # so that the collector meets half lines

    def check() -> None:
        """Cursors and rows move together."""
        positions = [json.loads(text) for text in query("SELECT position FROM cursors")]
        assert sum(position["line"] for position in positions) == len(stored_numbers())

    kill_again_and_again(str(log), rows=rows, kills=kills, give=give, check=check, seed=1)
    assert stored_numbers() == list(range(-1, rows))
    assert integrity() == "ok"


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_a_table(tmp_path: Path, rows: int, kills: int) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE chats (id INTEGER PRIMARY KEY, question TEXT, answer TEXT)")

    def give(numbers: list[int]) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            said = [(row(number)["prompt"], row(number)["completion"]) for number in numbers]
            database.executemany("INSERT INTO chats (question, answer) VALUES (?, ?)", said)

    def check() -> None:
        """The cursor stands on the last stored row."""
        positions = [json.loads(text)["value"] for text in query("SELECT position FROM cursors")]
        assert max(positions, default=0) == len(stored_numbers())

    source = f"sqlite:{path}?table=chats&map=prompt:question,completion:answer"
    kill_again_and_again(source, rows=rows, kills=kills, give=give, check=check, seed=2)
    assert stored_numbers() == list(range(rows))
    assert integrity() == "ok"


def acknowledged(client: Any, stream: str) -> set[str]:
    """Ids that the group has behind it: delivered, and not pending."""
    groups = client.xinfo_groups(stream)
    if not groups:
        return set()
    last = groups[0]["last-delivered-id"].decode()
    delivered = {entry.decode() for entry, _ in client.xrange(stream, max=last)}
    pending = client.xpending_range(stream, "hivetune", "-", "+", 100_000)
    return delivered - {entry["message_id"].decode() for entry in pending}


def check_stream(client: Any, stream: str) -> None:
    """What was acknowledged is in the store."""
    prefix = f"{stream}:"
    stored = {place.removeprefix(prefix) for place in query("SELECT source FROM interactions") if prefix in place}
    assert acknowledged(client, stream) <= stored


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_a_stream(server: RedisServer, rows: int, kills: int) -> None:
    server.add("chats", 0)
    server.client.xtrim("chats", maxlen=0)  # so that the stream is there for the first check
    kill_again_and_again(
        f"{server.url}?stream=chats",
        rows=rows,
        kills=kills,
        give=lambda numbers: server.add("chats", *numbers),
        check=lambda: check_stream(server.client, "chats"),
        seed=3,
    )
    assert stored_numbers() == list(range(rows))
    assert len(acknowledged(server.client, "chats")) == rows
    assert integrity() == "ok"


@pytest.mark.parametrize(("rows", "restarts"), RESTARTS)
def test_the_server_is_killed_and_comes_back(server: RedisServer, rows: int, restarts: int) -> None:
    """One collector lives through all deaths of the server."""
    collector = Collector(f"{server.url}?stream=chats")
    share = rows // restarts
    try:
        collector.wait_ready()
        for turn in range(restarts):
            server.add("chats", *range(turn * share, (turn + 1) * share))
            server.kill()
            server.start()
        wait_for(lambda: len(query("SELECT 1 FROM interactions")) == share * restarts, "all rows", timeout_s=60)
        check_stream(server.client, "chats")
    finally:
        collector.stop()
    assert stored_numbers() == list(range(share * restarts))
    assert len(acknowledged(server.client, "chats")) == share * restarts


@pytest.mark.parametrize(("rows", "kills"), CLUSTER_COUNTS)
def test_a_cluster(cluster: RedisCluster, rows: int, kills: int) -> None:
    """Three partitions in three slots; the collector is killed again and again, and one primary for good."""
    streams = [f"hive:{{{partition}}}:events" for partition in range(3)]
    rounds = iter(range(10 * kills))

    def give(numbers: list[int]) -> None:
        if next(rounds) == kills:
            cluster.kill_primary_of(streams[0])
        for partition, stream in enumerate(streams):
            cluster.add(stream, *(number for number in numbers if number % 3 == partition))

    def check() -> None:
        for stream in streams:
            if query("SELECT 1 FROM interactions WHERE source LIKE ?", f"{stream}%"):
                check_stream(cluster.client, stream)

    source = f"{cluster.url}?prefix=hive&partitions=3&claim_s=1"
    kill_again_and_again(source, rows=rows, kills=kills, give=give, check=check, seed=4)
    collect_now(source)
    assert stored_numbers() == list(range(rows))
    assert sum(len(acknowledged(cluster.client, stream)) for stream in streams) == rows
    assert integrity() == "ok"
