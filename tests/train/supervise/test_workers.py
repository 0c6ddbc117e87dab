"""Several ranks on this machine, as real processes that are killed and stopped: the bits stay the same."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_kills import RESULTS
from tiny_run import KILL, WORKER, make_run, supervise

from hivetune.base.journal import read_journal
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.machine.inventory import Card, Machine
from hivetune.process.protocol import Train
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.train.supervise import supervisor
from hivetune.train.supervise.attempt import rank_devices

pytestmark = pytest.mark.slow

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


def test_ranks_are_on_the_cards_that_the_worker_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a run may hide graphics in the processor: its first card is cuda:0 then, and no rank has 2."""
    config = make_run(tmp_path, 8, workers="auto", device="cuda")
    config = config.model_copy(update={"device": "auto"})
    write_resolved(tmp_path / "run", config, Choices(environment={"HIP_VISIBLE_DEVICES": "1,2"}))
    cards = tuple(replace(card, index=card.index + 1) for card in machine(8, 64, 2).cards)
    started: list[tuple[str, ...]] = []

    def start(task: Train, *given: object, **named: object) -> None:
        started.append(task.devices)
        raise InterruptedError

    monkeypatch.setattr(supervisor, "start_child", start)
    with pytest.raises(InterruptedError):
        supervise(tmp_path, config, machine=replace(machine(8, 64), cards=cards))
    assert started == [("cuda:0", "cuda:1")]


def test_more_ranks_than_cards_are_refused(tmp_path: Path) -> None:
    config = parse_config({"model": "tiny", "data": {"path": "none"}, "workers": 4})
    with pytest.raises(UsageError, match="workers is 4, this machine has 2 cards"):
        rank_devices(config, machine(8, 64, 2), tmp_path, "cuda", None)


class Killer(threading.Thread):
    """Sends a signal to a rank of each attempt in turn, once the attempt has made two steps."""

    def __init__(self, run: Path, signals: Sequence[tuple[int, signal.Signals]]):
        super().__init__(daemon=True)
        self.run_folder, self.signals, self.others = run, list(signals), list[psutil.Process]()

    def run(self) -> None:
        for attempt, (number, how) in enumerate(self.signals, 1):
            while not (rank_0 := self._at_work(attempt)):
                time.sleep(0.02)
            (other,) = psutil.Process(rank_0).children()
            self.others.append(other)
            os.kill(rank_0 if number == 0 else other.pid, how)
        self.signals.clear()

    def _at_work(self, attempt: int) -> int | None:
        """The process of rank 0 in this attempt."""
        told = events(self.run_folder, "events", "attempt")
        if len(told) < attempt:
            return None
        pid = int(told[attempt - 1]["pid"])
        lines = events(self.run_folder, "metrics", "started", "step")
        begun = [place for place, line in enumerate(lines) if line.get("pid") == pid]
        return pid if begun and len(lines) > begun[0] + 2 else None


def events(run: Path, journal: str, *names: str) -> list[dict[str, Any]]:
    path = run / f"{journal}.jsonl"
    return [entry for entry in (read_journal(path) if path.exists() else ()) if entry["event"] in names]


def trained(
    folder: Path,
    rows: int,
    workers: int,
    *signals: tuple[int, signal.Signals],
    worker: str | None = WORKER,
    **settings: Any,
) -> list[bytes]:
    """What a run comes to whose ranks get these signals: adapter and plan. Without `worker` ranks are new processes."""
    config = make_run(folder / "same", rows, workers=workers, **{**SETTINGS, **settings})
    killer = Killer(folder / "same/run", signals)
    killer.start()
    assert supervise(folder / "same", config, worker=worker).status == "done"
    assert not killer.signals, "the run was over before all were sent"
    assert not any(other.is_running() and other.status() != psutil.STATUS_ZOMBIE for other in killer.others)
    # Its name is in adapter_config.json: the base model's folder.
    return [(folder / "same/run" / name).read_bytes().replace(bytes(folder), b"") for name in RESULTS]


def test_ranks_that_are_killed_and_stopped_change_nothing(tmp_path: Path) -> None:
    """Each time all start again from the newest checkpoint."""
    rows, supervision = 480, {"supervise": {"checkpoint_every_s": 0.2, "hang_floor_s": 2}}
    signals = ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL))
    killed = trained(tmp_path / "two", rows, 2, *signals, **supervision)
    assert killed == trained(tmp_path / "alone", rows, 1, **supervision)
    faults = [entry["fault"] for entry in events(tmp_path / "two/same/run", "events", "failure")]
    assert faults == ["killed", "hang", "killed"]


def test_one_to_four_ranks_give_the_same_bits(tmp_path: Path) -> None:
    starts = ((1, WORKER), (2, None), (3, WORKER), (4, WORKER))
    alone, *others = (trained(tmp_path / str(n), 80, n, worker=worker, chunk_rows=40) for n, worker in starts)
    assert all(other == alone for other in others)


def test_a_row_that_kills_another_rank_is_found(tmp_path: Path) -> None:
    """It is in the share of rank 1, whose end is taken for the run's own."""
    config = make_run(tmp_path, 24, {5: KILL}, workers=2, supervise={"checkpoint_every_s": 0.1}, **SETTINGS)
    outcome = supervise(tmp_path, config)
    assert outcome.status == "done"
    amendments = list(read_journal(tmp_path / "run/amendments.jsonl"))
    assert [row for entry in amendments for row in entry["rows"]] == [5]
