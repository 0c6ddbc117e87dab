"""Ray, as it is used here: with a token, without statistics of use, and what its errors mean.

Ray carries its calls as pickles, so whoever has the token can run programs on every machine of the cluster.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.base.packages import install_command
from hivetune.cluster.machine import need_token
from hivetune.errors import MachineNotFit
from hivetune.process.cluster import ClusterNode, ClusterView, no_answer, own_address

# The custom resource of a machine, one for each device that it offers: Ray's own table of cards does not know all.
DEVICE = "hivetune_device"
NAMESPACE = "hivetune"
LOOPBACK = "127.0.0.1"


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MachineNotFit("a cluster needs Ray, which is not installed", hint=install_command("cluster"))


def ray_environment(address: str) -> dict[str, str]:
    """For every process that speaks Ray in the cluster at `address`. Raises UsageError without a token."""
    # Ray turns the loopback into an address that the network reaches, except under the name of this variable.
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address.startswith(f"{LOOPBACK}:") else {}
    return {
        **own,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(need_token()),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Agents of another patch of Python understand each other; the environments that compute are their own.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        # Ray hides the cards from processes that ask it for none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # It would kill agents where memory is short; the kernel takes the worker, which the supervisor explains.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def connect_ray(address: str) -> Any:
    """The module `ray`, connected to the cluster at `address`.

    Raises MachineNotFit when nobody answers there, when the token is another one, or when this machine is no node of
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
    words = " ".join(str(error).split())
    if "authentication" in words.lower() or "unauthenticated" in words.lower():
        return MachineNotFit(
            f"the cluster at {address} does not know this machine's token",
            hint="copy HOME/cluster/token of its head to this machine",
        )
    if "version" in words.lower():
        return MachineNotFit(f"the cluster at {address} has another version: {words}", hint="install the same Ray")
    if "node" in words.lower():
        return MachineNotFit(
            f"this machine is not a node of the cluster at {address}",
            hint=f"join it, without devices if it shall only train: hivetune cluster up --join {address} "
            "--devices none",
        )
    return no_answer(address, words)


def offered_by(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Devices of all nodes that live, as Ray lists them."""
    return sum(int(node["Resources"].get(DEVICE, 0)) for node in nodes if node["Alive"])


def view_cluster(address: str) -> ClusterView:
    """Raises what `connect_ray` raises."""
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
