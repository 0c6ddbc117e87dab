"""Trainings of experts side by side: a card each, none at all on a machine with one, an end when it is asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivetune.errors import HivetuneError, Stopped
from hivetune.machine.inventory import Card
from hivetune.specialists import runs
from hivetune.specialists.survey import Attended
from hivetune.train import queue
from hivetune.train.supervise.attempt import Terms

PROGRAM = """
import os, sys
from pathlib import Path
run = Path(sys.argv[1])
(run / "card").write_text(os.environ["HIP_VISIBLE_DEVICES"])
sys.exit(5 if (run / "fails").exists() else 0)
"""
STATUS = SimpleNamespace(step=3, last_fault="")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three runs of experts on a machine with two cards; the last is done."""
    monkeypatch.setattr(queue, "resume_command", lambda run: [sys.executable, "-S", "-c", PROGRAM, str(run)])
    monkeypatch.setattr(queue, "QUEUE_LOOK_S", 0.01)
    for module in (runs, queue):
        monkeypatch.setattr(module, "run_status", lambda folder: STATUS)
    with_cards(monkeypatch, 2)
    config = SimpleNamespace(workers=None, device="auto")
    found = []
    for number in range(3):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        facts = {"record": {"name": f"team-{number}"}, "is_finished": number == 2, "config": config}
        found.append(SimpleNamespace(folder=folder, plan=SimpleNamespace(steps=range(4)), **facts))
    return found


def with_cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cards = [Card("rocm", index, "R9700", 1, 1, "6.0") for index in range(count)]
    monkeypatch.setattr(runs, "read_machine", lambda folder: SimpleNamespace(cards=cards))


def cards_of(opened: list[Any]) -> list[str]:
    return [path.read_text() if (path := run.folder / "card").exists() else "" for run in opened]


def test_each_has_a_card_of_its_own(opened: list[Any]) -> None:
    steps: list[int] = []
    runs.train_side_by_side(opened, Attended(terms=Terms(on_step=steps.append)))
    assert cards_of(opened) == ["0", "1", ""]
    assert set(steps) == {6}


def test_with_one_device_or_where_all_must_stand_still_nothing_is_started(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.train_side_by_side(opened, Attended(side_by_side=False))
    runs.train_side_by_side(opened[1:], Attended())
    with_cards(monkeypatch, 1)
    runs.train_side_by_side(opened, Attended())
    assert cards_of(opened) == ["", "", ""]


def test_a_failure_is_told_when_the_other_is_done(opened: list[Any]) -> None:
    (opened[0].folder / "fails").touch()
    with pytest.raises(HivetuneError, match="team-0: its run ended with exit code 5"):
        runs.train_side_by_side(opened, Attended())
    assert cards_of(opened) == ["0", "1", ""]


def test_an_end_that_is_asked_for_ends_all(opened: list[Any]) -> None:
    with pytest.raises(Stopped):
        runs.train_side_by_side(opened, Attended(terms=Terms(ends=lambda: 1)))
