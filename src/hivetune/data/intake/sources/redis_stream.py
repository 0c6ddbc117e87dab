"""The reader of a Redis stream, from the entry behind the last one that was stored."""

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.intake.sources.delivered import Batches, Reader, divided, from_columns, rename, rows_of_document
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
PATIENCE_S = 60.0
MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0
CHECK_EVERY_S = 10.0
WRAPPERS = ("data", "json", "payload", "event", "body")
ENTRY_ID = re.compile(rb"\d{1,20}-\d{1,20}")
BEGINNING = "0-0"


class RedisReader(Reader):
    """The Reader of one stream, or of one partition in a Cluster. `field` has the row as JSON; without it see
    `entry_rows`.

    The position is ours and not a consumer group's: a row that comes twice is known by its content, so nothing has to
    be acknowledged, claimed or shared.
    """

    def __init__(
        self,
        server: Server,
        stream: str,
        *,
        field: str | None = None,
        column_map: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ):
        super().__init__(f"{server.shown}#{stream}")
        self._server, self._stream, self._field, self._map = server, stream, field, dict(column_map or {})
        self._patience_s = patience_s
        self._client: Any = None
        self._checked_at = -math.inf
        self._after, self._num_read = BEGINNING, 0  # the last entry that was read, and the number of all

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        """Yield batches. A connection that breaks is made again, with growing pauses.

        Raise MachineNotFit after `patience_s` without a connection, with `follow` only if there never was one.
        """
        redis, key = load_redis(), f"redis:{self.name}"
        self._after, self._num_read = json.loads(read_cursor(database, key) or json.dumps([BEGINNING, 0]))
        delay_s, failing_since, was_connected = MIN_DELAY_S, math.inf, False
        try:
            while True:
                try:
                    entries = self._entries()
                except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
                    if not is_passing(error):
                        raise explain_redis(error, self._server, self._stream) from error
                    self._close()
                    self.retrying = True
                    failing_since = min(failing_since, time.monotonic())
                    if time.monotonic() - failing_since > self._patience_s and not (follow and was_connected):
                        raise MachineNotFit(
                            f"{self._server.shown} cannot be used: {error}", hint="is the server running and reachable?"
                        ) from error
                    again_at = time.monotonic() + delay_s
                    while time.monotonic() < again_at:
                        yield None
                    delay_s = min(2 * delay_s, MAX_DELAY_S)
                    continue
                delay_s, failing_since, was_connected, self.retrying = MIN_DELAY_S, math.inf, True, False
                if not entries:
                    yield None
                    continue
                deliveries = [delivery for entry, fields in entries for delivery in self._deliveries(entry, fields)]
                self._after, self._num_read = entries[-1][0].decode(), self._num_read + len(entries)
                yield Batch(self.name, deliveries, Cursor(key, json.dumps([self._after, self._num_read])))
        finally:
            self._close()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the next entries of the stream."""
        if self._client is None:
            self._client = connect(self._server)
            self._checked_at = -math.inf
            if self._server.cluster:  # any node of the Cluster can replace the one in the URL
                nodes = [f"{node.host}:{node.port}" for node in self._client.get_nodes()]
                self._server = replace(self._server, hosts=tuple(dict.fromkeys((*self._server.hosts, *nodes))))
        if time.monotonic() - self._checked_at > CHECK_EVERY_S:
            self._check()
            self._checked_at = time.monotonic()
        return list(self._client.xrange(self._stream, min=f"({self._after}", count=_BATCH_ROWS))

    def _check(self) -> None:
        """Note settings of the server that may lose entries: no persistence, an expiry, trimming. A stream that was
        made again is read from its beginning. Raise UsageError for a server that evicts.
        """
        check_eviction(self._client, self._server, self._stream)
        if not info(self._client, self._server, self._stream, "persistence").get("aof_enabled"):
            self.note(f"{self.name}: appendonly is off: a server crash loses entries that were not collected yet")
        if self._client.ttl(self._stream) >= 0:
            self.note(f"{self.name}: the stream expires (TTL): entries that are not collected by then are lost")
        if not self._client.exists(self._stream):
            return
        stream = self._client.xinfo_stream(self._stream)
        if _numbers(stream["last-generated-id"]) < _numbers(self._after):
            self._after, self._num_read = BEGINNING, 0
        first = stream.get("first-entry")
        is_behind = first is None or _numbers(first[0]) > _numbers(self._after)
        lost = stream.get("entries-added", 0) - self._num_read - stream["length"]  # Redis 6.2 does not count them
        if is_behind and lost > 0:
            self.note(
                f"{self.name}: {lost} entries were trimmed from the stream before they were collected: raise MAXLEN,"
                " or collect with --follow"
            )

    def _deliveries(self, entry: bytes, fields: Mapping[bytes, bytes]) -> list[Delivery]:
        if not isinstance(entry, bytes) or not ENTRY_ID.fullmatch(entry):
            raise MachineNotFit(f"{self._server.shown} answers {entry!r} where a stream id should be")
        place = f"{self._stream}:{entry.decode()}"
        try:
            rows = [rename(row, self._map) for row in entry_rows(fields, self._field)]
        except RowRefused as refused:
            return [Delivery(self._stream, place, refused, raw=repr(fields).encode())]
        moment = int(entry.partition(b"-")[0]) / 1000
        return [Delivery(self._stream, place, row, time=moment) for row in rows]


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


def _numbers(entry: bytes | str) -> tuple[int, int]:
    milliseconds, _, sequence = (entry if isinstance(entry, str) else entry.decode()).partition("-")
    return int(milliseconds), int(sequence)
