"""How the process of a child comes to be: started with its task, or ahead of it.

One that is started ahead imports torch while its parent still reads rows, and waits at a socket (`wait_for_task` in
child.py). What is sent there makes it the child that would have been started otherwise.
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
from hivetune.process.still import join_standstill

ENVIRONMENT = {
    # Idle OpenMP threads that spin long make a step five times as slow on busy cores; those that sleep at once cost 15
    # to 27 % of it on idle ones, where they are woken for each product. GNU's runtime knows a middle way (docs/log.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
# It holds 240 MB with torch, and the parent must find room to read rows beside it.
LEAST_AVAILABLE_BYTES = 1 << 30

Launch = Callable[[str, str, IO[bytes], Sequence[int], Mapping[str, str | None]], "subprocess.Popen[bytes]"]
"""Of `launch_child` and its like: module, task file, log, handles, changes of the environment."""


def launch_child(
    module: str,
    task_file: str,
    log: IO[bytes],
    handles: Sequence[int],
    environment: Mapping[str, str | None],
    *,
    python: str | None = None,
) -> "subprocess.Popen[bytes]":
    """`python -m hivetune.process MODULE TASK.json` in a session of its own; `handles` keep their numbers there."""
    process = subprocess.Popen(
        [python or sys.executable, "-m", "hivetune.process", module, task_file],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=child_environment(environment),
        pass_fds=tuple(handles),
        start_new_session=True,
        cwd=start_folder(),
    )
    join_standstill(process)
    return process


def start_folder() -> str | None:
    """Where a child starts: None for this process's own folder, the root where that was deleted meanwhile, since Python
    can't import there. Tasks name files by absolute paths."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's own, what every child gets, and `changes`; a variable that is None there is removed."""
    merged: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **changes}
    knobs = sorted((name, value) for name, value in merged.items() if name.startswith("AMDGCN_") and value is not None)
    # Triton leaves some of these out of its cache's key, so kernels compiled under them would serve every later run
    # (unslothai/unsloth#11614). A child writes nowhere else.
    folder = f"triton-{hashlib.sha256(repr(knobs).encode()).hexdigest()[:12]}" if knobs else "triton"
    merged.setdefault("TRITON_CACHE_DIR", str(home() / "kernels" / folder))
    return {name: value for name, value in merged.items() if value is not None}


class Ahead:
    """At most one child that waits for its task. Use as a context: one that still waits at the end is ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start one, unless one waits or memory is short. Call it from a thread that lives as long as the child."""
        if self._process is not None or psutil.virtual_memory().available < LEAST_AVAILABLE_BYTES:
            return
        self._environment = child_environment({})
        self._socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the child is taken or ended)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hivetune.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=start_folder(),
            )
        join_standstill(self._process)

    def launch(
        self, module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
    ) -> "subprocess.Popen[bytes]":
        """As `launch_child`: the child that waits, if it can do it, else one that is started now. None waits then.

        Libraries read their variables when they are loaded, so one that waits must have been started with the same.
        """
        process = self._process
        same = process is not None and child_environment(environment) == self._environment
        if process is None or not same or process.poll() is not None or max(handles) >= RESERVED_HANDLES:
            self.close()
            return launch_child(module, task_file, log, handles, environment)
        message = {"module": module, "task": task_file, "handles": [1, 2, *handles]}
        self._said.seek(0)
        log.write(self._said.read())
        log.flush()
        try:
            files = [log.fileno(), log.fileno(), *handles]
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
        except BrokenPipeError:  # it ended just now
            self.close()
            return launch_child(module, task_file, log, handles, environment)
        self._process = None
        self._release()
        return process

    def close(self) -> None:
        """End the child that waits, if one does."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._release()

    def _release(self) -> None:
        self._socket.close()
        self._said.close()
