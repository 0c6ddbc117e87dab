"""The connection to a Redis server or Cluster: retries, errors in plain words, and required settings."""

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hivetune.base.paths import install_command
from hivetune.errors import MachineNotFit, UsageError

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
# Temporary errors of a server that starts, fails over or is out of memory; all others are final.
PASSING = ("LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "MISCONF", "OOM", "UNBLOCKED", "NOREPLICAS")


@dataclass(frozen=True, slots=True)
class Server:
    """The address. `url` has the password and is never shown; `shown` is for people. `hosts` are a Cluster's."""

    url: str
    shown: str
    cluster: bool
    hosts: tuple[str, ...] = ()


def load_redis() -> Any:
    """Import redis-py. Raise MachineNotFit if it is not installed."""
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.exceptions
        import redis.retry
    except ImportError:
        raise MachineNotFit("Redis sources need redis-py", hint=install_command("redis")) from None
    return redis


def parse_server(url: str, keys: Mapping[str, Any]) -> Server:
    """Return the server of a URL, without our own query parameters. Raise UsageError."""
    parts = urllib.parse.urlsplit(url)
    cluster = parts.scheme.endswith("+cluster")
    scheme = parts.scheme.removesuffix("+cluster")
    query = [pair for pair in urllib.parse.parse_qsl(parts.query, keep_blank_values=True) if pair[0] not in keys]
    credentials, at, hosts = parts.netloc.rpartition("@")
    names = tuple(hosts.split(","))
    if len(names) > 1 and not cluster:
        raise UsageError(f"{parts.scheme}:// takes one host", hint="several nodes: redis+cluster://HOST:PORT,HOST:PORT")
    text = urllib.parse.urlencode(query)
    url = urllib.parse.urlunsplit((scheme, credentials + at + names[0], parts.path, text, ""))
    return Server(url, urllib.parse.urlunsplit((parts.scheme, hosts, parts.path, "", "")), cluster, names)


def connect(server: Server) -> Any:
    """Return a client that tries each command once, since the reader handles failures.

    RESP2 has the same answers in all versions. Raise an error that `is_passing` knows, or UsageError.
    """
    redis = load_redis()
    options = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "protocol": 2,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    }
    try:
        if not server.cluster:
            client = redis.Redis.from_url(server.url, **options)
            client.ping()
            return client
        return _connect_cluster(redis, server, options)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{server.shown}: {error}", hint="redis://[:PASSWORD@]HOST:PORT/DB?stream=NAME") from None


def is_passing(error: BaseException) -> bool:
    """Return whether the same command may work a moment later."""
    wrong = load_redis().exceptions
    if isinstance(error, wrong.AuthenticationError | wrong.AuthorizationError | wrong.NoPermissionError):
        return False
    if isinstance(error, wrong.ResponseError) and str(error).startswith(PASSING):
        return True
    passing = (
        wrong.ConnectionError,
        wrong.TimeoutError,
        wrong.ClusterError,
        wrong.RedisClusterException,
        wrong.ReadOnlyError,
        wrong.TryAgainError,
        wrong.AskError,
        wrong.OutOfMemoryError,
        OSError,
    )
    return isinstance(error, passing)


def explain_redis(error: Exception, server: Server, stream: str) -> Exception:
    """Return a user's error in plain words; any other error as it is."""
    wrong = load_redis().exceptions
    if isinstance(error, wrong.AuthenticationError | wrong.AuthorizationError) or str(error).startswith("NOAUTH"):
        return UsageError(f"{server.shown} refuses the login: {error}", hint="redis://USER:PASSWORD@HOST:PORT/DB")
    if isinstance(error, wrong.NoPermissionError):
        return UsageError(
            f"{server.shown}: {error}",
            hint="the user needs +xrange +xinfo +exists +info +ttl on the stream",
        )
    if str(error).startswith("WRONGTYPE"):
        return UsageError(f"{stream} on {server.shown} is not a stream", hint="writers must use XADD")
    if str(error).lower().startswith("unknown command"):
        return MachineNotFit(f"{server.shown} is too old: {error}", hint="Redis 6.2 or later is needed")
    if isinstance(error, wrong.InvalidResponse):
        return MachineNotFit(f"{server.shown} cannot be used: it does not answer as Redis does", hint="check the port")
    return error


def check_eviction(client: Any, server: Server, stream: str) -> None:
    """Raise UsageError for a server that may evict the stream, with the command to change that."""
    policy = info(client, server, stream, "memory").get("maxmemory_policy", "noeviction")
    if not str(policy).startswith("allkeys-"):
        return
    parts = urllib.parse.urlsplit(server.url)
    if server.cluster:
        node = client.get_node_from_key(stream)
        host = f"-h {node.host} -p {node.port}"
    elif parts.scheme == "unix":
        host = f"-s {parts.path}"
    else:
        host = f"-h {parts.hostname or 'localhost'} -p {parts.port or 6379}"
    raise UsageError(
        f"{server.shown} evicts with {policy}: when its memory is full it may delete unread entries",
        hint=f"redis-cli {host} CONFIG SET maxmemory-policy noeviction && redis-cli {host} CONFIG REWRITE",
    )


def info(client: Any, server: Server, stream: str, section: str) -> dict[str, Any]:
    """Return INFO of the node that has the stream."""
    if not server.cluster:
        return dict(client.info(section))
    return dict(client.info(section, target_nodes=client.get_node_from_key(stream)))


def _connect_cluster(redis: Any, server: Server, options: dict[str, Any]) -> Any:
    """Connect through the first node that answers. Raise the last node's error."""
    parts = urllib.parse.urlsplit(server.url)
    credentials, at, _ = parts.netloc.rpartition("@")
    failure: Exception | None = None
    for host in server.hosts:
        url = urllib.parse.urlunsplit(parts._replace(netloc=credentials + at + host))
        try:
            return redis.cluster.RedisCluster.from_url(url, **options)
        except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            failure = error
    raise failure or ValueError("no host")
