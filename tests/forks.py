"""Tests start hundreds of children that import torch, 1.8 s each. Here the standard library's fork server does it once.

A forked child does what `python -m hivetune.process MODULE TASK.json HEARTBEAT` does. Tests about processes, and
children with variables that libraries read when they are loaded, get new ones.
"""

import multiprocessing
import os
import subprocess
import threading
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, cast
from unittest import mock

from hivetune.process import parent
from hivetune.process.launch import child_environment

_CONTEXT = multiprocessing.get_context("forkserver")
# Read when they are used, so a child may have others than the server.
_READ_LATE = ("HIVETUNE_HOME", "HIVETUNE_KERNELS", "HIVETUNE_SUPERVISION", "TRITON_CACHE_DIR", "PYTEST_CURRENT_TEST")
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


class Forks:
    """`start_process` of process/parent.py, by forks of a server that is started for the first of them."""

    def __init__(self) -> None:
        self._variables: dict[str, str] | None = None

    def start_process(
        self, module: str, task_file: Path, log: IO[bytes], heartbeat: int, environment: Mapping[str, str | None]
    ) -> "subprocess.Popen[bytes]":
        variables = child_environment(environment)
        early = {name: value for name, value in variables.items() if name not in _READ_LATE}
        if self._variables is None:
            _CONTEXT.set_forkserver_preload(["hivetune.train.worker.exchange", "forks"])
            with mock.patch.dict(os.environ, {**early, **_EARLY}):
                multiprocessing.forkserver.ensure_running()
            self._variables = early
        if early != self._variables or threading.current_thread() is not threading.main_thread():
            return start_new(module, task_file, log, heartbeat, environment)
        files = _Files(log.fileno(), heartbeat)
        process = _CONTEXT.Process(target=_run, args=(module, str(task_file), os.getcwd(), variables, files))
        process.start()
        return cast("subprocess.Popen[bytes]", Fork(process))


class _Files:
    """The handles that a child inherits; they are sent while it is started."""

    def __init__(self, log: int, heartbeat: int):
        self.handles = log, heartbeat

    def __reduce__(self) -> Any:
        return _received, tuple(map(DupFd, self.handles))


def _received(log: Any, heartbeat: Any) -> tuple[int, int]:
    return log.detach(), heartbeat.detach()


def _run(module: str, task_file: str, folder: str, variables: Mapping[str, str], files: tuple[int, int]) -> None:
    """Be the child."""
    from hivetune.process.child import run_child

    log, heartbeat = files
    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    run_child(module, task_file, str(heartbeat))
