"""Several ranks on this machine, as real processes that are killed and stopped: the bits stay the same."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_kills import RESULTS
from tiny_run import KILL, SUPERVISOR, Progress, make_run, supervise

from hivetune.base.journal import read_journal
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.machine.inventory import Card, Machine
from hivetune.train.supervise.attempt import rank_devices

# Several packs a step although the rows are tiny.
SETTINGS: dict[str, Any] = {"batch_size": 8, "lora": {"r": 4, "dropout": 0.1}, "choices": {"pack_tokens": 16}}


def machine(cores: int, memory_gb: float, cards: int = 0) -> Machine:
    there = tuple(Card("rocm", index, "R9700", 32 << 30, 32 << 30, "6.0") for index in range(cards))
    return Machine("cpu", (), cores, int(memory_gb * 2**30), 0, "machine", 0, there)


@pytest.mark.parametrize(
    ("workers", "device", "cores", "memory_gb", "cards", "devices"),
    [
        (None, "cuda", 8, 64, 2, ("cuda",)),
        (1, "cpu", 8, 64, 0, ("cpu",)),
        (3, "cpu", 2, 64, 0, ("cpu",) * 3),  # more than cores: a person's choice
        ("auto", "cpu", 8, 64, 0, ("cpu",) * 4),
        ("auto", "cpu", 64, 64, 0, ("cpu",) * 4),
        ("auto", "cpu", 8, 2.5, 0, ("cpu",) * 2),  # memory for two
        ("auto", "cpu", 8, 0.5, 0, ("cpu",)),
        ("auto", "cuda", 8, 64, 3, ("cuda", "cuda:1", "cuda:2")),
        ("auto", "cuda:1", 8, 64, 3, ("cuda:1", "cuda:0", "cuda:2")),
        (2, "cuda", 8, 64, 3, ("cuda", "cuda:1")),
        ("head:6379", "cuda", 8, 64, 2, ("cuda", "cuda:1")),  # this machine's part
    ],
)
def test_one_rank_a_card_or_a_quarter_of_the_cores(
    workers: Any, device: str, cores: int, memory_gb: float, cards: int, devices: tuple[str, ...], tmp_path: Path
) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": workers})
    assert rank_devices(config, machine(cores, memory_gb, cards), tmp_path, device, None) == devices


def test_graphics_in_the_processor_that_torch_counts_first_have_no_rank(tmp_path: Path) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": "auto"})
    cards = tuple(replace(card, index=card.index + 1) for card in machine(8, 64, 2).cards)
    with_cards = replace(machine(8, 64), cards=cards)
    assert rank_devices(config, with_cards, tmp_path, "cuda:1", None) == ("cuda:1", "cuda:2")


def test_more_ranks_than_cards_are_refused(tmp_path: Path) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": 4})
    with pytest.raises(UsageError, match="workers: 4, but this machine has 2 cards"):
        rank_devices(config, machine(8, 64, 2), tmp_path, "cuda", None)


class Run:
    """A supervised run in a process of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), ""])

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

    def other_rank(self) -> psutil.Process:
        """Rank 1 of the newest attempt, once it has made a step together with rank 0."""
        before = self.steps()
        self.until(lambda: self.steps() > before + 1)
        first = psutil.Process(self.events("attempt")[-1]["pid"])
        return next(child for child in first.children() if "ranks/1/task.json" in " ".join(child.cmdline()))

    def wait(self) -> None:
        progress = Progress(self.folder)
        while self.process.poll() is None:
            progress.check()
            time.sleep(0.05)
        assert self.process.returncode == 0


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(folder: Path) -> Run:
        started.append(Run(folder))
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
def test_ranks_that_are_killed_and_stopped_change_nothing(tmp_path: Path, runs: Callable[..., Run]) -> None:
    """Rank 1 is killed, then stopped, then rank 0 is killed: each time all start again from the newest checkpoint."""
    rows, supervision = 2400, {"supervise": {"checkpoint_every_s": 0.3, "hang_floor_s": 3}}
    alone = runs(made(tmp_path / "alone", rows, 1, **supervision))
    alone.wait()
    run = runs(made(tmp_path / "two", rows, 2, **supervision))
    for attempts, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
        run.other_rank().send_signal(number)
        run.until(lambda attempts=attempts: len(run.events("attempt")) > attempts)
    run.other_rank()
    os.kill(run.events("attempt")[-1]["pid"], signal.SIGKILL)
    run.wait()
    same_results(alone.folder, run.folder)
    faults = [entry["fault"] for entry in run.events("failure")]
    assert faults == ["killed", "hang", "killed"]
    assert not any("ranks/1/task.json" in " ".join(process.cmdline()) for process in psutil.Process().children(True))


@pytest.mark.slow
def test_one_to_four_ranks_give_the_same_bits(tmp_path: Path, runs: Callable[..., Run]) -> None:
    for workers in (1, 2, 3, 4):
        run = runs(made(tmp_path / str(workers), 160, workers, chunk_rows=80))
        run.wait()
        same_results(tmp_path / "1", run.folder)


@pytest.mark.slow
def test_a_row_that_kills_another_rank_is_found(tmp_path: Path) -> None:
    """It is in the share of rank 1, whose end is taken for the run's own."""
    config = make_run(tmp_path, 24, {5: KILL}, workers=2, supervise={"checkpoint_every_s": 0.1}, **SETTINGS)
    outcome = supervise(tmp_path, config)
    assert outcome.status == "done"
    amendments = list(read_journal(tmp_path / "run/amendments.jsonl"))
    assert [row for entry in amendments for row in entry["rows"]] == [5]
