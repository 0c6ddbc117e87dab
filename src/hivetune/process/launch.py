"""The start of child processes: their environment, CPU priority and time limits."""

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from hivetune.base.disk import home
from hivetune.errors import MachineNotFit

ENVIRONMENT = {
    # Idle OpenMP threads that spin long make a step five times slower on busy cores. Threads that sleep at once make it
    # 15 to 27 % slower on idle cores, since each product wakes them. GNU's runtime can do both (docs/log.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
# Kubernetes and SLURM set these for the job. A child that believed them would wait for other ranks, without heartbeat.
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a child: this process's own without RANK_VARIABLES, plus ENVIRONMENT and `changes`, in
    which None removes a variable."""
    merged: dict[str, str | None] = {**os.environ, **dict.fromkeys(RANK_VARIABLES), **ENVIRONMENT, **changes}
    knobs = sorted((name, value) for name, value in merged.items() if name.startswith("AMDGCN_") and value is not None)
    # Some of these are missing in the key of Triton's cache, so a later run would use kernels compiled with them
    # (unslothai/unsloth#11614).
    folder = f"triton-{hashlib.sha256(repr(knobs).encode()).hexdigest()[:12]}" if knobs else "triton"
    merged.setdefault("TRITON_CACHE_DIR", str(home() / "kernels" / folder))
    return {name: value for name, value in merged.items() if value is not None}


_gives_way: ContextVar[bool] = ContextVar("gives_way", default=False)


@contextlib.contextmanager
def idle_priority() -> Iterator[None]:
    """Give the children that this thread starts in the block the idle priority, so that they use only otherwise idle
    cores.

    Beside a busy gateway they get 0.3 % of a core, on an idle machine all cores. It has no effect on graphics cards,
    for which the lease decides (process/lease.py).
    """
    before = _gives_way.set(True)
    try:
        yield
    finally:
        _gives_way.reset(before)


def set_idle_priority(pid: int) -> None:
    """Give a child that was just started the idle priority, which its own children inherit, if this thread is in a
    block of `idle_priority`."""
    if _gives_way.get() and sys.platform == "linux":
        # Not for this process itself: without rights nobody gets from SCHED_IDLE back to the ordinary priority.
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


# JSON with other values. Tests set it so that a hang takes seconds; children inherit it.
VARIABLE = "HIVETUNE_SUPERVISION"


@dataclass(frozen=True)
class Supervision:
    """The time limits and retry counts of a supervisor; times in seconds."""

    hang_factor: float = 5.0  # a step hangs after this many times its usual time
    hang_floor_s: float = 60.0  # but not before this
    start_timeout_s: float = 900.0  # imports, model, first compilation
    evaluate_timeout_s: float = 1800.0
    save_timeout_s: float = 600.0
    attempts: int = 6  # without progress before giving up
    backoff_s: float = 5.0  # after a device fault; doubled up to 300 s if faults come at different steps
    checkpoint_every_s: float | None = None  # None: that of the task


def supervision() -> Supervision:
    """Return the time limits and retry counts of a run's supervisor."""
    return Supervision(**json.loads(os.environ.get(VARIABLE, "{}")))


# A head answers a connection at once, or is not there.
HEAD_ANSWERS_S = 3.0
# Ray's head speaks HTTP/2, which begins with fixed words and an empty frame of settings (RFC 9113, 3.4); so does its
# answer. Ray itself would try for a minute to reach another program, and name no reason.
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_KIND_OF_FRAME = slice(3, 4)


def reach_cluster(head: str) -> str:
    """Return the address of this machine in a Ray cluster: the one from which it reaches the head.

    `head` is HOST:PORT. Ray itself is not called, because its client may end the process if the head is gone. Raises
    MachineNotFit if no head answers.
    """
    host, _, port = head.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), HEAD_ANSWERS_S) as connection:
            connection.sendall(_HELLO + _SETTINGS)
            answer = connection.recv(len(_SETTINGS))
            own = str(connection.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:  # the last two: a name, or a port, that can't be
        raise no_answer(head, str(error)) from None
    if os.environ.get("RAY_USE_TLS") != "1" and answer[_KIND_OF_FRAME] != _SETTINGS[_KIND_OF_FRAME]:
        raise no_answer(head, "another program listens there")
    return own


def no_answer(head: str, reason: str) -> MachineNotFit:
    return MachineNotFit(
        f"the cluster at {head} does not answer: {reason}",
        hint="start Ray on its head (docs/cluster.md), or train on this machine alone",
    )
