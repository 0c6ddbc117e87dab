"""A child that was forked is the one that would have been started: same files, ends and limits, and as much alone."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_parent import TINY, gone, kill_supervisor, stop_at_work
from test_parent import run as run_child_task
from tiny_child import Play

from hivetune.process import forkserver, launch
from hivetune.process.forkserver import forking
from hivetune.process.parent import Child, run_task, see_off, start_child
from hivetune.process.protocol import Beat, Outcome, Train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")


# Children of this process that other tests left: a fixture of the whole session may hold a server.
earlier: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def opened(no_forks: None) -> Iterator[None]:
    earlier.clear()
    earlier.update(started())
    with forking():
        yield
    assert launch.OPEN.server is None and not started()


def started() -> list[psutil.Process]:
    """Children that this process started itself since the test began, the server among them."""
    children = set(psutil.Process().children()) - earlier
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


def begin(folder: Path, do: str = "work_on") -> Child:
    child = start_child(Play(do), folder, module=TINY)
    while not child.ended and Beat.ITEM not in child.wait_beats():
        pass
    return child


def is_fork(child: Child) -> bool:
    (server,) = started()
    return psutil.Process(child.process.pid).ppid() == server.pid


def test_every_end_of_a_task_is_told_as_it_is_of_a_new_process(tmp_path: Path) -> None:
    """One server for all of them, which none of these ends; test_parent.py has the same of new processes."""
    outcomes: dict[str, Outcome] = {}
    for do in ("environment", "refuse", "crash", "abort", "exit", "stop_itself"):
        outcomes[do] = run_child_task(tmp_path, do=do)
    assert {do: (outcome.status, outcome.returncode) for do, outcome in outcomes.items()} == {
        "environment": ("done", 0),
        "refuse": ("failed", 5),
        "crash": ("failed", 1),
        "abort": ("died", -signal.SIGABRT),
        "exit": ("died", 3),
        "stop_itself": ("hung", -signal.SIGKILL),
    }
    assert outcomes["environment"].result["oom"] == "500"
    assert outcomes["environment"].result["environment"] == launch.child_environment({})
    assert "in main" in outcomes["crash"].stderr_tail and "GPU node-1" in outcomes["abort"].stderr_tail
    assert outcomes["stop_itself"].state == "T"
    full = run_child_task(tmp_path, do="allocate", memory_limit_bytes=512 << 20)
    assert full.error is not None and full.error.type == "MemoryError"
    assert run_child_task(tmp_path, do="allocate").status == "done"  # the limit was the other one's
    saved = stop_at_work(Train(tmp_path, tmp_path, tmp_path), tmp_path)
    assert (saved.status, saved.result) == ("stopped", {"saved": True})
    reader, writer = os.pipe()
    see_off(start_child(Play("write", handle=writer), tmp_path, module=TINY, pass_fds=[writer]))
    os.close(writer)
    assert os.read(reader, 10) == b"hello" and os.read(reader, 1) == b""  # nobody holds what was passed
    (server,) = started()
    deadline = time.monotonic() + 20
    while server.children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.children()  # all are reaped


def test_one_that_is_killed_takes_no_other_with_it(tmp_path: Path) -> None:
    first, second = (begin(tmp_path / name) for name in ("first", "second"))
    assert is_fork(first) and is_fork(second)
    assert os.getsid(first.process.pid) == first.process.pid
    os.kill(first.process.pid, signal.SIGKILL)
    killed = see_off(first)
    assert (killed.status, killed.signal) == ("died", signal.SIGKILL)
    assert not second.ended and second.state() in "RS"
    assert run_task(Play("items", items=2), tmp_path / "third", module=TINY).result == {"items": 2}
    assert second.kill() and second.outcome().signal == signal.SIGKILL


def test_a_fork_has_the_folder_and_the_home_that_its_parent_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_task(Play("items"), tmp_path / "one", module=TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HIVETUNE_KERNELS")
    child = start_child(Play("environment"), tmp_path / "two", module=TINY)
    assert is_fork(child)
    result = see_off(child).result
    assert (result["folder"], result["environment"]) == (str(tmp_path), launch.child_environment({}))


def test_another_environment_takes_a_new_process(tmp_path: Path) -> None:
    """Libraries have read their variables by then."""
    run_task(Play("items"), tmp_path, module=TINY)
    child = start_child(Play("environment"), tmp_path, module=TINY, environment={"MINE": "1"})
    assert child.process.pid in [process.pid for process in started()]
    assert see_off(child).result["environment"]["MINE"] == "1"


def test_a_server_with_threads_forks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds is never released in a fork. The server stays for what it has forked before."""
    (tmp_path / "with_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        f"import runpy; __name__ == '__main__' and runpy.run_path({TINY!r}, run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_task(Play("items", items=1), tmp_path / "one", module=TINY).status == "done"
    (server,) = started()
    assert run_task(Play("items", items=2), tmp_path / "two", module="with_thread").result == {"items": 2}
    child = begin(tmp_path / "three")
    assert {process.pid for process in started()} == {server.pid, child.process.pid}
    child.kill()


def test_a_server_that_is_gone_is_replaced_by_new_processes(tmp_path: Path) -> None:
    child = begin(tmp_path / "one")
    (server,) = started()
    server.kill()
    outcome = see_off(child)  # it can't be told how it ended, so it ends with the server
    assert (outcome.status, outcome.signal) == ("died", signal.SIGKILL)
    assert run_task(Play("items", items=2), tmp_path / "two", module=TINY).result == {"items": 2}


def test_a_fork_that_comes_too_late_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two would work on one task."""
    reader, writer = os.pipe()
    monkeypatch.setattr(forkserver, "FORK_TIMEOUT_S", 0.001)
    child = start_child(Play("write", handle=writer), tmp_path, module=TINY, pass_fds=[writer])
    os.close(writer)
    assert see_off(child).status == "done"
    assert os.read(reader, 100) == b"hello" and os.read(reader, 100) == b""  # the late fork has ended and wrote nothing


def test_where_memory_is_short_there_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MIN_AVAILABLE_BYTES", 1 << 60)
    child = begin(tmp_path)
    assert [process.pid for process in started()] == [child.process.pid]
    child.kill()


@pytest.mark.parametrize("do", ["work_on", "stop_itself"])
def test_a_fork_dies_with_its_supervisor(tmp_path: Path, do: str) -> None:
    opened = "from hivetune.process.forkserver import forking; forks = forking(); forks.__enter__()"
    child, server, supervisor = kill_supervisor(tmp_path, do, first=opened)
    assert server != supervisor
    assert gone(child, server)
