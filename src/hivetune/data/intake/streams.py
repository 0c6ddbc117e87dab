"""The reader of Redis streams, of one server or a Cluster, from the entry after the last stored one.

redis-py retries commands, reconnects, and follows a Cluster to its new primaries; `batches` retries until a lost server
is back.
"""

import json
import math
import sqlite3
import time
import urllib.parse
from collections.abc import Mapping
from functools import partial
from typing import Any

from hivetune.data.files.unpack import package
from hivetune.data.intake.interactions import Batch, Delivery, read_cursor
from hivetune.data.intake.reader import Batches, Reader, delivered, parse_options, rows_of_cells
from hivetune.errors import HivetuneError, MachineNotFit, UsageError

SCHEMES = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")
OPTIONS = ("stream", "field")
_BATCH_ROWS = 500
# So long a server that does not answer is asked again: one that restarts loads its data first, and a replica takes over
# only after the timeout of its Cluster.
PATIENCE_S = 60.0
# Whether entries were trimmed is asked so often; it takes two more commands.
CHECK_EVERY_S = 10.0
SOCKET_TIMEOUT_S, CONNECT_TIMEOUT_S = 10.0, 3.0
# Other sources wait meanwhile, since one thread reads all: the pauses of a command are 0.05, 0.1 and 0.2 s.
RETRIES, FIRST_PAUSE_S, LONGEST_PAUSE_S = 3, 0.05, 0.5
BEGINNING = "0-0"


def _address(source: str) -> tuple[str, str, list[str]]:
    """Return the URL for redis-py, the URL for people, and the nodes of a Cluster. Raise UsageError."""
    parts = urllib.parse.urlsplit(source)
    scheme, _, cluster = parts.scheme.partition("+")
    credentials, at, hosts = parts.netloc.rpartition("@")
    nodes = hosts.split(",")
    if len(nodes) > 1 and not cluster:
        raise UsageError(f"{scheme}:// takes one host", hint="for a cluster, use redis+cluster://HOST:PORT,HOST:PORT")
    given = [pair for pair in urllib.parse.parse_qsl(parts.query, keep_blank_values=True) if pair[0] not in OPTIONS]
    place = credentials + at + nodes[0]
    url = urllib.parse.urlunsplit((scheme, place, parts.path, urllib.parse.urlencode(given), ""))
    shown = urllib.parse.urlunsplit((parts.scheme, hosts, parts.path, "", ""))
    return url, shown, nodes if cluster else []


class RedisReader(Reader):
    """The Reader of one stream, of redis://HOST:PORT/DB?stream=NAME. Raise UsageError, MachineNotFit."""

    # The position is ours and not a consumer group's: a row that comes twice is known by its content, so nothing has to
    # be acknowledged, claimed or shared.

    def __init__(self, source: str, *, patience_s: float = PATIENCE_S):
        package("redis", "redis")
        options = parse_options(urllib.parse.urlsplit(source).query, OPTIONS, source, strict=False)
        self._url, self._shown, self._nodes = _address(source)
        if "stream" not in options:
            raise UsageError(f"{self._shown} names no stream", hint="add ?stream=NAME")
        self._stream, self._patience_s = options["stream"], patience_s
        self._rows = partial(rows_of_cells, field=options.get("field"))
        super().__init__(f"{self._shown}#{self._stream}")
        self._client: Any = None
        self._checked_at = -math.inf
        self._after, self._num_read = BEGINNING, 0  # the last entry that was read, and the number of all

    def batches(self, database: sqlite3.Connection, follow: bool) -> Batches:
        """Yield batches of entries. Raise MachineNotFit after `patience_s` seconds without a connection; with `follow`
        only if there has never been one.
        """
        wrong, key = package("redis", "redis").exceptions, f"redis:{self.name}"
        self._after, self._num_read = json.loads(read_cursor(database, key) or json.dumps([BEGINNING, 0]))
        failing_since, was_connected = math.inf, False
        try:
            while True:
                try:
                    entries = self._entries()
                except (wrong.RedisError, wrong.RedisClusterException, OSError) as error:
                    failing_since = min(failing_since, time.monotonic())
                    is_over = time.monotonic() - failing_since >= self._patience_s and not (follow and was_connected)
                    if is_over or not _is_passing(error, wrong):
                        raise self._explained(error, wrong) from error
                    self.retrying = True
                    yield None
                    continue
                failing_since, was_connected, self.retrying = math.inf, True, False
                if not entries:
                    yield None
                    continue
                deliveries = [delivery for entry, fields in entries for delivery in self._deliveries(entry, fields)]
                self._after, self._num_read = entries[-1][0].decode(), self._num_read + len(entries)
                yield Batch(self.name, deliveries, (key, json.dumps([self._after, self._num_read])))
        finally:
            if self._client is not None:
                self._client.close()

    def _entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if self._client is None:
            self._client = self._connect()
        if time.monotonic() - self._checked_at > CHECK_EVERY_S:
            self._check()
            self._checked_at = time.monotonic()
        return list(self._client.xrange(self._stream, min=f"({self._after}", count=_BATCH_ROWS))

    def _connect(self) -> Any:
        # RESP2 has the same answers in all versions of Redis.
        redis = package("redis", "redis")
        pauses = redis.backoff.ExponentialBackoff(cap=LONGEST_PAUSE_S, base=FIRST_PAUSE_S)
        options = {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "protocol": 2,
            "retry": redis.retry.Retry(pauses, RETRIES),
        }
        try:
            if not self._nodes:
                return redis.Redis.from_url(self._url, **options)
            places = [urllib.parse.urlsplit(f"//{node}") for node in self._nodes]
            nodes = [redis.cluster.ClusterNode(place.hostname, place.port or 6379) for place in places]
            return redis.cluster.RedisCluster(url=self._url, startup_nodes=nodes, **options)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{self._shown}: {error}", hint="write it as redis://[:PASSWORD@]HOST:PORT/DB?stream=NAME"
            ) from None

    def _check(self) -> None:
        """Add a note if entries were trimmed from the stream before they were read."""
        stream: dict[str, Any] = {}
        if self._client.exists(self._stream):
            stream = self._client.xinfo_stream(self._stream)
        if stream and _numbers(stream["last-generated-id"]) < _numbers(self._after):
            # It was deleted and made again, with smaller ids than the last that was read.
            self._after, self._num_read = BEGINNING, 0
        first = stream.get("first-entry")
        is_behind = first is None or _numbers(first[0]) > _numbers(self._after)
        # Redis 6.2 does not count what was added.
        lost = stream.get("entries-added", 0) - self._num_read - stream.get("length", 0) if is_behind else 0
        if lost > 0:
            self.note(
                f"{self.name}: {lost} entries were trimmed before they were collected: raise MAXLEN, or collect with"
                " --follow"
            )

    def _explained(self, error: Exception, wrong: Any) -> HivetuneError:
        """Return a lasting error of Redis in plain words."""
        if isinstance(error, wrong.AuthenticationError | wrong.AuthorizationError) or str(error).startswith("NOAUTH"):
            return UsageError(
                f"{self._shown} refuses the login: {error}",
                hint="give user and password: redis://USER:PASSWORD@HOST:PORT/DB",
            )
        if str(error).startswith("WRONGTYPE"):
            return UsageError(f"{self._stream} on {self._shown} is not a stream", hint="writers must use XADD")
        return MachineNotFit(
            f"{self._shown} can't be read: {error}",
            hint="check that Redis (6.2 or later) runs and can be reached, and that its user has +xrange +xinfo +exists"
            " on the stream",
        )

    def _deliveries(self, entry: bytes, fields: Mapping[bytes, bytes]) -> list[Delivery]:
        cells = {name.decode("utf-8", "replace"): value for name, value in fields.items()}
        place, moment = f"{self._stream}:{entry.decode()}", _numbers(entry)[0] / 1000
        return delivered(self._stream, place, cells, self._rows, moment)


def _is_passing(error: Exception, wrong: Any) -> bool:
    """Return whether the same command may succeed a moment later."""
    # As while a server starts, or a replica takes over. A wrong password stays wrong.
    of_clusters = wrong.ClusterError | wrong.RedisClusterException | wrong.AskError | wrong.TryAgainError
    refused = wrong.AuthenticationError | wrong.AuthorizationError
    return isinstance(error, wrong.ConnectionError | wrong.TimeoutError | OSError | of_clusters) and not isinstance(
        error, refused
    )


def _numbers(entry: bytes | str) -> tuple[int, int]:
    milliseconds, _, sequence = (entry if isinstance(entry, str) else entry.decode()).partition("-")
    return int(milliseconds), int(sequence)
