"""Which Redis may keep a cluster's state."""

from pathlib import Path

import pytest
from data.intake.collecting import RedisServer

from hivetune.cluster.node import check_redis, judge_redis, redis_for_ray
from hivetune.errors import MachineNotFit, UsageError


def test_a_server_of_its_own_is_right_and_one_that_evicts_is_not(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        assert check_redis(server.url) == ()
        server.client.config_set("appendonly", "no")
        assert "append-only" in check_redis(server.url)[0]
        server.client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(MachineNotFit, match="evicts with allkeys-lru"):
            check_redis(server.url)
    finally:
        server.close()


def test_a_cluster_of_one_node_is_one_shard(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    try:
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        check_redis(server.url)
    finally:
        server.close()


def test_several_shards_are_refused_with_the_reason() -> None:
    with pytest.raises(MachineNotFit, match="a Redis Cluster of 3 shards: Ray keeps its state in one shard only"):
        judge_redis("redis://here", {"aof_enabled": 1}, 3)


def test_nobody_there() -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:1 does not answer"):
        check_redis("redis://:secret@127.0.0.1:1")


def test_the_password_goes_into_an_option_not_into_the_address() -> None:
    assert redis_for_ray("rediss://me:p%40ss@db:7000") == (
        "rediss://db:7000",
        ["--redis-username", "me", "--redis-password", "p@ss"],
    )
