"""The start of child processes: `python -m hivetune.process MODULE TASK.json`, or a fork of a fork server."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from hivetune.base.disk import home
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
# Kubernetes and SLURM set these for the job. A child that believed them would wait for other ranks, without heartbeat.
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Forks(Protocol):
    """A fork server (forkserver.py)."""

    def start(self, variables: Mapping[str, str], *imported: str) -> None:
        """Start it with these variables, unless it runs; it imports the named modules."""

    def fork(
        self, module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
    ) -> Process | None:
        """Return a fork for a task, as `launch_child` does, or None if it can't fork one."""


class OpenForks(threading.local):
    """The fork server that this thread has open. The kernel ends it, and with it its forks, when its thread ends."""

    server: Forks | None = None


OPEN = OpenForks()


def launch_child(
    module: str, task_file: str, log: IO[bytes], handles: Sequence[int], environment: Mapping[str, str | None]
) -> Process:
    """Start `python -m hivetune.process MODULE TASK.json` in its own session; `handles` keep their numbers.

    Where this thread has a fork server open, the child is one of its forks.
    """
    server = OPEN.server
    if server is not None and (forked := server.fork(module, task_file, log, handles, environment)) is not None:
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


def start_folder() -> str:
    """Return the folder of a child: this process's own, or "/" if that was deleted: Python can't import there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a child: this process's own without RANK_VARIABLES, ENVIRONMENT and `changes`, where
    None removes.
    """
    merged: dict[str, str | None] = {**os.environ, **dict.fromkeys(RANK_VARIABLES), **ENVIRONMENT, **changes}
    knobs = sorted((name, value) for name, value in merged.items() if name.startswith("AMDGCN_") and value is not None)
    # Some of these are missing in the key of Triton's cache, so a later run would use kernels compiled with them
    # (unslothai/unsloth#11614).
    folder = f"triton-{hashlib.sha256(repr(knobs).encode()).hexdigest()[:12]}" if knobs else "triton"
    merged.setdefault("TRITON_CACHE_DIR", str(home() / "kernels" / folder))
    return {name: value for name, value in merged.items() if value is not None}
