"""The reader of a Redis stream, with a consumer group: entries are acknowledged after the durable commit."""

import math
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any

from hivetune.data.intake.interactions import Batch, Delivery
from hivetune.data.intake.sources.delivered import (
    DELETED,
    DELETED_HINT,
    Batches,
    divided,
    from_columns,
    rename,
    rows_of_document,
)
from hivetune.data.intake.sources.redis_server import (
    Server,
    check_eviction,
    connect,
    explain_redis,
    info,
    is_passing,
    load_redis,
)
from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit

_BATCH_ROWS = 500
BLOCK_MS = 1000
CLAIM_AFTER_S = 60.0  # after this time entries that a consumer has not acknowledged are claimed
PATIENCE_S = 60.0
MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0
CHECK_EVERY_S = 10.0
WRAPPERS = ("data", "json", "payload", "event", "body")
STORED = "SELECT 1 FROM interactions WHERE source = ? LIMIT 1"
ENTRY_ID = re.compile(rb"\d{1,20}-\d{1,20}")


class RedisReader:
    """The Reader of one stream, or of one partition in a Cluster.

    `consumer` must be the same after a restart, so that its unacknowledged entries return at once. `field` has the row
    as JSON; without it see `entry_rows`.
    """

    def __init__(
        self,
        server: Server,
        stream: str,
        *,
        group: str,
        consumer: str,
        field: str | None = None,
        column_map: Mapping[str, str] | None = None,
        claim_after_s: float = CLAIM_AFTER_S,
        patience_s: float = PATIENCE_S,
    ):
        self.name = f"{server.shown}#{stream}"
        self.poll_s = 0.0  # XREADGROUP waits on the server
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self._server, self._stream, self._group, self._consumer = server, stream, group, consumer
        self._field, self._map = field, dict(column_map or {})
        self._claim_after_s, self._patience_s = claim_after_s, patience_s
        self._client: Any = None
        self._database: sqlite3.Connection
        self._unacknowledged: list[bytes] = []

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        """Yield batches. A connection that breaks is made again, with growing pauses.

        Raise MachineNotFit after `patience_s` without a connection, with `follow` only if there never was one.
        """
        self._database = database
        redis = load_redis()
        delay_s, failing_since, was_connected = MIN_DELAY_S, math.inf, False
        while not stop.is_set():
            try:
                with closing(connect(self._server)) as self._client:
                    self._join_group()
                    was_connected = True
                    for batch in self._entries(follow, stop):
                        yield batch
                        if self._unacknowledged:  # after a failure they stay pending, come again, and are recognised
                            self._client.xack(self._stream, self._group, *self._unacknowledged)
                        if stop.is_set():
                            return
                        delay_s, failing_since = MIN_DELAY_S, math.inf
            except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
                if not is_passing(error):
                    raise explain_redis(error, self._server, self._stream) from error
                failing_since = min(failing_since, time.monotonic())
                if time.monotonic() - failing_since > self._patience_s and not (follow and was_connected):
                    raise MachineNotFit(
                        f"{self._server.shown} cannot be used: {error}", hint="is the server running and reachable?"
                    ) from error
            stop.wait(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _join_group(self) -> None:
        """Make the group if it is not there, and check the server's settings."""
        if self._server.cluster:
            # Any node of the Cluster can replace the one in the URL.
            nodes = [f"{node.host}:{node.port}" for node in self._client.get_nodes()]
            self._server = replace(self._server, hosts=tuple(dict.fromkeys((*self._server.hosts, *nodes))))
        check_eviction(self._client, self._server, self._stream)
        try:
            self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except load_redis().exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._check_stream()

    def _entries(self, follow: bool, stop: threading.Event) -> Iterator[Batch | None]:
        """Yield own entries from before a crash first, then those of dead consumers and new ones."""
        while batch := self._batch(self._read_group("0", None)):
            yield batch
        claimed_at, checked_at = -math.inf, time.monotonic()
        while True:
            if time.monotonic() - claimed_at > self._claim_after_s:
                yield from self._claimed(stop)
                claimed_at = time.monotonic()
            if time.monotonic() - checked_at > CHECK_EVERY_S:
                self._check_stream()
                checked_at = time.monotonic()
            batch = self._batch(self._read_group(">", BLOCK_MS if follow else None))
            if batch is None and not follow:
                pending = self._client.xpending(self._stream, self._group)
                if pending and pending["pending"]:
                    self._note(
                        f"{pending['pending']} entries are with other consumers; they are taken over when these have"
                        f" been silent for {self._claim_after_s:.0f} s"
                    )
            yield batch

    def _read_group(self, after: str, block_ms: int | None) -> list[Any]:
        answer = self._client.xreadgroup(
            self._group, self._consumer, {self._stream: after}, count=_BATCH_ROWS, block=block_ms
        )
        return answer[0][1] if answer else []

    def _claimed(self, stop: threading.Event) -> Iterator[Batch]:
        """Take over the entries that other consumers have had for too long, and yield them."""
        idle_ms, start = int(self._claim_after_s * 1000), b"0-0"
        while not stop.is_set():
            start, entries, *deleted = self._client.xautoclaim(
                self._stream, self._group, self._consumer, idle_ms, start, count=_BATCH_ROWS
            )
            # Redis 7 lists deleted entries; 6.2 returns them without fields.
            batch = self._batch([*entries, *((entry, None) for entry in chain.from_iterable(deleted))])
            if batch:
                yield batch
            if start == b"0-0":
                return

    def _batch(self, entries: list[Any]) -> Batch | None:
        deliveries: list[Delivery] = []
        self._unacknowledged = []
        for entry, fields in entries:
            if entry is None:
                continue  # Redis 6.2 does not return the id of a deleted entry
            if not isinstance(entry, bytes) or not ENTRY_ID.fullmatch(entry):
                raise MachineNotFit(f"{self._server.shown} answers {entry!r} where a stream id should be")
            source = f"{self._stream}:{entry.decode()}"
            self._unacknowledged.append(entry)
            try:
                rows = [rename(row, self._map) for row in entry_rows(fields, self._field)] if fields else []
            except RowRefused as refused:
                deliveries.append(Delivery(self._stream, source, refused, raw=repr(fields).encode()))
                continue
            moment = int(entry.partition(b"-")[0]) / 1000
            deliveries += [Delivery(self._stream, source, row, time=moment) for row in rows]
            # A deleted entry may have been stored before a crash prevented its acknowledgement.
            if not rows and self._database.execute(STORED, (source,)).fetchone() is None:
                deliveries.append(Delivery(self._stream, source, RowRefused(DELETED, DELETED_HINT)))
        if not self._unacknowledged:
            return None
        return Batch(self.name, deliveries)

    def _check_stream(self) -> None:
        """Note settings of the server that may lose entries: no persistence, an expiry, trimming."""
        if not info(self._client, self._server, self._stream, "persistence").get("aof_enabled"):
            self._note("appendonly is off: a server crash loses entries that were not collected yet")
        if self._client.ttl(self._stream) >= 0:
            self._note("the stream expires (TTL): entries that are not collected by then are lost")
        stream = self._client.xinfo_stream(self._stream)
        groups = {group["name"]: group for group in self._client.xinfo_groups(self._stream)}
        group = groups.get(self._group.encode(), {})
        lag, first = group.get("lag"), stream.get("first-entry")
        if lag is None or (first and _numbers(first[0]) <= _numbers(group["last-delivered-id"])):
            return
        lost = lag - stream["length"]
        if lost > 0:
            self._note(f"{lost} entries were trimmed from the stream before they were collected: {DELETED_HINT}")

    def _note(self, text: str) -> None:
        note = f"{self.name}: {text}"
        if note not in self.notes:
            self.notes.append(note)


def entry_rows(fields: Mapping[bytes, bytes], field: str | None) -> list[dict[str, Any]]:
    """Return the rows of a stream entry, mostly one. Raise RowRefused.

    They are the JSON of `field`, else of one of WRAPPERS with the other fields, else the fields themselves.
    """
    if field is not None:
        if field.encode() not in fields:
            raise RowRefused("bad-json", f"the entry has no field {field}: check field= in the source")
        return rows_of_document(fields[field.encode()])
    row = from_columns({name.decode("utf-8", "replace"): value for name, value in fields.items()})
    for wrapper in WRAPPERS:
        if isinstance(row.get(wrapper), dict):
            inner = row.pop(wrapper)
            return divided({**row, **inner})
    if len(row) == 1 and next(iter(row)) in WRAPPERS:
        return rows_of_document(next(iter(fields.values())))
    return divided(row)


def _numbers(entry: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition(b"-")
    return int(milliseconds), int(sequence)
