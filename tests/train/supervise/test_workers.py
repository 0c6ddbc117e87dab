"""Workers beside a run, as real processes that are killed and stopped: the run goes on, and its bits stay the same."""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_kills import RESULTS
from tiny_run import KILL, SUPERVISOR, Progress, make_run, supervise

from hivetune.base.disk import sha256_file
from hivetune.base.journal import Journal, read_journal
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.machine.inventory import Card, Machine
from hivetune.process.parent import Limits
from hivetune.process.protocol import Meeting
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.train.supervise.workers import Workers, devices_beside

PACED = str(Path(__file__).with_name("paced_worker.py"))
# Several packs a step although the rows are tiny; the same products in each run, which a measurement chooses otherwise.
PACKS = {"pack_tokens": 16, "products": "torch"}
SETTINGS: dict[str, Any] = {"batch_size": 8, "lora": {"r": 4, "dropout": 0.1}, "choices": PACKS}


def machine(cores: int, memory_gb: float, cards: int = 0) -> Machine:
    card = Card("rocm", 0, "R9700", 32 << 30, 32 << 30, "6.0")
    return Machine("cpu", (), cores, int(memory_gb * 2**30), 0, "machine", 0, (card,) * cards)


@pytest.mark.parametrize(
    ("workers", "device", "cores", "memory_gb", "cards", "beside"),
    [
        (None, "cuda", 8, 64, 2, ()),
        (1, "cpu", 8, 64, 0, ()),
        (3, "cpu", 2, 64, 0, ("cpu", "cpu")),  # more than cores: a person's choice
        ("auto", "cpu", 8, 64, 0, ("cpu",) * 3),
        ("auto", "cpu", 64, 64, 0, ("cpu",) * 3),
        ("auto", "cpu", 8, 2.5, 0, ("cpu",)),  # memory for two
        ("auto", "cpu", 8, 0.5, 0, ()),
        ("auto", "cuda", 8, 64, 3, ("cuda:1", "cuda:2")),
        ("auto", "cuda:1", 8, 64, 3, ("cuda:0", "cuda:2")),
        (2, "cuda", 8, 64, 3, ("cuda:1",)),
    ],
)
def test_one_worker_a_card_or_a_quarter_of_the_cores(
    workers: Any, device: str, cores: int, memory_gb: float, cards: int, beside: tuple[str, ...], tmp_path: Path
) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": workers})
    write_resolved(tmp_path, config, Choices())
    assert devices_beside(tmp_path, tmp_path, config, machine(cores, memory_gb, cards), device) == beside


def test_more_workers_than_cards_are_refused(tmp_path: Path) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": 4})
    with pytest.raises(UsageError, match="workers: 4, but this machine has 2 cards"):
        devices_beside(tmp_path, tmp_path, config, machine(8, 64, 2), "cuda")


def test_what_a_killed_supervisor_left_is_taken_over_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def places(run: str) -> Workers:
        events = Journal(tmp_path / "events.jsonl")
        return Workers(tmp_path / run, tmp_path, ("cpu",), events, environment={}, limits=Limits)

    def write(meeting: Meeting | None) -> None:
        assert meeting is not None
        Path(meeting.address).write_text("a store")

    killed = places("run")
    write(killed.meeting)
    again, other = places("run"), places("other")
    assert again.meeting is not None and not Path(again.meeting.address).read_bytes()
    assert killed.meeting is not None and again.meeting.token != killed.meeting.token
    (folder,) = tmp_path.glob("hivetune-*")
    assert folder.stat().st_mode & 0o077 == 0 and len(list(folder.iterdir())) == 2
    for workers in (again, other):
        with workers:
            pass
    assert not list(folder.iterdir())


class Run:
    """A supervised run in a process of its own."""

    def __init__(self, folder: Path, worker: str = ""):
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), worker])

    def events(self, name: str, file: str = "events") -> list[dict[str, Any]]:
        path = self.folder / f"run/{file}.jsonl"
        return [entry for entry in (read_journal(path) if path.exists() else ()) if entry["event"] == name]

    def until(self, true: Callable[[], bool]) -> None:
        """However long it takes, as long as the run makes progress: a busy machine says nothing about the code."""
        progress = Progress(self.folder)
        while not true():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}"
            progress.check()
            time.sleep(0.05)

    def steps(self) -> int:
        return max((entry["step"] for entry in self.events("step", "metrics")), default=0)

    def wait(self) -> None:
        progress = Progress(self.folder)
        while self.process.poll() is None:
            progress.check()
            time.sleep(0.05)
        assert self.process.returncode == 0


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(folder: Path, worker: str = "") -> Run:
        started.append(Run(folder, worker))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


def made(folder: Path, num_rows: int, workers: int, **settings: Any) -> Path:
    config = make_run(folder, num_rows, workers=workers, **{**SETTINGS, **settings})
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


def same_results(one: Path, other: Path) -> None:
    for name in RESULTS:
        text = (one / "run" / name).read_bytes().replace(f"/{one.name}/".encode(), f"/{other.name}/".encode())
        assert text == (other / "run" / name).read_bytes(), name


@pytest.mark.slow
def test_workers_that_are_killed_and_stopped_change_nothing(tmp_path: Path, runs: Callable[..., Run]) -> None:
    rows, supervision = 2400, {"supervise": {"checkpoint_every_s": 0.3, "hang_floor_s": 3}}
    alone = runs(made(tmp_path / "alone", rows, 1, **supervision))
    alone.wait()
    run = runs(made(tmp_path / "beside", rows, 2, **supervision))
    run.until(lambda: len(run.events("worker_joined", "metrics")) == 1)
    worker = run.events("worker_started")[-1]["pid"]
    os.kill(worker, signal.SIGKILL)
    run.until(lambda: len(run.events("worker_joined", "metrics")) == 2)
    assert run.events("worker_ended")[0]["signal"] == signal.SIGKILL
    os.kill(run.events("worker_started")[-1]["pid"], signal.SIGSTOP)
    before = run.steps()
    run.until(lambda: run.steps() > before + 3)  # it is stopped, and training goes on without it
    run.wait()
    same_results(alone.folder, run.folder)
    assert run.events("worker_lost", "metrics")
    computed = run.events("packs_computed", "metrics")[-1]["workers"]
    assert computed["1"] > 0, "the run's own worker computed everything, which proves nothing"


@pytest.mark.proof
def test_a_row_that_kills_the_worker_beside_too_is_still_found(tmp_path: Path) -> None:
    """Whoever gets its pack dies; in the end the run's own worker does, and the supervisor isolates the row."""
    config = make_run(tmp_path, 24, {5: KILL}, workers=2, supervise={"checkpoint_every_s": 0.1}, **SETTINGS)
    outcome = supervise(tmp_path, config)
    assert outcome.status == "done"
    amendments = list(read_journal(tmp_path / "run/amendments.jsonl"))
    assert [row for entry in amendments for row in entry["rows"]] == [5]


@pytest.mark.proof
def test_twenty_kills_in_two_hundred_steps_change_nothing(
    tmp_path: Path, runs: Callable[..., Run], record_property: Callable[[str, object], None]
) -> None:
    """SIGKILL and SIGSTOP of workers beside the run's own and of that one, at random moments; packs of 0.2 s."""
    settings: dict[str, Any] = {"supervise": {"checkpoint_every_s": 0.5, "hang_floor_s": 3, "attempts": 20}}
    hashes = set()
    for workers in (1, 2, 4):
        calm = runs(made(tmp_path / f"calm-{workers}", STEPS * 8, workers, **settings))
        calm.wait()
        same_results(tmp_path / "calm-1", calm.folder)
        hashes.add(sha256_file(calm.folder / "run/adapter_model.safetensors"))
    killer = Killer(runs(made(tmp_path / "killed", STEPS * 8, 3, **settings), PACED), seed=3)
    killer.kill(20)
    killer.run.wait()
    same_results(tmp_path / "calm-1", killer.run.folder)
    hashes.add(sha256_file(killer.run.folder / "run/adapter_model.safetensors"))
    found = killer.told(packs_a_step=7)
    for name, value in found.items():
        record_property(name, value)
    record_property("adapter hashes", len(hashes))
    assert len(hashes) == 1
    assert all(found["packs of each worker"].values())
    assert found["share of the packs computed again"] <= 0.15  # a death repeats the step that it comes in
    assert statistics.median(killer.seen_s) <= 3 and max(killer.back_s) <= 10


STEPS = 200
KINDS = {
    "a worker, SIGKILL": signal.SIGKILL,
    "a worker, SIGSTOP": signal.SIGSTOP,
    "the run's own, SIGKILL": signal.SIGKILL,
    "the run's own, SIGSTOP": signal.SIGSTOP,
}


class Killer:
    """Sends signals at random moments of a run: most to workers that compute, a few to such as start or join."""

    def __init__(self, run: Run, seed: int):
        self.run, self.numbers = run, random.Random(seed)
        self.sent: list[str] = []
        self.lost: list[dict[str, Any]] = []
        self.seen_s: list[float] = []
        self.back_s: list[float] = []
        self._hit: set[int] = set()

    def kill(self, count: int) -> None:
        # Of five signals one is for the run's own worker: each of those repeats the steps since its newest state.
        kinds = list(KINDS)[:2] * 2 + [list(KINDS)[2]] * 1
        kinds = [*(kinds * count)[: count - 1], list(KINDS)[3]]
        self.numbers.shuffle(kinds)
        for kind in kinds:
            self.run.until(lambda: bool(self.run.events("attempt")))
            if kind.startswith("a worker"):
                self._one_beside(kind, computing=self.numbers.random() < 0.75)
            else:
                self._own(kind)
        assert len(self.sent) == count

    def _one_beside(self, kind: str, *, computing: bool) -> None:
        living: list[dict[str, Any]] = []

        def alive() -> bool:
            joined = {entry["pid"] for entry in self.run.events("worker_joined", "metrics")}
            living[:] = [
                entry
                for entry in self.run.events("worker_started")
                if _is_alive(entry["pid"]) and entry["pid"] not in self._hit and (entry["pid"] in joined) >= computing
            ]
            return bool(living)

        self.run.until(alive)
        time.sleep(self.numbers.uniform(0.0, 0.6))
        chosen, sent = self.numbers.choice(living), time.time()
        joined = any(entry["pid"] == chosen["pid"] for entry in self.run.events("worker_joined", "metrics"))
        if not _sent(chosen["pid"], KINDS[kind]):
            return self._one_beside(kind, computing=computing)
        self._hit.add(chosen["pid"])
        self.sent.append(f"{kind}, {'computing' if joined else 'starting or joining'}")
        if joined and KINDS[kind] == signal.SIGKILL:
            self._see(chosen["worker"], sent)

    def _see(self, worker: int, sent: float) -> None:
        """When its death is journaled; other entries of the run may go with its own worker's next death."""
        told: list[dict[str, Any]] = []

        def lost() -> bool:
            every = self.run.events("worker_lost", "metrics")
            told[:] = [entry for entry in every if entry["worker"] == worker and entry["time"] >= sent - 0.01]
            return bool(told)

        self.run.until(lost)
        self.lost.append(told[0])
        self.seen_s.append(told[0]["time"] - sent)

    def _own(self, kind: str) -> None:
        time.sleep(self.numbers.uniform(0.0, 1.2))
        attempts = self.run.events("attempt")
        started = time.monotonic()
        assert _sent(attempts[-1]["pid"], KINDS[kind])
        self.sent.append(kind)
        self.run.until(lambda: len(self.run.events("attempt")) > len(attempts))
        if KINDS[kind] == signal.SIGKILL:
            self.back_s.append(time.monotonic() - started)
        pid = self.run.events("attempt")[-1]["pid"]
        self.run.until(lambda: any(entry["pid"] == pid for entry in self.run.events("started", "metrics")))

    def told(self, packs_a_step: int) -> dict[str, Any]:
        again = sum(entry["packs"] for entry in self.run.events("packs_again", "metrics"))
        steps = sum(max(0, entry["step"] - entry["durable"]) for entry in self.run.events("ended"))
        return {
            **{kind: self.sent.count(kind) for kind in sorted(set(self.sent))},
            "packs of each worker": self.run.events("packs_computed", "metrics")[-1]["workers"],
            "packs computed again": again,
            "steps computed again": steps,
            "share of the packs computed again": round((again + steps * packs_a_step) / (STEPS * packs_a_step), 4),
            "median time until a death is told, s": round(statistics.median(self.seen_s), 2),
            "longest time until a death is told, s": round(max(self.seen_s), 2),
            "longest time to the next process of the run, s": round(max(self.back_s), 2),
        }


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _sent(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return pid > 0
