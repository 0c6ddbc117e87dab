"""A child that is started ahead of its task is the one that would have been started with it, and is never left over."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_child import Play

from hivetune.process import launch
from hivetune.process.launch import Ahead, child_environment
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Beat

TINY = str(Path(__file__).with_name("tiny_child.py"))


def waiting() -> list[int]:
    """Children of this process that were started ahead: the last word of their command is a handle."""
    return [child.pid for child in psutil.Process().children() if "".join(command(child)[-1:]).isdigit()]


def command(child: psutil.Process) -> list[str]:
    """Empty of a child that ended, and for a moment of one that begins: exec stores it after its parent goes on."""
    try:
        while not (words := child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
    except psutil.ZombieProcess:
        return []
    return words


def test_it_does_its_task_with_the_files_and_the_log_of_it(tmp_path: Path) -> None:
    """The one whose import of torch is waited for: it is the same process, and what it opened meanwhile is not in the
    way of the files' numbers."""
    gc.collect()  # files that earlier tests forgot take low numbers, of which there are RESERVED_HANDLES
    reader, writer = os.pipe()
    beats: list[Beat] = []
    with Ahead() as ahead:
        ahead.start()
        (pid,) = waiting()
        child = start_child(Play("write", handle=writer), tmp_path, module=TINY, pass_fds=[writer], start=ahead.launch)
        assert child.process.pid == pid
        outcome = see_off(child, beats.append)
    assert os.read(reader, 10) == b"hello"
    assert (outcome.status, beats) == ("done", [Beat.STARTING])
    assert "wrote 5 bytes" in outcome.stderr_tail


def test_another_environment_takes_another_child(tmp_path: Path) -> None:
    """Libraries have read their variables by then."""
    with Ahead() as ahead:
        ahead.start()
        (pid,) = waiting()
        child = start_child(Play("environment"), tmp_path, module=TINY, environment={"MINE": "1"}, start=ahead.launch)
        assert child.process.pid != pid and not waiting()
        assert see_off(child).result["environment"]["MINE"] == "1"


def test_one_that_ended_is_replaced(tmp_path: Path) -> None:
    with Ahead() as ahead:
        ahead.start()
        (pid,) = waiting()
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait()
        assert see_off(start_child(Play("items"), tmp_path, module=TINY, start=ahead.launch)).status == "done"


def test_what_fails_before_its_task_is_known_ends_it() -> None:
    def fail() -> None:
        with Ahead() as ahead:
            ahead.start()
            assert len(waiting()) == 1
            raise ValueError("rows")

    with pytest.raises(ValueError, match="rows"):
        fail()
    assert not waiting()


def test_it_dies_with_its_parent() -> None:
    code = (
        "import os; from hivetune.process.launch import Ahead; import psutil\n"
        "Ahead().start(); print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    child = int(told.stdout)
    if psutil.pid_exists(child):
        psutil.wait_procs([psutil.Process(child)], timeout=10)
    assert not psutil.pid_exists(child)


def test_none_is_started_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_AVAILABLE_BYTES", 1 << 60)
    with Ahead() as ahead:
        ahead.start()
        assert not waiting()


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
