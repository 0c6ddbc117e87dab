"""Real SIGKILLs of worker and supervisor at random moments: the run ends by itself, equal bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import FORKS
from tiny_run import SUPERVISOR, make_run

from hivetune.base.disk import sha256_bytes
from hivetune.run import checkpoints
from hivetune.run.checkpoints import TENSORS

pytestmark = pytest.mark.slow

# Each life must be able to save something: an interval well below what a killer leaves it.
SETTINGS = {"supervise": {"checkpoint_every_s": 0.1, "attempts": 20}, "batch_size": 4}
RESULTS = ("adapter_model.safetensors", "adapter_config.json", "plan.json", "plan.bin")


Start = Callable[[Path], "subprocess.Popen[bytes]"]


def start_new(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), ""])


def start_fork(folder: Path) -> "subprocess.Popen[bytes]":
    with open(folder / "log", "ab") as log:
        return FORKS.start_script(SUPERVISOR, str(folder), "", log=log)


class Killer:
    """Lets a run live in its own process and kills it or its worker until it has done so often enough."""

    def __init__(self, folder: Path, workers: int, supervisors: int, seed: int, start: Start):
        self.folder, self.random, self.start = folder, random.Random(seed), start
        self.left = ["worker"] * workers + ["supervisor"] * supervisors
        self.random.shuffle(self.left)
        self.dead: int | None = None
        self.process = start(folder)

    def run(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.process.returncode == -signal.SIGKILL:
            assert time.monotonic() < deadline, "the run did not end"
            if self.process.poll() is not None:
                self.process = self.start(self.folder)
            if self.left and self._wait_for_life():
                self._kill(self.left.pop())
            time.sleep(0.02)
        assert self.process.returncode == 0
        assert not self.left, f"the run was over before it was killed {len(self.left)} times more"

    def _wait_for_life(self) -> bool:
        """Until a worker lives that was not killed yet, mostly until it trains; then a moment. False: the run ended."""
        loading = self.random.random() < 0.2
        while True:
            pid = self._pid()
            if pid is not None and pid != self.dead and (loading or self._training(pid)):
                break
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        time.sleep(self.random.uniform(0.0, 0.5))
        return self.process.poll() is None

    def _kill(self, whom: str) -> None:
        pid = self.process.pid if whom == "supervisor" else self._pid()
        try:
            os.kill(pid or 0, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself just now
            self.left.append(whom)
            return
        self.dead = self._pid()
        if whom == "supervisor":
            self.process.wait()

    def _pid(self) -> int | None:
        pids = [entry["pid"] for entry in _lines(self.folder / "run/events.jsonl") if entry["event"] == "attempt"]
        return pids[-1] if pids else None

    def _training(self, pid: int) -> bool:
        path = self.folder / "run/metrics.jsonl"
        _, found, after = (path.read_text() if path.exists() else "").rpartition(f'"pid": {pid}')
        return bool(found) and after.count("\n") > 3


def train_both(
    folder: Path, num_rows: int, workers: int, supervisors: int, seed: int, timeout_s: float, start: Start
) -> tuple[dict[str, object], dict[str, object]]:
    """Return what the undisturbed run left and what the killed one left."""
    calm, killed = folder / "calm/run", folder / "killed/run"
    for run, kills in ((calm, (0, 0)), (killed, (workers, supervisors))):
        config = make_run(run.parent, num_rows, **SETTINGS)
        (run.parent / "config.json").write_text(config.model_dump_json())
        Killer(run.parent, *kills, seed, start).run(timeout_s)
    return left_by(calm), left_by(killed)


def left_by(run: Path) -> dict[str, object]:
    """Return hashes of a run's results, weights and optimizer, its newest step, and its changes and core dumps."""
    files = {name: sha256_bytes((run / name).read_bytes().replace(b"/killed/", b"/calm/")) for name in RESULTS}
    last = checkpoints.steps(run)[-1]
    state = sha256_bytes((checkpoints.folder_of(run, last) / TENSORS).read_bytes())
    unwanted = [path.name for path in (*run.glob("amendments.jsonl"), *run.glob("core*"))]
    return {**files, "steps": last, "state": state, "unwanted": unwanted}


def test_eight_kills_change_nothing(tmp_path: Path) -> None:
    calm, killed = train_both(tmp_path, 4_000, workers=6, supervisors=2, seed=1, timeout_s=300, start=start_fork)
    assert killed == calm and not killed["unwanted"]


@pytest.mark.proof
def test_a_hundred_and_twenty_kills_change_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    calm, killed = train_both(tmp_path, 60_000, workers=100, supervisors=20, seed=2, timeout_s=3600, start=start_new)
    assert killed == calm and not killed["unwanted"]
    attempts = [entry for entry in _lines(tmp_path / "killed/run/events.jsonl") if entry["event"] == "attempt"]
    counts = {"kills of the worker": 100, "kills of the supervisor": 20, "attempts": len(attempts)}
    for name, value in {**counts, "steps": killed["steps"]}.items():
        record_property(name, value)


def _lines(path: Path) -> list[dict[str, object]]:
    """The whole lines so far; the file may be replaced or written to at this moment."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
