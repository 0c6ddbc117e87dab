"""This machine as a member of a cluster: its token, the devices that it offers, and Ray as it is used here.

What a machine keeps lies below HOME/cluster. A device is held by a lock that the kernel drops when its holder dies,
whatever that dies of. Ray carries its calls as pickles, so whoever has the token can run programs on every machine of
the cluster.
"""

import fcntl
import importlib.util
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, read_json, sha256_file, write_json
from hivetune.base.paths import install_command, quoted
from hivetune.base.private import make_folder, open_plain
from hivetune.base.typed import from_plain, to_plain
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.machine.inventory import Machine, cpu_workers
from hivetune.models.prepared import find_prepared
from hivetune.process.cluster import ClusterNode, ClusterView, no_answer, own_address

_MACHINE, _TOKEN, _DEVICES = "machine.json", "token", "devices"


@dataclass(frozen=True)
class Membership:
    """This machine as a member of a cluster.

    `address`: of the head; `head`: whether it is this machine; `python`: of the environment that computes; `devices`:
    those that it offers; `redis`: where the head keeps its state, without a password.
    """

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
    """Make the token of the cluster whose head this machine is, unless there is one, and return its path."""
    if not token_path().exists():
        with open(open_plain(token_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    return token_path()


def need_token() -> Path:
    """Return the path of the token. Raises UsageError where there is none."""
    if not token_path().exists():
        raise UsageError(
            f"this machine lacks the cluster's token: {token_path()} does not exist",
            hint="copy HOME/cluster/token from the head, for example by scp; its owner can run programs there",
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
    """Return the devices that `wanted` names: `auto`, `none`, or names divided by commas.

    `auto` is each card; without cards it is as many CPU workers as share the cores. Raises UsageError for a device
    that is not there.
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
        raise UsageError(f"unknown device {unknown!r}; this machine has {has}", hint="use --devices auto for all cards")
    if len(set(names) - {"cpu"}) < sum(name != "cpu" for name in names):
        raise UsageError(f"--devices {wanted}: a card is listed twice")
    return names


def claim_device(devices: Sequence[str], wanted: str | None = None) -> tuple[str, int] | None:
    """Hold the first free one of `devices`, or only `wanted`. Return it with its lock; None when all are held.

    The device is held until the lock is closed or this process ends.
    """
    folder = cluster_folder() / _DEVICES
    make_folder(folder)
    for number, device in enumerate(devices):
        if wanted is not None and device != wanted:
            continue
        lock = open_plain(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return device, lock
    return None


def find_model(model: str, folder: Path, model_hash: str, host: str) -> Path:
    """Return the folder of the model with the same bytes: `folder`, as on the run's machine, or by its name here.

    Raises MachineNotFit.
    """

    def is_model(there: Path) -> bool:
        return (there / MANIFEST).exists() and sha256_file(there / MANIFEST) == model_hash

    if is_model(folder):
        return folder
    hint = f"prepare it there: hivetune fetch {quoted(model)}"
    try:
        prepared = find_prepared(model)
    except UsageError:
        prepared = None
    if prepared is None:
        raise MachineNotFit(f"{host} does not have the model {model}", hint=hint)
    if not is_model(prepared.folder):
        raise MachineNotFit(f"the model {model} of {host} has other bytes than the run's", hint=hint)
    return prepared.folder


# The custom resource of a machine, one for each device that it offers: Ray's own table of cards does not know all.
DEVICE = "hivetune_device"
NAMESPACE = "hivetune"
LOOPBACK = "127.0.0.1"


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MachineNotFit("a cluster needs Ray, which is not installed", hint=install_command("cluster"))


def ray_environment(address: str) -> dict[str, str]:
    """Return variables for every process that speaks Ray in a cluster. Raises UsageError without a token."""
    # Ray turns the loopback into an address that the network reaches, except under the name of this variable.
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address.startswith(f"{LOOPBACK}:") else {}
    return {
        **loopback,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(need_token()),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Actors of another patch release of Python understand each other.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        # Ray hides the cards from processes that ask it for none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # It would kill actors where memory is short; the kernel does that where it has to.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def connect_ray(address: str) -> Any:
    """Return the module `ray`, connected to the cluster at `address`.

    Raises MachineNotFit when nobody answers there, when the token is another one, or when this machine is not a node of
    it; UsageError without a token.
    """
    need_ray()
    own_address(address)
    os.environ.update(ray_environment(address))
    import ray
    import ray.exceptions
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        GcsClient(address=address)  # says at once that the token is another one, where `init` tries for a minute
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise _explained(error, address) from None
    return ray


def _explained(error: Exception, address: str) -> MachineNotFit:
    message = " ".join(str(error).split())
    if "authentication" in message.lower() or "unauthenticated" in message.lower():
        return MachineNotFit(
            f"the cluster at {address} does not know this machine's token",
            hint="copy HOME/cluster/token of its head to this machine",
        )
    if "version" in message.lower():
        return MachineNotFit(f"the cluster at {address} has another version: {message}", hint="install the same Ray")
    if "node" in message.lower():
        return MachineNotFit(
            f"this machine is not a node of the cluster at {address}",
            hint="join it, without devices if it shall only train: docs/cluster.md",
        )
    return no_answer(address, message)


def offered_by(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of devices on all nodes that live, as Ray lists them."""
    return sum(int(node["Resources"].get(DEVICE, 0)) for node in nodes if node["Alive"])


def view_cluster(address: str) -> ClusterView:
    """Return the machines and devices of a cluster. Raises what `connect_ray` raises."""
    ray = connect_ray(address)
    try:
        nodes = tuple(
            ClusterNode(
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                bool(node["Alive"]),
                int(node["Resources"].get(DEVICE, 0)),
            )
            for node in ray.nodes()
        )
        return ClusterView(address, nodes, int(ray.available_resources().get(DEVICE, 0)))
    finally:
        ray.shutdown()


def _tell(address: str) -> None:
    """Print what `view_cluster` finds, or its error, as JSON: of the process that `ask_cluster` starts."""
    document: dict[str, Any]
    try:
        document = to_plain(view_cluster(address))
    except HivetuneError as error:
        document = {"error": {"message": error.message, "hint": error.hint}}
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    _tell(sys.argv[1])
