"""The start of child processes, with their task or ahead of it.

A child that is started ahead imports torch while its parent still reads rows, and waits at a socket (`wait_for_task` in
child.py) for its task.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

import psutil

from hivetune.base.disk import home
from hivetune.process.protocol import RESERVED_HANDLES
from hivetune.process.still import Process, join_standstill

ENVIRONMENT = {
    # Idle OpenMP threads that spin long make a step five times slower on busy cores. Threads that sleep at once make it
    # 15 to 27 % slower on idle cores, since each product wakes them. GNU's runtime can do both (docs/log.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Its threads would start when numpy is imported, and only a process without threads can fork (forkserver.py).
    # Workers compute with torch.
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
# A waiting child takes 240 MB with torch, and the parent needs room to read rows.
MIN_AVAILABLE_BYTES = 1 << 30

Launch = Callable[[str, str, IO[bytes], Sequence[int], Mapping[str, str | None]], Process]
"""A function such as `launch_child`: module, task file, log, handles, changes of the environment."""

# The fork server, while one is open (forkserver.py). It returns None for a child that it can't fork.
FORKS: list[Callable[[str, str, IO[bytes], Sequence[int], Mapping[str, str | None]], Process | None]] = []


def launch_child(
    module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
) -> Process:
    """Start `python -m hivetune.process MODULE TASK.json` in its own session; `handles` keep their numbers.

    Where a fork server is open, the child is one of its forks.
    """
    if FORKS and (forked := FORKS[-1](module, task_file, log, handles, environment)) is not None:
        return forked
    return start_python([module, task_file], log, handles, child_environment(environment))


def start_python(
    arguments: Sequence[str], log: int | IO[bytes], handles: Sequence[int], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start `python -m hivetune.process ARGUMENTS`, which stands still with this process's children."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hivetune.process", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=tuple(handles),
        start_new_session=True,
        cwd=start_folder(),
    )
    join_standstill(process)
    return process


def start_folder() -> str | None:
    """Return the folder of a child: None for this process's own, or "/" if that was deleted.

    Python can't import in a deleted folder. Tasks have absolute paths.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a child: this process's own, ENVIRONMENT and `changes`, where None removes."""
    merged: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **changes}
    knobs = sorted((name, value) for name, value in merged.items() if name.startswith("AMDGCN_") and value is not None)
    # Some of these are missing in the key of Triton's cache, so a later run would use kernels compiled with them
    # (unslothai/unsloth#11614).
    folder = f"triton-{hashlib.sha256(repr(knobs).encode()).hexdigest()[:12]}" if knobs else "triton"
    merged.setdefault("TRITON_CACHE_DIR", str(home() / "kernels" / folder))
    return {name: value for name, value in merged.items() if value is not None}


class Ahead:
    """At most one child that waits for its task, as a context that ends a waiting child."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start a child from a thread that lives as long as the child.

        None is started while one waits, where memory is short, or where a fork server imports only once.
        """
        if self._process is not None or FORKS or psutil.virtual_memory().available < MIN_AVAILABLE_BYTES:
            return
        self._environment = child_environment({})
        self._socket, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the child is used or ended)
        with theirs:
            number = theirs.fileno()
            self._process = start_python([str(number)], self._output, [number], self._environment)

    def launch(
        self, module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
    ) -> Process:
        """Give the task to the waiting child, or start another one, as `launch_child` does.

        The waiting child must have the same environment, because libraries read variables when they are loaded.
        """
        process = self._process
        same = process is not None and child_environment(environment) == self._environment
        if process is None or not same or process.poll() is not None or max(handles) >= RESERVED_HANDLES:
            self.close()
            return launch_child(module, task_file, log, handles, environment)
        message = {"module": module, "task": task_file, "handles": [1, 2, *handles]}
        self._output.seek(0)
        log.write(self._output.read())
        log.flush()
        try:
            files = [log.fileno(), log.fileno(), *handles]
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
        except BrokenPipeError:  # it ended just now
            self.close()
            return launch_child(module, task_file, log, handles, environment)
        self._release()
        return process

    def close(self) -> None:
        """End the waiting child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._release()

    def _release(self) -> None:
        self._process = None
        self._socket.close()
        self._output.close()
