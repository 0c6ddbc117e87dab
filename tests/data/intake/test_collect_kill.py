"""kill -9 at random moments of intake, from each source: every acknowledged row exactly once, none lost."""

import gzip
import json
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

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
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path / "cluster")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_lines_through_rotation(tmp_path: Path, rows: int, kills: int) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(line(-1))
    collect_now(str(log))
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
        """No row is stored twice."""
        assert len(stored_numbers()) == len(set(stored_numbers()))

    kill_again_and_again(str(log), rows=rows, kills=kills, give=give, check=check, seed=1)
    assert stored_numbers() == list(range(-1, rows))
    assert integrity() == "ok"


class RotatedLog:
    """A log that is written all the time and rotated as `kind` says, as logrotate and its like do it."""

    def __init__(self, folder: Path, kind: str, seed: int):
        folder.mkdir()
        self.path = folder / "chat.jsonl"
        self.rows = 0
        self._kind, self._random = kind, random.Random(seed)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (the writer keeps it)
        self._write(1)
        self._writer = threading.Thread(target=self._run)

    def start(self) -> None:
        self._writer.start()

    def stop(self) -> None:
        self._stop.set()
        self._writer.join()
        self._file.close()

    def rotate(self, turn: int) -> None:
        kind = self._random.choice(ROTATIONS) if self._kind == "any" else self._kind
        if kind == "copytruncate":
            with self._lock:  # what is written between the copy and the cut is lost to everybody
                shutil.copyfile(self.path, self._named(f"-{turn}"))
                os.truncate(self.path, 0)
            return
        if kind == "shift":  # as logrotate: .2 to .3, .1 to .2, and the log to .1
            numbers = sorted(int(path.name.split(".")[2]) for path in self.path.parent.glob("chat.jsonl.*"))
            for number in reversed(numbers):
                for end in ("", ".gz"):
                    if self._named(f".{number}{end}").exists():
                        self._named(f".{number}{end}").rename(self._named(f".{number + 1}{end}"))
        rotated = self._named(".1" if kind == "shift" else f"-{turn}")
        self.path.rename(rotated)
        time.sleep(self._random.uniform(0, 0.02))  # the writer still has the old file
        with self._lock:
            self._file.close()
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        if kind != "rename" and self._random.random() < 0.5:
            with open(rotated, "rb") as plain, gzip.open(f"{rotated}.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            rotated.unlink()

    def _named(self, end: str) -> Path:
        return self.path.with_name(f"{self.path.name}{end}")

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._write(self._random.randrange(1, 8))
            time.sleep(self._random.uniform(0.001, 0.02))

    def _write(self, count: int) -> None:
        for number in range(self.rows, self.rows + count):
            self._file.write(line(number))
            if number % 3 == 0:
                self._file.flush()  # so that the collector meets half lines
        self._file.flush()
        self.rows += count


ROTATIONS = ("rename", "shift", "pack", "copytruncate")
HOSTILE = [
    pytest.param("any", 0, 10, 0.15, id="any-10-rotations", marks=pytest.mark.slow),
    *(
        pytest.param(kind, seed, 50, 0.4, id=f"{kind}-{seed}-50-rotations", marks=pytest.mark.proof)
        for kind, seeds in (("shift", 11), ("any", 10), ("pack", 4), ("copytruncate", 4), ("rename", 4))
        for seed in range(seeds)
    ),
]


@pytest.mark.parametrize(("kind", "seed", "rotations", "every_s"), HOSTILE)
def test_fast_rotation_and_kills_at_once(
    tmp_path: Path, kind: str, seed: int, rotations: int, every_s: float, record_property: Callable[[str, object], None]
) -> None:
    """The log is rotated every 0.4 s while a collector is killed every 0.8 s; a last collection brings the rest."""
    log = RotatedLog(tmp_path / "logs", kind, seed)
    collect_now(str(log.path))
    done, pauses, deaths = threading.Event(), random.Random(seed), 0

    def rotate() -> None:
        for turn in range(rotations):
            time.sleep(every_s)
            log.rotate(turn)
        done.set()

    rotator = threading.Thread(target=rotate)
    log.start()
    rotator.start()
    while not done.is_set():
        collector = Collector(str(log.path))
        try:
            done.wait(pauses.uniform(0, 4 * every_s))
        finally:
            collector.kill()
        deaths += 1
    rotator.join()
    log.stop()
    collect_now(str(log.path))
    record_property("rows", log.rows)
    record_property("kills", deaths)
    assert stored_numbers() == list(range(log.rows))
    assert query("SELECT count(*) FROM refused") == [0]
    assert integrity() == "ok"


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_a_table(tmp_path: Path, rows: int, kills: int) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE chats (id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT)")

    def give(numbers: list[int]) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            said = [(row(number)["prompt"], row(number)["completion"]) for number in numbers]
            database.executemany("INSERT INTO chats (prompt, completion) VALUES (?, ?)", said)

    def check() -> None:
        """The cursor stands on the last stored row."""
        positions = [json.loads(text)[0] for text in query("SELECT position FROM cursors")]
        assert max(positions, default=0) == len(stored_numbers())

    source = f"sqlite:{path}?table=chats"
    kill_again_and_again(source, rows=rows, kills=kills, give=give, check=check, seed=2)
    assert stored_numbers() == list(range(rows))
    assert integrity() == "ok"


def check_stream() -> None:
    """No row is stored twice, and none before the cursor is missing."""
    numbers = stored_numbers()
    assert len(numbers) == len(set(numbers))
    assert sum(json.loads(position)[1] for position in query("SELECT position FROM cursors")) <= len(numbers)


@pytest.mark.parametrize(("rows", "kills"), COUNTS)
def test_a_stream(server: RedisServer, rows: int, kills: int) -> None:
    kill_again_and_again(
        f"{server.url}?stream=chats",
        rows=rows,
        kills=kills,
        give=lambda numbers: server.add("chats", *numbers),
        check=check_stream,
        seed=3,
    )
    assert stored_numbers() == list(range(rows))
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
        check_stream()
    finally:
        collector.stop()
    assert stored_numbers() == list(range(share * restarts))


@pytest.mark.parametrize(("rows", "kills"), CLUSTER_COUNTS)
def test_a_cluster(cluster: RedisCluster, rows: int, kills: int) -> None:
    """Three streams in three slots; the collector is killed again and again, and one primary for good."""
    streams = [f"hive:{{{partition}}}:events" for partition in range(3)]
    rounds = iter(range(10 * kills))

    def give(numbers: list[int]) -> None:
        if next(rounds) == kills:
            cluster.kill_primary_of(streams[0])
        for partition, stream in enumerate(streams):
            cluster.add(stream, *(number for number in numbers if number % 3 == partition))

    sources = [f"{cluster.url}?stream={stream}" for stream in streams]
    kill_again_and_again(*sources, rows=rows, kills=kills, give=give, check=check_stream, seed=4)
    collect_now(*sources)
    assert stored_numbers() == list(range(rows))
    assert integrity() == "ok"
