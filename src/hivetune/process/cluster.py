"""Where a run's cluster is, and the question what it has, without Ray in this process.

Ray's client may end its process when the cluster's head is gone, so only processes that may die speak with it.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from hivetune import errors
from hivetune.base.typed import from_plain
from hivetune.config import RunConfig
from hivetune.errors import MachineNotFit

# A head answers a connection at once, or is not there.
ANSWER_TIMEOUT_S = 3.0
# Ray's head speaks HTTP/2, which begins with fixed words and a frame of settings on both sides (RFC 9113, 3.4).
_FRAME_BYTES, _KIND_OF_FRAME, _SETTINGS = 9, 3, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
# Ray is loaded, connects and counts: 4 s on two busy cores.
ASK_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class ClusterNode:
    """One machine of a cluster. `devices`: how many devices it offers."""

    host: str
    address: str
    alive: bool
    devices: int


@dataclass(frozen=True)
class ClusterView:
    """A cluster. `address`: of its head; `free`: devices that no run uses now."""

    address: str
    nodes: tuple[ClusterNode, ...]
    free: int

    @property
    def devices(self) -> int:
        return sum(node.devices for node in self.nodes if node.alive)


def cluster_of(config: RunConfig) -> str | None:
    """Return the address of the cluster that the setting `workers` names, None without one."""
    workers = config.workers
    return workers if isinstance(workers, str) and workers != "auto" else None


def ask_cluster(address: str) -> ClusterView:
    """Return the machines and devices of the cluster, as Ray lists them in a process of its own.

    Raises MachineNotFit when nobody answers, or refuses this machine.
    """
    own_address(address)
    try:
        answered = subprocess.run(
            [sys.executable, "-m", "hivetune.machine.cluster", address],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise no_answer(address, f"it said nothing in {ASK_TIMEOUT_S:.0f} s") from None
    try:
        document = json.loads(answered.stdout)
    except ValueError:
        raise no_answer(address, (answered.stderr.strip().splitlines() or ["no reason was given"])[-1]) from None
    if "error" in document:
        raise errors.MachineNotFit(document["error"]["message"], hint=document["error"]["hint"])
    return from_plain(ClusterView, {name: document[name] for name in ("address", "nodes", "free")})


def own_address(address: str) -> str:
    """Return the address by which the cluster's other machines reach this one: the one that reaches its head.

    Raises UsageError for what is not an address, MachineNotFit when nobody answers there, or another program does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise errors.UsageError(
            f"{address}: the address of a cluster is not of the form HOST:PORT",
            hint="for example 10.0.0.5:6479",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS") != "1":
                _need_head(connection, address)
            return str(connection.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:  # the last two: a name, or a port, that can't be
        raise no_answer(address, str(error)) from None


def _need_head(connection: socket.socket, address: str) -> None:
    """Raise MachineNotFit unless a head of Ray answers. Ray itself would try for a minute and name no reason."""
    connection.sendall(_HELLO)
    answer = b""
    while len(answer) < _FRAME_BYTES and (more := connection.recv(_FRAME_BYTES - len(answer))):
        answer += more
    if len(answer) < _FRAME_BYTES or answer[_KIND_OF_FRAME] != _SETTINGS:
        raise MachineNotFit(
            f"{address}: another program listens there, and no cluster",
            hint="give the address that its head listens on: docs/cluster.md",
        )


def no_answer(address: str, reason: str) -> MachineNotFit:
    return MachineNotFit(
        f"the cluster at {address} does not answer: {reason}",
        hint="start it on its head (docs/cluster.md); or continue on this machine alone",
    )
