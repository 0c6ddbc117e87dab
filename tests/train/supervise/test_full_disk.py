"""Another program takes every byte of the disk: the run pauses, tells so, and goes on when there is supervisor."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_disk import fill
from train.supervise.scripted import PACE, events, make_run, steps, supervise

from hivetune.train.supervise import supervisor
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.supervisor import RunOutcome

pytestmark = pytest.mark.slow


def other_program(folder: Path, after_step: int, gives_back: Callable[[], bool]) -> threading.Thread:
    """Fills the disk when the run has made `after_step` steps, again and again, until `gives_back` holds."""

    def work() -> None:
        while steps(folder) < after_step:
            time.sleep(0.005)
        while not gives_back():
            taken = fill(folder)
            time.sleep(0.005)
        taken.unlink()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MIN_RESERVE_BYTES", 256 << 10)
    monkeypatch.setattr(supervisor, "LOOK_S", 0.02)


def final_state(outcome: RunOutcome) -> str:
    return str(outcome.result["state"])


def test_every_byte_of_the_disk_is_taken_and_the_run_comes_to_its_end(small_disk: Path, tmp_path: Path) -> None:
    calm = tmp_path / "calm"
    expected = final_state(supervise(calm, make_run(calm, [PACE])).check())
    config = make_run(small_disk, [PACE])
    # Long journals: what is reserved behind them is used up, and the worker's own lines fail too.
    waited = lambda: any(events(small_disk, "disk_wait")) and started + 1.0 < time.monotonic()  # noqa: E731
    started = time.monotonic()
    thread = other_program(small_disk, 3, waited)
    outcome = supervise(small_disk, config).check()
    thread.join()
    assert outcome.status == "done"
    assert final_state(outcome) == expected
    assert set(outcome.faults) <= {"disk-full"}
    assert events(small_disk, "disk_wait") and events(small_disk, "disk_ready")
    lines = (small_disk / "run/events.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_a_disk_that_fills_before_the_worker_starts_is_waited_for(small_disk: Path) -> None:
    """Not even the task fits; the supervisor itself meets the full disk."""
    config = make_run(small_disk, [PACE])

    def take(folder: Path) -> bool:
        thread = other_program(small_disk, 0, lambda: bool(events(small_disk, "disk_wait")))
        while not (small_disk / "other-program").exists() or os.statvfs(small_disk).f_bfree:
            time.sleep(0.001)
        threads.append(thread)
        return False

    threads: list[threading.Thread] = []
    begin = supervisor._Supervisor.begin

    def begin_then_take(self: supervisor._Supervisor) -> None:
        begin(self)
        take(small_disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor._Supervisor, "begin", begin_then_take)
        outcome = supervise(small_disk, config).check()
    assert outcome.status == "done"
    assert threads and events(small_disk, "disk_wait")


def test_a_stop_is_heard_while_the_supervisor_waits(small_disk: Path) -> None:
    config = make_run(small_disk, [PACE])

    def told(step: int) -> None:
        fill(small_disk)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        raise OSError(errno.ENOSPC, "No space left on device")  # as a log of progress on that disk does

    outcome = supervise(small_disk, config, terms=Terms(told))
    assert outcome.status == "stopped"


def test_what_ends_a_run_is_written_when_there_is_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_disk / "run").mkdir()
    taken = fill(small_disk)
    target = small_disk / "run/run.json"
    reasons: list[str] = []

    def sleep(seconds: float) -> None:
        taken.unlink(missing_ok=True)

    monkeypatch.setattr(supervisor.time, "sleep", sleep)
    supervisor.write_with_retries(small_disk / "run", lambda: target.write_bytes(bytes(100_000)), reasons.append)
    assert len(reasons) == 1
    assert target.stat().st_size == 100_000
    assert len(events(small_disk, "disk_wait")) == 1
