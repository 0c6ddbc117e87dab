"""What the tests of collecting share: rows that can be counted, real Redis, a collector that can be killed."""

import json
import os
import random
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from programs import require_program

from hivetune.base.database import open_database
from hivetune.data.intake.collect import Collected, collect, parse_sources

CHILD = Path(__file__).parent / "collect_child.py"


def row(number: int) -> dict[str, Any]:
    """A row that is like no other one."""
    return {"prompt": f"question {number}", "completion": f"answer {number}", "session_id": f"s{number % 7}"}


def line(number: int) -> str:
    return json.dumps(row(number)) + "\n"


def collect_now(*sources: str) -> Collected:
    """Everything that is there, into the home of this test."""
    return collect(parse_sources(sources), follow=False, stop=threading.Event())


def total(*sources: str) -> tuple[int, int, int, int]:
    """(stored, duplicates, refused, forgotten) of collecting now."""
    tally = collect_now(*sources).total()
    return tally.stored, tally.duplicates, tally.refused, tally.forgotten


def query(sql: str, *values: object) -> list[Any]:
    """Rows of hive.db; of one column: its values."""
    with closing(open_database()) as database:
        rows = database.execute(sql, values).fetchall()
    return [found[0] for found in rows] if rows and len(rows[0]) == 1 else rows


def stored_numbers() -> list[int]:
    """The numbers of all rows made by `row`, with repetitions, sorted."""
    return sorted(int(json.loads(text)["prompt"].split()[1]) for text in query("SELECT row FROM interactions"))


def count_stored() -> int:
    return int(query("SELECT count(*) FROM interactions")[0])


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0, pause_s: float = 0.01) -> None:
    """Until it is true; fails with `what`. Polls: it is other processes that are waited for."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(pause_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A real server on loopback, every command on disk before it answers; may be killed and started again."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None):
        import redis

        self.program = require_program("redis-server", "redis-server")
        if "--cluster-enabled" in arguments and "--cluster-port" not in arguments:
            # Redis takes port + 10000 for its bus, and ends where that is above 65535: one free port in five.
            arguments = (*arguments, "--cluster-port", str(free_port()))
        self.folder, self.arguments = folder, arguments
        self.port = port or free_port()
        self.client = redis.Redis(port=self.port, socket_timeout=10)
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        settings = ["--port", str(self.port), "--dir", str(self.folder), "--save", "", "--bind", "127.0.0.1"]
        settings += ["--appendonly", "yes", "--appendfsync", "always", *self.arguments]
        log = open(self.folder / "redis.log", "ab")  # noqa: SIM115 (the child keeps it)
        self.process = subprocess.Popen([self.program, *settings], stdout=log, stderr=log)
        log.close()
        wait_for(self.answers_or_ended, "redis-server to answer")
        assert self.process.poll() is None, (self.folder / "redis.log").read_text()

    def answers(self) -> bool:
        import redis

        try:
            return bool(self.client.ping())
        except redis.exceptions.RedisError:
            return False

    def answers_or_ended(self) -> bool:
        return self.process.poll() is not None or self.answers()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def add(self, stream: str, *numbers: int) -> None:
        pipe = self.client.pipeline(transaction=False)
        for number in numbers:
            pipe.xadd(stream, {"data": json.dumps(row(number))})
        pipe.execute()

    def close(self) -> None:
        self.client.close()
        self.kill()


class RedisCluster:
    """Three primaries with a replica each, on loopback."""

    def __init__(self, folder: Path):
        import redis.cluster

        self.nodes: list[RedisServer] = []
        self.widow: int | None = None  # port of a primary without replica
        try:
            self._start(folder)
            self.client = redis.cluster.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, protocol=2)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"redis+cluster://{hosts}"

    def _start(self, folder: Path) -> None:
        # A node is given up after half a second; not before it had the time to load.
        settings = ["--cluster-enabled", "yes", "--cluster-node-timeout", "500"]
        buses = [free_port() for _ in range(6)]
        for number, bus in enumerate(buses):
            self.nodes.append(RedisServer(folder / str(number), *settings, "--cluster-port", str(bus)))
        first = self.nodes[0]
        for node, bus in zip(self.nodes, buses, strict=True):
            first.client.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        for number, (low, high) in enumerate(((0, 5460), (5461, 10922), (10923, 16383))):
            self.nodes[number].client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
        wait_for(lambda: all(self._says(node, "cluster_known_nodes:6") for node in self.nodes), "the nodes to meet")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            identity = primary.client.execute_command("CLUSTER MYID").decode()
            wait_for(lambda r=replica, i=identity: self._replicate(r, i), "a replica to know its primary")
        wait_for(lambda: all(self._says(node, "cluster_state:ok") for node in self.nodes), "the cluster to be well")
        wait_for(lambda: all(n.client.info("replication")["connected_slaves"] for n in self.nodes[:3]), "replicas")

    def _replicate(self, replica: RedisServer, primary: str) -> bool:
        import redis

        try:
            return bool(replica.client.execute_command("CLUSTER REPLICATE", primary))
        except redis.exceptions.ResponseError:
            return False

    def _says(self, node: RedisServer, text: str) -> bool:
        answer = node.client.execute_command("CLUSTER INFO")
        known = answer if isinstance(answer, dict) else dict(part.split(":") for part in answer.decode().split())
        name, _, value = text.partition(":")
        return str(known.get(name)) == value

    def add(self, stream: str, *numbers: int) -> None:
        """Until the entries are on the primary and its replica."""
        for number in numbers:
            self.client.xadd(stream, {"data": json.dumps(row(number))})
        holder = self.client.get_node_from_key(stream)
        if holder.port != self.widow:
            self.client.execute_command("WAIT", 1, 2000, target_nodes=holder)

    def kill_primary_of(self, stream: str) -> None:
        """Returns when its replica has taken over."""
        import redis.cluster

        holder = self.client.get_node_from_key(stream)
        victim = next(node for node in self.nodes if node.port == holder.port)
        self.client.execute_command("WAIT", 1, 2000, target_nodes=holder)
        heir = self.nodes[self.nodes.index(victim) + 3]
        victim.kill()
        self.widow = heir.port
        wait_for(lambda: heir.client.info("replication")["role"] == "master", "the replica to take over")
        alive = [node for node in self.nodes if node is not victim]
        wait_for(lambda: all(self._says(node, "cluster_state:ok") for node in alive), "the cluster to be well")
        self.client.close()
        self.client = redis.cluster.RedisCluster(host="127.0.0.1", port=heir.port, protocol=2)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Collector:
    """A following collector in a process of its own, with small batches, that dies when told to."""

    def __init__(self, *sources: str, batch_rows: int = 20):
        self.log = Path(os.environ["HIVETUNE_HOME"]).parent / "collector.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), str(batch_rows), *sources],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Until it begins to collect."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready and self.process.stdout.readline() == "ready\n", self.log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """A clean end."""
        self.process.send_signal(signal.SIGTERM)
        assert self._end() == 0, self.log.read_text()

    def _end(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(timeout=30)


def kill_again_and_again(
    *sources: str, rows: int, kills: int, give: Callable[[list[int]], None], check: Callable[[], None], seed: int
) -> None:
    """Feed `rows` rows while a collector of `sources` is killed `kills` times at random moments.

    Every fourth kill comes at a moment of its start, the others within 10 ms after it stored a random part of what is
    there, so that reading, committing and acknowledging are all met. `give` hands the next rows to the source (half of
    them before the collector starts, half while it runs); `check` holds what must be true after every death. Ends with
    a clean collection of the rest.
    """
    random_ = random.Random(seed)
    numbers = iter(range(rows))
    share = rows // kills
    for kill in range(kills):
        before = count_stored()
        part = list(islice(numbers, share))
        give(part[: share // 2])
        collector = Collector(*sources)
        try:
            collector.wait_ready()
            give(part[share // 2 :])
            if kill % 4 == 0:
                time.sleep(random_.uniform(0, 0.1))
            else:
                wanted = before + random_.randrange(1, share)
                wait_for(lambda wanted=wanted: count_stored() >= wanted, "progress", pause_s=0.001)
                time.sleep(random_.uniform(0, 0.01))
        finally:
            collector.kill()
        check()
    give(list(numbers))
    collect_now(*sources)
    check()


def integrity() -> str:
    with closing(sqlite3.connect(Path(os.environ["HIVETUNE_HOME"]) / "hive.db")) as database:
        return str(database.execute("PRAGMA integrity_check").fetchone()[0])
