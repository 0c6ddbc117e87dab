"""The queue: as many at once as there are places, each with its own card; pauses, failures, and an end by force."""

import sys
from pathlib import Path

import pytest

from hivetune.machine.inventory import Card
from hivetune.train import queue
from hivetune.train.queue import Going, run_queue, visible_devices

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[1])
(run / "card").write_text(os.environ.get("HIP_VISIBLE_DEVICES", ""))
def stop(*_):
    (run / "ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if (run / "fails").exists():
    sys.exit(5)
(run / "up").touch()
while (run / "long").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(queue, "resume_command", lambda run: [sys.executable, "-S", "-c", PROGRAM, str(run)])
    monkeypatch.setattr(queue, "QUEUE_LOOK_S", 0.01)
    folders = [tmp_path / f"run{number}" for number in range(4)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_every_run_gets_a_place_and_none_more_than_one(runs: list[Path]) -> None:
    most = 0

    def look() -> None:
        nonlocal most
        up = sum((run / "up").exists() for run in runs)
        most = max(most, up)

    codes = run_queue([Going(run) for run in runs], [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}], look)
    assert codes == dict.fromkeys(runs, 0)
    assert {(run / "card").read_text() for run in runs} == {"0", "1"}


def test_a_pause_is_no_failure_and_a_failure_stops_nobody_else(runs: list[Path]) -> None:
    (runs[0] / "long").touch()
    (runs[1] / "fails").touch()
    up = runs[0] / "up"
    codes = run_queue([Going(runs[0], up.exists), Going(runs[1]), Going(runs[2])], [{}], lambda: None)
    assert codes == {runs[0]: 0, runs[1]: 5, runs[2]: 0}
    assert (runs[0] / "ended").exists()


def test_who_is_interrupted_leaves_no_process_behind(runs: list[Path]) -> None:
    (runs[0] / "long").touch()

    def look() -> None:
        if (runs[0] / "up").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_queue([Going(runs[0])], [{}], look)
    assert (runs[0] / "ended").exists()


def test_one_place_a_card() -> None:
    cards = [Card("rocm", index, "R9700", 1, 1, "6.0") for index in range(2)]
    assert visible_devices(cards, "auto", {}) == [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}]
    assert visible_devices(cards, "auto", {"HIP_VISIBLE_DEVICES": "3, 5"}) == [
        {"HIP_VISIBLE_DEVICES": "3"},
        {"HIP_VISIBLE_DEVICES": "5"},
    ]
    assert visible_devices(cards, "cuda:1", {}) == [{}]
    assert visible_devices(cards, "cpu", {}) == [{}]
    assert visible_devices([], "auto", {}) == [{}]
