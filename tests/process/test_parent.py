"""A child always ends in an outcome, whatever it does, and never outlives who started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from forks import start_new
from tiny_child import Play

from hivetune.errors import DoesNotFit, HivetuneError
from hivetune.process import parent
from hivetune.process.launch import Supervision, child_environment, idle_priority
from hivetune.process.parent import GRACE_S, Limits, start_child, wait_for_outcome
from hivetune.process.protocol import Beat, Outcome, Train

pytestmark = pytest.mark.slow

TINY = str(Path(__file__).with_name("tiny_child.py"))
JOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module", autouse=True)
def new_processes() -> Iterator[None]:
    """These tests are about the start of processes: none is forked."""
    with mock.patch.object(parent, "start_process", start_new):
        yield


@pytest.fixture(scope="module")
def ended(new_processes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """How children end that do what their name says: they are started together, since each imports for a second."""
    folder = tmp_path_factory.mktemp("children")
    (folder / "needs.py").write_text("import torch_that_is_not_there\n")
    (folder / "exit").mkdir()
    (folder / "exit" / "outcome.json").write_text('{"schema": 1, "status": "done"}')  # of an earlier attempt
    children = {}
    for do in ("items", "refuse", "crash", "abort", "exit", "stop_itself", "hold_gil", "environment", "allocate"):
        children[do] = start_child(
            Play(do, items=3),
            folder / do,
            module=TINY,
            limits=Limits(Supervision(start_timeout_s=60, hang_floor_s=0.5)),
            environment={"MINE": "1", "HOME": None},
            memory_limit_bytes=512 << 20 if do == "allocate" else None,
        )
    children["needs"] = start_child(Play("nothing"), folder / "needs", module=str(folder / "needs.py"))
    return {do: wait_for_outcome(child) for do, child in children.items()}


@pytest.mark.parametrize(
    ("do", "status", "code", "message"),
    [
        ("items", "done", 0, ""),
        ("refuse", "failed", 5, "needs 9 GiB"),
        ("crash", "failed", 1, "scoring failed: ValueError: no good"),
        ("allocate", "failed", 1, "scoring failed: MemoryError"),
        ("needs", "failed", 4, "torch_that_is_not_there is not installed"),
        ("abort", "died", -signal.SIGABRT, "was killed by SIGABRT"),
        ("exit", "died", 3, "ended with exit code 3 and without an outcome"),
        ("stop_itself", "hung", -signal.SIGKILL, "no sign of life"),
        ("hold_gil", "hung", None, "no sign of life"),
    ],
)
def test_every_end_is_an_outcome(
    ended: dict[str, Outcome], do: str, status: str, code: int | None, message: str
) -> None:
    outcome = ended[do]
    assert outcome.status == status
    assert code in (None, outcome.returncode)  # a signal ends the sleep of the one that holds the GIL
    if not message:
        assert outcome.check("scoring") == {"items": 3}
        return
    with pytest.raises(HivetuneError, match=message) as raised:
        outcome.check("scoring")
    if outcome.error is not None:
        assert raised.value.hint == outcome.error.hint


def test_an_outcome_tells_what_its_reader_needs(ended: dict[str, Outcome]) -> None:
    refused, crashed = ended["refuse"].error, ended["crash"].error
    assert refused is not None and refused.hint == "use a smaller model"
    assert crashed is not None and "in main" in ended["crash"].stderr_tail
    assert ended["needs"].error is not None and "pip install" in ended["needs"].error.hint
    assert "Memory access fault by GPU node-1" in ended["abort"].stderr_tail
    assert "tiny_child.py" in ended["hold_gil"].stderr_tail  # the stack, dumped without the GIL


def test_environment_is_offline_and_first_in_line_for_the_oom_killer(ended: dict[str, Outcome]) -> None:
    environment = ended["environment"].result["environment"]
    assert (environment["HF_HUB_OFFLINE"], environment["GOMP_SPINCOUNT"]) == ("1", "1000")
    assert environment["MINE"] == "1" and "HOME" not in environment
    assert ended["environment"].result["oom"] == "500"


def test_items_are_beats_also_in_a_job_of_several_processes(tmp_path: Path) -> None:
    """Kubernetes and SLURM set WORLD_SIZE: every task lost its heartbeat, and rank 1 its outcome."""
    beats: list[Beat] = []
    begun: list[bool] = []
    with mock.patch.dict(os.environ, JOB):
        child = start_child(Play("items", items=3), tmp_path, module=TINY)
        outcome = wait_for_outcome(child, beats.append, meanwhile=lambda: begun.append(not child.ended))
    assert outcome.check("it") == {"items": 3} and beats == [Beat.STARTING, *[Beat.ITEM] * 3]
    assert begun == [True]  # `meanwhile` runs beside it


def test_what_fails_meanwhile_ends_it(tmp_path: Path) -> None:
    child = start_child(Play("work_on"), tmp_path, module=TINY)

    def refuse() -> None:
        raise DoesNotFit("no room")

    with pytest.raises(DoesNotFit):
        wait_for_outcome(child, meanwhile=refuse)
    assert child.ended


def stop_at_work(task: object, folder: Path) -> Outcome:
    """Stopped once it works. With a long grace: what ends within the ordinary one was ended by SIGTERM."""
    child = start_child(task, folder, module=TINY)
    while Beat.ITEM not in child.wait_beats():
        assert not child.ended
    child.stop(grace_s=2 * GRACE_S)
    return child.outcome()


def test_sigterm_lets_a_training_save(tmp_path: Path) -> None:
    outcome = stop_at_work(Train(tmp_path, tmp_path, tmp_path), tmp_path)
    assert (outcome.status, outcome.result) == ("stopped", {"saved": True})


def test_sigterm_ends_a_task_that_saves_nothing_at_once(tmp_path: Path) -> None:
    """Nothing reads a request to stop in it: a handler would only keep Ctrl-C waiting until SIGKILL."""
    started = time.monotonic()
    outcome = stop_at_work(Play("hold_gil"), tmp_path)
    assert (outcome.status, outcome.signal) == ("died", signal.SIGTERM)
    assert time.monotonic() - started < GRACE_S


@pytest.mark.parametrize("do", ["work_on", "stop_itself"])
def test_the_child_dies_with_its_supervisor(tmp_path: Path, do: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(TINY).parent)!r}); from tiny_child import *\n"
        "from pathlib import Path; from hivetune.process.parent import *\n"
        f"child = start_child(Play({do!r}), Path({str(tmp_path)!r}), module={TINY!r})\n"
        "while Beat.ITEM not in child.wait_beats(): pass\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    gone, _ = psutil.wait_procs([child], timeout=20)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority")
def test_the_children_of_a_cycle_compute_when_nobody_else_does(tmp_path: Path) -> None:
    with idle_priority():
        child = start_child(Play("work_on"), tmp_path, module=TINY)
    other = start_child(Play("work_on"), tmp_path / "other", module=TINY)
    assert os.sched_getscheduler(child.process.pid) == os.SCHED_IDLE
    assert os.sched_getscheduler(other.process.pid) == os.sched_getscheduler(0) == os.SCHED_OTHER
    assert child.kill() and other.kill()


def test_kernels_compiled_under_a_variable_serve_no_run_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's key leaves some of its compiler's variables out."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("AMDGCN_USE_BUFFER_OPS", raising=False)
    changes = [{}, {"AMDGCN_USE_BUFFER_OPS": "0"}, {"AMDGCN_USE_BUFFER_OPS": "1"}]
    assert len({child_environment(change)["TRITON_CACHE_DIR"] for change in changes}) == 3
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert child_environment({})["TRITON_CACHE_DIR"] == "/elsewhere"


# ---- limits


def test_no_false_alarm_in_steps_that_vary() -> None:
    """The first step compiles for five minutes, one in fifty takes four times as long, and saving is slow."""
    limits = Limits(Supervision())
    beats = [(Beat.STARTING, 40.0), (Beat.PREPARING, 3.0), (Beat.ITEM, 300.0)]
    for number in range(1, 2000):
        beats.append((Beat.ITEM, 30.0 * (4.0 if number % 50 == 0 else 0.7 + number % 7 / 10)))
        if number % 500 == 0:
            beats += [(Beat.VALIDATING, 0.1), (Beat.VALIDATING, 1500.0), (Beat.SAVING, 20.0), (Beat.ITEM, 400.0)]
    for beat, seconds in beats:
        assert seconds <= limits.allowed_s(), f"{seconds} s until {beat} were taken for a hang"
        limits.beat(beat, seconds)


@pytest.mark.parametrize(("step_s", "allowed_s"), [(0.2, 60.0), (30.0, 150.0)])
def test_a_hang_is_noticed_after_five_steps_or_a_minute(step_s: float, allowed_s: float) -> None:
    limits = Limits(Supervision())
    assert limits.allowed_s() == 900.0
    for beat in (Beat.STARTING, Beat.PREPARING, *[Beat.ITEM] * 101):
        limits.beat(beat, step_s)
    assert limits.allowed_s() == allowed_s
