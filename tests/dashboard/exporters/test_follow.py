"""An exporter beside a run that goes on: it ends when the run does, and outlives a tool that can't be reached."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from journals import make_run, make_steps, points_in
from small_disk import fill
from tensorboard_reader import read_by_tensorboard

from hivetune.base.disk import home
from hivetune.dashboard.exporters.follow import (
    MAX_PAUSE_S,
    TRIES_AFTER_END_S,
    Destination,
    report_on,
    report_once,
    reports_of,
)
from hivetune.errors import Busy, DoesNotFit, MachineNotFit
from hivetune.run.status import hold_run


class World:
    """Time that passes only in `sleep`, whose n-th call does what the test wants to happen then."""

    def __init__(self, *happens: Callable[[], object]):
        self.now, self.happens = 0.0, list(happens)
        self.pauses: list[float] = []
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        if self.happens:
            self.happens.pop(0)()

    def report(self, run: Path, place: Path) -> None:
        destination = Destination("tensorboard", str(place))
        report_on(run, destination, self.said.append, sleep=self.sleep, clock=lambda: self.now)


def test_it_follows_to_the_end_and_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with ExitStack() as held:
        held.enter_context(hold_run(run))

        def last_words() -> None:
            make_steps(run, 6, 12)
            held.close()

        World(lambda: make_steps(run, 1, 5), lambda: None, last_words).report(run, tmp_path / "tb")
    assert read_by_tensorboard(tmp_path / "tb").keys() == points_in(run).keys()
    [report] = reports_of(run)
    assert (report.points, report.sent, report.problem) == (13, 13, "")


def test_a_place_that_can_not_be_written_is_told_once_and_tried_again(tmp_path: Path) -> None:
    run, place = make_run(tmp_path), tmp_path / "tb"
    place.write_text("a file where a folder has to be")
    make_steps(run, 1, 5)
    with ExitStack() as held:
        held.enter_context(hold_run(run))
        problems: list[str] = []

        def look() -> None:
            problems.append(reports_of(run)[0].problem)

        world = World(*[look] * 8, place.unlink, held.close)
        world.report(run, place)
    assert len(world.said) == 1
    assert all("tb" in problem for problem in problems)
    assert world.pauses[:3] == [2.0, 4.0, 8.0]
    assert max(world.pauses) == MAX_PAUSE_S
    assert reports_of(run)[0].problem == ""
    assert read_by_tensorboard(place).keys() == points_in(run).keys()


def test_a_full_disk_is_said_and_leaves_no_torn_file(small_disk: Path, tmp_path: Path) -> None:
    run, place = make_run(tmp_path), Destination("tensorboard", str(small_disk / "tb"))
    make_steps(run, 1, 5)
    report_once(run, place)
    [file] = (small_disk / "tb").glob("*/*")
    before = file.read_bytes()
    make_steps(run, 6, 200)
    taken = fill(small_disk)
    with pytest.raises(DoesNotFit, match="No space left on device"):
        report_once(run, place)
    assert file.read_bytes() == before
    assert (reports_of(run)[0].points, "No space left" in reports_of(run)[0].problem) == (5, True)
    other = make_run(tmp_path, "other")
    make_steps(other, 1, 5)
    with pytest.raises(DoesNotFit):
        report_once(other, place)
    assert {path for path in small_disk.rglob("*") if path.is_file()} == {file, taken}
    taken.unlink()
    report_once(run, place)
    assert read_by_tensorboard(file.parent).keys() == points_in(run).keys()


def test_an_exporter_goes_on_when_the_home_is_full(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(small_disk / "home"))
    run, place = make_run(tmp_path), tmp_path / "tb"
    make_steps(run, 1, 5)
    with ExitStack() as held:
        held.enter_context(hold_run(run))
        world = World(lambda: fill(small_disk), lambda: make_steps(run, 6, 12), *[lambda: None] * 20)
        world.happens += [(small_disk / "other-program").unlink, held.close]
        world.report(run, place)
    [said] = world.said
    assert "state.json" in said and "No space left" in said
    assert read_by_tensorboard(place).keys() == points_in(run).keys()
    assert reports_of(run)[0].points == 13


def test_after_the_run_it_tries_for_a_while_and_says_how_to_send_the_rest(tmp_path: Path) -> None:
    run, place = make_run(tmp_path), tmp_path / "tb"
    place.write_text("")
    world = World()
    with pytest.raises(MachineNotFit, match="tensorboard at"):
        world.report(run, place)
    assert TRIES_AFTER_END_S <= world.now <= TRIES_AFTER_END_S + MAX_PAUSE_S


def test_two_that_report_the_same_do_not_write_at_once(tmp_path: Path) -> None:
    run, place = make_run(tmp_path), tmp_path / "tb"

    def second() -> None:
        with pytest.raises(Busy):
            report_once(run, Destination("tensorboard", str(place)))
        report_once(run, Destination("tensorboard", str(tmp_path / "elsewhere")))

    with ExitStack() as held:
        held.enter_context(hold_run(run))
        World(second, held.close).report(run, place)


def test_a_state_that_is_damaged_hides_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in ("one", "other"):
        report_once(run, Destination("tensorboard", str(tmp_path / name)))
    damaged, _ = sorted((home() / "reports").glob("*/state.json"))
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert len(reports_of(run)) == 1
