"""Whether a Redis can keep the state of a cluster's head, so that the head may die: asked before Ray is."""

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from hivetune.data.intake.sources.redis_server import connect, explain_redis, load_redis, parse_server
from hivetune.errors import HivetuneError, MachineNotFit, UsageError

DEFAULT_PORT = 6379


def check_redis(url: str) -> tuple[str, ...]:
    """What is worth a warning. Raises MachineNotFit for a Redis that can't keep the state, with the reason; UsageError
    for one that is not there."""
    server = parse_server(url, {})
    try:
        client = connect(server)
        told = dict(client.info())
        shards = _shards(str(client.execute_command("CLUSTER", "INFO"))) if told["cluster_enabled"] else 1
    except HivetuneError:
        raise
    except (load_redis().exceptions.RedisError, OSError) as error:
        explained = explain_redis(error, server, "")
        if isinstance(explained, HivetuneError):
            raise explained from None
        raise UsageError(f"{server.shown} does not answer: {error}", hint="--redis redis://HOST:PORT") from None
    return judge_redis(server.shown, told, shards)


def _shards(told: str) -> int:
    """By the text of CLUSTER INFO."""
    found = re.search(r"cluster_size:(\d+)", told)
    return int(found[1]) if found else 0


def judge_redis(shown: str, told: Mapping[str, Any], shards: int) -> tuple[str, ...]:
    """By the server's INFO and the number of its shards. Raises MachineNotFit."""
    if shards > 1:
        raise MachineNotFit(
            f"{shown} is a Redis Cluster of {shards} shards: Ray keeps its state in one shard only",
            hint="give the cluster a Redis of its own, a single server or one behind Sentinel",
        )
    policy = str(told.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise MachineNotFit(
            f"{shown} evicts with {policy}: when its memory is full it may delete the state of the cluster",
            hint="redis-cli CONFIG SET maxmemory-policy noeviction, or a Redis of its own",
        )
    if not int(told.get("aof_enabled", 0)):
        return (f"{shown} writes no append-only file: after its own restart the cluster has to be started anew",)
    return ()


def redis_words(url: str) -> tuple[str, list[str]]:
    """What Ray is told of it: the address, and options for `ray start`."""
    parts = urllib.parse.urlsplit(url)
    scheme = "rediss://" if parts.scheme == "rediss" else ""
    options = []
    if parts.username:
        options += ["--redis-username", urllib.parse.unquote(parts.username)]
    if parts.password:
        options += ["--redis-password", urllib.parse.unquote(parts.password)]
    return f"{scheme}{parts.hostname}:{parts.port or DEFAULT_PORT}", options
