"""A Redis Cluster of several shards can't keep what a cluster of machines needs kept: told where Ray is installed."""

from dataclasses import replace
from pathlib import Path

import pytest
from machines import Fake, seen

from hivetune.machine.doctor.findings import judge_machine


@pytest.mark.parametrize(
    ("packages", "shards", "told"), [({"ray": "2.60.0"}, 3, True), ({"ray": "2.60.0"}, 1, False), ({}, 3, False)]
)
def test_several_shards_are_told_with_the_reason(
    packages: dict[str, str], shards: int, told: bool, tmp_path: Path
) -> None:
    look = seen(Fake(packages=packages), tmp_path)
    judged = judge_machine(replace(look, host=replace(look.host, redis_shards=shards)))
    found = [finding for finding in judged.findings if finding.id == "redis-cluster"]
    assert bool(found) == told
    assert not found or ("one shard only" in found[0].says and "hivetune cluster up --redis" in found[0].mend)
