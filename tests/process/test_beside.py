"""Exporters beside a run: started, started again when they die, left alone when they are done, never worth the run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hivetune.process.detach import AGAIN_S, Exporters


class Process:
    """Lives until `code` is set."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class World:
    """A clock, and what was started at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[tuple[float, str, Process]] = []
        self.refuse = False

    def start(self, run: Path, target: str) -> Any:
        if self.refuse:
            raise OSError("no more processes")
        self.started.append((self.now, target, Process()))
        return self.started[-1][2]

    def times(self) -> list[tuple[float, str]]:
        return [(time, target) for time, target, _ in self.started]


def test_one_process_a_tool_and_another_when_it_dies() -> None:
    world = World()
    exporters = Exporters(Path("run"), ["mlflow", "tensorboard", "mlflow"], start=world.start, clock=lambda: world.now)
    for _ in range(3):
        exporters.look()
    assert world.times() == [(0.0, "mlflow"), (0.0, "tensorboard")]
    world.started[0][2].code = -9
    world.now = AGAIN_S - 1
    exporters.look()
    assert len(world.started) == 2, "not at once: what kills it may go on doing so"
    world.now = AGAIN_S
    exporters.look()
    assert world.times()[2:] == [(AGAIN_S, "mlflow")]


def test_one_that_has_sent_all_or_can_not_begin_is_left_alone() -> None:
    world = World()
    exporters = Exporters(Path("run"), ["mlflow", "wandb"], start=world.start, clock=lambda: world.now)
    exporters.look()
    world.started[0][2].code, world.started[1][2].code = 0, 2  # done; its package is missing
    world.now = 10 * AGAIN_S
    exporters.look()
    assert len(world.started) == 2


def test_a_start_that_fails_is_tried_again() -> None:
    world = World()
    world.refuse = True
    exporters = Exporters(Path("run"), ["mlflow"], start=world.start, clock=lambda: world.now)
    exporters.look()
    world.refuse, world.now = False, AGAIN_S
    exporters.look()
    assert world.times() == [(AGAIN_S, "mlflow")]


def test_what_it_says_is_in_a_log_of_the_home(own_home: Path, tmp_path: Path) -> None:
    exporters = Exporters(tmp_path / "none", ["tensorboard"])
    exporters.look()
    [exporter] = exporters._exporters
    assert isinstance(exporter.process, subprocess.Popen)
    assert exporter.process.wait(30) == 2
    assert exporter.process.args[0] == sys.executable  # type: ignore[index]
    assert "is not a run folder" in (own_home / "reports" / "none-tensorboard.log").read_text()
