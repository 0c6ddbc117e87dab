"""A fork server that is started ahead of the first task serves it as a new process would, and is never left over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_child import Play

from hivetune.process import forkserver
from hivetune.process.forkserver import forking, start_ahead
from hivetune.process.launch import child_environment
from hivetune.process.parent import run_task, see_off, start_child
from hivetune.process.protocol import Beat

TINY = str(Path(__file__).with_name("tiny_child.py"))


def servers() -> list[psutil.Process]:
    """Fork servers of this process. One that was just started has no arguments for a moment."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "fork" in (child.cmdline() or ["fork"])]


def test_it_does_its_task_with_the_files_and_the_log_of_it(tmp_path: Path) -> None:
    """The one whose import of torch is waited for; what it opened meanwhile is not in the way of the files' numbers."""
    reader, writer = os.pipe()
    beats: list[Beat] = []
    with forking():
        start_ahead()
        (server,) = servers()
        child = start_child(Play("write", handle=writer), tmp_path, module=TINY, pass_fds=[writer])
        assert psutil.Process(child.process.pid).ppid() == server.pid
        outcome = see_off(child, beats.append)
    assert os.read(reader, 10) == b"hello"
    assert (outcome.status, beats) == ("done", [Beat.STARTING])
    assert "wrote 5 bytes" in outcome.stderr_tail
    assert not servers()


def test_one_that_runs_is_not_started_again(tmp_path: Path) -> None:
    with forking():
        start_ahead()
        (server,) = servers()
        assert see_off(start_child(Play("items"), tmp_path, module=TINY)).status == "done"
        start_ahead()
        assert servers() == [server]


def test_another_environment_takes_another_server(tmp_path: Path) -> None:
    """Libraries have read their variables by then."""
    with forking():
        start_ahead()
        (first,) = servers()
        child = start_child(Play("environment"), tmp_path, module=TINY, environment={"MINE": "1"})
        (second,) = servers()
        assert second.pid != first.pid and psutil.Process(child.process.pid).ppid() == second.pid
        assert see_off(child).result["environment"]["MINE"] == "1"


def test_one_that_ended_is_replaced(tmp_path: Path) -> None:
    with forking():
        start_ahead()
        (server,) = servers()
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        assert see_off(start_child(Play("items"), tmp_path, module=TINY)).status == "done"


def test_what_fails_before_its_task_is_known_ends_it() -> None:
    def fail() -> None:
        with forking():
            start_ahead()
            assert len(servers()) == 1
            raise ValueError("rows")

    with pytest.raises(ValueError, match="rows"):
        fail()
    assert not servers()


def test_it_dies_with_its_parent() -> None:
    code = (
        "import os; from hivetune.process import forkserver; import psutil\n"
        "forks = forkserver.forking(); forks.__enter__(); forkserver.start_ahead()\n"
        "print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    child = int(told.stdout)
    if psutil.pid_exists(child):  # it ends after its imports when its parent died before it asked for a signal of that
        psutil.wait_procs([psutil.Process(child)], timeout=60)
    assert not psutil.pid_exists(child)


def test_none_is_started_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MIN_AVAILABLE_BYTES", 1 << 60)
    with forking():
        start_ahead()
        assert not servers()


def test_one_without_work_ends_and_another_serves_the_next_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import hivetune.process.forkserver as f; f.IDLE_S = 0.5\n")
    with forking():
        assert run_task(Play("items"), tmp_path / "one", module=TINY).status == "done"
        (first,) = servers()
        first.wait(20)
        child = start_child(Play("work_on"), tmp_path / "two", module=TINY)
        (second,) = servers()
        assert second.pid != first.pid and psutil.Process(child.process.pid).ppid() == second.pid
        child.kill()


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
