"""A real cluster of Ray on this machine: workers are placed, watched and placed again, and the bits stay the same."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data.intake.collecting import RedisServer, free_port
from programs import require_module
from safetensors.torch import load_file
from train.supervise.paced_worker import HURRY
from train.supervise.tiny_run import SUPERVISOR, Progress, make_run

from hivetune.base.disk import home, sha256_file
from hivetune.base.journal import read_journal
from hivetune.cluster.node import HOME_MARK, Joining, end_node, mark_of_home, start_node
from hivetune.errors import Busy, MachineNotFit
from hivetune.machine.cluster import (
    DEVICE,
    Membership,
    make_token,
    ray_environment,
    token_path,
    write_membership,
)
from hivetune.process.cluster import ask_cluster

require_module("ray", "cluster")
TESTS = Path(__file__).parents[1]
PACED = str(TESTS / "train" / "supervise" / "paced_worker.py")
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "lora": {"r": 4, "dropout": 0.1},
    "choices": {"pack_tokens": 16, "products": "torch"},
}


@pytest.mark.slow
def test_a_worker_is_placed_and_its_end_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    try:
        membership, _ = start_node(Joining(address, None, "cpu,cpu", None, None))
        assert list(membership.devices) == ["cpu", "cpu"]
        with pytest.raises(Busy):
            start_node(Joining("127.0.0.1", None, "auto", None, None))
        _compute_and_kill(address, tmp_path)
        token_path().write_text("0" * 64)
        with pytest.raises(MachineNotFit, match="does not know this machine's token"):
            ask_cluster(address)
        assert end_node() > 2
    finally:
        end_node()
    with pytest.raises(MachineNotFit, match="does not answer"):
        ask_cluster(address)


def _compute_and_kill(address: str, folder: Path) -> None:
    """A run with one worker of the cluster beside its own, which has the other device. It dies while it has packs."""
    rows, own = 500, home()
    alone = begin(folder / "alone", rows, 1, "", own)
    done(alone, folder / "alone")
    run = begin(folder / "beside", rows, address, PACED, own)
    joined_or_ended(run, folder / "beside", 1)
    (joined,) = told(folder / "beside", "worker_joined")
    assert joined["worker"] == 1 and joined["host"]
    before, progress = len(told(folder / "beside", "step")), Progress(folder / "beside")
    while run.poll() is None and len(told(folder / "beside", "step")) < before + 2:
        progress.check()
        time.sleep(0.05)
    os.kill(joined["pid"], signal.SIGKILL)
    joined_or_ended(run, folder / "beside", 2)
    (own / HURRY).touch()
    done(run, folder / "beside")
    (lost,) = told(folder / "beside", "worker_lost")
    assert lost["packs"], "it had none, so nothing was placed again"
    computed = told(folder / "beside", "packs_computed")[-1]["workers"]
    assert computed["0"] > 0 and computed["1"] > 0
    hashes = {sha256_file(each / "run/adapter_model.safetensors") for each in (folder / "alone", folder / "beside")}
    assert len(hashes) == 1 and not told(folder / "beside", "worker_wrong")


class Machines:
    """A head and nodes of `ray.cluster_utils`; each node with a home of its own, as a machine has."""

    def __init__(self, folder: Path, redis: str):
        make_token()
        # The mark by which `close` finds all of it, whatever became of it.
        os.environ.update({**ray_environment("elsewhere:1"), "RAY_REDIS_ADDRESS": redis, HOME_MARK: mark_of_home()})
        from ray._raylet import AuthenticationTokenLoader
        from ray.cluster_utils import Cluster

        AuthenticationTokenLoader.instance().reset_cache()  # a process keeps the first token that it reads
        self.folder, self.homes = folder, 0
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, python: str = sys.executable) -> Any:
        self.homes += 1
        own = self.folder / f"home-{self.homes}"
        before = os.environ["HIVETUNE_HOME"]
        os.environ["HIVETUNE_HOME"] = str(own)
        try:
            write_membership(Membership(self.address, False, python, ("cpu",)))
            return self.cluster.add_node(num_cpus=0, resources={DEVICE: 1}, env_vars={"HIVETUNE_HOME": str(own)})
        finally:
            os.environ["HIVETUNE_HOME"] = before

    def kill(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        head = self.cluster.head_node
        os.kill(head.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
        head.kill_gcs_server(check_alive=False)

    def start_head(self) -> None:
        self.cluster.head_node.start_gcs_server()


def joined_or_ended(run: "subprocess.Popen[bytes]", folder: Path, count: int) -> None:
    progress = Progress(folder)
    while len(told(folder, "worker_joined")) < count:
        assert run.poll() is None, f"the run ended with {run.returncode} before {count} workers joined"
        progress.check()
        time.sleep(0.1)


def done(run: "subprocess.Popen[bytes]", folder: Path) -> None:
    progress = Progress(folder)
    while run.poll() is None:
        progress.check()
        time.sleep(0.1)
    assert run.returncode == 0


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    before = dict(os.environ)
    os.environ["HIVETUNE_HOME"] = str(folder / "own")
    redis = RedisServer(folder / "redis")
    try:
        here = Machines(folder, f"127.0.0.1:{redis.port}")
        yield here
        here.cluster.shutdown()
    finally:
        os.environ["HIVETUNE_HOME"] = str(folder / "own")
        end_node()
        redis.close()
        os.environ.clear()
        os.environ.update(before)


def begin(folder: Path, num_rows: int, workers: int | str, worker: str, where: Path) -> "subprocess.Popen[bytes]":
    supervision = {"checkpoint_every_s": 1.0, "hang_floor_s": 30}
    config = make_run(folder, num_rows, workers=workers, supervise=supervision, **SETTINGS)
    (folder / "config.json").write_text(config.model_dump_json())
    environment = {**os.environ, "HIVETUNE_HOME": str(where), "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    return subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), worker], env=environment)


def told(folder: Path, name: str, file: str = "metrics") -> list[dict[str, Any]]:
    path = folder / f"run/{file}.jsonl"
    return [entry for entry in (read_journal(path) if path.exists() else ()) if entry["event"] == name]


@pytest.mark.proof
def test_machines_and_the_head_die_and_the_bits_stay(
    machines: Machines, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    own, rows = machines.folder / "own", 1600
    alone = begin(tmp_path / "alone", rows, 1, "", own)
    first, second = machines.add(), machines.add()
    done(alone, tmp_path / "alone")
    folder = tmp_path / "cluster"
    run = begin(folder, rows, machines.address, PACED, own)

    def goes_on(steps: int) -> None:
        before, progress = len(told(folder, "step")), Progress(folder)
        while run.poll() is None and len(told(folder, "step")) < before + steps:
            progress.check()
            time.sleep(0.1)

    joined_or_ended(run, folder, 2)
    machines.kill(second)
    goes_on(5)
    machines.kill_head()
    goes_on(10)
    machines.start_head()
    third = machines.add()
    joined_or_ended(run, folder, 3)
    done(run, folder)
    hashes = {sha256_file(each / "run/adapter_model.safetensors") for each in (tmp_path / "alone", folder)}
    record_property("adapter hashes of one worker and of the cluster", len(hashes))
    record_property("steps", len(told(folder, "step")))
    record_property("packs of each worker", told(folder, "packs_computed")[-1]["workers"])
    record_property("workers that joined", len(told(folder, "worker_joined")))
    record_property("connections lost", len(told(folder, "worker_lost")))
    record_property("attempts of the run's own worker", len(told(folder, "attempt", "events")))
    assert len(hashes) == 1
    lost = [entry for entry in told(folder, "worker_lost") if entry["packs"]]
    assert lost, "no worker died with packs of its own, so nothing was placed again"
    computed = told(folder, "packs_computed")[-1]["workers"]
    assert sum(packs for worker, packs in computed.items() if worker != "0") > computed["0"] / 2
    for node in (first, third):  # the next test has machines of its own
        machines.kill(node)


@pytest.mark.proof
def test_another_environment_computes_in_the_same_run(
    machines: Machines, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """HIVETUNE_OTHER_PYTHON: an environment with another torch. Without it this one, under the name of a link."""
    other = os.environ.get("HIVETUNE_OTHER_PYTHON", sys.executable)
    torch = subprocess.run([other, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    own, rows = machines.folder / "own", 1200  # more than the own worker computes until the other one has joined
    alone = begin(tmp_path / "alone", rows, 1, "", own)
    machines.add(other)
    done(alone, tmp_path / "alone")
    folder = tmp_path / "mixed"
    done(begin(folder, rows, machines.address, PACED, own), folder)
    joins = told(folder, "worker_joined")
    assert joins
    differs = joins[0].get("differs", "")
    assert (f"torch {torch.stdout.strip()} instead of" in differs) == ("HIVETUNE_OTHER_PYTHON" in os.environ)
    record_property("what differs in the other environment", differs or "nothing")
    packs = told(folder, "packs_computed")[-1]["workers"]
    record_property("packs of the run's own worker and of the other one", list(packs.values()))
    assert packs["1"] > 0
    record_property("workers called wrong", len(told(folder, "worker_wrong")))
    one, mixed = (load_file(each / "run/adapter_model.safetensors") for each in (tmp_path / "alone", folder))
    off = max(float((one[name] - mixed[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)
    record_property("largest relative difference of a matrix to one worker's", off)
    assert off < 1e-3  # float32 over 50 steps of AdamW
    assert not told(folder, "worker_wrong")
