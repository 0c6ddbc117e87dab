"""A child always ends in an outcome, whatever it does, and never outlives who started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_child import Play

from hivetune.errors import DoesNotFit, HivetuneError
from hivetune.process.launch import child_environment, when_idle
from hivetune.process.parent import GRACE_S, Limits, run_task, see_off, start_child
from hivetune.process.protocol import Beat, Outcome, Train
from hivetune.process.supervision import Supervision

TINY = str(Path(__file__).with_name("tiny_child.py"))


def run(folder: Path, do: str, memory_limit_bytes: int | None = None) -> Outcome:
    limits = Limits(Supervision(start_timeout_s=20, hang_floor_s=0.5))
    return run_task(Play(do), folder, module=TINY, limits=limits, memory_limit_bytes=memory_limit_bytes)


def test_items_are_beats_and_the_result_comes_back(tmp_path: Path) -> None:
    beats: list[Beat] = []
    outcome = run_task(Play("items", items=5), tmp_path, module=TINY, on_beat=beats.append)
    assert (outcome.status, outcome.returncode, outcome.check("it")) == ("done", 0, {"items": 5})
    assert beats == [Beat.STARTING, *[Beat.ITEM] * 5]


def test_a_job_of_several_processes_around_it_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes and SLURM set WORLD_SIZE: every task lost its heartbeat, and rank 1 its outcome."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    beats: list[Beat] = []
    outcome = run_task(Play("items", items=3), tmp_path, module=TINY, on_beat=beats.append)
    assert outcome.check("it") == {"items": 3} and beats == [Beat.STARTING, *[Beat.ITEM] * 3]


def test_what_is_done_meanwhile_is_done_beside_it(tmp_path: Path) -> None:
    child = start_child(Play("items", items=5), tmp_path, module=TINY)
    begun: list[bool] = []
    outcome = see_off(child, meanwhile=lambda: begun.append(not child.ended))
    assert (outcome.status, begun) == ("done", [True])


def test_what_fails_meanwhile_ends_it(tmp_path: Path) -> None:
    child = start_child(Play("work_on"), tmp_path, module=TINY)

    def refuse() -> None:
        raise DoesNotFit("no room")

    with pytest.raises(DoesNotFit):
        see_off(child, meanwhile=refuse)
    assert child.ended


def test_an_error_for_people_keeps_its_words_and_exit_code(tmp_path: Path) -> None:
    outcome = run(tmp_path, do="refuse")
    assert outcome.status == "failed"
    with pytest.raises(DoesNotFit, match="needs 9 GiB") as caught:
        outcome.check("scoring")
    assert (caught.value.hint, outcome.returncode) == ("use a smaller model", 5)


def test_a_bug_is_reported_with_its_traceback(tmp_path: Path) -> None:
    outcome = run(tmp_path, do="crash")
    assert outcome.error is not None and "in main" in outcome.error.traceback
    with pytest.raises(HivetuneError, match="scoring failed: ValueError: no good"):
        outcome.check("scoring")


def test_death_by_signal_is_named_and_keeps_the_last_lines(tmp_path: Path) -> None:
    outcome = run(tmp_path, do="abort")
    assert (outcome.status, outcome.signal) == ("died", signal.SIGABRT)
    with pytest.raises(HivetuneError, match="was killed by SIGABRT"):
        outcome.check("scoring")
    assert "Memory access fault by GPU node-1" in outcome.stderr_tail
    assert not list(tmp_path.glob("core*"))


def test_an_exit_without_outcome_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"schema": 1, "status": "done"}')  # of an earlier attempt
    outcome = run(tmp_path, do="exit")
    assert (outcome.status, outcome.returncode) == ("died", 3)


@pytest.mark.parametrize(("do", "state"), [("stop_itself", "T"), ("hold_gil", "S")])
def test_silence_is_a_hang_and_is_ended(tmp_path: Path, do: str, state: str) -> None:
    outcome = run(tmp_path, do=do)
    assert (outcome.status, outcome.state, outcome.survived) == ("hung", state, False)
    if do == "hold_gil":
        assert "tiny_child.py" in outcome.stderr_tail  # the stack, dumped without the GIL


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


@pytest.mark.parametrize("do", ["work_on", "hold_gil"])
def test_sigterm_ends_a_task_that_saves_nothing_at_once(tmp_path: Path, do: str) -> None:
    """Nothing reads a request to stop in these: a handler would only keep Ctrl-C waiting until SIGKILL."""
    started = time.monotonic()
    outcome = stop_at_work(Play(do), tmp_path)
    assert (outcome.status, outcome.signal) == ("died", signal.SIGTERM)
    assert time.monotonic() - started < GRACE_S


def test_environment_is_offline_and_first_in_line_for_the_oom_killer(tmp_path: Path) -> None:
    outcome = run_task(Play("environment"), tmp_path, module=TINY, environment={"MINE": "1", "HOME": None})
    environment = outcome.result["environment"]
    assert (environment["HF_HUB_OFFLINE"], environment["GOMP_SPINCOUNT"]) == ("1", "1000")
    assert environment["MINE"] == "1" and "HOME" not in environment
    assert outcome.result["oom"] == "500"


def test_memory_beyond_the_limit_is_an_error_that_is_told(tmp_path: Path) -> None:
    outcome = run(tmp_path, do="allocate", memory_limit_bytes=512 << 20)
    assert outcome.error is not None
    assert outcome.error.type == "MemoryError"


def test_a_missing_package_is_said_with_the_command_that_mends_it(tmp_path: Path) -> None:
    script = tmp_path / "needs.py"
    script.write_text("import torch_that_is_not_there\n")
    outcome = run_task(Play("nothing"), tmp_path, module=str(script))
    assert outcome.error is not None
    assert (outcome.error.type, outcome.returncode) == ("MachineNotFit", 4)
    assert "pip install" in outcome.error.hint


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
    with when_idle():
        child = start_child(Play("work_on"), tmp_path, module=TINY)
    other = start_child(Play("work_on"), tmp_path / "other", module=TINY)
    assert os.sched_getscheduler(child.process.pid) == os.SCHED_IDLE
    assert os.sched_getscheduler(other.process.pid) == os.sched_getscheduler(0) == os.SCHED_OTHER
    assert child.kill() and other.kill()


def test_kernels_compiled_under_a_variable_serve_no_run_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's key leaves some of its compiler's variables out."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("AMDGCN_USE_BUFFER_OPS", raising=False)
    plain = child_environment({})["TRITON_CACHE_DIR"]
    one, other = (child_environment({"AMDGCN_USE_BUFFER_OPS": value})["TRITON_CACHE_DIR"] for value in "01")
    assert len({plain, one, other}) == 3
    monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "1")
    assert child_environment({})["TRITON_CACHE_DIR"] == other
    assert child_environment({"AMDGCN_USE_BUFFER_OPS": None})["TRITON_CACHE_DIR"] == plain
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert child_environment({})["TRITON_CACHE_DIR"] == "/elsewhere"
