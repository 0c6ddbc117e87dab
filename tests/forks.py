"""Tests start hundreds of processes that import torch (1.4 s each) and transformers (2.5 s more). Here the standard
library's fork server does it once, for all workers of pytest-xdist, and each of them is a fork.

A forked task does what `python -m hivetune.process MODULE TASK.json HEARTBEAT` does, a forked script what `python -c`
does, and its own tasks are forks too. Tests about processes, and children with variables that libraries read when they
are loaded, get new ones.
"""

import fcntl
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, cast
from unittest import mock

from hivetune.process import parent
from hivetune.process.launch import child_environment

_CONTEXT = multiprocessing.get_context("forkserver")
# All that tasks and supervisors import. Of a name that does not exist the server says nothing.
_PRELOADED = (
    "hivetune.cli.main",
    "hivetune.train.supervise.supervisor",
    "hivetune.train.worker.recover",
    "hivetune.judge.worker.score",
    "hivetune.models.worker.prepare_model",
    "hivetune.release.worker.score_passages",
    "hivetune.release.worker.to_gguf",
    "forks",
)
# Read when they are used, so a child may have others than the server.
_READ_LATE = {"HIVETUNE_HOME", "HIVETUNE_KERNELS", "HIVETUNE_SUPERVISION", "TRITON_CACHE_DIR", "PYTEST_CURRENT_TEST"}
_READ_LATE |= {"TORCHINDUCTOR_CACHE_DIR"}  # torch sets it where it is imported, as this process may have done since
# numpy would start threads, and only a process without threads can fork.
_EARLY = {"OPENBLAS_NUM_THREADS": "1"}

start_new = parent.start_process


class Fork:
    """A forked child as its parent sees it: as `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess):
        assert process.pid is not None
        self.pid = process.pid
        self._process, self._lock = process, threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """`start_process` of process/parent.py, by forks of a server that is started for the first of them.

    `variables`: those that the server has, where it runs already.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables, self._runs = dict(variables or {}), variables is not None

    def begin(self, address: str | None = None) -> None:
        """Let the server have this process's variables, without what a test changes later. `address`: of a server that
        another process has started with the same ones."""
        self._variables = _read_early(child_environment({}))
        if address is not None:
            server = forkserver._forkserver
            # The server gets both ends of what it listens to from whoever started it.
            server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
            server.ensure_running = lambda: None
            self._runs = True

    def serve(self, **variables: str) -> str:
        """Start the server, with these variables besides this process's own; return its address."""
        if not self._runs:
            assert all(map(importlib.util.find_spec, _PRELOADED))
            _CONTEXT.set_forkserver_preload(list(_PRELOADED))
            with mock.patch.dict(os.environ, {**self._variables, **variables, **_EARLY}, clear=True):
                forkserver.ensure_running()
            self._runs = True
        return str(forkserver._forkserver._forkserver_address)

    def start_process(
        self, module: str, task_file: Path, log: IO[bytes], heartbeat: int, environment: Mapping[str, str | None]
    ) -> "subprocess.Popen[bytes]":
        variables = child_environment(environment)
        if not self._can_fork(variables):
            return start_new(module, task_file, log, heartbeat, environment)
        return self._fork(_run_task, variables, (log.fileno(), heartbeat), module, str(task_file))

    def start_script(self, script: str, *arguments: str, log: IO[Any]) -> "subprocess.Popen[bytes]":
        """Start what `python -c SCRIPT ARGUMENTS` does with this process's variables, output and errors into `log`."""
        assert self._can_fork(child_environment({}))
        return self._fork(_run_script, dict(os.environ), (log.fileno(),), self._variables, script, arguments)

    def _can_fork(self, variables: Mapping[str, str]) -> bool:
        if _read_early(variables) != self._variables:
            return False
        if threading.current_thread() is threading.main_thread():
            self.serve()
        return self._runs

    def _fork(
        self, run: Callable[..., None], variables: Mapping[str, str], files: tuple[int, ...], *arguments: Any
    ) -> "subprocess.Popen[bytes]":
        process = _CONTEXT.Process(target=_run, args=(run, os.getcwd(), variables, _Files(files), *arguments))
        process.start()
        return cast("subprocess.Popen[bytes]", Fork(process))


def _read_early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _READ_LATE}


FORKS = Forks()  # of this process


class _Files:
    """The handles that a child inherits; they are sent while it is started."""

    def __init__(self, handles: tuple[int, ...]):
        self.handles = handles

    def __reduce__(self) -> Any:
        return _received, tuple(map(DupFd, self.handles))


def _received(*handles: Any) -> tuple[int, ...]:
    return tuple(handle.detach() for handle in handles)


def _run(
    run: Callable[..., None], folder: str, variables: Mapping[str, str], files: tuple[int, ...], *more: Any
) -> None:
    """Be the child."""
    os.setsid()
    _die_with_parent()
    for number in (1, 2):
        os.dup2(files[0], number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    run(files, *more)


def _die_with_parent() -> None:
    """Let the kernel kill this process, even stopped, when the one that wanted it ends. Its parent is the server."""
    known = multiprocessing.parent_process()
    assert known is not None
    fcntl.fcntl(known.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(known.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(known.sentinel, fcntl.F_SETFL, os.O_ASYNC)


def _run_task(files: tuple[int, ...], module: str, task_file: str) -> None:
    from hivetune.process.child import run_child

    run_child(module, task_file, str(files[1]))


def _run_script(
    _: tuple[int, ...], server_variables: Mapping[str, str], script: str, arguments: tuple[str, ...]
) -> None:
    # Its own server, which the library would start, would load everything again.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    parent.start_process = Forks(server_variables).start_process
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
