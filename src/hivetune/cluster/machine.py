"""What a machine keeps of the cluster that it belongs to, below HOME/cluster: the token, its devices, who has which.

A device is held by a lock that the kernel drops when its holder dies, whatever that dies of.
"""

import fcntl
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import home, read_json, write_json
from hivetune.base.private import make_folder, open_plain
from hivetune.base.typed import from_plain, to_plain
from hivetune.errors import UsageError
from hivetune.machine.inventory import Machine, cpu_workers

_MACHINE, _TOKEN, _DEVICES = "machine.json", "token", "devices"


@dataclass(frozen=True)
class Membership:
    """This machine in a cluster. `address`: of the head; `head`: it is this machine; `python`: of the environment that
    computes; `devices`: those that it offers; `redis`: where the head keeps its state, without a password."""

    address: str
    head: bool
    python: str
    devices: tuple[str, ...]
    redis: str = ""


def cluster_folder() -> Path:
    folder = home() / "cluster"
    make_folder(folder)
    return folder


def token_path() -> Path:
    return cluster_folder() / _TOKEN


def make_token() -> Path:
    """The token of the cluster whose head this machine is; one that is there stays."""
    if not token_path().exists():
        with open(open_plain(token_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    return token_path()


def need_token() -> Path:
    """Raises UsageError where there is none."""
    if not token_path().exists():
        raise UsageError(
            f"this machine has no token of the cluster: {token_path()} does not exist",
            hint="copy HOME/cluster/token of the head to it, by scp for example; who has it may run programs there",
        )
    return token_path()


def write_membership(membership: Membership) -> None:
    write_json(cluster_folder() / _MACHINE, to_plain(membership))


def forget_membership() -> None:
    (cluster_folder() / _MACHINE).unlink(missing_ok=True)


def read_membership() -> Membership | None:
    path = cluster_folder() / _MACHINE
    return from_plain(Membership, read_json(path)) if path.exists() else None


def offered_devices(wanted: str, machine: Machine) -> tuple[str, ...]:
    """`auto`: each card; without cards as many CPU workers as share the cores. `none`, or names divided by commas.

    Raises UsageError for a device that is not there.
    """
    cards = tuple(f"cuda:{index}" for index in range(len(machine.cards)))
    if wanted == "auto":
        return cards or ("cpu",) * cpu_workers(machine.cores)
    if wanted == "none":
        return ()
    names = tuple(name.strip() for name in wanted.split(","))
    unknown = next((name for name in names if name != "cpu" and name not in cards), None)
    if unknown is not None:
        has = ", ".join(("cpu", *cards))
        raise UsageError(f"unknown device {unknown!r}; this machine has {has}", hint="--devices auto takes each card")
    if len(set(names) - {"cpu"}) < sum(name != "cpu" for name in names):
        raise UsageError(f"--devices {wanted}: a card is listed twice")
    return names


def claim_device(devices: Sequence[str], wanted: str | None = None) -> tuple[str, int] | None:
    """The first of `devices` that nobody holds (only `wanted`, where it is named), and the lock that holds it until it
    is closed or this process ends. None: all are held."""
    folder = cluster_folder() / _DEVICES
    make_folder(folder)
    for place, device in enumerate(devices):
        if wanted is not None and device != wanted:
            continue
        lock = open_plain(folder / f"{place}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return device, lock
    return None
