"""A sweep on two machines of a real cluster, real runs on each, one machine killed on the way: the same adapters."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_families import write_model
from programs import require_module

from hivetune.base.disk import sha256_file
from hivetune.base.journal import read_journal
from hivetune.cluster.node import HOME_MARK, end_node, mark_of_home
from hivetune.machine.cluster import DEVICE, Membership, make_token, ray_environment, write_membership
from hivetune.run.folder import ADAPTER, EVENTS, METRICS

require_module("ray", "cluster")
OVER = ("--over", "learning_rate=1e-3,2e-3")
CONFIG = """
model: model
data: {path: rows.jsonl, near_duplicates: 0, validation: 0.2}
batch_size: 4
max_steps: 600
epochs: 150
device: cpu
dtype: float32
validate_every: 300
patience: null
eval: {prompts: 2}
"""
# The same number on both sides: it decides how some products are rounded.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Machines:
    """Nodes of `ray.cluster_utils` on this machine, each with a home of its own; the head offers no device."""

    def __init__(self, folder: Path):
        make_token()
        # The mark by which `end_node` finds all of it, whatever became of it.
        os.environ.update({**ray_environment("elsewhere:1"), **ONE_THREAD, HOME_MARK: mark_of_home()})
        from ray._raylet import AuthenticationTokenLoader
        from ray.cluster_utils import Cluster

        AuthenticationTokenLoader.instance().reset_cache()  # a process keeps the first token that it reads
        self.folder = folder
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.address = str(self.cluster.address)
        self.nodes = [self._add(folder / name) for name in ("one", "two")]

    def _add(self, home: Path) -> Any:
        before = os.environ["HIVETUNE_HOME"]
        os.environ["HIVETUNE_HOME"] = str(home)
        try:
            write_membership(Membership(self.address, False, sys.executable, ("cpu",)))
        finally:
            os.environ["HIVETUNE_HOME"] = before
        return self.cluster.add_node(num_cpus=0, resources={DEVICE: 1}, env_vars={"HIVETUNE_HOME": str(home)})


@pytest.fixture
def machines(tmp_path: Path, own_home: Path) -> Iterator[Machines]:
    before = dict(os.environ)
    try:
        here = Machines(tmp_path)
        yield here
        here.cluster.shutdown()
    finally:
        end_node()
        os.environ.clear()
        os.environ.update(before)


def sweep(folder: Path, home: Path, *options: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, **ONE_THREAD, "HIVETUNE_HOME": str(home)}
    command = [sys.executable, "-m", "hivetune", "sweep", "mine.yaml", *OVER, *options, "--json"]
    with open(folder / f"{home.name}.log", "w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def ended(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=500)
    assert process.returncode in (0, 6), out
    document: dict[str, Any] = json.loads(out)
    return document


def adapters(document: dict[str, Any]) -> dict[str, str]:
    return {line["settings"][0]: sha256_file(Path(line["run"]) / ADAPTER) for line in document["runs"]}


def told(run: Path, name: str, journal: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(run / journal) if entry["event"] == name]


@pytest.mark.proof
def test_two_runs_on_two_machines_one_is_killed_and_the_adapters_are_the_same(
    machines: Machines, tmp_path: Path, own_home: Path, record_property: Callable[[str, object], None]
) -> None:
    write_model(tmp_path / "model", "llama")
    rows = [{"prompt": f"What comes after {i}?", "completion": f"It is {i + 1}."} for i in range(150)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(CONFIG)
    away = sweep(tmp_path, own_home, "--on", machines.address)

    def steps() -> list[int]:
        return [len(told(run, "step", METRICS)) for run in sorted((own_home / "runs").glob("[!.]*"))]

    deadline = time.monotonic() + 240
    while len(steps()) < 2 or min(steps()) < 5:
        assert away.poll() is None and time.monotonic() < deadline, (tmp_path / f"{own_home.name}.log").read_text()
        time.sleep(0.2)
    machines.cluster.remove_node(machines.nodes[1], allow_graceful=False)
    document = ended(away)
    alone = ended(sweep(tmp_path, tmp_path / "alone"))
    record_property("runs", len(document["runs"]))
    starts = [len(told(Path(line["run"]), "supervisor_started", EVENTS)) for line in document["runs"]]
    record_property("starts of a run's supervisor", sorted(starts))
    cluster, here = adapters(document), adapters(alone)
    record_property("runs whose adapters differ", sum(cluster[key] != here[key] for key in here))
    assert cluster == here
    logs = [(Path(line["run"]) / "supervisor.log").read_text() for line in document["runs"]]
    assert any("is lost" in log for log in logs)
    assert not list((own_home / "runs").glob(".*.tmp"))
