"""A real Ray on this machine, with several nodes: ranks are placed on them and killed, and the bits stay the same."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import require_module
from train.supervise.tiny_run import SUPERVISOR, Progress, make_run

from hivetune.base.disk import sha256_file
from hivetune.base.journal import read_journal

pytestmark = pytest.mark.proof

require_module("ray", "cluster")
TESTS = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {"batch_size": 8, "lora": {"r": 4, "dropout": 0.1}, "choices": {"pack_tokens": 16}}
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 5  # how long Ray's processes wait for a dead head


class Machines:
    """A head, which is the run's own machine, and nodes; each has one CPU, and each node a home of its own."""

    def __init__(self, folder: Path):
        from ray.cluster_utils import Cluster

        self.folder, self.homes = folder, 0
        os.environ[RECONNECT] = str(RECONNECT_S)
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        self.homes += 1
        own = {"HIVETUNE_HOME": str(self.folder / f"home-{self.homes}")}
        # An address of its own, by which Ray tells machines apart.
        return self.cluster.add_node(num_cpus=1, env_vars=own, node_ip_address=f"127.0.0.{self.homes + 1}")

    def kill(self, node: Any) -> None:
        """End all of a node's processes, as the death of a machine does."""
        for process in psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        os.kill(self.cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    before = dict(os.environ)
    here = Machines(tmp_path)
    yield here
    children = psutil.Process().children(recursive=True)
    here.cluster.shutdown()
    for process in children:
        if process.is_running():
            process.kill()
    os.environ.clear()
    os.environ.update(before)


class Run:
    """A supervised run in a process of its own."""

    def __init__(self, folder: Path, workers: int | str, rows: int = 2000):
        self.folder = folder
        supervision = {"checkpoint_every_s": 1.0, "hang_floor_s": 30}
        config = make_run(folder, rows, workers=workers, supervise=supervision, **SETTINGS)
        (folder / "config.json").write_text(config.model_dump_json())
        environment = {
            **os.environ,
            "HIVETUNE_HOME": str(folder),
            "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)]),
        }
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), ""], env=environment)

    def told(self, name: str, file: str = "metrics") -> list[dict[str, Any]]:
        path = self.folder / f"run/{file}.jsonl"
        return [entry for entry in (read_journal(path) if path.exists() else ()) if entry["event"] == name]

    def until(self, true: Callable[[], object]) -> None:
        progress = Progress(self.folder)
        while not true():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}"
            progress.check()
            time.sleep(0.1)

    def start_of(self, attempt: int) -> int:
        """The number of ranks of this attempt, once it made a step."""
        attempts = lambda: self.told("attempt", "events")  # noqa: E731
        self.until(lambda: len(attempts()) >= attempt)
        pid = attempts()[attempt - 1]["pid"]
        self.until(lambda: any(entry.get("pid") == pid for entry in self.told("started")))
        started = next(entry for entry in self.told("started") if entry.get("pid") == pid)
        self.until(lambda: self.told("step")[-1:] and self.told("step")[-1]["step"] > started["step"] + 1)
        return int(started["ranks"])

    def rank_0(self) -> psutil.Process:
        return psutil.Process(self.told("attempt", "events")[-1]["pid"])

    def adapter_hash(self) -> str:
        progress = Progress(self.folder)
        while self.process.poll() is None:
            progress.check()
            time.sleep(0.1)
        assert self.process.returncode == 0
        return sha256_file(self.folder / "run/adapter_model.safetensors")


def test_two_machines_give_the_bits_of_one_and_a_rank_that_dies_starts_again(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add()
    alone, run = Run(tmp_path / "alone", 1), Run(tmp_path / "two", machines.address)
    assert run.start_of(1) == 2
    next(p for p in psutil.process_iter() if p.status() != "zombie" and p.name().startswith("ray::compute")).kill()
    assert run.start_of(2) == 2
    assert run.adapter_hash() == alone.adapter_hash()
    assert len(list((tmp_path / "home-1/carried").iterdir())) == 2  # the model and the rows


def test_nodes_and_the_head_die_and_the_bits_stay(machines: Machines, tmp_path: Path) -> None:
    node = machines.add()
    alone, run = Run(tmp_path / "alone", 1, 16000), Run(tmp_path / "two", machines.address, 16000)
    assert run.start_of(1) == 2
    machines.kill(node)
    assert run.start_of(2) == 1
    machines.add()
    run.rank_0().kill()
    assert run.start_of(3) == 2
    machines.kill_head()
    assert run.start_of(4) == 1  # it goes on alone
    assert any("on this machine alone" in entry["text"] for entry in run.told("problem"))
    assert run.adapter_hash() == alone.adapter_hash()
