"""Where a run's Ray cluster is, and whether its head answers, without Ray in this process.

Ray's client may end its process when the cluster's head is gone, so only rank 0 speaks with it, which may die.
"""

import os
import socket

from hivetune.config import RunConfig
from hivetune.errors import MachineNotFit, UsageError

# A head answers a connection at once, or is not there.
ANSWER_TIMEOUT_S = 3.0
# Ray's head speaks HTTP/2, which begins with fixed words and a frame of settings on both sides (RFC 9113, 3.4).
_FRAME_BYTES, _KIND_OF_FRAME, _SETTINGS = 9, 3, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))


def cluster_of(config: RunConfig) -> str | None:
    """Return the address of the cluster that the setting `workers` names, None without one."""
    workers = config.workers
    return workers if isinstance(workers, str) and workers != "auto" else None


def own_address(address: str) -> str:
    """Return the address by which the cluster's other machines reach this one: the one that reaches its head.

    Raises UsageError for what is not an address, MachineNotFit when nobody answers there, or another program does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
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
        hint="start Ray on its head (docs/cluster.md), or train on this machine alone",
    )
